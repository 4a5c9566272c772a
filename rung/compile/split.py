"""Cut a traced graph at its split ops into pieces and breaks, in one linear walk.

Adjacent split ops form one break. Views and `empty` calls that stand between split ops are hoisted above them where their inputs exist
already, so that attention (cache write, output buffer, attention) is one break and not two with a piece of bookkeeping between.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from rung import torch_compat
from rung.compile.eager_break import NAMESPACE

_HOISTABLE_METHODS = frozenset({"view", "reshape", "unsqueeze", "squeeze", "transpose", "permute", "flatten", "unflatten", "new_empty"})
_IN_PLACE_OPERATORS = frozenset(name for name in vars(operator) if name.startswith("i") and hasattr(operator, f"__{name[1:]}__"))  # iadd
_HOISTABLE_FUNCTIONS = frozenset({torch.empty, torch.empty_like, torch.unsqueeze, torch.transpose, torch.flatten})

_FUNCTIONAL = ("input", "running_mean", "running_var", "weight", "bias")
_BUILTIN = ("input", "weight", "bias", "running_mean", "running_var")
# norm over the batch -> the order of its arguments, the one that says whether statistics are updated, and its default
_NORMS: dict[Any, tuple[tuple[str, ...], str, bool]] = {
    torch.nn.functional.batch_norm: ((*_FUNCTIONAL, "training"), "training", False),
    torch.nn.functional.instance_norm: ((*_FUNCTIONAL, "use_input_stats"), "use_input_stats", True),
    torch.batch_norm: ((*_BUILTIN, "training"), "training", False),
    torch.instance_norm: ((*_BUILTIN, "use_input_stats"), "use_input_stats", True),
}


@dataclass(slots=True)
class Segment:
    """A maximal run of nodes of one kind, in graph order."""

    kind: Literal["piece", "break"]
    nodes: list[fx.Node] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)  # nodes from outside, in order of first use
    outputs: list[fx.Node] = field(default_factory=list)  # nodes used outside


def split_graph(graph: fx.Graph, is_split_op: Callable[[fx.Node], bool]) -> list[Segment]:
    """Segments in execution order. Placeholders, the output node and size arithmetic belong to no segment; a piece copies what it needs of
    the latter."""
    segments: list[Segment] = []
    owner: dict[fx.Node, int] = {}
    tuple_makers: set[fx.Node] = set()  # multi-output split ops: their getitems stay with them
    kept = _written_inputs(graph)
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or is_size_arithmetic(node):
            continue
        position = _place(node, segments, owner, is_split_op, tuple_makers, kept)
        segments[position].nodes.append(node)
        owner[node] = position
    _connect(segments, owner)
    return segments


def _place(
    node: fx.Node,
    segments: list[Segment],
    owner: dict[fx.Node, int],
    is_split_op: Callable[[fx.Node], bool],
    tuple_makers: set[fx.Node],
    kept: set[int],
) -> int:
    last = len(segments) - 1
    if is_split_op(node):
        if last < 0 or segments[last].kind == "piece":
            segments.append(Segment("break"))
            last += 1
        if isinstance(node.meta.get("example_value"), tuple | list):
            tuple_makers.add(node)
        return last
    source = node.args[0] if node.args else None
    if isinstance(source, fx.Node) and source in tuple_makers and _is_getitem(node):
        return owner[source]
    stays = any(kept & storages(used) for used in node.all_input_nodes)
    if (
        last >= 1
        and segments[last].kind == "break"
        and _is_hoistable(node)
        and not stays
        and _can_precede(node, segments[last], owner, last)
    ):
        return last - 1
    if last < 0 or segments[last].kind == "break":
        segments.append(Segment("piece"))
        last += 1
    return last


def _written_inputs(graph: fx.Graph) -> set[int]:
    """Storages of graph inputs that some node writes: a view of one stays where it is, since a piece may not be given such a tensor
    twice."""
    written = {storage for node in graph.nodes if mutates(node) for storage in written_storages(node)}
    return {storage for node in graph.nodes if node.op == "placeholder" for storage in storages(node) & written}


def _can_precede(node: fx.Node, segment: Segment, owner: dict[fx.Node, int], position: int) -> bool:
    """Whether `node` may run before the break: its inputs exist there and the break writes none of them."""
    written = {storage for split in segment.nodes for storage in written_storages(split)}
    return all(owner.get(used, -1) < position and not written & storages(used) for used in node.all_input_nodes)


def written_storages(node: fx.Node) -> set[int]:
    statistics = _statistics(node)
    if statistics:
        return {storage for used in statistics for storage in storages(used)}
    schema = operator_schema(node.target)
    if schema is None and (node.op == "call_method" or getattr(node.target, "__module__", "") == "_operator"):
        return storages(node.all_input_nodes[0]) if mutates(node) else set()
    if schema is None:  # unknown code may write anything it is given
        return {storage for used in node.all_input_nodes for storage in storages(used)}
    named = {argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)} | dict(node.kwargs)
    written = [
        named.get(argument.name) for argument in schema.arguments if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return {storage for value in written if isinstance(value, fx.Node) for storage in storages(value)}


def _statistics(node: fx.Node) -> list[fx.Node]:
    """The running statistics that a norm over the batch updates without saying so in its name."""
    found = _NORMS.get(node.target) if node.op == "call_function" and callable(node.target) else None
    if found is None:
        return []
    names, flag, default = found
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    running = [given.get(name) for name in ("running_mean", "running_var")]
    return [item for item in running if isinstance(item, fx.Node)] if given.get(flag, default) else []


def storages(node: fx.Node) -> set[int]:
    value = node.meta.get("example_value")
    values = value if isinstance(value, tuple | list) else (value,)
    return {torch_compat.storage_identity(item) for item in values if isinstance(item, torch.Tensor)}


def operator_schema(target: Any) -> Any | None:
    """The schema of a registered op, given as overload or as packet with one overload; None for other callables."""
    overload = torch_compat.single_overload(target)
    return getattr(overload, "_schema", None)


def _is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def _is_hoistable(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _HOISTABLE_METHODS
    return node.op == "call_function" and (node.target in _HOISTABLE_FUNCTIONS or _is_getitem(node))


def is_size_arithmetic(node: fx.Node) -> bool:
    """Whether a node computes a size from other sizes: cheap, pure, and copied into every piece that uses it."""
    return (
        node.op == "call_function"
        and torch_compat.is_sym_int_node(node)
        and all(torch_compat.is_sym_int_node(used) for used in node.all_input_nodes)
    )


def _connect(segments: list[Segment], owner: dict[fx.Node, int]) -> None:
    for position, segment in enumerate(segments):
        inputs: dict[fx.Node, None] = {}
        for node in segment.nodes:
            inputs.update(dict.fromkeys(_outer_inputs(node, owner, position)))
            if any(_used_outside(node, position, owner)):
                segment.outputs.append(node)
        segment.inputs = list(inputs)


def _outer_inputs(node: fx.Node, owner: dict[fx.Node, int], position: int) -> Iterable[fx.Node]:
    for used in node.all_input_nodes:
        if is_size_arithmetic(used):
            yield from _outer_inputs(used, owner, position)
        elif owner.get(used) != position:
            yield used


def _used_outside(node: fx.Node, position: int, owner: dict[fx.Node, int]) -> Iterable[bool]:
    for user in node.users:
        if is_size_arithmetic(user):
            yield from _used_outside(user, position, owner)
        else:
            yield owner.get(user) != position


def simplify_sizes(graph: fx.Graph) -> None:
    """Drop size assertions (the audit has proved or refused them) and read every plain symbol from its placeholder."""
    placeholders = {
        str(torch_compat.symbol_of(node.meta["example_value"])): node
        for node in graph.nodes
        if node.op == "placeholder" and torch_compat.is_sym_int_node(node)
    }
    for node in list(graph.nodes):
        if node.op == "call_function" and "_assert_scalar" in str(node.target):
            graph.erase_node(node)
    for node in list(graph.nodes):
        if node.op not in ("placeholder", "output") and torch_compat.is_sym_int_node(node):
            known = placeholders.get(str(torch_compat.symbol_of(node.meta["example_value"])))
            if known is not None:
                node.replace_all_uses_with(known)
    graph.eliminate_dead_code(is_impure_node=_is_impure)


def _is_impure(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    if torch_compat.is_sym_int_node(node) or node.meta.get("example_value") is True:
        return False
    schema = operator_schema(node.target)
    # what runs eagerly may do something that no schema tells of
    effects = schema is not None and (not schema.returns or schema.name.startswith(f"{NAMESPACE}::"))
    return bool(node.is_impure()) or mutates(node) or effects


def updates_first(node: fx.Node) -> bool:
    """Whether a node writes into its first argument and returns it, as `x += y` and `x.add_(y)` do."""
    name = str(getattr(node.target, "__name__", node.target))
    if node.op == "call_method":
        return name.endswith("_") and not name.endswith("__")
    return node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator" and name in _IN_PLACE_OPERATORS


def mutates(node: fx.Node) -> bool:
    """Whether a node writes into one of its inputs, so that it counts although nobody reads its result."""
    name = str(getattr(node.target, "__name__", node.target))
    if node.op == "call_method":
        return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    if node.op != "call_function":
        return False
    if getattr(node.target, "__module__", "") == "_operator":
        return name == "setitem" or name in _IN_PLACE_OPERATORS
    schema = operator_schema(node.target)
    if schema is not None:
        return bool(schema.is_mutable)
    return bool(_statistics(node)) or name.endswith("_") or "out" in node.kwargs or bool(node.kwargs.get("inplace"))
