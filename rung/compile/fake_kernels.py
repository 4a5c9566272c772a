"""Whether split ops return what their fake kernels said: pieces behind them were generated for that and check nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from rung import torch_compat
from rung.compile.bound import BoundStep, StepRunner
from rung.errors import FakeKernelError


@dataclass(frozen=True, slots=True)
class FakeOutput:
    """What a fake kernel said of one output. A size is a number, the name of a dimension, or None where it is another expression."""

    op: str
    index: int
    dtype: str
    shape: tuple[int | str | None, ...]
    contiguous: bool

    def to_json(self) -> list[Any]:
        return [self.op, self.index, self.dtype, list(self.shape), self.contiguous]

    @staticmethod
    def from_json(data: Sequence[Any]) -> FakeOutput:
        return FakeOutput(data[0], data[1], data[2], tuple(data[3]), data[4])

    @staticmethod
    def of(op: str, index: int, value: torch.Tensor, symbols: Mapping[str, str]) -> FakeOutput:
        shape = tuple(_size(extent, symbols) for extent in value.shape)
        return FakeOutput(op, index, str(value.dtype), shape, torch_compat.is_surely_contiguous(value))

    def check(self, value: Any, sizes: Mapping[str, int]) -> None:
        """Raises `FakeKernelError` when `value` is something else. `sizes` are those of the dimensions in this call."""
        want = [sizes.get(extent) if isinstance(extent, str) else extent for extent in self.shape]
        if not isinstance(value, torch.Tensor):
            raise self._error(type(value).__name__, f"{self.dtype} {want}")
        fits = value.dim() == len(want) and all(extent in (None, size) for extent, size in zip(want, value.shape, strict=True))
        if str(value.dtype) != self.dtype or not fits:
            raise self._error(
                f"{value.dtype} {list(value.shape)}", f"{self.dtype} {['any' if extent is None else extent for extent in want]}"
            )
        if self.contiguous and not value.is_contiguous():
            raise self._error(f"strides {list(value.stride())}", "a contiguous tensor")

    def _error(self, real: str, fake: str) -> FakeKernelError:
        return FakeKernelError(
            f"output {self.index} of {self.op} is {real}, but its fake kernel said {fake}",
            hint="mend the function given to torch.library.register_fake (or `out=` of an eager break)",
        )


def _size(extent: Any, symbols: Mapping[str, str]) -> int | str | None:
    symbol = torch_compat.symbol_of(extent)
    return int(extent) if symbol is None else symbols.get(str(symbol))


def checking(runner: StepRunner, outputs: Mapping[str, Mapping[int, FakeOutput]], sizes: Mapping[str, int]) -> StepRunner:
    """`runner`, and a look at what each break returns: by name of the step, position in its outputs -> what is expected."""

    def run(step: BoundStep, arguments: list[Any]) -> Sequence[Any]:
        results = runner(step, arguments)
        for position, expected in outputs.get(step.name, {}).items():
            expected.check(results[position], sizes)
        return results

    return run


class CheckedInterpreter(fx.Interpreter):
    """Runs the graph of a piece and looks at what ops that are not torch's own return, with the sizes that its inputs have."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._sizes: dict[Any, int] = {}  # symbol of the trace -> its size in this run

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        fake = n.meta.get("example_value")
        if n.op == "placeholder":
            self._sizes |= torch_compat.sizes_of_symbols(fake, result)
        overload = torch_compat.single_overload(n.target)
        if n.op != "call_function" or not torch_compat.is_op(overload) or overload.name().partition("::")[0] in ("aten", "prims", "prim"):
            return result
        for index, (said, came) in enumerate(zip(_list(fake), _list(result), strict=False)):
            if isinstance(said, torch.Tensor):
                shape = tuple(torch_compat.known_size(extent, self._sizes) for extent in said.shape)
                replace(FakeOutput.of(overload.name(), index, said, {}), shape=shape).check(came, {})
        return result


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]
