"""Inductor's standalone compile and what lies inside its artifacts."""

from __future__ import annotations

import contextlib
import re
import sysconfig
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from rung.torch_compat import ambient
from rung.torch_compat.compiler import compile_lock
from rung.torch_compat.fresh_symbols import FreshSymbols

# Two passes that move calls for locality and memory do not know that random numbers come in an order (pytorch/pytorch#176842 and #192635).
# Can go when both do.
_IN_ORDER = {"reorder_for_locality": False, "reorder_for_peak_memory": False}
# AOTAutograd refuses to serialise a graph with `torch.tensor(x.shape[0])`, which is a function of its arguments alone. Can go when it is on
# its list of safe functions (torch/_functorch/_aot_autograd/autograd_cache.py, `check_node_safe`).
_CACHEABLE = {**ambient.CACHEABLE, "torch._refs.tensor": "arguments alone"}
_ENVIRONMENT = re.compile(rb"os\.environ\['\w+'\] = [^\n]*")
_DRAWS = re.compile(r"rand|dropout|bernoulli|normal|multinomial|poisson|uniform|exponential|geometric|cauchy|rrelu")


def _draws(graph_module: fx.GraphModule) -> bool:
    """Whether a graph may draw several random numbers: a name with that sound is enough."""
    names = [str(getattr(node.target, "__name__", node.target)) for node in graph_module.graph.nodes if node.op.startswith("call_")]
    return sum(bool(_DRAWS.search(name)) for name in names) > 1


def compile_piece(graph_module: fx.GraphModule, fresh: FreshSymbols, inputs: Sequence[Any], config: dict[str, Any]) -> Any:
    """Compile one piece with Inductor into an artifact that can be serialised. Takes ownership of `graph_module`.

    Inductor's configuration is patched around this call alone; 2.11 patches are process-wide, hence the lock."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import standalone_compile
    from torch.fx.experimental import _config

    shapes_config: Any = _config  # its `patch` is installed at run time

    patches = {"unsafe_marked_cacheable_functions": _CACHEABLE, **(_IN_ORDER if _draws(graph_module) else {}), **config}
    with compile_lock, torch.no_grad(), tracing(TracingContext(fresh.mode)), shapes_config.patch(backed_size_oblivious=True):
        return standalone_compile(
            graph_module, list(inputs), dynamic_shapes="from_tracing_context", options={"config_patches": patches}, aot=True
        )


def needs_size_asserts() -> bool:
    """Whether generated code knows the sizes of its inputs only when it asserts them: 2.14's wrapper binds symbols that no Dynamo source
    names together with the assertions, and fails with a NameError without. Can go when it binds them anyway (`codegen_inputs`)."""
    return _version() >= (2, 14)


def loses_guards() -> bool:
    """Whether a piece from Inductor's own cache may come without guards on its sizes, so that nobody knows for which it was made: on 2.11
    the C++ of a sum is for up to 4096 rows, and a hit said nothing of it. Hits are meant to add them again
    (https://github.com/pytorch/pytorch/pull/151563); 2.12 to 2.14 put no such guard. Can go with 2.11."""
    return _version() < (2, 12)


def _version() -> tuple[int, ...]:
    """Of torch, major and minor."""
    return tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))


class NotSerialisableError(Exception):
    """AOTAutograd made something of a graph that cannot be serialised."""


def serialize_artifact(artifact: Any) -> bytes:
    """Without the environment of this process, which a text for debugging repeats. Raises `NotSerialisableError`; see `distrusted_call`."""
    import torch._functorch.config as functorch_config

    with compile_lock, functorch_config.patch("bundled_autograd_cache", True):
        try:
            serialized = bytes(artifact.serialize())
        except TypeError as error:  # its `serialize` is None
            raise NotSerialisableError(str(error)) from error
    return _ENVIRONMENT.sub(lambda line: b"#".ljust(len(line[0])), serialized)  # as long as before, since a pickle counts bytes


def distrusted_call(graph: fx.Graph) -> tuple[str, fx.Node] | None:
    """The first call in a trace that AOTAutograd does not take for a function of its arguments, so that it gives nothing to serialise: what
    it is in words, and its node. None when there is no such call."""
    from torch._functorch._aot_autograd.autograd_cache import check_node_safe
    from torch._inductor import config

    with compile_lock, config.patch(unsafe_marked_cacheable_functions=_CACHEABLE):
        for node in graph.nodes:
            try:
                check_node_safe(node)
            except Exception:  # also what asking fails with, which counts as no to AOTAutograd
                return _in_words(node), node
    return None


def _in_words(node: fx.Node) -> str:
    name = str(getattr(node.target, "__name__", node.target))
    if node.target is torch.Tensor.set_:  # what Dynamo makes of it
        return "an assignment to `.data`"
    return f"NumPy's {name.removeprefix('wrapped_')}" if type(node.target).__name__.startswith("numpy_") else name


def without_folders(library: bytes) -> bytes:
    """A shared library without the folders of torch, Python's headers and Inductor, which messages and debug information name. Each becomes
    slashes, as long as before, so that nothing moves."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    for folder in (str(Path(torch.__file__).parent), sysconfig.get_path("include"), cache_dir()):
        library = library.replace(folder.encode() + b"/", b"/" * (len(folder.encode()) + 1))
        library = library.replace(folder.encode() + b"\0", b"/" * len(folder.encode()) + b"\0")
    return library


def deserialize_artifact(blob: bytes) -> Any:
    """Load a serialised artifact. This unpickles: the caller has verified the bytes. One thread at a time: 2.11 patches process-wide."""
    from torch._inductor.standalone_compile import AOTCompiledArtifact

    with compile_lock:
        return AOTCompiledArtifact.deserialize(blob)


def raw_callable(artifact: Any) -> Callable[[list[Any]], Any] | None:
    """Inductor's own entry of an artifact, below AOTAutograd's runtime wrapper: takes a list (which it clears), returns a sequence.

    Found by a walk over closures. None when the walk finds nothing: the caller then calls the artifact itself."""
    graph = compiled_graph(artifact)
    return None if graph is None else graph.current_callable


def artifact_source(artifact: Any) -> str:
    """The source that Inductor generated, or an empty text."""
    graph = compiled_graph(artifact)
    return str(getattr(graph, "source_code", "") or "")


def compiled_graph(artifact: Any) -> Any | None:
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
