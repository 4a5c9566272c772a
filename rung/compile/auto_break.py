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
from rung.compile.auto_region import Call, NoRegion, base_name, region_of
from rung.compile.eager_break import NAMESPACE
from rung.compile.regions import Region
from rung.compile.signature import own_signature
from rung.compile.sources import source_refs
from rung.compile.trace import DynamicDims, TracedGraph, error_frames, trace, user_location
from rung.errors import DynamicShapeError, TraceError

MAX_REGIONS = 64  # of one trace


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a function or method can be replaced: `names[name]`, the dictionary of a submodule or of an imported module."""

    holder: str
    name: str
    names: dict[str, Any]
    function: Callable[..., Any]  # what runs; bound


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
            new, why = _regions(error, function, locals_, dynamic, maximum, set(found))
            if len(found) + len(new) > MAX_REGIONS:
                new, why = {}, f"a trace has at most {MAX_REGIONS}"
            if not new:
                raise _no_break(error, why) from error.__cause__
            found |= new
    codes = [inspect.unwrap(target.function).__code__ for target, _ in found.values()]  # an edited region may return other sizes
    return replace(traced, sources=(*(ref for ref in traced.sources if ref.module != __name__), *source_refs(codes)))


def _no_break(error: TraceError, why: str) -> TraceError:
    advice = (
        "move what will not trace into a function at module level that takes and returns tensors (with annotations), and decorate that "
        "with @rung.eager_break"
    )
    own = f"{error.hint}; or " if isinstance(error, DynamicShapeError) else ""
    return type(error)(f"{error.message}; it is no automatic break: {why}", hint=own + advice)


# --- where ---------------------------------------------------------------------------------------------------------------------------


def _regions(
    error: TraceError, function: Callable[..., Any], locals_: Mapping[str, Any], dynamic: DynamicDims, maximum: int | None, known: set[Any]
) -> tuple[dict[tuple[str, str], tuple[_Target, Region]], str]:
    """The innermost code on the way to the error that can be a break, everywhere it is reached from; and why none, of the innermost."""
    frames = error_frames(error.__cause__)  # type: ignore[arg-type]
    reason = error.message.partition(f"{user_location(error.__cause__)}: ")[2] or error.message  # type: ignore[arg-type]
    whys: list[str] = []
    for caller, frame in reversed(list(itertools.pairwise(frames))):
        targets = [target for target in _targets(function, caller, frame) if (target.holder, target.name) not in known]
        if not targets and _is_code_of(getattr(function, "__func__", function), frame):
            whys.append("the line stands in the wrapped function itself")
        elif not targets:
            whys.append(f"{frame.name} is neither a method of a submodule nor a function under its name in {base_name(caller.filename)}")
        if not targets:
            continue
        runs = [_observed(function, arguments, targets) for arguments in _samples(locals_, dynamic, maximum)]
        regions: dict[tuple[str, str], tuple[_Target, Region]] = {}
        found = [(target, [run[index] for run in runs]) for index, target in enumerate(targets) if any(run[index] for run in runs)]
        refusals = [] if found else [f"{frame.name} was not reached by that name"]
        for target, calls in found:
            try:
                regions[target.holder, target.name] = target, region_of(target.holder, target.name, target.function, calls, reason)
            except NoRegion as no:
                refusals.append(f"{frame.name} {no}")
        if not refusals:
            return regions, ""
        whys += refusals
    return {}, next(iter(whys), "the line stands in the wrapped function itself")


def _targets(function: Callable[..., Any], caller: Any, frame: Any) -> Iterator[_Target]:
    owner = getattr(function, "__self__", None)
    for path, module in owner.named_modules() if isinstance(owner, nn.Module) else ():
        declared = inspect.getattr_static(type(module), frame.name, None)
        method: Any = getattr(module, frame.name) if isinstance(declared, types.FunctionType | classmethod | staticmethod) else None
        kept = [(name, value) for name, value in module.__dict__.items() if isinstance(value, types.FunctionType)]  # self.act = function
        for name, value in [(frame.name, method), *kept]:
            plain = value.__func__ if isinstance(value, types.MethodType) else value
            if isinstance(plain, types.FunctionType) and _is_code_of(plain, frame) and value != function:
                yield _Target(path, name, module.__dict__, value)
    named: dict[int, tuple[str, Any]] = {}  # multiprocessing knows a script's `__main__` by a second name
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == caller.filename and (name == module.__name__ or id(module) not in named):
            named[id(module)] = name, module
    for name, module in named.values():
        for attribute, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType) and _is_code_of(value, frame) and value is not function:
                yield _Target(f"<module {name}>", attribute, vars(module), value)


def _is_code_of(function: Any, frame: Any) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None)  # below decorators
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


def _observed(function: Callable[..., Any], arguments: Mapping[str, Any], targets: Sequence[_Target]) -> list[list[Call]]:
    """The calls of each target in an eager run, whose effects on buffers are undone."""
    calls: list[list[Call]] = [[] for _ in targets]
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


def _watched(function: Callable[..., Any], seen: list[Call]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        before = [tensor.clone() for tensor in tensors]
        result = function(*args, **kwargs)
        written = tuple(
            i
            for i, (old, new) in enumerate(zip(before, tensors, strict=True))
            if old.shape != new.shape or not torch.allclose(old, new, rtol=0, atol=0, equal_nan=True)
        )
        seen.append(Call(args, kwargs, before, written, result))
        return result

    return call


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
