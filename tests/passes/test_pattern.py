"""The pattern layer: what is captured, what is compared, what is refused, what is reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from rung.errors import PatternError
from rung.passes.fusion import add_norm, rms_norm
from rung.passes.fusion.rms_norm import RMS_NORM
from rung.passes.pattern import Draw, Pattern, always, each_dtype
from rung.passes.pattern_graph import trace_pattern
from rung.passes.pattern_pass import PatternPass
from tests.passes.graphs import misses, run, same, targets, traced

X, Y, W = torch.randn(3, 8), torch.randn(3, 8), torch.rand(8) + 0.5


def norm(x: torch.Tensor, w: torch.Tensor, epsilon: float = 1e-5, power: int = 2) -> torch.Tensor:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(power).mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x.sin() * factor


def example(draw: Draw) -> Mapping[str, Any]:
    return {"x": draw.tensor("x", draw.size(3)), "factor": draw.float(0.5, 2.0)}


SCALED = Pattern(
    name="scaled",
    search=scaled,
    replacement=lambda x, factor: x.cos() * factor - (x.cos() - x.sin()) * factor,
    precondition=always,
    example=example,
    variants=each_dtype("x", dtypes=(torch.float64,)),
)


def changed(**fields: Any) -> PatternPass:
    return PatternPass("changed", (dataclasses.replace(SCALED, **fields),))


# --- what is captured ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [1e-5, 0.25, 1])
def test_a_constant_is_captured_and_carried_on(epsilon: float) -> None:
    module = traced(lambda x, w: norm(x, w, epsilon), x=X, w=W)
    assert run(module, rms_norm()) == {"rms_norm": 1}
    (node,) = module.graph.find_nodes(op="call_function", target=torch.ops.rung.rms_norm.default)
    assert node.args[2] == epsilon
    same(module, lambda x, w: norm(x, w, epsilon), {"x": X, "w": W})


def test_operands_of_a_commutative_operation_fit_in_both_orders() -> None:
    def swapped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (torch.rsqrt(1e-5 + x.pow(2).mean(-1, keepdim=True)) * x) * w

    module = traced(swapped, x=X, w=W)
    assert run(module, rms_norm()) == {"rms_norm": 1}
    same(module, swapped, {"x": X, "w": W})


def test_defaults_that_are_written_out_fit() -> None:
    module = traced(lambda x, y, w: torch.ops.rung.rms_norm(torch.add(x, y, alpha=1), w, 1e-5), x=X, y=Y, w=W)
    assert run(module, add_norm()) == {"add_norm": 1}


def test_a_second_match_finds_its_own_constant() -> None:
    module = traced(lambda x, w: norm(norm(x, w, 0.5), w, 0.125), x=X, w=W)
    assert run(module, rms_norm()) == {"rms_norm": 2}
    assert [node.args[2] for node in module.graph.find_nodes(op="call_function", target=torch.ops.rung.rms_norm.default)] == [0.5, 0.125]


def test_all_outputs_are_replaced() -> None:
    def layer(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + y
        return torch.ops.rung.rms_norm(total, w, 1e-5).relu(), total * 2

    module = traced(layer, x=X, y=Y, w=W)
    assert run(module, add_norm()) == {"add_norm": 1}
    assert "aten.add.Tensor" not in targets(module)
    same(module, layer, {"x": X, "y": Y, "w": W})


# --- near misses ---------------------------------------------------------------------------------------------------------------------


def reason(function: Callable[..., Any], item: PatternPass | None = None, **tensors: torch.Tensor) -> str:
    """Why the place that fits best does not fit."""
    return misses(traced(function, **tensors), item or rms_norm())[0].reason


def test_another_power_is_named() -> None:
    assert "constant 2 expected, found 3" in reason(lambda x, w: norm(x, w, power=3), x=X, w=W)


def test_another_operation_is_named() -> None:
    assert "aten.rsqrt.default expected, found aten.sqrt.default" in reason(
        lambda x, w: w * (x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)), x=X, w=W
    )


def test_another_user_is_named() -> None:
    def leaks(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return w * (x * scale), scale.exp()

    assert "rsqrt (aten.rsqrt.default) has another user: exp" in reason(leaks, x=X, w=W)


def test_an_operation_that_may_be_shared_stays() -> None:
    def shares(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = x.float()
        return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype), wide.exp()

    tensors = {"x": X.bfloat16(), "w": W.bfloat16()}
    module = traced(shares, **tensors)
    assert run(module, rms_norm()) == {"rms_norm": 1}
    same(module, shares, tensors)


def test_a_dtype_that_no_variant_has_is_named() -> None:
    only_bfloat16 = PatternPass("n", (dataclasses.replace(RMS_NORM, variants=each_dtype("x", "weight", dtypes=(torch.bfloat16,))),))
    assert (
        reason(norm, only_bfloat16, x=X.bfloat16(), w=W) == "torch.bfloat16 expected for the result of aten.mul.Tensor, found torch.float32"
    )


def test_a_precondition_that_refuses_is_quoted() -> None:
    assert "the weight has shape (3, 8)" in reason(norm, x=X, w=Y)


def test_a_match_across_a_write_is_refused() -> None:
    def writes(x: torch.Tensor, w: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        part.add_(1)
        return w * (x * scale)

    module = traced(writes, x=X, w=W, part=Y)
    assert "add_ (aten.add_.Tensor) writes in place" in misses(module, rms_norm())[0].reason


def test_a_match_across_the_split_is_named() -> None:
    found = reason(lambda x, w, scale: w * (x * torch.rsqrt(scale + 1e-5)), x=X, w=W, scale=torch.rand(3, 1))
    assert found == "aten.mean.dim expected, found an input of the piece (scale)"


def test_what_another_pass_put_there_is_named() -> None:
    module = traced(lambda x, y, w: norm(x + y, w).sin() * 0.5, x=X, y=Y, w=W)
    assert run(module, rms_norm()) == {"rms_norm": 1}
    exponential = changed(
        search=lambda x, factor: x.exp().sin() * factor,
        replacement=lambda x, factor: (x.exp() * 1).sin() * factor,
        variants=each_dtype("x", dtypes=(torch.float32,)),
    )
    assert misses(module, exponential)[0].reason == "aten.exp.default expected, found rung.rms_norm.default, put there by rms_norm"


def test_a_needed_order_that_cannot_be_kept_is_refused() -> None:
    def early(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = x + y
        return torch.ops.rung.rms_norm(total, total.mean(0), 1e-5)

    assert "needs add before all inputs of the replacement exist" in reason(early, add_norm(), x=X, y=Y)


# --- registration --------------------------------------------------------------------------------------------------------------------


def test_a_right_replacement_is_accepted() -> None:
    changed().check()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"replacement": lambda x, factor: x.sin()}, "differs from the replacement by"),
        ({"replacement": lambda x, factor: (x.sin() * factor).float()}, "the replacement gives float32"),
        ({"replacement": lambda x, factor: (x, x)}, "returns 1 results, its replacement 2"),
        ({"replacement": lambda x: x}, "cannot run on its example 0"),
    ],
    ids=["constant dropped", "dtype", "results", "arguments"],
)
def test_a_replacement_that_differs_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PatternError, match=message):
        changed(**fields).check()


def test_nothing_is_replaced_before_the_check() -> None:
    module = traced(lambda x: scaled(x, 0.5), x=torch.randn(3).double())
    before = str(module.graph)
    with pytest.raises(PatternError):
        changed(replacement=lambda x, factor: x * factor).run(module.graph)
    assert str(module.graph) == before


def test_a_pattern_without_a_precondition_is_refused() -> None:
    with pytest.raises(PatternError, match="has no precondition"):
        dataclasses.replace(SCALED, precondition=None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"search": lambda x, factor: x * (factor + 1)}, "is no constant of it"),
        ({"search": lambda x, factor: x.sin()}, "the constant 'factor' is found nowhere"),
        ({"search": lambda x, factor: torch.ones(2) * factor}, "never reads its tensor 'x'"),
        ({"search": lambda x, factor: x.reshape(1, -1).expand(2, x.shape[0]) * factor}, "in one example and"),
        ({"search": lambda x, factor: x.sin() if x.shape[0] == 3 else x.cos()}, "depend on sizes or numbers"),
        ({"variants": ({"x": torch.float64, "y": torch.float64},)}, "its variants name"),
    ],
    ids=["computed constant", "unused constant", "unread tensor", "size", "structure", "names"],
)
def test_a_search_that_cannot_be_generalised_is_refused(fields: dict[str, Any], message: str) -> None:
    pattern = dataclasses.replace(SCALED, **fields)
    with pytest.raises(PatternError, match=message):
        trace_pattern(pattern, pattern.variants[0])


# --- identity ------------------------------------------------------------------------------------------------------------------------


def test_the_identity_is_stable() -> None:
    assert rms_norm().uuid() == rms_norm().uuid()


def made(offset: float) -> Callable[..., Any]:
    return lambda x, factor: x.sin() * factor + offset - offset


@pytest.mark.parametrize(
    "fields",
    [
        {"variants": each_dtype("x")},
        {"shared": ("sin",)},
        {"tolerance": {torch.float64: 1e-3}},
        {"replacement": scaled},
        {"replacement": made(1.0)},
    ],
    ids=["variants", "shared", "tolerance", "function", "closure"],
)
def test_the_identity_covers_source_and_parameters(fields: dict[str, Any]) -> None:
    assert changed(**fields).uuid() != changed().uuid()


def test_what_a_function_closes_over_is_in_the_identity() -> None:
    assert changed(replacement=made(1.0)).uuid() != changed(replacement=made(2.0)).uuid()
