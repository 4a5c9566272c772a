"""Copies that keep values out of the memory into which Inductor computes in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rung import torch_compat
from rung.passes.cleanup.aliases import Aliases, may_alias
from rung.passes.identity import code_identity, digest

aten = torch.ops.aten
_VIEWS = "rung_views"  # of a node's meta: where it hands out, or reads, memory that is another's by the program


class KeepApart:
    """Runs last before Inductor computes scatters, and ops that write, in the memory of their argument. When it asks whether that
    memory is needed later, it does not ask whether the result is, nor what the op itself reads from there, and copies whose values
    the program took in time are gone by then. So

    - what an op reads from memory that it updates is copied (pytorch/pytorch#197829, #198031);
    - an update of an input that is not what the input holds in the end is one of a copy (pytorch/pytorch#198096, #198270);
    - so is a result that is handed out, or copied into another input, and would lie in an updated one (pytorch/pytorch#198131).

    Can go when these are in every version that is served."""

    name = "keep_apart"

    def uuid(self) -> str:
        return digest(code_identity(KeepApart.run, Aliases._classes_of, torch_compat.updated_arguments))

    def note(self, graph: fx.Graph) -> None:
        """Before any rewrite: which outputs are views of inputs, and which opaque ops are given memory that they update once more."""
        known = _Values(graph)
        output, copies = graph.output_node(), _final_copies(graph)
        views = known.inputs.union(*(known.classes[copy.args[1]] for copy in copies))  # type: ignore[index]
        output.meta[_VIEWS] = {index for index, node in enumerate(_flat(output)) if known.classes.get(node, frozenset()) & views}
        for node in filter(torch_compat.is_opaque_update, graph.nodes):
            node.meta[_VIEWS] = {used for used in _reads(node) if known.classes[used] & _updated(known, node)}

    def run(self, graph: fx.Graph) -> dict[str, int]:
        if not any(torch_compat.updated_arguments(node) for node in graph.nodes) and len(_final_copies(graph)) < 2:
            return {"copied": 0}
        return {"copied": _copy_reads(graph) + _copy_updated(graph) + _copy_results(graph)}


class _Values(Aliases):
    """Memory of a functional graph by its meaning: a result of an op that writes is memory of its own."""

    def _classes_of(self, node: fx.Node, stored: dict[int, int]) -> frozenset[int]:
        return frozenset((self.order[node],)) if torch_compat.is_result(node) else super()._classes_of(node, stored)


class _InPlace(_Values):
    """Memory as it may be once Inductor has computed in place."""

    def _classes_of(self, node: fx.Node, stored: dict[int, int]) -> frozenset[int]:
        updated = torch_compat.updated_argument(node)
        own = super()._classes_of(node, stored)
        return own if updated is None else own | self.classes[updated]


def _copy_reads(graph: fx.Graph) -> int:
    known, count = _Values(graph), 0
    for node in list(graph.nodes):
        memory = _updated(known, node)
        given = node.meta.get(_VIEWS, ()) if torch_compat.is_opaque_update(node) else ()
        copies = {
            used: _copied(used, node)
            for used in (_reads(node) if memory else ())
            if used not in given and isinstance(used.meta.get("val"), torch.Tensor) and known.classes[used] & memory
        }
        if copies:
            torch_compat.change_reads(node, lambda used, copies=copies: copies.get(used, used))  # type: ignore[misc]
        count += len(copies)
    return count


def _copy_updated(graph: fx.Graph) -> int:
    known, copies, count = _Values(graph), _final_copies(graph), 0
    written = _written(known, copies)
    lasting = {node for copy in copies for node in _lasting(copy.args[1])}
    for node in list(graph.nodes):
        for used in torch_compat.updated_arguments(node) if node not in lasting else ():
            if known.classes[used] & written:
                node.replace_input_with(used, _copied(used, node))
                count += 1
    return count


def _copy_results(graph: fx.Graph) -> int:
    known, placed, copies, output = _Values(graph), _InPlace(graph), _final_copies(graph), graph.output_node()
    nodes = {index: node for node, index in known.order.items()}
    written = _written(known, copies)
    roots: dict[fx.Node, None] = {}
    for index, node in enumerate(_flat(output)):
        fresh = index not in output.meta.get(_VIEWS, ()) and node in placed.classes and not known.classes[node] & known.inputs
        if fresh and placed.classes[node] & written:
            roots.update(dict.fromkeys(nodes[memory] for memory in known.classes[node]))
    for root in roots:
        with graph.inserting_after(root):
            copy = _clone(root)
        views = [
            user
            for user in root.users
            if user is not copy and (user is output or known.classes.get(user, frozenset()) & known.classes[root])
        ]
        for user in views:
            user.replace_input_with(root, copy)
    return len(roots) + _copy_sources(known, placed, copies)


def _copy_sources(known: Aliases, placed: Aliases, copies: list[fx.Node]) -> int:
    """Values that go into an input, and lie in another one that is given its new value before, or never holds them in the end."""
    pairs: list[tuple[Any, Any]] = [(copy.args[0], copy.args[1]) for copy in copies]
    into = [known.classes[target] for target, _ in pairs]
    count = 0
    for number, (target, source) in enumerate(pairs):
        own, possible = known.classes[source], placed.classes[source]
        others = [other for other in range(len(pairs)) if into[other] != into[number]]
        ended = any(own & into[other] for other in others if other < number)
        passing = any((possible - own) & into[other] and not own & known.classes[pairs[other][1]] for other in others)
        if ended or passing:
            early = known.order[source] < known.order[copies[0]]
            copies[number].args = (target, _copied(source, copies[0] if early else copies[number]), *copies[number].args[2:])
            count += 1
    return count


def _final_copies(graph: fx.Graph) -> list[fx.Node]:
    """The copies at the end of a graph that give its inputs their new values."""
    found = [node for node in graph.nodes if node.target is aten.copy_.default]
    return [node for node in found if node.args[0].op in ("placeholder", "get_attr") and isinstance(node.args[1], fx.Node)]


def _written(known: Aliases, copies: list[fx.Node]) -> frozenset[int]:
    return frozenset().union(*(known.classes[copy.args[0]] for copy in copies))  # type: ignore[index]


def _lasting(value: Any) -> set[fx.Node]:
    """The updates that lead to a value, and whose results no later one of them computes with."""
    way = _way(value)
    read = {used for node in way for used in _reads(node) if used not in way}
    return {node for node in way if not read & _following(node)}


def _following(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        new = [user for user in waiting.pop().users if user not in found]
        found.update(new)
        waiting += new
    return found


def _way(value: Any) -> set[fx.Node]:
    """The updates that lead to a value, one upon the other."""
    found: set[fx.Node] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        updated = torch_compat.updated_argument(node)
        if updated is None:
            waiting += may_alias(node) if node.op == "call_function" and not torch_compat.is_result(node) else []
            continue
        found.add(node.args[0] if torch_compat.is_result(node) else node)
        waiting.append(updated)
        if torch_compat.scatters_view(node) and torch_compat.updated_argument(node.args[1]) is not None:
            waiting.append(node.args[1])
    return found


def _updated(known: Aliases, node: fx.Node) -> frozenset[int]:
    return frozenset().union(*(known.classes[used] for used in torch_compat.updated_arguments(node)))


def _reads(node: fx.Node) -> list[fx.Node]:
    found: dict[fx.Node, None] = {}
    torch_compat.change_reads(node, lambda used: found.setdefault(used, None) or used)
    return list(found)


def _flat(output: fx.Node) -> list[Any]:
    values: Any = output.args[0]
    return list(values) if isinstance(values, list | tuple) else [values]


def _copied(value: fx.Node, before: fx.Node) -> fx.Node:
    with before.graph.inserting_before(before):
        return _clone(value)


def _clone(value: fx.Node) -> fx.Node:
    copy = value.graph.call_function(aten.clone.default, (value,))
    copy.meta = {"val": value.meta["val"].clone()}
    return copy
