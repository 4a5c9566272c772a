"""The contract of a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch


class WeightSource(ABC):
    """Tensors under the names transformers gives them ("model.layers.0.self_attn.q_proj.weight"), one at a time.

    A tensor handed out belongs to the caller until the next one is asked for; it may be a view of a mapped file and is not to be written.
    Any layout of the file's own (permuted rows, quantised blocks) is undone before. Raises `ModelLoadError` for a file that is damaged."""

    @abstractmethod
    def names(self) -> Iterator[str]:
        """All tensor names, in the order in which they are cheapest to read."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, in its stored dtype, or fp32 when it was quantised."""

    @abstractmethod
    def place(self, name: str | None = None) -> str:
        """The file that holds `name` (or would hold it), for messages."""
