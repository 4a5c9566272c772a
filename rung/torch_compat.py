"""Every private torch API that rung stands on, one small function each, resolved when first used.

Checked on torch 2.11.0, 2.13.0 and 2.14.1 unless a function says otherwise. `PROBES` names what must exist and `missing_apis` reports
what does not.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import torch
from torch import fx
from torch.utils import _pytree as pytree  # public only as torch.utils._pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # there is no public name

OpOverload = torch._ops.OpOverload  # one overload of a registered op
compile_lock = threading.RLock()  # torch's compiler and its configuration are process-wide: one compile at a time


# --- capture -------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Capture:
    """What Dynamo's fullgraph capture gives."""

    graph_module: fx.GraphModule
    sources: list[str]  # one a placeholder: Dynamo's source expression, e.g. "L['self']._parameters['weight']"
    shape_env: Any
    traced_code: list[types.CodeType]
    bytecode: types.CodeType  # what Dynamo would run in place of the function
    side_effects: tuple[str, ...]  # what the bytecode changes beside calling the graph: Dynamo's source expressions
    replay: Callable[[Callable[..., Any]], Callable[..., Any]]  # compiled_fn -> a callable that runs that bytecode around it


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
    with compile_lock, settings, torch.no_grad(), get_metrics_context(), dynamo_timed("rung.capture"), _side_effects() as side_effects:
        captured: Any = fullgraph_capture(function, args, kwargs)
    output: Any = captured.graph_capture_output
    if captured.backend_input is None:
        raise NoTensorOpsError
    module = captured.backend_input.graph_module
    names = output.output_graph.export_metadata.graph_input_idx_to_local_source
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    sources = [_source_name(names[i]) if i in names else f"?{node.name}" for i, node in enumerate(placeholders)]
    return Capture(
        graph_module=module,
        sources=sources,
        shape_env=captured.backend_input.fake_mode.shape_env,
        traced_code=list(output.traced_code or ()),
        bytecode=output.bytecode,
        side_effects=tuple(side_effects),
        replay=lambda compiled: captured.forward_callable(compiled_fn=compiled, extra_globals=output.f_globals),
    )


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
            found += listed.split(", ") if listed else [text]
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


class NoTensorOpsError(Exception):
    """The traced function contains no tensor operation."""


def _source_name(source: Any) -> str:
    return str(source.name() if callable(source.name) else source.name)


def mark_unbacked(tensor: torch.Tensor, dim: int, shape_id: str) -> None:
    """Give `dim` an unbacked symbol, equal for all tensors of one `shape_id`. Leaves attributes on the tensor: mark clones only."""
    from torch._dynamo.decorators import mark_unbacked as mark

    mark(tensor, dim, shape_id=shape_id)


def is_capture_error(error: BaseException) -> bool:
    """Whether `error` is Dynamo's way of saying that the user's code cannot be traced."""
    from torch._dynamo import exc
    from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, GuardOnDataDependentSymNode

    return isinstance(error, exc.TorchDynamoException | ConstraintViolationError | GuardOnDataDependentSymNode)


def is_size_decision(error: BaseException) -> bool:
    """Whether a trace failed because the code decides on an unbacked size (rather than on a value that only exists while running)."""
    seen: BaseException | None = error
    while seen is not None:
        if "data-dependent" in str(seen) and "Size-like symbols: none" not in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def resolved_symbol(shape_env: Any, size: Any) -> Any | None:
    """What a traced size stands for after all unifications: a sympy expression, or None for a plain int."""
    return shape_env.replace(size.node.expr) if isinstance(size, torch.SymInt) else None


def upper_bound(shape_env: Any, symbol: Any) -> int | None:
    """The largest size that the trace allows for a symbol, or None when it is free."""
    upper = shape_env.var_to_range[symbol].upper
    return int(upper) if upper.is_number and upper.is_finite and upper < 1 << 40 else None


def unproved_relations(capture: Capture, bounds: dict[Any, int | None]) -> list[tuple[Any, str]]:
    """Relations that the trace relies on and that do not hold for all sizes from 0 to the bounds, each with its place in user code.

    They are proved with the symbols' full ranges and without the trace's own assertions as axioms."""
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges

    env = capture.shape_env
    full = {symbol: ValueRanges(0, int_oo if bound is None else bound) for symbol, bound in bounds.items()}
    relations = [(item.expr, item.stack) for items in env.deferred_runtime_asserts.values() for item in items]
    relations += [(guard.expr, getattr(guard, "sloc", None)) for guard in env.guards]
    found = []
    for expression, stack in relations:
        replaced = env.replace(expression)
        ranges = {symbol: full.get(symbol) or env.var_to_range[symbol] for symbol in replaced.free_symbols}
        static = env._maybe_evaluate_static(replaced, axioms=(), var_to_range=tuple(ranges.items()))
        if static is None or not bool(static):
            found.append((replaced, _place(stack)))
    return found


def bounding_constant(shape_env: Any, relation: Any, symbol: Any) -> int | None:
    """The largest constant of a relation such that the relation holds for all sizes up to it, e.g. 64 for Eq(s, Min(64, s))."""
    from torch.utils._sympy.value_ranges import ValueRanges

    constants = sorted({int(atom) for atom in relation.atoms() if atom.is_Integer and atom > 1}, reverse=True)
    for constant in constants:
        # up to the constant Min(constant, s) is s, which the range analysis does not see by itself
        reduced = relation.replace(lambda e: type(e).__name__ == "Min" and symbol in e.args, lambda _: symbol)
        static = shape_env._maybe_evaluate_static(reduced, axioms=(), var_to_range=((symbol, ValueRanges(0, constant)),))
        if static is not None and bool(static):
            return constant
    return None


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
        if "/torch/" not in file and "/rung/" not in file:
            return f" at {file}:{line} ({code.strip()})"
    return ""


def _place(stack: Any) -> str:
    """` at file:line (code)` of the innermost user frame of a captured traceback."""
    summary = getattr(stack, "summary", None)
    frames = summary() if callable(summary) else getattr(stack, "framework_loc", None) or ()
    for frame in reversed(list(frames) if not isinstance(frames, str) else []):
        if f"{'torch'}/" not in frame.filename and "/rung/" not in frame.filename and frame.line:
            return f" at {frame.filename}:{frame.lineno} ({frame.line.strip()})"
    return ""


def symbol_of(size: Any) -> Any | None:
    """The sympy expression of a SymInt, or None for a plain int."""
    return size.node.expr if isinstance(size, torch.SymInt) else None


def free_symbols(value: Any) -> set[Any]:
    """The symbols in a traced size, or in the sizes and strides of a traced tensor."""
    if isinstance(value, torch.Tensor):
        return {symbol for extent in (*value.shape, *value.stride()) for symbol in free_symbols(extent)}
    return set(value.node.expr.free_symbols) if isinstance(value, torch.SymInt) else set()


def evaluate_size(value: Any, size: int) -> Any:
    """A traced size with every symbol set to `size`."""
    if not isinstance(value, torch.SymInt):
        return value
    return int(value.node.expr.subs(dict.fromkeys(value.node.expr.free_symbols, size)))


def readable(graph_module: fx.GraphModule) -> str:
    """A graph as annotated Python."""
    return str(graph_module.print_readable(print_output=False))


def storage_identity(tensor: torch.Tensor) -> int:
    """Equal for tensors (fake ones too) that share a storage."""
    return int(tensor.untyped_storage()._cdata)


def single_overload(target: Any) -> Any:
    """The overload behind an op packet that has only one; anything else as it is."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        names = target.overloads()
        return getattr(target, names[0]) if len(names) == 1 else target
    return target


def is_sym_int_node(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.SymInt)


# --- compile -------------------------------------------------------------------------------------------------------------------------


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
        self._symbols: dict[str, torch.SymInt] = {}
        self._high: dict[Any, int | None] = {}

    def symbol(self, name: str, high: int | None = None) -> torch.SymInt:
        """The size called `name`, at most `high`."""
        if name not in self._symbols:
            self._symbols[name] = self._backed(name, high) if self.hinted else self._unbacked(high)
        return self._symbols[name]

    def _backed(self, name: str, high: int | None) -> torch.SymInt:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
        from torch.utils._sympy.numbers import int_oo
        from torch.utils._sympy.value_ranges import ValueRanges

        hint = min(64 + 16 * len(self._symbols), high or 1 << 30)  # different hints, so that none is taken to equal another
        fake = self.mode.from_tensor(
            torch.empty(max(hint, 2), device="meta"),
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC]),
            source=ConstantSource(f"rung_{name}"),
        )
        symbol: torch.SymInt = fake.shape[0]
        self._high[symbol.node.expr] = high
        self.shape_env.var_to_range[symbol.node.expr] = ValueRanges(2, int_oo if high is None or high < 2 else high)
        return symbol

    def _unbacked(self, high: int | None) -> torch.SymInt:
        from torch.fx.experimental.symbolic_shapes import _constrain_range_for_size

        with self.shape_env.ignore_fresh_unbacked_symbols():  # an input's symbol has no producing node
            symbol = self.shape_env.create_unbacked_symint()
        _constrain_range_for_size(symbol, min=0, max=high)
        return cast("torch.SymInt", symbol)

    def restrictions(self) -> list[str]:
        """Guards that the compile added and that do not hold for all sizes from 2 to the maximum. Empty: the code serves all of them."""
        from torch.utils._sympy.numbers import int_oo
        from torch.utils._sympy.value_ranges import ValueRanges

        env = self.shape_env
        ranges = tuple((symbol, ValueRanges(2, int_oo if high is None else max(high, 2))) for symbol, high in self._high.items())
        found = [] if not self.hinted else [f"{symbol} = {value}" for symbol, value in env.replacements.items() if symbol in self._high]
        for guard in env.guards:
            static = env._maybe_evaluate_static(guard.expr, axioms=(), var_to_range=ranges)
            if static is None or not bool(static):
                found.append(str(guard.expr))
        return found if self.hinted else []

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

        with self.mode, torch.no_grad():
            Propagate(graph_module).run(*inputs)


def compile_piece(graph_module: fx.GraphModule, fresh: FreshSymbols, inputs: Sequence[Any], config: dict[str, Any]) -> Any:
    """Compile one piece with Inductor into an artifact that can be serialised. Takes ownership of `graph_module`.

    Inductor's configuration is patched around this call alone; 2.11 patches are process-wide, hence the lock."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import standalone_compile
    from torch.fx.experimental import _config

    shapes_config: Any = _config  # its `patch` is installed at run time

    with compile_lock, torch.no_grad(), tracing(TracingContext(fresh.mode)), shapes_config.patch(backed_size_oblivious=True):
        return standalone_compile(
            graph_module, list(inputs), dynamic_shapes="from_tracing_context", options={"config_patches": config}, aot=True
        )


def serialize_artifact(artifact: Any) -> bytes:
    import torch._functorch.config as functorch_config

    with compile_lock, functorch_config.patch("bundled_autograd_cache", True):
        return bytes(artifact.serialize())


def deserialize_artifact(blob: bytes) -> Any:
    """Load a serialised artifact. This unpickles: the caller has verified the bytes. One thread at a time: 2.11 patches process-wide."""
    from torch._inductor.standalone_compile import AOTCompiledArtifact

    with compile_lock:
        return AOTCompiledArtifact.deserialize(blob)


def raw_callable(artifact: Any) -> Callable[[list[Any]], Any] | None:
    """Inductor's own entry of an artifact, below AOTAutograd's runtime wrapper: takes a list (which it clears), returns a sequence.

    Found by a walk over closures. None when the walk finds nothing: the caller then calls the artifact itself."""
    graph = _compiled_graph(artifact)
    return None if graph is None else graph.current_callable


def artifact_source(artifact: Any) -> str:
    """The source that Inductor generated, or an empty text."""
    graph = _compiled_graph(artifact)
    return str(getattr(graph, "source_code", "") or "")


def _compiled_graph(artifact: Any) -> Any | None:
    from torch._inductor.output_code import CompiledFxGraph

    stack: list[Any] = [getattr(artifact, "_compiled_fn", None) or artifact.inner_fn]
    seen: set[int] = set()
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, CompiledFxGraph):
            return item
        if isinstance(item, types.FunctionType):
            for cell in item.__closure__ or ():
                with contextlib.suppress(ValueError):  # an empty cell (2.11)
                    stack.append(cell.cell_contents)
            stack.append(getattr(item, "__wrapped__", None))
        elif isinstance(item, types.MethodType):
            stack += [item.__self__, item.__func__]
        elif isinstance(item, list | tuple):
            stack += item
        elif hasattr(item, "__dict__") and type(item).__module__.startswith("torch."):
            stack += vars(item).values()
    return None


# --- passes --------------------------------------------------------------------------------------------------------------------------


def graph_pass(function: Callable[[fx.Graph], None], uuid: bytes) -> Any:
    """Wrap `function` as the one custom pass that Inductor runs before its own post-grad passes. `uuid` enters Inductor's cache keys."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            function(graph)

        def uuid(self) -> bytes:
            return uuid

    return Pass()


PASS_OPTION = "post_grad_custom_pre_pass"  # fusions must run before Inductor turns mm + add into addmm


def trace_body(function: Callable[..., Any], values: Sequence[Any]) -> fx.GraphModule:
    """Trace `function` over fake `values` into ATen nodes, decomposed as Inductor would."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = next(v.fake_mode for v in values if hasattr(v, "fake_mode"))
    with mode, torch.no_grad():
        traced: fx.GraphModule = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="real")(*values)
    traced.graph.eliminate_dead_code()
    return traced


# --- keys ----------------------------------------------------------------------------------------------------------------------------


def toolchain_factors() -> dict[str, str]:
    """What in torch and its compiler can change generated code."""
    from torch._inductor import config as inductor_config
    from torch._inductor.codecache import torch_key

    portable = sorted((name, repr(value)) for name, value in inductor_config.save_config_portable().items())
    return {
        "torch": torch.__version__,
        "torch_key": torch_key().hex(),
        "cuda": str(torch.version.cuda),
        "inductor_config": hashlib.sha256(repr(portable).encode()).hexdigest(),
    }


def device_factors(device: torch.device) -> dict[str, str]:
    """What of a device enters generated code: never its ordinal."""
    if device.type != "cuda":
        return {"device": device.type}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
    }


# --- dispatch, for the recorded graph backend ----------------------------------------------------------------------------------------


def tree_leaves(values: Any) -> list[Any]:
    """The leaves of nested tuples, lists and dicts."""
    return list(pytree.tree_leaves(values))


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """Apply `function` to every tensor of nested tuples, lists and dicts."""
    return pytree.tree_map_only(torch.Tensor, function, values)


def storage_use_count(tensor: torch.Tensor) -> int:
    """How many tensors share the storage of `tensor`, itself included. Can go when torch shows publicly that memory is free."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # one reference is `storage` itself


def is_python_op(function: Any) -> bool:
    """Whether an OpOverload was defined from Python, so that its kernels are Python too."""
    return bool(getattr(function, "_defined_in_python", False))


def call_cpu_kernel(function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Call the CPU kernel of an OpOverload below the Python dispatch key: a dispatch mode then sees what the kernel calls, not the op."""
    return function.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *arguments, **keywords)


def generator_key(generator: torch.Generator) -> int:
    """Tells generators apart: a dispatch mode is given a new Python object for the same one. Can go when they compare equal."""
    return int(generator._cdata)  # type: ignore[attr-defined]


def end_allocation_to_pool(device: torch.device, handle: tuple[int, int]) -> None:
    """Take the caching allocator out of capture mode after a capture that could not be ended: until then it refuses `empty_cache` and
    retries after running out of memory (pytorch/pytorch#190308). Raises when the failed end has done it already."""
    torch._C._cuda_endAllocateToPool(device.index or 0, handle)


# --- health --------------------------------------------------------------------------------------------------------------------------

PROBES = (
    "torch._dynamo.convert_frame.fullgraph_capture",
    "torch._dynamo.utils.get_metrics_context",
    "torch._dynamo.utils.dynamo_timed",
    "torch._dynamo.decorators.mark_unbacked",
    "torch._dynamo.exc.TorchDynamoException",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv",
    "torch.fx.experimental.symbolic_shapes._constrain_range_for_size",
    "torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode",
    "torch.fx.experimental.proxy_tensor.make_fx",
    "torch._guards.tracing",
    "torch._inductor.standalone_compile",
    "torch._inductor.standalone_compile.AOTCompiledArtifact",
    "torch._inductor.output_code.CompiledFxGraph",
    "torch._inductor.custom_graph_pass.CustomGraphPass",
    "torch._inductor.decomposition.select_decomp_table",
    "torch._inductor.codecache.torch_key",
    "torch._inductor.config.save_config_portable",
)


def missing_apis() -> list[str]:
    """The probed names that this torch does not have."""
    return [name for name in PROBES if not _exists(name)]


def _exists(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    try:
        return hasattr(import_module(module), attribute)
    except ImportError:
        return False


@contextlib.contextmanager
def quiet_compiler() -> Iterator[None]:
    """Keep the compiler's deprecation chatter out of a program that turns warnings into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores", category=UserWarning)  # the user's choice, not ours
        yield
