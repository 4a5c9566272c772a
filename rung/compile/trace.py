"""Trace a function once, with its dynamic dimensions unbacked, into one FX graph with named inputs and a return template."""

from __future__ import annotations

import inspect
import re
import traceback
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from rung import torch_compat
from rung.compile.ambient import note_blocks
from rung.compile.arguments import Container, leaves, replace_tensors
from rung.compile.audit import FixedDimension, audit_symbols, refuse_lost_dimensions, refuse_sizes_of_values, refuse_values_on_the_host
from rung.compile.effect_names import changed_globals, name_of_effect, name_of_global
from rung.compile.effects import is_seen, keep_updated_state, net_effects, refuse_side_effects
from rung.compile.guards import NO_GUARDS, GuardSet, Roots, collect_guards
from rung.compile.paths import Path, parse_path
from rung.compile.regions import Region
from rung.compile.signature import argument_path, own_signature, self_name
from rung.compile.sources import SourceRef, source_refs
from rung.compile.template import Recorder, Template, difference
from rung.errors import DynamicShapeError, RungError, TraceError, UnsupportedModuleError

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ([^\n]*)\n\s*([^\n]*)')

DynamicDims = Mapping[str, Mapping[int, str]]  # argument (dotted path) -> {dim: name of the symbol}


@dataclass(frozen=True, slots=True)
class TracedGraph:
    """One traced function. `graph_module` belongs to whoever holds this object; its placeholders are `inputs`, in order."""

    graph_module: fx.GraphModule
    inputs: tuple[Path, ...]
    symbols: Mapping[str, str]  # the trace's symbol -> the user's name of the dimension
    bounds: Mapping[str, int | None]  # name of a dimension -> the largest size the graph serves, None when any
    template: Template
    sources: tuple[SourceRef, ...]  # every function that was traced through
    unified: Mapping[str, str]  # name of a dimension -> the name that stands for it after unification
    bytecode: types.CodeType | None
    guards: GuardSet = NO_GUARDS  # what the trace has read besides its arguments
    regions: Mapping[str, Region] = field(default_factory=dict)  # op that stands in the graph -> the region that runs eagerly there


def trace(
    function: Callable[..., Any],
    locals_: Mapping[str, Any],
    dynamic: DynamicDims,
    *,
    maximum: int | None = None,
    regions: Mapping[str, Region] | None = None,
) -> TracedGraph:
    """Trace `function` (a function or a bound method) with the bound arguments `locals_` (self excluded).

    Tensors named in `dynamic` are replaced by fresh ones of a size that no buffer has, so the caller's tensors stay unmarked.
    `regions` are those whose ops stand where they are called, for the length of this trace.
    Raises `DynamicShapeError` when the trace fixes a declared dimension, `TraceError` when it does not end in one graph."""
    try:
        return _trace_once(function, locals_, dynamic, maximum, regions or {})
    except FixedDimension as fixed:
        dims = {dim: name for dim, name in dynamic[fixed.argument].items() if dim != fixed.dim}
        return trace(function, locals_, {**dynamic, fixed.argument: dims}, maximum=maximum, regions=regions)


def _trace_once(
    function: Callable[..., Any], locals_: Mapping[str, Any], dynamic: DynamicDims, maximum: int | None, regions: Mapping[str, Region]
) -> TracedGraph:
    size = _free_size(function)
    example = _example_arguments(locals_, dynamic, size)
    args, kwargs = _as_call(function, example)
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not _wants_gradient(function)):  # code may ask for the mode
            capture = torch_compat.capture_graph(function, args, kwargs)
    except torch_compat.NoTensorOpsError:
        raise TraceError(
            f"{_name(function)} contains no tensor operation, so there is nothing to compile", hint="leave this module unwrapped"
        ) from None
    except Exception as error:
        if isinstance(error, RungError) or not torch_compat.is_capture_error(error):
            raise
        if torch_compat.is_size_decision(error) and _has_undeclared(dynamic):
            return _trace_once(function, locals_, _declared(dynamic), maximum, regions)
        raise _trace_error(function, error) from error
    inputs = tuple(argument_path(parse_path(source), function) for source in capture.sources)
    owner = getattr(function, "__self__", None)
    full = dict(example) if owner is None else {self_name(function): owner, **example}
    _check_reachable(inputs, full)
    _refuse_subclasses(inputs, full)
    refuse_sizes_of_values(capture, _name(function))
    refuse_values_on_the_host(capture, _name(function))
    symbols, bounds, unified = audit_symbols(capture, inputs, dynamic, maximum, _name(function))
    refuse_lost_dimensions(capture, inputs, dynamic, symbols, _name(function))
    note_blocks(capture.graph_module.graph)
    template, of_size = _record_template(capture, function, inputs, full, args, kwargs, owner)
    if of_size and _has_undeclared(dynamic):
        return _trace_once(function, locals_, _declared(dynamic), maximum, regions)
    if of_size:
        raise UnsupportedModuleError(
            f"{_name(function)} makes {of_size} from the size of a dynamic dimension; a compiled graph would repeat it for every size",
            hint="return the size itself (`x.shape[0]`) or a tensor, and compute the rest where the module is called",
        )
    roots = Roots(function, ignored=[(region.holder, region.name) for region in regions.values()])
    return TracedGraph(
        capture.graph_module,
        inputs,
        symbols,
        bounds,
        template,
        source_refs(capture.traced_code),
        unified,
        capture.bytecode,
        collect_guards(capture.guards, roots, capture.traced_code),
        regions,
    )


def _has_undeclared(dynamic: DynamicDims) -> bool:
    return any(name.startswith("~") for dims in dynamic.values() for name in dims.values())


def _declared(dynamic: DynamicDims) -> DynamicDims:
    """Without the dimensions that nobody declared (their names begin with "~")."""
    kept = {argument: {dim: name for dim, name in dims.items() if not name.startswith("~")} for argument, dims in dynamic.items()}
    return {argument: dims for argument, dims in kept.items() if dims}


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def _wants_gradient(function: Callable[..., Any]) -> bool:
    owner = getattr(function, "__self__", None)
    return isinstance(owner, nn.Module) and any(parameter.requires_grad for parameter in owner.parameters())


def _free_size(function: Callable[..., Any]) -> int:
    """A size above every dimension of the module's tensors, so that no size coincides with the dynamic one by chance."""
    owner = getattr(function, "__self__", None)
    used = {37}
    if isinstance(owner, nn.Module):
        used |= {size for tensor in (*owner.parameters(), *owner.buffers()) for size in tensor.shape}
    size = 41
    while size in used or any(other % size == 0 for other in used if other):
        size += 2
    return size


def _example_arguments(locals_: Mapping[str, Any], dynamic: DynamicDims, size: int) -> dict[str, Any]:
    # One object passed twice would become one input, and serve later calls with two. `detach` makes them two.
    example = {name: replace_tensors(value, lambda tensor: tensor.contiguous().detach()) for name, value in locals_.items()}
    found = {path.dotted(): value for path, value in leaves(example)}
    stand_ins: dict[int, torch.Tensor] = {}
    for argument, dims in dynamic.items():
        tensor = found.get(argument)
        if tensor is None and any(found.get(prefix, example) is None for prefix in _prefixes(argument)):
            continue  # an optional argument that is absent in this call
        if not isinstance(tensor, torch.Tensor):
            raise DynamicShapeError(
                f"dynamic names argument {argument!r}, but "
                + ("there is no such argument" if argument not in found else f"it is a {_type_of(tensor)}, not a tensor"),
                hint=f"name one of the tensor arguments: {[k for k, v in found.items() if isinstance(v, torch.Tensor)]}",
            )
        bad = [dim for dim in dims if not 0 <= dim < tensor.dim()]
        if bad:
            raise DynamicShapeError(
                f"dynamic names dimension {bad[0]} of argument {argument!r}, which has {tensor.dim()} dimensions",
                hint="count dimensions from 0; negative numbers are not accepted",
            )
        shape = [size if dim in dims else extent for dim, extent in enumerate(tensor.shape)]
        stand_in = tensor.new_zeros(shape)
        for dim, symbol in dims.items():
            torch_compat.mark_unbacked(stand_in, dim, shape_id=symbol)
        stand_ins[id(tensor)] = stand_in
    return {name: replace_tensors(value, lambda tensor: stand_ins.get(id(tensor), tensor)) for name, value in example.items()}


def _prefixes(dotted: str) -> list[str]:
    """`a.b.c`, `a.b`, `a`."""
    parts = dotted.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _type_of(leaf: Any) -> str:
    return (leaf.type if isinstance(leaf, Container) else type(leaf)).__name__


def _as_call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    bound = inspect.BoundArguments(own_signature(function), dict(arguments))
    return bound.args, bound.kwargs


def _check_reachable(inputs: tuple[Path, ...], locals_: Mapping[str, Any]) -> None:
    for path in inputs:
        try:
            path.resolve(locals_)
        except (KeyError, AttributeError, IndexError, TypeError):
            raise UnsupportedModuleError(
                f"the graph reads {path.dotted()!r}, which cannot be found again on the module or its arguments",
                hint="register the tensor as a parameter or buffer, or pass it as an argument",
            ) from None


def _refuse_subclasses(inputs: tuple[Path, ...], locals_: Mapping[str, Any]) -> None:
    """A piece is called below everything that gives a tensor subclass its meaning."""
    for path in inputs:
        value = path.resolve(locals_)
        plain = not isinstance(value, torch.Tensor) or type(value) in (torch.Tensor, nn.Parameter) or torch_compat.is_fake(value)
        if not plain:
            raise UnsupportedModuleError(
                f"{path.dotted()!r} is a {type(value).__qualname__}, a subclass of torch.Tensor, which pieces cannot take",
                hint="use the model without it (for example not quantised), or call the part that needs it in a rung.eager_break",
            )


def _record_template(
    capture: torch_compat.Capture,
    function: Callable[..., Any],
    inputs: tuple[Path, ...],
    locals_: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    owner: object | None,
) -> tuple[Template, str]:
    """The template, and what in it was computed from a size on the host: the bytecode around the graph runs twice, with other stand-ins for
    outputs, and what differs then is."""
    output_node = next(node for node in reversed(capture.graph_module.graph.nodes) if node.op == "output")
    nodes = list(output_node.args[0])
    kept: list[Any] = [None] * len(nodes)
    if owner is not None:
        keep_updated_state(output_node, inputs, self_name(function), locals_, kept)
    roots = Roots(function)
    objects = {source: roots.find(source) for source in capture.side_effects}
    assigned = {f"G[{name!r}]" for name in changed_globals(capture.bytecode, {}, roots)}
    hidden = [source for source, found in objects.items() if not (is_seen(found) or source in assigned)]
    if any(objects[source] is not None or "self" not in source for source in hidden):
        raise _side_effect_error(capture, function, dict.fromkeys(hidden, ""))
    given = {id(path.resolve(locals_)): i for i, path in enumerate(inputs) if path.dim is None}
    runs = [_markers(nodes, kept, start) for start in (1 << 40, 1 << 41)]
    calls = [capture.replay(lambda *_, m=markers: list(m)) for markers in runs]
    with net_effects(objects) as changed, refuse_side_effects(owner, _name(function)), torch.no_grad():
        try:
            samples = [call(*((owner,) if owner is not None else ()), *args, **kwargs) for call in calls]
        except Exception as error:
            if isinstance(error, RungError) or not objects:
                raise
            # such as a value of a tensor that is put into a list
            raise _side_effect_error(capture, function, dict.fromkeys(objects, "")) from error
    changed |= dict.fromkeys(hidden, "")
    globals_ = [name for name, differs in changed_globals(capture.bytecode, calls[0].__globals__, roots).items() if differs]
    if changed or globals_:
        raise _side_effect_error(capture, function, changed, globals_)
    template, other = (_recorder(markers, given).record(sample) for markers, sample in zip(runs, samples, strict=True))
    return template, difference(template, other)


def _markers(nodes: Sequence[fx.Node], kept: Sequence[Any], start: int) -> list[Any]:
    """Stand-ins for the outputs of a graph; numbers and the contents of tensors follow from `start`."""
    numbers = [start + 7919 * index for index in range(len(nodes))]
    return [
        tensor if tensor is not None else number if torch_compat.is_sym_int_node(node) else torch.tensor(number, dtype=torch.float64)
        for node, tensor, number in zip(nodes, kept, numbers, strict=True)
    ]


def _recorder(markers: Sequence[Any], given: Mapping[int, int]) -> Recorder:
    return Recorder(
        outputs={id(marker): i for i, marker in enumerate(markers) if isinstance(marker, torch.Tensor) and id(marker) not in given},
        integers={marker: i for i, marker in enumerate(markers) if isinstance(marker, int)},
        inputs=given,
    )


def _side_effect_error(
    capture: torch_compat.Capture, function: Callable[..., Any], changed: Mapping[str, str], globals_: Iterable[str] = ()
) -> UnsupportedModuleError:
    """`changed` has Dynamo's sources of objects and an attribute of each, or an empty text."""
    names = [name_of_global(name, capture.traced_code) for name in globals_]
    names += [name_of_effect(source, attribute, Roots(function), capture.traced_code) for source, attribute in changed.items()]
    return UnsupportedModuleError(
        f"{_name(function)} changes {', '.join(names)} while it runs; a compiled graph would do so only once",
        hint="return the value instead, update a registered buffer in place (buffer.copy_(...)), or do it in a rung.eager_break",
    )


def _trace_error(function: Callable[..., Any], error: BaseException) -> TraceError:
    where = user_location(error)
    first = str(error).strip().splitlines()
    reason = next((line.strip() for line in first if line.strip()), type(error).__name__)
    if torch_compat.is_size_decision(error):
        return DynamicShapeError(
            f"{_name(function)} decides on the size of a dynamic dimension{where}: {reason}",
            hint="a compiled graph serves every size: make the code independent of the size, or leave the dimension out of `dynamic`",
        )
    return TraceError(
        f"{_name(function)} could not be traced as one graph{where}: {reason}",
        hint="move it out of forward, or into a function of its own that is a rung.eager_break "
        '(breaks="auto" makes one of the function or method around it); RUNG_DISABLE=1 runs the module eagerly',
    )


def user_location(error: BaseException) -> str:
    """` at file:line (code)` of the innermost frame of user code that an error of the compiler names, or an empty text."""
    for frame in reversed(error_frames(error)):
        if frame.line:
            return torch_compat.place(frame.filename, frame.lineno, frame.line)
    return ""


def error_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of user code that an error of the compiler names, innermost last."""
    stack: Any = getattr(error, "real_stack", None)
    frames = list(stack) if stack else list(traceback.extract_tb(error.__traceback__))
    # some of torch 2.11's errors carry the stack as text alone
    text = [traceback.FrameSummary(file, int(line), name, line=code) for file, line, name, code in _FRAME.findall(str(error))]
    return [frame for frame in (*frames, *text) if torch_compat.is_user_file(frame.filename)]
