"""A folder with `model.safetensors`, or with `model.safetensors.index.json` and the shards it lists."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rung.errors import MissingWeightError, ModelLoadError, UnknownModelError
from rung.models.config import read_json
from rung.models.weights.base import WeightSource

INDEX_NAME = "model.safetensors.index.json"


class SafetensorsSource(WeightSource):
    """Shards are mapped, and one is open at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open_path: Path | None = None
        self._open_file: Any = None
        self._files = _index(folder) if (folder / INDEX_NAME).exists() else self._scan(folder)

    def names(self) -> Iterator[str]:
        yield from sorted(self._files, key=lambda name: (self._files[name], name))

    def read(self, name: str) -> torch.Tensor:
        path = self._files[name]
        try:
            tensor: torch.Tensor = self._opened(path).get_tensor(name)
        except ModelLoadError:
            raise
        except Exception as problem:  # SafetensorError is all that the library promises
            raise MissingWeightError(f"cannot read tensor {name!r} from {path}: {problem}", hint="download the file again") from problem
        return tensor

    def place(self, name: str | None = None) -> str:
        paths = sorted(set(self._files.values()))
        if name in self._files:
            return str(self._files[name])
        return str(paths[0]) if len(paths) == 1 else str(self._folder)

    def _opened(self, path: Path) -> Any:
        if path != self._open_path:
            self._open_file, self._open_path = _open(path), path
        return self._open_file

    def _scan(self, folder: Path) -> dict[str, Path]:
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise UnknownModelError(f"{folder} holds no *.safetensors file", hint="give a folder with safetensors weights, or a GGUF file")
        return {name: path for path in paths for name in self._opened(path).keys()}  # noqa: SIM118  safe_open is no mapping


def _index(folder: Path) -> dict[str, Path]:
    weight_map = read_json(folder / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelLoadError(f"{folder / INDEX_NAME} must hold a weight_map", hint="download the file again")
    for name, file in weight_map.items():
        if Path(str(file)).name != file:
            raise ModelLoadError(f"the index places {name!r} outside of the folder: {file!r}", hint="do not use this checkpoint")
    return {str(name): folder / str(file) for name, file in weight_map.items()}


def _open(path: Path) -> Any:
    from safetensors import safe_open

    if not path.exists():
        raise MissingWeightError(f"the shard {path} does not exist", hint="download the checkpoint completely")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except Exception as problem:
        raise ModelLoadError(f"cannot open {path}: {problem}", hint="download the file again") from problem
