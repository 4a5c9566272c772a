"""Products of the same rows by weights that lie apart become one op: queries, keys and values, and the two halves of a gated MLP.

mm(x, first), mm(x, second), mm(x, third)             linear_three
silu_mul(mm(x, gate), mm(x, up))                      linear_gated
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from rung.passes.fused_ops import GELU_MUL, SILU_MUL
from rung.passes.fusion.joining import put, takes, values_of
from rung.passes.fusion.products import Product, product_of
from rung.passes.identity import code_identity, digest
from rung.passes.ir import LINEAR_GATED, LINEAR_THREE, IROp

_GATES: dict[Any, str] = {SILU_MUL.overload: "silu", GELU_MUL.overload: "gelu"}


class Siblings:
    """Joins them where a provider takes the joined op. The weights stay where they are: nothing is copied.

    Preconditions: plain weights, whole and used transposed. Gate and other factor have no bias and no other reader. Of three products all
    have a bias or none, and the weights are known before the first; rows of two products, or of four, are left alone."""

    name = "siblings"

    def __init__(self, why_not: Callable[[IROp, tuple[Any, ...]], str | None] = takes) -> None:
        self._why_not = why_not

    def uuid(self) -> str:
        return digest(code_identity(Siblings.run, put, product_of))

    def run(self, graph: fx.Graph) -> dict[str, int]:
        report = {LINEAR_GATED.name: 0, LINEAR_THREE.name: 0}
        for node in list(graph.nodes):
            if node.target in _GATES and not node.kwargs:
                _note(report, LINEAR_GATED, self._gated(graph, node))
        groups: dict[fx.Node, list[Product]] = {}
        for node in graph.nodes:
            product = product_of(node)
            if type(product) is Product:
                groups.setdefault(product.x, []).append(product)
        for x, products in groups.items():
            if len(products) == 3:
                _note(report, LINEAR_THREE, self._three(graph, x, products))
        return report

    def _gated(self, graph: fx.Graph, node: fx.Node) -> str | None:
        """Why not."""
        halves = [product_of(arg) if isinstance(arg, fx.Node) else None for arg in node.args]
        gate, up = halves
        if type(gate) is not Product or type(up) is not Product or gate.x is not up.x:
            return "the factors are no products of the same rows"
        if any(list(half.node.users) != [node] for half in (gate, up)):
            return "a factor has other readers"
        (gate_weight, gate_bias), (up_weight, up_bias) = gate.weight, up.weight
        if gate_bias is not None or up_bias is not None:
            return "a factor has a bias"
        args = gate.x, gate_weight, up_weight, _GATES[node.target]
        reason = self._why_not(LINEAR_GATED, values_of(args))
        if reason is None:
            put(graph, LINEAR_GATED, args, (node,), (node, gate.node, up.node))
        return reason

    def _three(self, graph: fx.Graph, x: fx.Node, products: list[Product]) -> str | None:
        """Why not."""
        weights, biases = zip(*(product.weight for product in products), strict=True)
        if len({bias is None for bias in biases}) > 1:
            return "some have a bias and some none"
        first = products[0].node
        if any(isinstance(arg, fx.Node) and not arg < first for arg in (*weights, *biases)):
            return "a weight is computed behind the first product"
        args = (x, *weights, *biases)
        reason = self._why_not(LINEAR_THREE, values_of(args))
        if reason is None:
            nodes = [product.node for product in products]
            put(graph, LINEAR_THREE, args, nodes, nodes, at=first)
        return reason


def _note(report: dict[str, int], op: IROp, why_not: str | None) -> None:
    key = op.name if why_not is None else f"near miss: {op.name}: {why_not}"
    report[key] = report.get(key, 0) + 1
