"""A path or a name becomes a module with weights, its configuration and its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rung.errors import TokenizerError, UnknownModelError
from rung.models.build import config_from_transformers, empty_model
from rung.models.config import LlamaConfig, read_json
from rung.models.folder_tokenizer import generation_from_folder, tokenizer_from_folder
from rung.models.gguf_tokenizer import stop_ids, tokenizer_from_gguf
from rung.models.llama import LlamaForCausalLM
from rung.models.quickstart import find_quickstart
from rung.models.tokenizer import Tokenizer
from rung.models.weights import GGUFSource, SafetensorsSource, load_weights

_NAMES = {"smollm2": find_quickstart}
_GGUF_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What `load_model` returns. `generation` is the model's generation configuration; `eos_token_id` in it is always a list."""

    module: LlamaForCausalLM
    config: LlamaConfig
    generation: dict[str, Any]
    path: Path
    optional_tokenizer: Tokenizer | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises `TokenizerError` when the model came without one."""
        if self.optional_tokenizer is None:
            raise TokenizerError(f"{self.path} has no tokenizer.json", hint="put the model's tokenizer.json into the folder")
        return self.optional_tokenizer


def load_model(path: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> LoadedModel:
    """Load a GGUF file, a folder with one, a transformers folder with safetensors, or the quick start by its name "smollm2".

    Parameters need no gradient and lie on `device` in `dtype`. Raises `UnknownModelError` when there is no model, `MissingWeightError`,
    `UnexpectedWeightError`, `TokenizerError` or `ModelLoadError` when it is not complete or not readable."""
    place = resolve_path(path)
    return _load_gguf(place, dtype, device) if place.is_file() else _load_folder(place, dtype, device)


def resolve_path(path: str | Path) -> Path:
    """The GGUF file or the transformers folder that `path` or a known name means. Raises `UnknownModelError`."""
    place = Path(path)
    if not place.exists():
        if str(path) in _NAMES:
            return _NAMES[str(path)]()
        raise UnknownModelError(
            f"no model at {str(path)!r}", hint=f"give a GGUF file, a folder with config.json and safetensors, or {', '.join(_NAMES)}"
        )
    if place.is_file() or (place / "config.json").exists():
        return place
    files = sorted(place.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    found = f"{len(files)} GGUF files" if files else "neither a config.json nor a GGUF file"
    raise UnknownModelError(f"the folder {str(path)!r} holds {found}", hint="give the path of one GGUF file, or of a transformers folder")


def model_config(path: str | Path) -> LlamaConfig:
    """The configuration of what `load_model` would load; weights are not read."""
    place = resolve_path(path)
    return GGUFSource(place).config if place.is_file() else config_from_transformers(read_json(place / "config.json"))


def _load_gguf(path: Path, dtype: torch.dtype, device: torch.device | str) -> LoadedModel:
    source = GGUFSource(path)
    tokenizer = tokenizer_from_gguf(source.metadata)  # before the weights: it is quick and may refuse
    module = empty_model(source.config, dtype, device)
    load_weights(module, source)
    generation = {"eos_token_id": stop_ids(source.metadata), **_sampling_of(source.metadata)}
    return LoadedModel(module=module, config=source.config, generation=generation, path=path, optional_tokenizer=tokenizer)


def _sampling_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling settings of a GGUF file, by the names of `generation_config.json`. A temperature above 0 means sampling."""
    found = {name: metadata[key] for key, name in _GGUF_SAMPLING.items() if key in metadata}
    return {**found, "do_sample": True} if found.get("temperature") else found


def _load_folder(folder: Path, dtype: torch.dtype, device: torch.device | str) -> LoadedModel:
    values = read_json(folder / "config.json")
    config = config_from_transformers(values)
    source = SafetensorsSource(folder)
    generation = generation_from_folder(folder, values)
    tokenizer = tokenizer_from_folder(folder, generation["eos_token_id"])
    module = empty_model(config, dtype, device)
    load_weights(module, source)
    return LoadedModel(module=module, config=config, generation=generation, path=folder, optional_tokenizer=tokenizer)
