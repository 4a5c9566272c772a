"""Regions that run as plain Python between pieces because they will not trace: what a plan knows of one, and its call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn

from rung.errors import OutputMismatchError

TARGET = "region"  # namespace of such calls in a plan: `region::0` is the first


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """One tensor that a region returns. A size is a number, or [i, j]: size j of tensor argument i."""

    dtype: str
    device: str  # type only
    shape: tuple[Any, ...]

    def sizes(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        return [extent if isinstance(extent, int) else tensors[extent[0]].shape[extent[1]] for extent in self.shape]


@dataclass(frozen=True, slots=True)
class Region:
    """A function or a method that runs eagerly. Arguments are {"tensor": i} or {"constant": c}."""

    holder: str  # dotted path of the submodule, or "<module a.b>"
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[OutputSpec, ...]
    kind: str  # of the result: "none", "tensor", "tuple" or "list"
    written: tuple[int, ...]  # tensor arguments that it updates in place
    where: str
    reason: str

    @property
    def label(self) -> str:
        """A name for its step."""
        inside = self.holder.rpartition(".")[2] if self.name == "forward" and not self.holder.startswith("<") else self.name
        return inside if inside.isidentifier() else f"{self.name}_{inside}"

    def empty(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """New tensors like those that it returns for these tensor arguments."""
        return [
            torch.empty(spec.sizes(tensors), dtype=getattr(torch, spec.dtype.removeprefix("torch.")), device=spec.device)
            for spec in self.outputs
        ]

    def to_json(self) -> list[Any]:
        outputs = [[spec.dtype, spec.device, list(spec.shape)] for spec in self.outputs]
        head = [self.holder, self.name, list(self.args), dict(self.kwargs)]
        return [*head, outputs, self.kind, list(self.written), self.where, self.reason]

    @staticmethod
    def from_json(data: Sequence[Any]) -> Region:
        outputs = tuple(OutputSpec(dtype, device, tuple(shape)) for dtype, device, shape in data[4])
        return Region(data[0], data[1], tuple(data[2]), data[3], outputs, data[5], tuple(data[6]), data[7], data[8])

    def call(self, owner: Any) -> Callable[..., tuple[torch.Tensor, ...]]:
        """`call(*tensors)` runs what lies there at that time; outputs are contiguous and share no memory. Raises `OutputMismatchError`."""
        if self.holder.startswith("<module "):
            holder: Any = import_module(self.holder.removeprefix("<module ").removesuffix(">"))
        else:
            holder = owner.get_submodule(self.holder) if isinstance(owner, nn.Module) else owner

        def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            args = [_filled(value, tensors) for value in self.args]
            kwargs = {name: _filled(value, tensors) for name, value in self.kwargs.items()}
            return self._checked(getattr(holder, self.name)(*args, **kwargs), tensors)

        return run

    def _checked(self, result: Any, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Code behind the region was generated for what the spec says, and checks nothing itself."""
        found = () if result is None else (result,) if isinstance(result, torch.Tensor) else tuple(result)
        if len(found) != len(self.outputs):
            raise self._mismatch(f"{len(self.outputs)} tensors", f"{len(found)}")
        used = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        outputs = []
        for spec, value in zip(self.outputs, found, strict=True):
            want = f"{spec.dtype} {spec.device} {spec.sizes(tensors)}"
            if not isinstance(value, torch.Tensor) or f"{value.dtype} {value.device.type} {list(value.shape)}" != want:
                came = f"{value.dtype} {value.device.type} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                raise self._mismatch(want, came)
            own = value.contiguous()
            outputs.append(own.clone() if own.untyped_storage().data_ptr() in used else own)
            used.add(outputs[-1].untyped_storage().data_ptr())
        return tuple(outputs)

    def _mismatch(self, want: str, came: str) -> OutputMismatchError:
        return OutputMismatchError(
            f"{self.label}, which runs eagerly between pieces, returned {came} where {want} was expected{self.where}",
            hint="sizes of what it returns must follow from those of its arguments; keep others inside of the region",
        )


def _filled(value: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> Any:
    return tensors[value["tensor"]] if "tensor" in value else value["constant"]
