"""Operations whose results and writes nobody sees."""

from __future__ import annotations

import torch
from torch import fx

from rung.passes.cleanup.aliases import Aliases, is_pure_function, schema_of, writes
from rung.passes.identity import code_identity, digest


class DeadCode:
    """Walks backwards with the memory that is still read. A write counts when its memory is read later, or belongs to an input or output.

    Random operations stay, since they advance a generator, and so does everything whose effects are not known: calls without a schema
    and operations without a result, such as assertions."""

    name = "dead_code"

    def uuid(self) -> str:
        return digest(code_identity(DeadCode.run, Aliases._classes_of))

    def run(self, graph: fx.Graph) -> dict[str, int]:
        known = Aliases(graph)
        alive = set(known.inputs | known.outputs)
        removed = 0
        for node in reversed(list(graph.nodes)):
            if node.op != "call_function":
                continue
            written = [memory for used in writes(node) for memory in known.classes[used]]
            if node.users or not _known(node) or not alive.isdisjoint(written):
                alive.update(memory for used in node.all_input_nodes for memory in known.classes[used])
            else:
                graph.erase_node(node)
                removed += 1
        return {"removed": removed}


def _known(node: fx.Node) -> bool:
    schema = schema_of(node)
    if schema is None:
        return is_pure_function(node)
    return bool(schema.returns) and torch.Tag.nondeterministic_seeded not in node.target.tags  # type: ignore[union-attr]
