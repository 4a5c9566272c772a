"""One trace of a function and the generated entry that checks a call against it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rung.compile.arguments import Container, Leaf
from rung.compile.compiled import CompiledFunction
from rung.compile.overlap import Overlap
from rung.compile.plan import TensorSpec
from rung.compile.report import CompileReport
from rung.compile.state import ModuleState
from rung.compile.stitch import Source
from rung.errors import InputMismatchError

Run = Callable[..., Any]  # takes the tensors of `CompiledFunction.input_names`


class Variant:
    """A compiled function for one signature of arguments. `run` is the compiled call, or a graph manager's."""

    def __init__(self, compiled: CompiledFunction, report: CompileReport, found: list[Leaf], owner: Any) -> None:
        self.compiled = compiled
        self.report = report
        self.run: Run = compiled
        self.fast: Callable[..., Any] | None = None  # the generated entry, made at the first call
        self.training = getattr(owner, "training", False)
        self.state = ModuleState(owner, compiled.plan.reads) if isinstance(owner, torch.nn.Module) else None
        self.constants = [(path, value) for path, value in found if not isinstance(value, torch.Tensor)]
        self.devices = {path.dotted(): value.device for path, value in found if isinstance(value, torch.Tensor)}
        self.overlap = Overlap(compiled.plan.written, compiled.arguments)
        self.default_dtype = torch.get_default_dtype()

    def inputs(self, locals_: Mapping[str, Any]) -> list[Any]:
        """The tensors that `run` takes. Code was generated for contiguous ones, so others are copied."""
        values = [self.compiled.plan.inputs[number].resolve(locals_) for number in self.compiled.arguments]
        self._check_written(values)
        return [value.contiguous() if isinstance(value, torch.Tensor) else value for value in values]

    def accepts(self, owner: Any) -> bool:
        """Whether the module still is what was traced. Tensors that were replaced by others of the same layout are bound anew."""
        if self.state is None or self.state.unchanged():
            return True
        if not self.state.same_trace():
            return False
        self.replaced(owner)
        return True

    def replaced(self, owner: Any, *, recapture: bool = False) -> None:
        """The module's tensors may be others now: `run` follows its address policy if it has one, or captures its graphs again with
        `recapture`; else they are bound anew."""
        follow = getattr(self.run, "recapture" if recapture else "weights_changed", None)
        if follow is None:
            self.rebind(owner)
        else:
            follow()
            if self.state is not None:
                self.state.refresh()

    def rebind(self, owner: Any) -> None:
        """Read the module's tensors again."""
        self.bind_weights(owner)
        if self.state is not None:
            self.state.refresh()

    def bind_weights(self, owner: Any) -> None:
        self.compiled.rebind({self.compiled.plan.inputs[n].local: owner for n in self.compiled.weights})

    def overlaps(self, locals_: Mapping[str, Any]) -> bool:
        """Whether a tensor that the graph writes shares memory with an argument of this call."""
        return self.overlap.possible and self._overlaps(*(self.compiled.plan.inputs[n].resolve(locals_) for n in self.compiled.arguments))

    def _overlaps(self, *inputs: Any) -> bool:
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

    def entry(self, function: Callable[..., Any], owner: Any, miss: Callable[..., Any]) -> Callable[..., Any]:
        """Generate the checked entry: same parameters as `function`, calls `miss` when any check fails."""
        signature = inspect.signature(function)
        source = Source("entry", "")
        source.prefix = "_rung_"  # a parameter may have any other name
        source.head = f"    def entry({_parameters(signature, source)}):"
        checks = self._checks(source, owner)
        forwarded = ", ".join(_forward(parameter) for parameter in signature.parameters.values())
        inputs = ", ".join(self.compiled.plan.inputs[number].expression() for number in self.compiled.arguments)
        if self.overlap.possible:
            checks.append(f"not {source.bind(self._overlaps)}({inputs})")
        source.bind(miss, "_rung_miss")
        source.bind(self, "_rung_variant")
        source.lines.append("try:")
        source.lines.append(f"    _rung_good = {' and '.join(checks) or 'True'}")
        source.lines.append("except Exception:")  # a leaf is missing or of another type: the slow road tells which
        source.lines.append("    _rung_good = False")
        source.lines.append("if _rung_good:")
        source.lines.append(f"    return _rung_variant.run({inputs})")
        source.lines.append(f"return _rung_miss({forwarded})")
        return source.build("entry")

    def _checks(self, source: Source, owner: Any) -> list[str]:
        source.bind(torch.Tensor, "_rung_Tensor")
        source.bind(torch.is_grad_enabled, "_rung_grad")
        source.bind(torch.is_autocast_enabled, "_rung_autocast")
        checks: list[str] = []
        first: dict[str, str] = {}
        for path, spec in self.compiled.plan.tensors:
            checks += self._tensor_checks(path.expression(), path.dotted(), spec, source, first)
        for path, value in self.constants:
            checks += _constant_checks(path.expression(), value, source)
        for device_type in sorted({spec.device for _, spec in self.compiled.plan.tensors}):
            checks.append(f"not _rung_autocast({device_type!r})")
        checks.append(f"{source.bind(torch.get_default_dtype)}() is {source.bind(self.default_dtype)}")
        if self.state is not None:
            state = source.bind(self.state)
            checks.append(f"not (_rung_grad() and {state}.wants_gradient())")
            checks.append(f"{state}.unchanged()")
        if owner is not None and hasattr(owner, "training"):
            checks.append(f"{source.bind(owner, '_rung_owner')}.training is {self.training}")
        return checks

    def _tensor_checks(self, text: str, name: str, spec: TensorSpec, source: Source, first: dict[str, str]) -> list[str]:
        dtype = source.bind(getattr(torch, spec.dtype.removeprefix("torch.")))
        device = source.bind(self.devices[name])
        checks = [f"{text}.__class__ is _rung_Tensor", f"{text}.dtype is {dtype}", f"{text}.device == {device}"]
        checks += [f"{text}.dim() == {len(spec.shape)}", f"{text}.is_contiguous()", f"not ({text}.requires_grad and _rung_grad())"]
        for dim, extent in enumerate(spec.shape):
            here = f"{text}.shape[{dim}]"
            if isinstance(extent, int):
                checks.append(f"{here} == {extent}")
            elif extent in first:
                checks.append(f"{here} == {first[extent]}")
            else:
                first[extent] = here
                bound = self.compiled.plan.bounds.get(extent)
                checks.append(f"{here} >= 1" if bound is None else f"1 <= {here} <= {bound}")
        return checks


def _constant_checks(text: str, value: Any, source: Source) -> list[str]:
    if value is None or isinstance(value, bool):
        return [f"{text} is {value!r}"]
    if isinstance(value, Container):
        checks = [f"{text}.__class__ is {source.bind(value.type)}"]
        if isinstance(value.keys, tuple):
            return [*checks, f"(*{text},) == {source.bind(value.keys)}"]
        return checks if value.keys is None else [*checks, f"len({text}) == {value.keys}"]
    checks = [f"{text}.__class__ is {source.bind(type(value))}", f"{text} == {source.bind(value)}"]
    if isinstance(value, float) and value == 0:  # 0.0 == -0.0
        checks.append(f"repr({text}) == {repr(value)!r}")
    return checks


def _parameters(signature: inspect.Signature, source: Source) -> str:
    parts: list[str] = []
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    for index, parameter in enumerate(signature.parameters.values()):
        if (
            parameter.kind is parameter.KEYWORD_ONLY
            and parameter.VAR_POSITIONAL not in kinds
            and parameter.KEYWORD_ONLY not in kinds[:index]
        ):
            parts.append("*")
        star = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else f"={source.bind(parameter.default)}"
        parts.append(f"{star}{parameter.name}{default}")
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.POSITIONAL_ONLY not in kinds[index + 1 :]:
            parts.append("/")
    return ", ".join(parts)


def _forward(parameter: inspect.Parameter) -> str:
    if parameter.kind is parameter.VAR_POSITIONAL:
        return f"*{parameter.name}"
    if parameter.kind is parameter.VAR_KEYWORD:
        return f"**{parameter.name}"
    return f"{parameter.name}={parameter.name}" if parameter.kind is parameter.KEYWORD_ONLY else parameter.name
