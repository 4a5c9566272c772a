"""Fake inputs for a compile that no other compile can influence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from rung.torch_compat.dispatch import python_dispatcher


class FreshSymbols:
    """Fake inputs in an own ShapeEnv, so that compiling one piece cannot influence another.

    `hinted` sizes are backed by a hint and range from 2: Inductor fuses across them. Without hints (unbacked symbols) it scores every
    fusion 0 on 2.11 (`GraphLowering.get_dep_size_hint`) and emits two kernels for a norm; explicitly hinted unbacked symbols count from
    2.13 on, so this can go with 2.11 and 2.12. What Inductor decided about the sizes is read from `restrictions` afterwards."""

    def __init__(self, *, hinted: bool = True) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.hinted = hinted
        self.shape_env: Any = ShapeEnv(specialize_zero_one=False)
        self.mode: Any = FakeTensorMode(shape_env=self.shape_env)
        self._symbols: dict[str, torch.SymInt | int] = {}
        self._range: dict[Any, tuple[int, int | None]] = {}

    @property
    def has_hints(self) -> bool:
        """Whether a size has a hint, so that guards may follow from it."""
        return bool(self._range)

    def symbol(self, name: str, high: int | None = None, low: int = 0) -> torch.SymInt | int:
        """The size called `name`, at least `low` and at most `high`; a number where these are equal."""
        if name not in self._symbols:
            self._symbols[name] = low if low == high else self._backed(name, low, high) if self.hinted else self._unbacked(low, high)
        return self._symbols[name]

    def _backed(self, name: str, low: int, high: int | None) -> torch.SymInt:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
        from torch.utils._sympy.numbers import int_oo
        from torch.utils._sympy.value_ranges import ValueRanges

        low = max(low, 2)  # code for sizes from 2 serves 1 too: there a dimension of size 1 is addressed like any other
        hint = max(low, min(64 + 16 * len(self._symbols), high or 1 << 30))  # different hints, so that none is taken to equal another
        fake = self.mode.from_tensor(
            torch.empty(hint, device="meta"),
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC]),
            source=ConstantSource(f"rung_{name}"),
        )
        symbol: torch.SymInt = fake.shape[0]
        self._range[symbol.node.expr] = low, high
        self.shape_env.var_to_range[symbol.node.expr] = ValueRanges(low, int_oo if high is None or high < 2 else high)
        return symbol

    def _unbacked(self, low: int, high: int | None) -> torch.SymInt:
        from torch.fx.experimental.symbolic_shapes import _constrain_range_for_size

        with self.shape_env.ignore_fresh_unbacked_symbols():  # an input's symbol has no producing node
            symbol = self.shape_env.create_unbacked_symint()
        _constrain_range_for_size(symbol, min=low, max=high)
        return cast("torch.SymInt", symbol)

    def restrictions(self) -> list[str]:
        """Guards that the compile added and that do not hold for all sizes from 2 to the maximum. Empty: the code serves all of them."""
        if not self.hinted:
            return []
        fixed = [f"{symbol} = {value}" for symbol, value in self.shape_env.replacements.items() if symbol in self._range]
        return fixed + self._unproved(None)

    def bound(self) -> int | None:
        """The largest power of two up to which the code serves sizes that have no maximum of their own, None when it serves all or none:
        Inductor takes 32-bit indexing for granted where the hint allows it."""
        if not self.restrictions():
            return None
        return next((bound for bound in (1 << power for power in range(30, 15, -1)) if not self._unproved(bound)), None)

    def _unproved(self, unbounded: int | None) -> list[str]:
        """Guards that are not implied; sizes without a maximum range up to `unbounded` (None: any)."""
        from torch.utils._sympy.numbers import int_oo
        from torch.utils._sympy.value_ranges import ValueRanges

        free = int_oo if unbounded is None else unbounded
        ranges = tuple((symbol, ValueRanges(low, free if high is None else max(high, low))) for symbol, (low, high) in self._range.items())
        found = []
        for guard in self.shape_env.guards:
            static = self.shape_env._maybe_evaluate_static(guard.expr, axioms=(), var_to_range=ranges)
            if static is None or not bool(static):
                found.append(str(guard.expr))
        return found

    def evaluate(self, expression: Any) -> Any:
        """Rebuild a sympy expression of a trace's symbols over the fresh ones."""
        if expression.is_number:
            return int(expression)
        from torch.utils._sympy.interp import sympy_interp
        from torch.utils._sympy.reference import PythonReferenceAnalysis

        return sympy_interp(PythonReferenceAnalysis, {s: self.symbol(str(s)) for s in expression.free_symbols}, expression)

    def integer(self, value: Any) -> Any:
        """An int as it is; a SymInt of another ShapeEnv over the fresh symbols."""
        return self.evaluate(value.node.expr) if isinstance(value, torch.SymInt) else value

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        """A fake tensor of the layout of `like`, whose sizes and strides may hold symbols of another ShapeEnv."""
        size = [self.integer(extent) for extent in like.shape]
        stride = [self.integer(extent) for extent in like.stride()]
        with self.mode:
            return torch.empty_strided(size, stride, dtype=like.dtype, device=like.device)

    def propagate(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Give every node an `example_value` over the fresh symbols; Inductor's cache wants them on the nodes."""

        class Propagate(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                value = super().run_node(n)
                if n.op != "output":
                    n.meta["example_value"] = value
                return value

        with self.mode, python_dispatcher(), torch.no_grad():
            Propagate(graph_module).run(*inputs)
