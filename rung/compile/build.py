"""From a traced graph to pieces and the steps of a plan. No code is generated here."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rung import torch_compat
from rung.attention import SPLIT_OPS
from rung.compile.ambient import blocks_of
from rung.compile.eager_break import NAMESPACE, plain_name
from rung.compile.fake_kernels import FakeOutput
from rung.compile.guards import Roots
from rung.compile.pieces import Piece, extract_piece
from rung.compile.plan import OpCall, Step
from rung.compile.regions import TARGET, Region
from rung.compile.split import Segment, is_size_arithmetic, mutates, simplify_sizes, split_graph, storages, written_storages
from rung.compile.trace import TracedGraph
from rung.compile.whole import WholeReport, layers_of, run_whole
from rung.config import CompileConfig
from rung.errors import UnsupportedModuleError


@dataclass(frozen=True, slots=True)
class SplitGraph:
    """Unique pieces and the steps that use them."""

    pieces: tuple[Piece, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Any, ...]
    fakes: dict[int, FakeOutput]  # value number -> what a fake kernel said of this output of a split op
    written: tuple[int, ...]  # value numbers of the graph's inputs that are updated in place
    aliased: tuple[int, ...]  # value numbers whose memory another value has too

    def forget(self) -> None:
        """Drop the graphs of the pieces: the fake tensors on their nodes keep the whole trace alive."""
        for piece in self.pieces:
            piece.graph_module.graph = fx.Graph()


def split_traced(traced: TracedGraph, function: Callable[..., Any], config: CompileConfig) -> tuple[SplitGraph, WholeReport]:
    """Run the passes over the whole graph of `function` and split what they leave. Mutates the traced graph."""
    whole = run_whole(traced.graph_module.graph, layers_of(Roots(function)), config)
    return build_steps(traced, SPLIT_OPS | set(config.split_ops)), whole


def build_steps(traced: TracedGraph, split_ops: Collection[str]) -> SplitGraph:
    """Split `traced` at `split_ops` (names such as "rung::attention") and number its values. Mutates the traced graph."""
    module = traced.graph_module
    simplify_sizes(module.graph)
    _refuse_constants(module.graph)
    written = _written_inputs(module.graph)
    segments = split_graph(module.graph, lambda node: is_split_op(node, split_ops))
    builder = _Builder(module, traced.regions, traced.symbols)
    for segment in segments:
        if segment.kind == "piece":
            builder.add_piece(segment)
        else:
            builder.add_break(segment)
    output = next(node for node in reversed(module.graph.nodes) if node.op == "output")
    builder.add_sizes(output)
    outputs = tuple(builder.argument(item) for item in output.args[0])
    return SplitGraph(tuple(builder.unique.values()), tuple(builder.steps), outputs, builder.fakes, written, builder.aliased())


def is_split_op(node: fx.Node, split_ops: Collection[str]) -> bool:
    overload = torch_compat.single_overload(node.target)
    if node.op != "call_function" or not isinstance(overload, torch_compat.OpOverload):
        if (packet := torch_compat.packet_name(overload)) in split_ops:
            raise UnsupportedModuleError(
                f"{packet} is a split op and has several overloads; it is called without saying which{torch_compat.node_location(node)}",
                hint=f"call one of them, such as torch.ops.{packet.replace('::', '.')}.default",
            )
        return False
    name = overload.name().split(".")[0]
    return name in split_ops or name.startswith(f"{NAMESPACE}::")


def _written_inputs(graph: fx.Graph) -> tuple[int, ...]:
    """Numbers of the placeholders whose storage some node may write: any storage that a mutating node without a schema is given."""
    written = {storage for node in graph.nodes if mutates(node) for storage in written_storages(node)}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    return tuple(number for number, node in enumerate(placeholders) if storages(node) & written)


def _refuse_constants(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op == "get_attr" and isinstance(node.meta.get("example_value"), torch.Tensor):
            raise UnsupportedModuleError(
                f"forward makes a constant tensor{torch_compat.node_location(node)}",
                hint="register it as a buffer of the module",
            )


class _Builder:
    def __init__(self, module: fx.GraphModule, regions: Mapping[str, Region], symbols: Mapping[str, str]) -> None:
        self.module = module
        self.symbols = symbols
        self.fakes: dict[int, FakeOutput] = {}
        self.regions = {op: (f"{TARGET}::{index}", region) for index, (op, region) in enumerate(regions.items())}
        self.numbers: dict[fx.Node, int] = {}
        self.steps: list[Step] = []
        self.unique: dict[str, Piece] = {}
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self.number(node)

    def number(self, node: fx.Node) -> int:
        return self.numbers.setdefault(node, len(self.numbers))

    def aliased(self) -> tuple[int, ...]:
        """The numbers of values that have memory in common with another one."""
        owners: dict[int, list[int]] = {}
        for node, number in self.numbers.items():
            for storage in storages(node):
                owners.setdefault(storage, []).append(number)
        return tuple(sorted({number for numbers in owners.values() if len(numbers) > 1 for number in numbers}))

    def add_piece(self, segment: Segment) -> None:
        if not segment.outputs and not any(mutates(node) for node in segment.nodes):
            return
        piece = extract_piece(self.module, segment)
        self.unique.setdefault(piece.key, piece)
        index = list(self.unique).index(piece.key)
        inputs = tuple(self.number(node) for node in segment.inputs)
        outputs = tuple(self.number(node) for node in segment.outputs)
        self.steps.append(Step(f"piece_{self._count('piece'):02}", inputs, outputs, piece=index))

    def add_break(self, segment: Segment) -> None:
        calls: list[OpCall] = []
        sizes: dict[fx.Node, None] = {}
        for node in segment.nodes:
            if node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
                continue
            calls += self._size_calls(node, sizes)
            calls.append(self._call(node))
        inputs = tuple(self.number(node) for node in segment.inputs)
        outputs = tuple(self.number(node) for node in segment.outputs)
        namespace, _, name = calls[-1].target.partition(".")[0].partition("::")
        labels = {target: region.label for target, region in self.regions.values()}
        name = plain_name(name) if namespace == NAMESPACE else labels.get(calls[-1].target, name)
        self.steps.append(Step(f"{name}_{self._count('break'):02}", inputs, outputs, calls=tuple(calls)))

    def add_sizes(self, output: fx.Node) -> None:
        """A last break for flat outputs that are computed from sizes."""
        sizes: dict[fx.Node, None] = {}
        calls = self._size_calls(output, sizes)
        if calls:
            leaves = [used for node in sizes for used in node.all_input_nodes if used not in sizes]
            inputs = tuple(dict.fromkeys(self.number(node) for node in leaves))
            outputs = tuple(self.number(node) for node in sizes if output in node.users)
            self.steps.append(Step("sizes", inputs, outputs, calls=tuple(calls)))

    def _size_calls(self, node: fx.Node, made: dict[fx.Node, None]) -> list[OpCall]:
        """The size arithmetic that `node` needs and that is not `made` yet in this break."""
        calls = []
        for used in node.all_input_nodes:
            if is_size_arithmetic(used) and used not in made:
                calls += self._size_calls(used, made)
                made[used] = None
                arguments = tuple(self.argument(value) for value in used.args)
                calls.append(OpCall(_size_target(used), arguments, {}, (self.number(used),)))
        return calls

    def _count(self, kind: str) -> int:
        return sum((step.piece is not None) == (kind == "piece") for step in self.steps)

    def _call(self, node: fx.Node) -> OpCall:
        overload: Any = torch_compat.single_overload(node.target)
        is_tuple = isinstance(node.meta.get("example_value"), tuple | list)
        outputs: tuple[int, ...] = ()
        if is_tuple:
            parts = {int(user.args[1]): user for user in node.users}  # type: ignore[arg-type]
            outputs = tuple(self.number(parts[i]) if i in parts else -1 for i in range(len(node.meta["example_value"])))
        elif node.users:
            outputs = (self.number(node),)
        kwargs = {key: self.argument(value) for key, value in node.kwargs.items()}
        name = overload.name()
        if name.partition(".")[0] in self.regions:
            name = self.regions[name.partition(".")[0]][0]
        else:
            values = node.meta["example_value"] if is_tuple else [node.meta.get("example_value")]
            for index, (number, value) in enumerate(zip(outputs, values, strict=False)):
                if number >= 0 and isinstance(value, torch.Tensor):
                    self.fakes[number] = FakeOutput.of(name, index, value, self.symbols)
        return OpCall(name, tuple(self.argument(value) for value in node.args), kwargs, outputs, is_tuple, blocks_of(node))

    def argument(self, value: Any) -> Any:
        """The JSON form of an argument: a value number, a constant, or a list of them."""
        if isinstance(value, fx.Node):
            return {"value": self.number(value)}
        if isinstance(value, tuple | list):
            return [self.argument(item) for item in value]
        if isinstance(value, bool | int | float | str | type(None)):
            return {"constant": value}
        if isinstance(value, torch.dtype | torch.device):
            return {"torch": str(value)}
        raise UnsupportedModuleError(
            f"a split op is called with a {type(value).__name__}, which a plan cannot hold",
            hint="pass tensors, numbers, strings, lists of them, dtypes or devices",
        )


def _size_target(node: fx.Node) -> str:
    name = getattr(node.target, "__name__", str(node.target))
    if getattr(operator, name, None) is node.target:
        return f"operator::{name}"
    if getattr(torch, name, None) is node.target:
        return f"torch::{name}"
    raise UnsupportedModuleError(
        f"a size is computed by {name}, which a plan cannot hold{torch_compat.node_location(node)}",
        hint="compute sizes with +, -, *, //, %, min and max",
    )
