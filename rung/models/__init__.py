"""Models: decoders of the Llama family and Gemma-3, configurations, weights out of safetensors and GGUF, tokenizer and chat template."""

from rung.models.build import read_config
from rung.models.calibrate import calibrate_input_scales, calibrate_kv_scales
from rung.models.config import ARCHITECTURES, LlamaConfig
from rung.models.fp8 import FP8Linear, quantize_fp8, share_input_scales
from rung.models.gemma3 import Gemma3Config, Gemma3ForCausalLM
from rung.models.llama import LlamaForCausalLM
from rung.models.load import LoadedModel, load_model, resolve_path
from rung.models.quickstart import find_quickstart
from rung.models.random import SHAPES, random_model
from rung.models.tokenizer import Detokenizer, Tokenizer

__all__ = [
    "calibrate_input_scales",
    "calibrate_kv_scales",
    "ARCHITECTURES",
    "SHAPES",
    "Detokenizer",
    "FP8Linear",
    "Gemma3Config",
    "Gemma3ForCausalLM",
    "LlamaConfig",
    "LlamaForCausalLM",
    "LoadedModel",
    "Tokenizer",
    "find_quickstart",
    "load_model",
    "quantize_fp8",
    "random_model",
    "read_config",
    "resolve_path",
    "share_input_scales",
]
