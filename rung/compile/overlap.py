"""Whether what a graph writes shares memory with another of its inputs. A trace takes its inputs for separate memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

Span = tuple[int, int]  # addresses, half-open


def span(tensor: torch.Tensor) -> Span:
    """The addresses between the first and the last element."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


class Overlap:
    """Finds out for each call whether a written tensor overlaps an argument. `written` and `arguments` are numbers of graph inputs."""

    def __init__(self, written: Sequence[int], arguments: Sequence[int]) -> None:
        self._written = [position for position, number in enumerate(arguments) if number in written]
        self._weights = [number for number in written if number not in arguments]

    @property
    def possible(self) -> bool:
        return bool(self._written or self._weights)

    def found(self, inputs: Sequence[Any], weights: Mapping[int, Any]) -> bool:
        """`inputs` are the tensor arguments in order."""
        spans = [span(value) if isinstance(value, torch.Tensor) else (0, 0) for value in inputs]
        written = [(position, spans[position]) for position in self._written]
        written += [(-1, span(weights[number])) for number in self._weights]
        return any(
            position != other and low < spans[other][1] and spans[other][0] < high
            for position, (low, high) in written
            for other in range(len(spans))
        )
