"""Dynamo's capture of a function as one graph, and the user code behind its nodes."""

from __future__ import annotations

import builtins
import contextlib
import inspect
import re
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rung.torch_compat.compiler import compile_lock
from rung.torch_compat.guards import DynamoGuard, dynamo_guards
from rung.torch_compat.user_code import is_user_file, place


@dataclass(frozen=True, slots=True)
class Capture:
    """What Dynamo's fullgraph capture gives."""

    graph_module: fx.GraphModule
    sources: list[str]  # one a placeholder: Dynamo's source expression, e.g. "L['self']._parameters['weight']"
    shape_env: Any
    traced_code: list[types.CodeType]
    bytecode: types.CodeType  # what Dynamo would run in place of the function
    guards: list[DynamoGuard]  # what the trace has read of the program
    side_effects: tuple[str, ...]  # what the bytecode changes beside calling the graph: Dynamo's source expressions
    # compiled_fn -> a function of that bytecode around it, with globals of its own
    replay: Callable[[Callable[..., Any]], types.FunctionType]


class NoTensorOpsError(Exception):
    """The traced function contains no tensor operation."""


def capture_graph(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Capture:
    """Trace `function` (a plain function or a bound method) as one graph. Raises Dynamo's own errors; see `user_error`.

    `fullgraph_capture` must run inside a metrics context or it fails at the first branch it meets. Numbers and undeclared sizes are always
    constants: by default Dynamo makes one dynamic that it has seen with another value, so a trace would depend on the traces before it."""
    from torch._dynamo import config as dynamo_config
    from torch._dynamo.convert_frame import fullgraph_capture
    from torch._dynamo.utils import dynamo_timed, get_metrics_context

    settings = dynamo_config.patch(
        specialize_float=True, automatic_dynamic_shapes=False, assume_static_by_default=True, side_effect_replay_policy="warn"
    )
    with compile_lock, settings, get_metrics_context(), dynamo_timed("rung.capture"), _side_effects() as side_effects:
        captured: Any = fullgraph_capture(function, args, kwargs)
    output: Any = captured.graph_capture_output
    if captured.backend_input is None:
        raise NoTensorOpsError
    module = captured.backend_input.graph_module
    names = output.output_graph.export_metadata.graph_input_idx_to_local_source
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    sources = [_source_name(names[i]) if i in names else f"?{node.name}" for i, node in enumerate(placeholders)]
    placeholders += _tensors_of_sizes(module.graph, placeholders, sources, captured.backend_input.fake_mode.shape_env)
    _forget_real_tensors(placeholders)
    return Capture(
        graph_module=module,
        sources=sources,
        shape_env=captured.backend_input.fake_mode.shape_env,
        traced_code=list(output.traced_code or ()),
        bytecode=output.bytecode,
        guards=dynamo_guards(output.output_graph),
        side_effects=tuple(side_effects),
        replay=lambda compiled: captured.forward_callable(compiled_fn=compiled, extra_globals=_with_builtins(output)),
    )


def _tensors_of_sizes(graph: fx.Graph, placeholders: list[fx.Node], sources: list[str], shape_env: Any) -> list[fx.Node]:
    """Placeholders for tensors of which a graph has the sizes alone: Dynamo leaves them out, and whoever calls the graph passes tensors.
    Their sources are appended to `sources`. Checked on torch 2.11 and 2.13."""
    fakes = {_source_name(tracked.source): tracked.fake for tracked in shape_env.tracked_fakes or ()}
    made: list[fx.Node] = []
    for source in [source.rpartition(".size()[")[0] for source in sources]:
        if source in fakes and source not in sources:
            with graph.inserting_after((placeholders + made)[-1]):
                node = graph.placeholder(f"tensor_{len(made)}")
            node.meta["example_value"] = fakes[source]
            sources.append(source)
            made.append(node)
    return made


def _with_builtins(output: Any) -> dict[str, Any]:
    """The globals of a capture's bytecode. 2.11 takes builtins that it names for globals that are missing; can go with 2.11."""
    names: dict[str, Any] = output.f_globals
    missing = {name: vars(builtins)[name] for name in output.bytecode.co_names if name in vars(builtins) and name not in names}
    return {**names, **missing} if missing else names


def _forget_real_tensors(placeholders: list[fx.Node]) -> None:
    """Drop the weak references of a trace to the tensors that it saw; `torch.utils.swap_tensors` refuses a tensor that has any.

    Without this they stay for good: torch's caches of methods of `ShapeEnv` keep every trace alive. Checked on torch 2.11 and 2.13; it can
    go when those caches let a trace go."""
    for mode in {node.meta["example_value"].fake_mode for node in placeholders if hasattr(node.meta.get("example_value"), "fake_mode")}:
        describer = mode.fake_tensor_converter.meta_converter.describer
        describer.lookup_tensor.clear()
        describer.lookup_storage.clear()


@contextlib.contextmanager
def _side_effects() -> Iterator[list[str]]:
    """Collect what Dynamo warns of under `side_effect_replay_policy="warn"`; other warnings are given again after the block."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    for warning in caught:
        text = str(warning.message)
        if "certain side effects happened" in text:
            listed = text.partition(": [")[2].removesuffix("]")
            found += [_unquoted(item) for item in listed.split(", ")] if listed else [text]
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def _source_name(source: Any) -> str:
    return str(source.name() if callable(source.name) else source.name)


def mark_unbacked(tensor: torch.Tensor, dim: int, shape_id: str) -> None:
    """Give `dim` an unbacked symbol, equal for all tensors of one `shape_id`. Leaves attributes on the tensor: mark clones only.

    Sizes begin at 1, which lets a batch norm (it asks for size 0) be traced; torch 2.11 cannot be told so."""
    from torch._dynamo.decorators import mark_unbacked as mark

    bounds = {"min": 1} if "min" in inspect.signature(mark).parameters else {}
    mark(tensor, dim, shape_id=shape_id, **bounds)


def is_capture_error(error: BaseException) -> bool:
    """Whether `error` is Dynamo's way of saying that the user's code cannot be traced."""
    from torch._dynamo import exc
    from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, GuardOnDataDependentSymNode

    return isinstance(error, exc.TorchDynamoException | ConstraintViolationError | GuardOnDataDependentSymNode)


def is_size_decision(error: BaseException) -> bool:
    """Whether a trace failed because the code decides on an unbacked size (rather than on a value that only exists while running)."""
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen)
        if "Size-like symbols: " in text and "Size-like symbols: none" not in text:
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def where_fixed(capture: Capture, placeholder: fx.Node, size: int) -> str:
    """The place in user code where a tensor derived from `placeholder` first met one with a dimension of exactly `size`."""
    derived = {placeholder}
    for node in capture.graph_module.graph.nodes:
        inputs = node.all_input_nodes
        if not derived.isdisjoint(inputs):
            if any(size in getattr(other.meta.get("example_value"), "shape", ()) for other in inputs if other not in derived):
                return node_location(node)
            derived.add(node)
    return ""


def node_location(node: fx.Node) -> str:
    """` at file:line (code)` of the user code behind a graph node, or an empty text."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)', node.stack_trace or "")
    for file, line, code in reversed(frames):
        if is_user_file(file):
            return place(file, int(line), code)
    return ""


def readable(graph_module: fx.GraphModule) -> str:
    """A graph as annotated Python."""
    return str(graph_module.print_readable(print_output=False))
