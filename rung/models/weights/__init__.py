"""Where weights come from: the contract of a source (`base.py`), safetensors folders, GGUF files, and the loader that fuses them."""

from rung.models.weights.base import WeightSource
from rung.models.weights.fuse import load_weights
from rung.models.weights.gguf import GGUFSource
from rung.models.weights.safetensors import SafetensorsSource

__all__ = ["GGUFSource", "SafetensorsSource", "WeightSource", "load_weights"]
