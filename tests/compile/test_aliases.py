"""Writes and views across cuts, with compiled pieces: equal to the original, or refused with a hint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import rung
from rung.errors import RungError
from tests.compile.cases import TOY_OPS, assert_same, double

ops = torch.ops.rungtest


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def write_into_view(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape[0], 4)
    ops.write(x.view(-1, 2, 2) + 1, out.view(-1, 2, 2))
    return out * 3


def update_base_then_read_view(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    view = y[:, :2]
    z = double(view)
    y.add_(1)
    return view + z


def update_view_then_read_base(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    view = y[:, :2]
    z = double(view)
    view.mul_(10)
    return y[:, :2] + z


def write_then_read_then_write(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x + 1
    ops.write(x, y, 5.0)
    between = y + 1
    ops.write(x, y, 7.0)
    return between, y


def update_returned_value(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    z = double(y)
    y.add_(z)
    return y


FUNCTIONS = [write_into_view, update_base_then_read_view, update_view_then_read_base, write_then_read_then_write, update_returned_value]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_equals_original_or_is_refused(function: Callable[..., Any]) -> None:
    compiled = rung.wrap(function, dynamic={"x": {0: "rows"}}, split_ops=TOY_OPS)
    for rows in (3, 1):
        x = torch.randn(rows, 4)
        expected = function(x.clone())
        try:
            actual = compiled(x)
        except RungError as error:
            assert error.hint  # noqa: PT017 - an error is as good as the right value
            return
        assert_same(actual, expected)


def test_write_then_read_then_write_is_not_refused() -> None:
    compiled = rung.wrap(write_then_read_then_write, dynamic={"x": {0: "rows"}}, split_ops=TOY_OPS)
    x = torch.randn(3, 4)
    assert_same(compiled(x), write_then_read_then_write(x))


def write_halves(x: torch.Tensor, order: str) -> Any:
    base = x * 1
    ops.write_both(x[:, :2] + 7, base[:, :2], base[:, 2:])
    return read_back(base, base[:, :2], base[:, 2:], order)


def write_overlapping(x: torch.Tensor, order: str) -> Any:
    base = x * 1
    left, right = base[:, :3], base[:, 1:]
    ops.write_both(x[:, :3] + 7, left, right)
    return read_back(base, left, right, order)


def read_back(base: torch.Tensor, left: torch.Tensor, right: torch.Tensor, order: str) -> Any:
    views = {"b": base, "l": left, "r": right}
    return tuple(views[name] * 3 + index for index, name in enumerate(order))


@pytest.mark.parametrize("order", ["blr", "lrb", "rbl", "lb", "br"])
@pytest.mark.parametrize("split_ops", [TOY_OPS, ()], ids=["between pieces", "inside of a piece"])
@pytest.mark.parametrize("function", [write_halves, write_overlapping], ids=lambda function: function.__name__)
def test_an_op_that_writes_two_views_of_one_tensor(function: Callable[..., Any], split_ops: tuple[str, ...], order: str) -> None:
    compiled = rung.wrap(function, dynamic={"x": {0: "rows"}}, split_ops=split_ops)
    for rows in (3, 1):
        x = torch.randn(rows, 4)
        try:
            actual = compiled(x, order)
        except RungError as error:
            assert error.hint  # noqa: PT017 - an error is as good as the right value
            return
        assert all(torch.equal(one, other) for one, other in zip(actual, function(x, order), strict=True))


FRESH: dict[str, Callable[[torch.Tensor], Any]] = {
    "times one": lambda x: x * 1,
    "one times": lambda x: 1 * x,
    "plus zero": lambda x: x + 0,
    "minus zero": lambda x: x - 0,
    "by one": lambda x: x / 1,
    "times ones": lambda x: x * torch.ones_like(x),
    "plus zeros": lambda x: torch.zeros(4) + x,
    "twice": lambda x: x * 1 + 0,
    "view": lambda x: (x * 1)[:, :2],
    "of a view": lambda x: x[:, :2] / 1,
    "of a transpose": lambda x: x.t() * 1,
    "true": lambda x: (x > 0) * True,
}


@pytest.mark.parametrize(
    ("name", "split_ops"), [*((name, ()) for name in FRESH), ("times one", TOY_OPS), ("times ones", TOY_OPS), ("view", TOY_OPS)]
)
def test_a_write_into_a_fresh_result_leaves_the_input_alone(name: str, split_ops: tuple[str, ...]) -> None:
    def function(x: torch.Tensor) -> Any:
        y = FRESH[name](x)
        if split_ops:
            ops.write(x.view(-1)[: y.numel()].view_as(y) + 5, y)
        return y

    compiled = rung.wrap(function, dynamic={"x": {0: "rows"}}, split_ops=split_ops)
    for rows in (3, 1):
        x = torch.randn(rows, 4)
        before, expected = x.clone(), function(x.clone())
        actual = compiled(x)
        assert_same(actual, expected)
        assert actual.dtype == expected.dtype
        actual.fill_(1)
        assert torch.equal(x, before)


def test_two_results_that_are_computed_apart_share_no_memory() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.sin()
        return y * 1, y / 1, y

    results = rung.wrap(function, dynamic={"x": {0: "rows"}})(torch.randn(3, 4))
    assert len({result.untyped_storage().data_ptr() for result in results}) == 3


def test_a_copy_is_of_the_time_before_an_update_of_its_source() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x[:, :2] * 1
        x.add_(1)
        return y

    compiled = rung.wrap(function, dynamic={"x": {0: "rows"}})
    for rows in (3, 1):
        x, other = torch.randn(rows, 4), torch.randn(rows, 4)
        other.copy_(x)
        assert_same(compiled(x), function(other))
        assert_same(x, other)


SEEN: list[int] = []


@rung.eager_break(mutates=("cache",))
def fill(cache: torch.Tensor, x: torch.Tensor) -> None:
    SEEN.append(cache.data_ptr())
    cache[: x.shape[0]].copy_(x)


class Cached(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(8, 4))

    def forward(self, x: torch.Tensor) -> Any:
        fill(self.cache, x)
        first = self.cache + 1
        fill(self.cache, x * 2)
        return first, self.cache * 1


def test_a_reader_sees_each_write_and_the_memory_is_the_callers() -> None:
    module = rung.wrap(Cached(), dynamic={"x": {0: "rows"}})
    expected = torch.zeros(8, 4)
    for rows in (3, 1):
        x = torch.randn(rows, 4)
        SEEN.clear()
        first, second = module(x)
        expected[:rows] = x
        assert torch.equal(first, expected + 1)
        expected[:rows] = x * 2
        assert torch.equal(second, expected)
        assert set(SEEN) == {module.cache.data_ptr()}
        assert torch.equal(module.cache, expected)


class Sliced(Cached):
    """Views of a buffer before and behind cuts, and an update between them."""

    def forward(self, x: torch.Tensor) -> Any:
        y = double(x + 1)
        self.cache[:2].add_(y.sum(0))
        z = double(y * 2)
        return z + self.cache[:2].sum(0), self.cache[1:3] * 2


def test_views_of_an_updated_buffer_on_both_sides_of_a_cut() -> None:
    eager = Sliced()
    module = rung.wrap(Sliced(), dynamic={"x": {0: "rows"}}, split_ops=TOY_OPS)
    for rows in (3, 1):
        x = torch.randn(rows, 4)
        assert_same(module(x), eager(x))
        assert_same(module.cache, eager.cache)
