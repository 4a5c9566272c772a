"""Products in the graph of a piece, as `Projections` joins them: by plain weights and by e4m3 ones."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import fx

from rung.passes.ir import (
    FP8_LINEAR,
    FP8_LINEAR_NORM_LINEAR,
    FP8_NORM_LINEAR,
    FP8_QUANT_GROUP,
    FP8_QUANT_LINEAR,
    FP8_QUANT_PER_TOKEN,
    FP8_QUANT_STATIC,
    LINEAR,
    LINEAR_NORM_LINEAR,
    NORM_LINEAR,
    IROp,
)
from rung.passes.ir.fp8 import E4M3

aten = torch.ops.aten
QUANTISATIONS = (FP8_QUANT_PER_TOKEN.overload, FP8_QUANT_GROUP.overload)  # that find their scales


@dataclass(frozen=True, slots=True)
class Product:
    """A product in the graph. Its arguments are read when they are needed: joining what lies before changes them."""

    node: fx.Node

    linear: ClassVar[IROp] = LINEAR
    norm_linear: ClassVar[IROp] = NORM_LINEAR
    linear_norm_linear: ClassVar[IROp] = LINEAR_NORM_LINEAR

    @property
    def stands_alone(self) -> bool:
        """Whether it can be joined without a sum behind it."""
        return True

    @property
    def x(self) -> fx.Node:
        return cast(fx.Node, self.node.args[-2])

    @property
    def weight(self) -> tuple[Any, ...]:
        """The weight as arguments of the joined ops."""
        transposed: Any = self.node.args[-1]
        return transposed.args[0], self.node.args[0] if len(self.node.args) == 3 else None

    @property
    def last(self) -> tuple[Any, ...]:
        """The last arguments of the joined ops."""
        return ()

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """What it consists of, users first."""
        return (self.node,)


@dataclass(frozen=True, slots=True)
class QuantisedProduct(Product):
    """Quantisation of the activations and a product by an e4m3 weight. `given`: they came as e4m3, with one scale, as attention writes
    them; then the joined op takes them so, if it has a residual to tell the dtype of its results."""

    given: bool = False

    linear: ClassVar[IROp] = FP8_QUANT_LINEAR
    norm_linear: ClassVar[IROp] = FP8_NORM_LINEAR
    linear_norm_linear: ClassVar[IROp] = FP8_LINEAR_NORM_LINEAR

    @property
    def stands_alone(self) -> bool:
        return not self.given

    @property
    def _quantisation(self) -> fx.Node:
        values = cast(fx.Node, self.node.args[0])
        return values if values.target is FP8_QUANT_STATIC.overload else cast(fx.Node, values.args[0])

    @property
    def x(self) -> fx.Node:
        return cast(fx.Node, self.node.args[0] if self.given else self._quantisation.args[0])

    @property
    def weight(self) -> tuple[Any, ...]:
        _, x_scale, weight, scale, bias, _ = self.node.args
        if self.given:
            return weight, scale, x_scale, bias
        static = self._quantisation.args[1] if self._quantisation.target is FP8_QUANT_STATIC.overload else None
        return weight, scale, static, bias

    @property
    def last(self) -> tuple[Any, ...]:
        if self.given:
            return (0,)
        grouped = self._quantisation.target is FP8_QUANT_GROUP.overload
        return (self._quantisation.args[1] if grouped else 0,)

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        if self.given:
            return (self.node,)
        operands = tuple(arg for arg in self.node.args[:2] if isinstance(arg, fx.Node) and arg.target is operator.getitem)
        return (self.node, *operands, self._quantisation)


def product_of(node: fx.Node) -> Product | None:
    """The node as a product by a transposed weight, with or without a bias, or by an e4m3 weight of what is quantised for it alone."""
    if node.target is FP8_LINEAR.overload:
        return _quantised(node)
    if node.kwargs or node.target not in (aten.mm.default, aten.addmm.default):
        return None
    x, transposed = node.args[-2:]
    if not isinstance(x, fx.Node) or not isinstance(transposed, fx.Node):
        return None
    if transposed.target is not aten.permute.default or transposed.args[1] != [1, 0]:
        return None
    if node.target is aten.addmm.default and (not isinstance(node.args[0], fx.Node) or node.args[0].meta["val"].dim() != 1):
        return None
    return Product(node)


def _quantised(node: fx.Node) -> Product | None:
    values, scale, *_ = node.args
    if not isinstance(values, fx.Node) or not isinstance(scale, fx.Node):
        return None
    if values.target is FP8_QUANT_STATIC.overload:
        fits = values.args[1] is scale and list(values.users) == [node]
        x = values.args[0]
    else:
        parts = (values, scale)
        source = values.args[0] if values.target is operator.getitem else None
        if not isinstance(source, fx.Node) or source.target not in QUANTISATIONS:
            one_scale = values.meta["val"].dtype == E4M3 and scale.meta["val"].dim() <= 1
            return QuantisedProduct(node, given=True) if one_scale else None
        fits = all(part.target is operator.getitem and part.args == (source, index) for index, part in enumerate(parts))
        fits = fits and len(source.users) == 2 and all(list(part.users) == [node] for part in parts)
        x = source.args[0]
    same = isinstance(x, fx.Node) and x.meta["val"].dtype == node.args[-1]
    return QuantisedProduct(node) if fits and same else None
