"""Cleanup passes: small examples, and random graphs with views and writes against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from rung.passes.cleanup import DeadCode, Duplicates, InPlace, KeepCopies, NoopElimination
from rung.passes.manager import GraphPass
from tests.passes.graphs import targets
from tests.passes.random_graphs import outcome, random_function, traced_as_is

X, Y = torch.randn(4, 4), torch.randn(4, 4)
library = torch.library.Library("rung_tests_cleanup", "FRAGMENT")
library.define("scale(Tensor x, float factor) -> Tensor")
library.define("scale_(Tensor(a!) x, float factor) -> Tensor(a!)")
library.define("shift(Tensor x, Tensor by) -> Tensor")
library.define("shift.into(Tensor(a!) x, Tensor by) -> ()")
library.impl("scale", lambda x, factor: x * factor, "CompositeExplicitAutograd")
library.impl("scale_", lambda x, factor: x.mul_(factor), "CompositeExplicitAutograd")
library.impl("shift", lambda x, by: x + by, "CompositeExplicitAutograd")
library.impl("shift.into", lambda x, by: (x.add_(by), None)[1], "CompositeExplicitAutograd")
ops = torch.ops.rung_tests_cleanup
PASSES: tuple[Callable[[], GraphPass], ...] = (NoopElimination, DeadCode, lambda: InPlace(lambda node: True))


def cleaned(function: Callable[..., Any], item: GraphPass) -> tuple[fx.GraphModule, dict[str, int]]:
    module = traced_as_is(function, X.clone(), Y.clone())
    counts = dict(item.run(module.graph))
    module.graph.lint()
    module.recompile()
    for one, other in zip(outcome(module, X, Y), outcome(function, X, Y), strict=True):
        assert torch.equal(one, other)
    return module, counts


@pytest.mark.parametrize("group", range(4))
def test_random_graphs_compute_the_same(group: int) -> None:
    found = dict.fromkeys(("noop", "dead_code", "in_place"), 0)
    for seed in range(group * 20, group * 20 + 20):
        function = random_function(seed)
        module = traced_as_is(function, X.clone(), Y.clone())
        want = outcome(function, X, Y)
        for make in PASSES:
            item = make()
            found[item.name] += sum(dict(item.run(module.graph)).values())
            module.graph.lint()
            module.recompile()
            for one, other in zip(outcome(module, X, Y), want, strict=True):
                assert torch.equal(one, other), f"seed {seed}"
    assert min(found.values()) > 0, found


# --- noop ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: [x.sin().view(4, 4).cos()],
        lambda x, y: [x.sin().reshape(4, 4).cos()],
        lambda x, y: [x.sin()[0:4].cos()],
        lambda x, y: [x.sin().expand(4, 4).cos()],
        lambda x, y: [x.sin().permute(0, 1).cos()],
        lambda x, y: [torch.cat([x.sin()]).cos()],
        lambda x, y: [x.sin().clone().cos()],
        lambda x, y: [torch.ops.prims.convert_element_type(x.sin(), torch.float32).cos()],
        lambda x, y: [(x.sin() * 1).cos()],
        lambda x, y: [(x.sin() / 1).cos()],
        lambda x, y: [(x.sin() - 0).cos()],
        lambda x, y: [(x.sin() + -0.0).cos()],
    ],
)
def test_an_operation_that_changes_nothing_goes(function: Callable[..., Any]) -> None:
    module, counts = cleaned(function, NoopElimination())
    assert targets(module) == ["aten.sin.default", "aten.cos.default"]
    assert sum(counts.values()) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: [(x.sin() + 0).cos()],  # -0.0 becomes 0.0
        lambda x, y: [(x.sin() - -0.0).cos()],
        lambda x, y: [x.sin().t().cos()],
        lambda x, y: [x.sin()[0:3].cos()],
        lambda x, y: [x.sin().double().cos()],
        lambda x, y: [torch.cat([x, x])],
        lambda x, y: [x.t().clone(memory_format=torch.contiguous_format).cos()],
        lambda x, y: [x.clone()],  # the caller may write into it
        lambda x, y: [s := x.sin(), s.clone()],
        lambda x, y: [(c := x.clone(), x.add_(1), c.cos())[2]],
        lambda x, y: [(c := x.clone(), c.add_(1), c.cos())[2]],
        lambda x, y: [(s := x.sin(), c := s.clone(), c[0].zero_(), s.cos() + c)[3]],
        lambda x, y: [(s := x.sin(), c := s.clone().t(), s[0].zero_(), c.cos())[3]],
    ],
)
def test_an_operation_that_matters_stays(function: Callable[..., Any]) -> None:
    assert cleaned(function, NoopElimination())[1] == {}


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: [(s := x.sin(), c := s.clone(), c.add_(1), c.cos())[3]],  # the source is dead
        lambda x, y: [(s := x.sin(), d := s.clone().cos(), s.add_(1), d + s)[3]],  # the copy is dead
    ],
)
def test_a_clone_goes_where_no_write_can_tell(function: Callable[..., Any]) -> None:
    assert cleaned(function, NoopElimination())[1] == {"clone": 1}


# --- dead code -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "removed"),
    [
        (lambda x, y: [(x.sin().cos(), y.cos())[1]], 2),
        (lambda x, y: [(s := x.sin(), s.add_(1), y.cos())[2]], 2),  # a write that nobody reads
        (lambda x, y: [(x.add_(1), y.cos())[1]], 0),  # the caller sees it
        (lambda x, y: [(s := x.sin(), s[0].zero_(), s.cos())[2]], 0),  # seen through the whole
        (lambda x, y: [(s := x.sin(), v := s.t(), s.zero_(), v.cos())[3]], 0),
        (lambda x, y: [(torch.rand(3), y.cos())[1]], 0),  # advances the generator
        (lambda x, y: [(torch._assert_async(x.sum() < 1e9), y.cos())[1]], 0),
    ],
)
def test_dead_code_respects_effects(function: Callable[..., Any], removed: int) -> None:
    assert cleaned(function, DeadCode())[1] == {"removed": removed}


# --- in place ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "counts"),
    [
        (lambda x, y: [ops.scale(x.sin(), 2.0)], {"rung_tests_cleanup.scale_.default": 1}),
        (lambda x, y: [ops.shift(x.sin(), y)], {"rung_tests_cleanup.shift.into": 1}),
        (lambda x, y: [ops.scale(x, 2.0)], {}),  # an input
        (lambda x, y: [s := x.sin(), ops.scale(s, 2.0)], {}),  # an output
        (lambda x, y: [(s := x.sin(), v := s.t(), ops.scale(s, 2.0) + v)[2]], {}),  # read through a view afterwards
        (lambda x, y: [ops.shift(s := x.sin(), s.t())], {}),  # another argument shares the memory
        (lambda x, y: [ops.scale(x.sin()[:1].expand(4, 4), 2.0)], {}),  # elements share addresses
        (lambda x, y: [x.sin().cos()], {}),  # torch's own are fused instead
    ],
    ids=["underscore", "overload", "input", "output", "view", "argument", "expanded", "aten"],
)
def test_in_place_variants_are_found_by_schema(function: Callable[..., Any], counts: dict[str, int]) -> None:
    assert cleaned(function, InPlace())[1] == counts


def test_identities_cover_parameters() -> None:
    assert InPlace().uuid() == InPlace().uuid()
    assert len({item().uuid() for item in (*PASSES, InPlace)}) == 4


# --- duplicates ----------------------------------------------------------------------------------------------------------------------


def test_equal_calls_of_an_ir_op_are_one() -> None:
    def twice(x: torch.Tensor, y: torch.Tensor) -> Any:
        (a, s), (b, t) = torch.ops.rung.fp8_quant_per_token(x), torch.ops.rung.fp8_quant_per_token(x)
        return a.float() * s + b.float() * t, torch.ops.rung.silu_and_mul(y), torch.ops.rung.silu_and_mul(x)

    module, counts = cleaned(twice, Duplicates())
    assert counts == {"duplicates": 1}
    assert targets(module).count("rung.fp8_quant_per_token.default") == 1


def test_calls_that_differ_in_an_attribute_stay_two() -> None:
    def norms(x: torch.Tensor, y: torch.Tensor) -> Any:
        return torch.ops.rung.rms_norm(x, y[0], 1e-5) + torch.ops.rung.rms_norm(x, y[0], 1e-6)

    assert cleaned(norms, Duplicates())[1] == {"duplicates": 0}


def test_calls_around_a_write_stay_two() -> None:
    def writes(x: torch.Tensor, y: torch.Tensor) -> Any:
        before = torch.ops.rung.silu_and_mul(x)
        x.add_(1)
        return before + torch.ops.rung.silu_and_mul(x)

    assert cleaned(writes, Duplicates())[1] == {"duplicates": 0}


# --- copies that stay ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (lambda x, y: [x * 1], 1),
        (lambda x, y: [(x + 0).t()], 1),
        (lambda x, y: [x - torch.full((4, 4), 0.0)], 1),
        (lambda x, y: [x * 1 / 1], 1),  # the first of them may go
        (lambda x, y: [s := x.sin(), s * 1], 1),
        (lambda x, y: [(s := x.sin()) * 1, s * 1], 1),  # one of them may
        (lambda x, y: [(c := x * 1, x.add_(1), c.cos())[2]], 1),
        (lambda x, y: [x[:, :2] * 1], 1),
        (lambda x, y: [(x * 1).cos()], 0),
        (lambda x, y: [x.sin() * 1], 0),
        (lambda x, y: [x * 2, y + 1, x - y, x / 2], 0),
        (lambda x, y: [x.long() * 1.0], 0),  # a conversion is memory of its own
    ],
)
def test_a_copy_stays_where_it_keeps_memory_apart(function: Callable[..., Any], kept: int) -> None:
    module, counts = cleaned(function, KeepCopies())
    assert counts == {"kept": kept}
    assert sum(name.endswith(".Scalar") for name in targets(module)) == kept
