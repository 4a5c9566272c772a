"""Calls whose arguments look like those of an earlier one and are not: each must equal the function run eagerly."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import rung
from rung.errors import InputMismatchError


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
