"""`breaks="auto"`: a region that will not trace becomes a break.

The innermost function or method in which a trace failed is run twice on real data to learn what it returns, and stands as an op in the
next trace. In the plan it is the place where it lies; when called, what lies there runs.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rung.compile.arguments import leaves, replace_tensors
from rung.compile.eager_break import NAMESPACE
from rung.compile.regions import OutputSpec, Region
from rung.compile.signature import own_signature
from rung.compile.sources import source_refs
from rung.compile.trace import DynamicDims, TracedGraph, error_frames, trace
from rung.errors import TraceError

MAX_REGIONS = 64  # of one trace
_CONSTANTS = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a function or method can be replaced: `names[name]`, the dictionary of a submodule or of an imported module."""

    holder: str
    name: str
    names: dict[str, Any]
    function: Callable[..., Any]  # what runs; bound


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a target in a run on real data."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[torch.Tensor]
    written: tuple[int, ...]
    result: Any


def trace_with_breaks(
    function: Callable[..., Any], locals_: Mapping[str, Any], dynamic: DynamicDims, *, maximum: int | None = None
) -> TracedGraph:
    """`trace`, again and again with a region more that is a break. Raises the `TraceError` of what cannot become one: the function itself,
    regions that take or return other things than tensors, or return sizes that do not follow from those of their arguments."""
    found: dict[tuple[str, str], tuple[_Target, Region]] = {}
    while True:
        try:
            with _ops(list(found.values())) as ops:
                traced = trace(function, locals_, dynamic, maximum=maximum, regions=ops)
            break
        except TraceError as error:
            if error.__cause__ is None:  # a dimension of an argument, no place in the code
                raise
            new = _regions(error, function, locals_, dynamic, maximum, set(found))
            if not new or len(found) + len(new) > MAX_REGIONS:
                raise
            found |= new
    codes = [inspect.unwrap(target.function).__code__ for target, _ in found.values()]  # an edited region may return other sizes
    return replace(traced, sources=(*(ref for ref in traced.sources if ref.module != __name__), *source_refs(codes)))


# --- where ---------------------------------------------------------------------------------------------------------------------------


def _regions(
    error: TraceError, function: Callable[..., Any], locals_: Mapping[str, Any], dynamic: DynamicDims, maximum: int | None, known: set[Any]
) -> dict[tuple[str, str], tuple[_Target, Region]]:
    """The innermost code on the way to the error that can be a break, everywhere it is reached from."""
    frames = error_frames(error.__cause__)  # type: ignore[arg-type]
    for caller, frame in reversed(list(itertools.pairwise(frames))):
        targets = [target for target in _targets(function, caller, frame) if (target.holder, target.name) not in known]
        if not targets:
            continue
        runs = [_observed(function, arguments, targets) for arguments in _samples(locals_, dynamic, maximum)]
        regions = {
            (target.holder, target.name): (target, _region(target, [run[index] for run in runs], error))
            for index, target in enumerate(targets)
            if any(run[index] for run in runs)
        }
        if regions and all(region is not None for _, region in regions.values()):
            return regions  # type: ignore[return-value]
    return {}


def _targets(function: Callable[..., Any], caller: Any, frame: Any) -> Iterator[_Target]:
    owner = getattr(function, "__self__", None)
    for path, module in owner.named_modules() if isinstance(owner, nn.Module) else ():
        method = getattr(module, frame.name, None)
        if isinstance(method, types.MethodType) and _is_code_of(method.__func__, frame) and method != function:
            yield _Target(path, frame.name, module.__dict__, method)
    named: dict[int, tuple[str, Any]] = {}  # multiprocessing knows a script's `__main__` by a second name
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == caller.filename and (name == module.__name__ or id(module) not in named):
            named[id(module)] = name, module
    for name, module in named.values():
        for attribute, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType) and _is_code_of(value, frame) and value is not function:
                yield _Target(f"<module {name}>", attribute, vars(module), value)


def _is_code_of(function: Any, frame: Any) -> bool:
    code = getattr(function, "__code__", None)
    if code is None or code.co_filename != frame.filename or code.co_name != frame.name:
        return False
    return any(line == frame.lineno for _, _, line in code.co_lines())


# --- what it returns -----------------------------------------------------------------------------------------------------------------


def _samples(locals_: Mapping[str, Any], dynamic: DynamicDims, maximum: int | None) -> Iterator[dict[str, Any]]:
    """The arguments of the call, and the same with one row more, or less at the maximum, in every dynamic dimension."""
    own = {name: replace_tensors(value, torch.Tensor.clone) for name, value in locals_.items()}
    yield own
    if not any(dynamic.values()):
        return
    other = {name: replace_tensors(value, torch.Tensor.clone) for name, value in locals_.items()}
    changed: dict[int, torch.Tensor] = {}
    for path, value in leaves(other):
        if isinstance(value, torch.Tensor):
            resized = value
            for dim in dynamic.get(path.dotted(), {}):
                size = value.shape[dim]
                rows = torch.arange(size - 1 if size == maximum and size > 1 else size + 1, device=value.device) % size
                resized = resized.index_select(dim, rows)
            changed[id(value)] = resized
    yield {name: replace_tensors(value, lambda tensor: changed[id(tensor)]) for name, value in other.items()}


def _observed(function: Callable[..., Any], arguments: Mapping[str, Any], targets: Sequence[_Target]) -> list[list[_Call]]:
    """The calls of each target in an eager run, whose effects on buffers are undone."""
    calls: list[list[_Call]] = [[] for _ in targets]
    owner = getattr(function, "__self__", None)
    buffers = [(buffer, buffer.clone()) for buffer in owner.buffers()] if isinstance(owner, nn.Module) else []
    bound = inspect.BoundArguments(own_signature(function), dict(arguments))
    watched = [(target, _watched(target.function, seen)) for target, seen in zip(targets, calls, strict=True)]
    with _replaced(watched), torch.no_grad():
        try:
            function(*bound.args, **bound.kwargs)
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)
    return calls


def _watched(function: Callable[..., Any], seen: list[_Call]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        before = [tensor.clone() for tensor in tensors]
        result = function(*args, **kwargs)
        written = tuple(
            i
            for i, (old, new) in enumerate(zip(before, tensors, strict=True))
            if old.shape != new.shape or not torch.allclose(old, new, rtol=0, atol=0, equal_nan=True)
        )
        seen.append(_Call(args, kwargs, before, written, result))
        return result

    return call


def _region(target: _Target, runs: Sequence[Sequence[_Call]], error: TraceError) -> Region | None:
    """What the calls of a target have in common; None where they differ, or are not calls of tensors with tensors."""
    if len({len(run) for run in runs}) != 1:
        return None
    found = [_described(target, calls, error) for calls in zip(*runs, strict=True)]
    written = tuple(sorted({number for run in runs for call in run for number in call.written}))
    first = found[0]
    return None if first is None or any(other != first for other in found) else replace(first, written=written)


def _described(target: _Target, calls: Sequence[_Call], error: TraceError) -> Region | None:
    shapes = [_arguments(call) for call in calls]
    results = [_results(call.result) for call in calls]
    if shapes[0] is None or not calls[0].tensors or any(shape != shapes[0] for shape in shapes[1:]) or None in results:
        return None
    kinds = {(kind, len(tensors)) for kind, tensors in results if tensors is not None}  # type: ignore[misc]
    if len(kinds) != 1:
        return None
    kind = next(iter(kinds))[0]
    outputs = [_output([values[1][index] for values in results], calls) for index in range(len(results[0][1]))]  # type: ignore[index]
    if None in outputs:
        return None
    reason = error.message.partition(": ")[2] or error.message
    return Region(target.holder, target.name, *shapes[0], tuple(outputs), kind, (), _place(target.function), reason)  # type: ignore[arg-type]


def _place(function: Callable[..., Any]) -> str:
    code = inspect.unwrap(function).__code__
    return f" at {code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}"  # a plan holds no path


def _arguments(call: _Call) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments with tensors numbered in the order of `_Call.tensors`; None when there is something else than constants."""
    numbers = itertools.count()
    if not all(isinstance(value, (torch.Tensor, *_CONSTANTS)) for value in (*call.args, *call.kwargs.values())):
        return None

    def form(value: Any) -> dict[str, Any]:
        return {"tensor": next(numbers)} if isinstance(value, torch.Tensor) else {"constant": value}

    return tuple(form(value) for value in call.args), {name: form(value) for name, value in call.kwargs.items()}


def _results(result: Any) -> tuple[str, list[torch.Tensor]] | None:
    if result is None:
        return "none", []
    if isinstance(result, torch.Tensor):
        return "tensor", [result]
    if type(result) in (tuple, list) and all(isinstance(item, torch.Tensor) for item in result):
        return type(result).__name__, list(result)
    return None


def _output(values: Sequence[torch.Tensor], calls: Sequence[_Call]) -> OutputSpec | None:
    """An output's sizes: equal in all runs, or those of an argument in each of them."""
    if len({(value.dtype, value.device, value.dim()) for value in values}) != 1:
        return None
    shape: list[Any] = []
    for dim in range(values[0].dim()):
        sizes = [value.shape[dim] for value in values]
        inputs = [(i, j) for i, tensor in enumerate(calls[0].tensors) for j in range(tensor.dim())]
        match = next(([i, j] for i, j in inputs if [call.tensors[i].shape[j] for call in calls] == sizes), None)
        if len(set(sizes)) == 1:
            shape.append(sizes[0])
        elif match is None:
            return None
        else:
            shape.append(match)
    return OutputSpec(str(values[0].dtype), values[0].device.type, tuple(shape))


# --- as an op ------------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _ops(found: Sequence[tuple[_Target, Region]]) -> Iterator[dict[str, Region]]:
    """Regions stand as ops while a trace is made; the ops by qualified name. They are never run."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    ops: dict[str, Region] = {}
    replacements = []
    for target, region in found:
        name = next(n for i in itertools.count() if not hasattr(getattr(torch.ops, NAMESPACE), n := f"{region.label}_{i:08x}"))
        count = sum("tensor" in value for value in (*region.args, *region.kwargs.values()))
        parameters = ", ".join(f"Tensor({chr(97 + i)}!) t{i}" if i in region.written else f"Tensor t{i}" for i in range(count))
        library.define(f"{name}({parameters}) -> {'Tensor[]' if region.outputs else '()'}", tags=(torch.Tag.cudagraph_unsafe,))
        torch.library.register_fake(f"{NAMESPACE}::{name}", lambda *tensors, region=region: region.empty(tensors) or None, lib=library)
        ops[f"{NAMESPACE}::{name}"] = region
        replacements.append((target, _stand_in(getattr(getattr(torch.ops, NAMESPACE), name).default, region.kind, target.function)))
    with _replaced(replacements):
        yield ops


def _stand_in(op: Any, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # another thread runs the module
            return function(*args, **kwargs)
        made = op(*[value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)])
        return None if kind == "none" else made[0] if kind == "tensor" else tuple(made) if kind == "tuple" else made

    return call


@contextlib.contextmanager
def _replaced(pairs: Sequence[tuple[_Target, Callable[..., Any]]]) -> Iterator[None]:
    """Each target's name leads to its replacement inside the block."""
    missing = object()
    before = [target.names.get(target.name, missing) for target, _ in pairs]
    for target, replacement in pairs:
        target.names[target.name] = replacement
    try:
        yield
    finally:
        for (target, _), value in zip(pairs, before, strict=True):
            if value is missing:
                target.names.pop(target.name, None)
            else:
                target.names[target.name] = value
