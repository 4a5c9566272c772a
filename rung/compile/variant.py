"""One trace of a function and the generated entry that checks a call against it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from rung import torch_compat
from rung.compile.arguments import Leaf
from rung.compile.compiled import CompiledFunction
from rung.compile.entry_code import generate_entry
from rung.compile.guards import GuardState, Roots
from rung.compile.overlap import Overlap
from rung.compile.report import CompileReport
from rung.errors import InputMismatchError

Run = Callable[..., Any]  # takes the tensors of `CompiledFunction.input_names`


def modes() -> tuple[torch.dtype, bool, tuple[str, ...]]:
    """Global modes that a trace takes for granted: default dtype, deterministic algorithms, function modes (a default device is one)."""
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch_compat.function_modes()


class Variant:
    """A compiled function for one signature of arguments and one state of what the trace has read. `run` is the compiled call, or a graph
    manager's. `fast` is the generated entry; where a check of it fails it calls `miss`: the entry of the next variant, or the slow road."""

    def __init__(
        self,
        compiled: CompiledFunction,
        report: CompileReport,
        found: list[Leaf],
        function: Callable[..., Any],
        dropped: Collection[str] = (),
    ) -> None:
        owner = getattr(function, "__self__", None)
        self.compiled = compiled
        self.report = report
        self.run: Run = compiled
        self.fast: Callable[..., Any] | None = None
        self.miss: Callable[..., Any] = function
        self.stale: Callable[..., Any] = function
        self.training = getattr(owner, "training", False)
        self.state = GuardState(compiled.plan.guards, Roots(function), dropped)
        self.constants = [(path, value) for path, value in found if not isinstance(value, torch.Tensor)]
        self.devices = {path.dotted(): value.device for path, value in found if isinstance(value, torch.Tensor)}
        self.overlap = Overlap(compiled.plan.written, compiled.arguments)
        self.modes = modes()

    @property
    def repeatable(self) -> bool:
        """Whether a call may be run again: it writes nothing but its outputs."""
        return not self.compiled.plan.written

    @property
    def sweeps_behind(self) -> bool:
        """Whether tensors are looked at behind the work. Graphs follow replaced tensors by a policy of their own and are told before."""
        return self.repeatable and self.run is self.compiled

    def entry(self, function: Callable[..., Any], owner: Any, slow: Callable[..., Any]) -> Callable[..., Any]:
        """Generate the checked entry."""
        self.miss = self.stale = slow
        source = generate_entry(self, function, owner)
        if self.report.dump is not None:
            self.report.dump.entry(source, self.state.source)
        return source.build("entry")

    def wants_gradient(self) -> bool:
        return any(tensor.requires_grad for tensor in self.compiled.weights.values() if isinstance(tensor, torch.Tensor))

    def inputs(self, locals_: Mapping[str, Any]) -> list[Any]:
        """The tensors that `run` takes. Code was generated for contiguous ones, so others are copied."""
        values = [self.compiled.plan.inputs[number].resolve(locals_) for number in self.compiled.arguments]
        self._check_written(values)
        return [value.contiguous() if isinstance(value, torch.Tensor) else value for value in values]

    def violation(self, owner: Any) -> str:
        """What the trace has read and what is no longer so, empty when the variant can serve. Objects that were replaced by others which
        trace alike are taken over."""
        if self.state.unchanged() and self.state.all_swept():
            return ""
        violated = self.state.violation()
        if not violated:
            self.replaced(owner)
        return violated

    def replaced(self, owner: Any, *, recapture: bool = False) -> None:
        """The module's tensors may be others now: `run` follows its address policy if it has one, or captures its graphs again with
        `recapture`; else they are bound anew."""
        follow = getattr(self.run, "recapture" if recapture else "weights_changed", None)
        if follow is None:
            self.rebind(owner)
        else:
            follow()
            self.state.refresh()

    def rebind(self, owner: Any) -> None:
        """Read the module's tensors again."""
        self.bind_weights(owner)
        self.state.refresh()

    def bind_weights(self, owner: Any) -> None:
        self.compiled.rebind({self.compiled.plan.inputs[n].local: owner for n in self.compiled.weights})

    def overlaps(self, locals_: Mapping[str, Any]) -> bool:
        """Whether a tensor that the graph writes shares memory with an argument of this call."""
        return self.overlap.possible and self.overlaps_among(
            *(self.compiled.plan.inputs[n].resolve(locals_) for n in self.compiled.arguments)
        )

    def overlaps_among(self, *inputs: Any) -> bool:
        """The same for the tensors that `run` takes."""
        return self.overlap.found(inputs, self.compiled.weights)

    def release(self) -> None:
        """Free graphs, if `run` holds any."""
        release = getattr(self.run, "release", None)
        if release is not None:
            release()

    def _check_written(self, inputs: Sequence[Any]) -> None:
        """An argument that is updated in place cannot be replaced by a contiguous copy."""
        for number, value in zip(self.compiled.arguments, inputs, strict=True):
            if number in self.compiled.plan.written and not value.is_contiguous():
                raise InputMismatchError(
                    f"argument {self.compiled.plan.inputs[number].dotted()!r} is updated in place, but it is not contiguous",
                    hint="pass a contiguous tensor, or return the new value",
                )

    def check_sizes(self, locals_: Mapping[str, Any]) -> None:
        """Raise `InputMismatchError` naming both arguments when sizes disagree, or the argument whose size is above the bound."""
        known: dict[str, tuple[int, str]] = {}
        for path, spec in self.compiled.plan.tensors:
            shape = path.resolve(locals_).shape
            for dim, extent in enumerate(spec.shape):
                if isinstance(extent, int):
                    continue
                here = f"{path.dotted()}.shape[{dim}]"
                size, where = known.setdefault(extent, (shape[dim], here))
                if size != shape[dim]:
                    raise InputMismatchError(
                        f"{where} is {size} and {here} is {shape[dim]}, but both are dimension {extent!r}",
                        hint="pass tensors of equal size there",
                    )
                bound = self.compiled.plan.bounds.get(extent)
                if bound is not None and size > bound:
                    raise InputMismatchError(
                        f"{here} is {size}, above the maximum of {bound}", hint="wrap with `maximum=` of at least that, or split the call"
                    )
