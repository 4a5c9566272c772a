"""Blocks of autocast, gradient and inference mode inside of a traced function.

In a trace such a block is a pair of calls somewhere around its nodes, and a cut may lie between the two. So the pair is taken out of the
graph, every node inside notes the settings, and a piece or a break enters them again around its own nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from rung import torch_compat

Settings = tuple[Any, ...]  # of one block: device type, dtype or None, enabled, whether casts of weights are kept

_META = "rung_autocast"


def note_blocks(graph: fx.Graph) -> None:
    """Take mode changes out of a traced graph. Gradient and inference modes mean nothing in a compiled graph, which knows no gradients."""
    open_blocks: list[fx.Node] = []
    changes: list[fx.Node] = []
    for node in graph.nodes:
        change = torch_compat.mode_change(node)
        if change:
            changes.append(node)
        if change == "autocast":
            open_blocks.append(node)
        elif change == "/autocast":
            open_blocks.remove(node.args[0])
        elif not change and open_blocks:
            node.meta[_META] = tuple(block.args for block in open_blocks)
    for node in reversed(changes):
        graph.erase_node(node)


def blocks_of(node: fx.Node) -> tuple[Settings, ...]:
    """The autocast blocks around a node, outermost first."""
    found: tuple[Settings, ...] = node.meta.get(_META, ())
    return found


class Reentry:
    """Opens and closes autocast blocks in a new graph while nodes are copied into it in order."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._open: list[tuple[Settings, fx.Node]] = []

    def at(self, blocks: Sequence[Settings]) -> None:
        """From here on `blocks` hold, outermost first."""
        common = 0
        while common < min(len(self._open), len(blocks)) and self._open[common][0] == blocks[common]:
            common += 1
        while len(self._open) > common:
            torch_compat.exit_autocast(self._graph, self._open.pop()[1])
        for settings in blocks[common:]:
            self._open.append((settings, torch_compat.enter_autocast(self._graph, settings)))
