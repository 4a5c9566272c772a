"""Products of the same rows by weights that lie apart become one op: queries, keys and values, and the two halves of a gated MLP.

mm(x, first), mm(x, second), mm(x, third)             linear_three
silu_mul(mm(x, gate), mm(x, up))                      linear_gated

Products of the same e4m3 rows by e4m3 weights become `fp8_linear_three`, and with the activation and the quantisation of its result, static
or row by row, `fp8_linear_gated`, which hands on a scale for each row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from rung.passes.fused_ops import GELU_MUL, SILU_MUL
from rung.passes.fusion.joining import are_products_of, is_scaled_product, put, quantised_by, takes, values_of
from rung.passes.fusion.products import Product, product_of
from rung.passes.identity import code_identity, digest
from rung.passes.ir import (
    FP8_LINEAR_GATED,
    FP8_LINEAR_THREE,
    FP8_QUANT_PER_TOKEN,
    FP8_QUANT_STATIC,
    LINEAR_GATED,
    LINEAR_THREE,
    IROp,
)

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
        report = {op.name: 0 for op in (LINEAR_GATED, LINEAR_THREE, FP8_LINEAR_GATED, FP8_LINEAR_THREE)}
        for node in list(graph.nodes):
            if node.target in _GATES and not node.kwargs:
                if all(is_scaled_product(arg) for arg in node.args):
                    _note(report, FP8_LINEAR_GATED, self._fp8_gated(graph, node))
                else:
                    _note(report, LINEAR_GATED, self._gated(graph, node))
        groups: dict[fx.Node, list[Product]] = {}
        scaled: dict[tuple[Any, Any], list[fx.Node]] = {}
        for node in graph.nodes:
            product = product_of(node)
            if type(product) is Product:
                groups.setdefault(product.x, []).append(product)
            elif is_scaled_product(node):
                scaled.setdefault((node.args[0], node.args[1]), []).append(node)
        for products in groups.values():
            if len(products) == 3:
                weights, biases = zip(*(product.weight for product in products), strict=True)
                args = (products[0].x, *weights, *biases)  # not what it was above: joining what lies before has put others in its place
                _note(report, LINEAR_THREE, self._three(graph, LINEAR_THREE, args, biases, [product.node for product in products]))
        for nodes in scaled.values():
            if len(nodes) == 3 and len({node.args[5] for node in nodes}) == 1:
                biases = tuple(node.args[4] for node in nodes)
                args = (*nodes[0].args[:2], *(part for node in nodes for part in node.args[2:4]), *biases, nodes[0].args[5])
                _note(report, FP8_LINEAR_THREE, self._three(graph, FP8_LINEAR_THREE, args, biases, nodes))
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

    def _fp8_gated(self, graph: fx.Graph, node: fx.Node) -> str | None:
        """Why not."""
        gate, up = node.args
        assert isinstance(gate, fx.Node)
        assert isinstance(up, fx.Node)
        if gate.args[:2] != up.args[:2] or gate.args[5] != up.args[5]:
            return "the factors are no products of the same rows"
        if any(list(half.users) != [node] for half in (gate, up)):
            return "a factor has other readers"
        if gate.args[4] is not None or up.args[4] is not None:
            return "a factor has a bias"
        (reader, *others) = node.users
        if others or reader.target not in (FP8_QUANT_STATIC.overload, FP8_QUANT_PER_TOKEN.overload):
            return "the result is not quantised, or read by others too"
        scale = reader.args[1] if reader.target is FP8_QUANT_STATIC.overload else None
        if isinstance(scale, fx.Node) and not are_products_of(reader, scale):
            return "a static quantisation is read by something else than products with its scale"
        args = (*gate.args[:4], *up.args[2:4], _GATES[node.target], scale, gate.args[5])
        reason = self._why_not(FP8_LINEAR_GATED, values_of(args))
        if reason is None:
            quantised_by(graph, FP8_LINEAR_GATED, args, reader, at=reader)
            for superfluous in (reader, node, gate, up):
                graph.erase_node(superfluous)
        return reason

    def _three(self, graph: fx.Graph, op: IROp, args: tuple[Any, ...], biases: tuple[Any, ...], nodes: list[fx.Node]) -> str | None:
        """Why not."""
        if len({bias is None for bias in biases}) > 1:
            return "some have a bias and some none"
        if any(isinstance(arg, fx.Node) and not arg < nodes[0] for arg in args):
            return "a weight is computed behind the first product"
        reason = self._why_not(op, values_of(args))
        if reason is None:
            put(graph, op, args, nodes, nodes, at=nodes[0])
        return reason


def _note(report: dict[str, int], op: IROp, why_not: str | None) -> None:
    key = op.name if why_not is None else f"near miss: {op.name}: {why_not}"
    report[key] = report.get(key, 0) + 1
