"""Calls whose arguments look like those of an earlier one and are not: each must equal the function run eagerly."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rung
from rung.counters import Count
from rung.errors import InputMismatchError, RungError
from tests.compile.cases import TOY_OPS


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


@dataclass
class Scaled:
    x: torch.Tensor
    factor: float


def total(values: Any) -> torch.Tensor:
    items = list(values.values()) if isinstance(values, dict) else list(values)
    result = items[0] * 2
    for item in items[1:]:
        result = result + item
    return result


def total_of_all(*values: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
    return total([*values, *named.values()])


def scaled(value: Scaled) -> torch.Tensor:
    return value.x * value.factor


def signed(x: torch.Tensor, value: float) -> torch.Tensor:
    return torch.copysign(x, torch.full_like(x, value))


def columns(values: list[torch.Tensor]) -> torch.Tensor:
    return values[0].sum(1)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (x * 3).to(dtype)


def check(function: Any, *calls: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    compiled = rung.wrap(function, dynamic={})
    for args, kwargs in [*calls, calls[0]]:
        got = compiled(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        torch.testing.assert_close(got, function(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
    return compiled


A, B, C = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]), torch.tensor([0.5, 0.25])


@pytest.mark.parametrize(
    "calls",
    [
        [([A],), ([A, B],), ([A, B, C],), ((A, B),)],
        [({"a": A},), ({"a": A, "b": B},), ({"b": B, "a": A},)],
    ],
    ids=["lengths", "keys"],
)
def test_other_lengths_keys_and_orders_of_a_container(calls: list[tuple[Any]]) -> None:
    check(total, *((args, {}) for args in calls))


def test_more_positional_and_named_arguments() -> None:
    check(total_of_all, ((A,), {}), ((A, B), {}), ((A,), {"u": B}), ((A,), {"u": B, "v": C}), ((A,), {"v": C, "u": B}))


def test_zeros_of_both_signs() -> None:
    check(signed, ((A, 0.0), {}), ((A, -0.0), {}))


def test_one_tensor_twice_in_a_container_is_two_arguments() -> None:
    compiled = rung.wrap(total, dynamic={})
    torch.testing.assert_close(compiled([A, A]), A * 3)
    torch.testing.assert_close(compiled([A, B]), A * 2 + B)


def test_tensor_in_a_container_that_is_not_contiguous() -> None:
    check(columns, (([torch.arange(24.0).view(4, 6)[:, ::2]],), {}), (([torch.arange(12.0).view(3, 4).t()],), {}))


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        (scaled, [((Scaled(A, 2.0),), {}), ((Scaled(A, 3.0),), {})]),
        (cast, [((A, torch.float64), {}), ((A, torch.bfloat16), {})]),
    ],
    ids=["in a dataclass", "a dtype"],
)
def test_constants_are_told_apart_in_the_store(function: Any, calls: list[Any]) -> None:
    for call in calls:
        check(function, call)


def doubled_before(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x + y


def test_written_argument_that_is_another_argument_too() -> None:
    compiled = rung.wrap(doubled_before, dynamic={})
    torch.testing.assert_close(compiled(A.clone(), B), A * 2 + B)
    both = A.clone()
    torch.testing.assert_close(compiled(both, both), A * 4)
    base = torch.arange(6.0)
    torch.testing.assert_close(compiled(base[:3], base[2:5]), torch.tensor([4.0, 5.0, 8.0]))
    assert compiled.rung.counters["eager.shared_memory"] == 2
    torch.testing.assert_close(compiled(base[:2], base[4:]), torch.tensor([4.0, 9.0]))  # beside each other
    assert compiled.rung.counters["eager.shared_memory"] == 2


def with_default_dtype(x: torch.Tensor) -> torch.Tensor:
    return x.double() + torch.ones(2) / 3


def test_default_dtype_after_the_trace() -> None:
    compiled = rung.wrap(with_default_dtype, dynamic={})
    compiled(A)
    try:
        torch.set_default_dtype(torch.float64)
        assert torch.equal(compiled(A), with_default_dtype(A))
    finally:
        torch.set_default_dtype(torch.float32)


def test_too_many_container_lengths_name_the_argument() -> None:
    compiled = rung.wrap(total, dynamic={}, max_variants=1)
    compiled([A])
    with pytest.raises(InputMismatchError, match="values"):
        compiled([A, B])


def with_an_unread_option(x: torch.Tensor, unread: torch.Tensor | None = None) -> torch.Tensor:
    return x * 2 + 1


@pytest.mark.parametrize("order", [(1, 2, 5, 64), (64, 1, 0, 2)])
def test_sizes_of_a_tensor_that_nobody_reads_cost_no_trace(order: tuple[int, ...]) -> None:
    compiled = rung.wrap(with_an_unread_option, dynamic={"x": {0: "rows"}, "unread": {0: "others"}})
    for rows in order:
        for others in (0, 2, 1):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(compiled(x, torch.ones(others)), x * 2 + 1)
    assert compiled.rung.counters[Count.DYNAMO_TRACES] == 1


def above(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.shape[0] > 128 else x - 1


def divisible(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.shape[0] % 8 == 0 else x - 1


def in_fours(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(x.shape[0] // 4, 4, -1) + 1


RELATIONS = {above: r"u\d+ > 128|> 128", divisible: r"% 8|Mod\(.*8\)", in_fours: r"// ?4|%|Mod|4\*"}
SIZES = [*range(20), 62, 63, 64, 65, 127, 128, 129, 130, 255, 256]


def agrees_or_refuses(compiled: Any, function: Any, rows: int, *, may_refuse: bool) -> None:
    x = torch.randn(rows, 4)
    try:
        expected: Any = function(x)
    except RuntimeError:
        expected = None
    try:
        actual = compiled(x)
    except (RungError, RuntimeError) as error:
        refused = str(error)
        assert expected is None or (may_refuse and re.search(RELATIONS[function], refused)), refused
        return
    assert expected is not None
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("function", RELATIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("first", [64, 1, 129])
def test_every_size_equals_eager_mode_or_is_an_error_that_names_the_relation(function: Any, first: int) -> None:
    compiled = rung.wrap(function, dynamic={"x": {0: "rows"}})
    for rows in (first, *SIZES):
        agrees_or_refuses(compiled, function, rows, may_refuse=True)


@pytest.mark.parametrize("function", RELATIONS, ids=lambda function: function.__name__)
def test_a_dimension_that_nobody_declared_becomes_static_instead(function: Any) -> None:
    compiled = rung.wrap(function)
    for rows in (64, 1, 130, 62):
        agrees_or_refuses(compiled, function, rows, may_refuse=False)


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        torch.ops.rungtest.write(self.linear(x), y)
        self.cache.mul_(0.5).add_(y.sum(0))
        return torch.relu(y) + self.cache[:2].sum(0)


def test_inductors_own_cache_does_not_hide_for_which_sizes_a_piece_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second store is empty, Inductor's cache is not."""
    module = nn.Sequential(Caching(), Caching()).eval().requires_grad_(False)
    found = []
    for store in ("first", "second"):
        monkeypatch.setenv("RUNG_CACHE_DIR", str(tmp_path / store))
        copied, eager = copy.deepcopy(module), copy.deepcopy(module)
        rung.wrap(copied, dynamic={"input": {0: "rows"}}, split_ops=TOY_OPS)
        for rows in (3, 5000):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(copied(x), eager(x), rtol=1e-4, atol=1e-4)
        found.append(copied.rung.counters[Count.UNHINTED_COMPILES])
    assert found[0] == found[1]


def test_a_second_set_of_caches_costs_no_trace() -> None:
    module = nn.Sequential(*[Caching() for _ in range(8)]).eval().requires_grad_(False)
    eager = copy.deepcopy(module)
    rung.wrap(module, dynamic={"input": {0: "rows"}}, split_ops=TOY_OPS)
    for round_ in range(3):
        for rows in (3, 5):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(module(x), eager(x))
        for block, other in zip(module, eager, strict=True):
            torch.testing.assert_close(block.cache, other.cache)
            block.cache, other.cache = torch.full((8, 4), float(round_)), torch.full((8, 4), float(round_))
    (report,) = module.rung.report()
    assert module.rung.counters[Count.DYNAMO_TRACES] == 1
    assert (report["pieces"], report["unique_pieces"]) == (9, 3)
