"""Matrix products with the norm before, the activation behind, and the product and residual before the norm, as one op each.

mm(x, w), with or without silu_and_mul behind it                linear
rms_norm(h) -> product                                          norm_linear
h = mm(x, w) + residual -> rms_norm(h) -> product               linear_norm_linear
h = mm(x, w) + residual -> rms_norm(h) -> several readers       linear_norm

Products by e4m3 weights, with the quantisation of their activations, become the ops of the same names with `fp8_` before them
(`fp8_quant_linear` for the first, with or without an activation), and all that stands between two attentions becomes `fp8_block`.
"""

from __future__ import annotations

import hashlib
import inspect
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from rung.passes.fusion import joining, products
from rung.passes.fusion.joining import are_products_of, is_scaled_product, put, quantised_by, takes, values_of
from rung.passes.fusion.products import QUANTISATIONS, Product, product_of
from rung.passes.ir import (
    FP8_BLOCK,
    FP8_LINEAR,
    FP8_LINEAR_NORM,
    FP8_LINEAR_NORM_LINEAR,
    FP8_QUANT_PER_TOKEN,
    FP8_QUANT_STATIC,
    GELU_AND_MUL,
    LINEAR,
    LINEAR_NORM,
    LINEAR_NORM_LINEAR,
    NORM_LINEAR,
    RMS_NORM,
    SILU_AND_MUL,
    IROp,
)

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.addmm.default, FP8_LINEAR.overload)
_QUANTISATIONS = (FP8_QUANT_STATIC.overload, *QUANTISATIONS)
_VIEWS = (aten.view.default, aten.reshape.default, aten.squeeze.dim, aten.unsqueeze.default)
_ACTIVATIONS: dict[Any, str] = {SILU_AND_MUL.overload: "silu", GELU_AND_MUL.overload: "gelu"}


class Projections:
    """Joins products with their neighbours where a provider takes the joined op; elsewhere the graph stays as it is.

    Preconditions: a weight is a whole [n, k] tensor used transposed, a bias a vector, a residual of the product's shape; a norm and an
    activation have no user but what they are joined with, nor has a product; the sum in front of a norm, which the joined op returns
    too, is used by nothing before the second product. What matched but for one of these is reported as a near miss.
    `why_not` says why an op is not to be joined (tests join on any device)."""

    name = "projections"

    def __init__(self, why_not: Callable[[IROp, tuple[Any, ...]], str | None] = takes) -> None:
        self._why_not = why_not

    def uuid(self) -> str:
        return hashlib.sha256(
            "".join(inspect.getsource(module) for module in (sys.modules[__name__], products, joining)).encode()
        ).hexdigest()

    def run(self, graph: fx.Graph) -> dict[str, int]:
        join = _Join(graph, self._why_not)
        for node in list(graph.nodes):
            if (product := product_of(node)) is not None:
                join(product)
        for norm in list(graph.find_nodes(op="call_function", target=RMS_NORM.overload)):
            join.sum_and_norm_of_many(norm)
            join.quantised_sum_and_norm(norm)
        for target in _PRODUCTS:
            for node in list(graph.find_nodes(op="call_function", target=target)):
                if (product := product_of(node)) is not None:
                    join.alone(product)
        join.blocks()
        return join.report


class _Join:
    """Joins one product after the other, in the order of the graph."""

    def __init__(self, graph: fx.Graph, why_not: Callable[[IROp, tuple[Any, ...]], str | None]) -> None:
        self._graph, self._why_not = graph, why_not
        self.report = {op.name: 0 for op in (LINEAR_NORM_LINEAR, NORM_LINEAR, LINEAR_NORM, LINEAR)}

    def __call__(self, product: Product) -> None:
        users = list(product.node.users)
        activation = _ACTIVATIONS.get(users[0].target) if len(users) == 1 else None
        result = users[0] if activation is not None else product.node
        behind = (*product.weight, activation or "", *product.last)
        norm = product.x
        if not product.stands_alone:
            return
        if norm.target is RMS_NORM.overload and self._has_one_user(norm):
            if self._sum_and_norm(norm, product, result, behind):
                return
            self._put(product.norm_linear, (*norm.args, *behind), (result,), (result, *product.nodes, norm))
        elif activation is not None:
            self._put(product.linear, (norm, *behind), (result,), (result, *product.nodes))

    def _sum_and_norm(self, norm: fx.Node, product: Product, result: fx.Node, behind: tuple[Any, ...]) -> bool:
        hidden, norm_weight, epsilon = norm.args
        pair = _sum(hidden)
        if pair is None:
            return False
        assert isinstance(hidden, fx.Node)
        before, residual = pair
        if before.linear_norm_linear is not product.linear_norm_linear or before.last != product.last:
            self._miss("the products before and behind a norm are quantised differently")
            return False
        if any(user is not norm and user < result for user in hidden.users):
            self._miss("the sum before a norm is used before the product behind the norm")
            return False
        args = before.x, *before.weight, residual, norm_weight, epsilon, *behind
        joined = result, *product.nodes, norm, hidden, *before.nodes
        return self._put(product.linear_norm_linear, args, (result, hidden), joined)

    def sum_and_norm_of_many(self, norm: fx.Node) -> None:
        """A norm that several products read, or none, with the sum before it: the product in the sum may be split then, and leave its parts
        to the kernel that norms. Where the norm is quantised it goes with the quantisation instead."""
        hidden, norm_weight, epsilon = norm.args
        pair = _sum(hidden)
        if pair is None or type(pair[0]) is not Product or any(user.target in _QUANTISATIONS for user in norm.users):
            return
        assert isinstance(hidden, fx.Node)
        before, residual = pair
        if not (isinstance(norm_weight, fx.Node) and norm_weight < hidden):
            self._miss("the weight of a norm is computed behind the sum")
            return
        args = before.x, *before.weight, residual, norm_weight, epsilon
        self._put(LINEAR_NORM, args, (norm, hidden), (norm, hidden, *before.nodes), at=hidden)

    def quantised_sum_and_norm(self, norm: fx.Node) -> None:
        """As `sum_and_norm_of_many`, of a product of e4m3 rows, with the quantisation behind the norm."""
        hidden, norm_weight, epsilon = norm.args
        found = _scaled_sum(hidden)
        if found is None or len(norm.users) != 1:
            return
        (reader,) = norm.users
        if reader.target not in (FP8_QUANT_STATIC.overload, FP8_QUANT_PER_TOKEN.overload):
            return
        assert isinstance(hidden, fx.Node)
        product, residual = found
        scale = reader.args[1] if reader.target is FP8_QUANT_STATIC.overload else None
        if isinstance(scale, fx.Node) and not are_products_of(reader, scale):
            self._miss("a static quantisation is read by something else than products with its scale")
            return
        if any(isinstance(arg, fx.Node) and not arg < hidden for arg in (norm_weight, scale)):
            self._miss("the weight of a norm, or a scale, is computed behind the sum")
            return
        args = (*product.args[:5], residual, norm_weight, epsilon, scale)
        reason = self._why_not(FP8_LINEAR_NORM, values_of(args))
        if reason is not None:
            self._miss(f"{FP8_LINEAR_NORM.name}: {reason}")
            return
        quantised_by(self._graph, FP8_LINEAR_NORM, args, reader, at=hidden, also=hidden)
        for superfluous in (reader, norm, hidden, product):
            self._graph.erase_node(superfluous)
        self.report[FP8_LINEAR_NORM.name] = self.report.get(FP8_LINEAR_NORM.name, 0) + 1

    def alone(self, product: Product) -> None:
        """A product that nothing was joined with becomes an op too, which chooses by the number of rows; an e4m3 one together with its
        quantisation, which one row does without. Not where the quantisation is shared, or goes with what computes the rows."""
        if product.stands_alone and (type(product) is Product or _comes_as_it_is(product.x)):
            self._put(product.linear, (product.x, *product.weight, "", *product.last), (product.node,), product.nodes)

    def blocks(self) -> None:
        """Join the MLP of e4m3 weights with what stands around it, so that its activation can hand on quantised rows."""
        for node in list(self._graph.find_nodes(op="call_function", target=FP8_LINEAR_NORM_LINEAR.overload)):
            middle, residual = node.args[0], node.args[5]
            if not isinstance(middle, fx.Node) or not isinstance(residual, fx.Node) or middle.target is not operator.getitem:
                continue
            before = middle.args[0]
            if not isinstance(before, fx.Node) or before.target is not FP8_LINEAR_NORM_LINEAR.overload or not before.args[12]:
                continue
            chained = middle.args == (before, 0) and residual.args == (before, 1) and before.args[13] == node.args[13]
            if not chained or any(list(part.users) != [node] for part in (middle, residual)):
                continue
            args = (*before.args[:13], *node.args[1:5], *node.args[6:])
            results = tuple(sorted(node.users, key=lambda user: int(str(user.args[1]))))
            if len(results) == 2 and self._put(FP8_BLOCK, args, results, (*results, node, middle, residual, before)):
                self.report[FP8_LINEAR_NORM_LINEAR.name] -= 2

    def _put(
        self, op: IROp, args: tuple[Any, ...], results: tuple[fx.Node, ...], joined: tuple[fx.Node, ...], at: fx.Node | None = None
    ) -> bool:
        """`put`, or a near miss where the op is not to be joined."""
        reason = self._why_not(op, values_of(args))
        if reason is not None:
            self._miss(f"{op.name}: {reason}")
            return False
        put(self._graph, op, args, results, joined, at)
        self.report[op.name] = self.report.get(op.name, 0) + 1
        return True

    def _has_one_user(self, norm: fx.Node) -> bool:
        if len(norm.users) == 1:
            return True
        self._miss("a norm before a product has other users")
        return False

    def _miss(self, reason: str) -> None:
        key = f"near miss: {reason}"
        self.report[key] = self.report.get(key, 0) + 1


def _comes_as_it_is(x: fx.Node) -> bool:
    """Whether rows are read by one product, and come from outside of the piece or out of a product."""
    if len(x.users) != 1:
        return False
    while x.target in _VIEWS and isinstance(x.args[0], fx.Node):
        x = x.args[0]
    x = x.args[0] if x.target is operator.getitem and isinstance(x.args[0], fx.Node) else x
    return x.op == "placeholder" or "linear" in str(x.target) or "block" in str(x.target) or x.target in _PRODUCTS


def _sum(node: Any) -> tuple[Product, fx.Node] | None:
    """The product and the residual of a sum, or None."""
    if not isinstance(node, fx.Node) or node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return None
    for product, residual in (node.args, node.args[::-1]):
        found = product_of(product) if isinstance(product, fx.Node) else None
        if found is not None and len(found.node.users) == 1 and isinstance(residual, fx.Node) and _alike(found.node, residual):
            return found, residual
    return None


def _scaled_sum(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """The product of e4m3 rows and the residual of a sum, or None."""
    if not isinstance(node, fx.Node) or node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return None
    for product, residual in (node.args, node.args[::-1]):
        if not isinstance(product, fx.Node) or not isinstance(residual, fx.Node):
            continue
        if is_scaled_product(product) and len(product.users) == 1 and _alike(product, residual):
            return product, residual
    return None


def _alike(product: fx.Node, residual: fx.Node) -> bool:
    ours, theirs = product.meta["val"], residual.meta["val"]
    return (
        isinstance(theirs, torch.Tensor)
        and ours.dtype == theirs.dtype
        and ours.dim() == theirs.dim()
        and all(str(a) == str(b) for a, b in zip(ours.shape, theirs.shape, strict=True))
    )
