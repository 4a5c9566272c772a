"""Copies of memory that is updated in place: eager is what they are held against, at the first call and later."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import rung
from tests.compile.cases import TOY_OPS, double


def shift_rows(x: torch.Tensor, out: torch.Tensor) -> None:
    """Row by row, so that it matters when `x` is `out`."""
    for number, row in enumerate(x[: len(out) - 1]):
        out[number + 1].copy_(row)


library = torch.library.Library("rung_tests_apart", "FRAGMENT")
library.define("shift(Tensor x, Tensor(a!) out) -> ()")
library.define("add_and_sum(Tensor(a!) x, Tensor by) -> Tensor")
library.impl("shift", shift_rows, "CompositeExplicitAutograd")
library.impl("add_and_sum", lambda x, by: x.add_(by.sum()).sum(0), "CompositeExplicitAutograd")
torch.library.register_fake("rung_tests_apart::shift", lambda x, out: None, lib=library)
torch.library.register_fake("rung_tests_apart::add_and_sum", lambda x, by: torch.empty_like(x[0]), lib=library)
ops = torch.ops.rung_tests_apart

Tensor = torch.Tensor
INDEX = (1, 7, 3, 5)
WRITES: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "index_put": lambda b, i, x: b.__setitem__(i, x),
    "slice": lambda b, i, x: b[2:6].copy_(x),
    "slice of a slice": lambda b, i, x: b[2:6, 1:].copy_(x[:, 1:]),
    "index_add_": lambda b, i, x: b.index_add_(0, i, x),
    "scatter_": lambda b, i, x: b.scatter_(0, i[:, None].expand(4, 4), x),
    "copy_": lambda b, i, x: b.copy_(x.repeat(2, 1)),
    "mul_": lambda b, i, x: b.mul_(x.sum()),
    "diagonal": lambda b, i, x: b.diagonal().copy_(x[0]),
    "opaque": lambda b, i, x: ops.add_and_sum(b, x),
    "shift": lambda b, i, x: b[1:].copy_(b[:-1].clone()),
    "permuted": lambda b, i, x: b.__setitem__(i, b[:4].clone()),
    "flip": lambda b, i, x: b.copy_(b.flip(0)),
}
COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda b: b.clone(),
    "times one": lambda b: b * 1,
    "plus zero": lambda b: b + 0,
    "to": lambda b: b.to(b.dtype, copy=True),
    "contiguous": lambda b: b.t().contiguous().t().clone(),
    "cat": lambda b: torch.cat([b]),
    "view": lambda b: b[1:].clone(),
}
USES = {"clone": ("returned", "used", "both", "at the end")}  # others: the last two


class Updates(torch.nn.Module):
    """A buffer for each kind of copy and use, written in one way, then in another."""

    def __init__(self, write: str, then: str, cut: bool) -> None:
        super().__init__()
        self.names = [(name, use) for name in COPIES for use in USES.get(name, USES["clone"][2:])]
        self.write, self.then, self.cut = write, then, cut
        for number in range(len(self.names)):
            self.register_buffer(f"b{number}", torch.arange(32.0).view(8, 4) + number)
        self.register_buffer("i", torch.tensor(INDEX))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = x.view(4, 4)
        results: list[Tensor] = []
        for number, (name, use) in enumerate(self.names):
            buffer = getattr(self, f"b{number}")
            WRITES[self.write](buffer, self.i, x)
            old = COPIES[name](buffer)
            if self.cut:
                x = double(x) - x
            if use != "at the end":
                WRITES[self.then](buffer, self.i, x + 1)
            results += [old] if use != "used" else []
            results += [old + 1] if use in ("used", "both") else []
        return results


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def held(eager: torch.nn.Module, calls: int = 3, **config: Any) -> None:
    """Equal results and buffers at each call, and results of earlier calls that stay what they were."""
    module = rung.wrap(copy.deepcopy(eager), dynamic={}, **config)
    kept: list[tuple[Any, Any]] = []
    for _ in range(calls):
        x = torch.randn(4, 4)
        results, wanted = module(x), eager(x)
        kept.append((results, copy.deepcopy(wanted)))
        torch.testing.assert_close(dict(module.named_buffers()), dict(eager.named_buffers()))
        for one, other in kept:
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("write", WRITES)
def test_a_copy_is_of_its_time(write: str) -> None:
    held(Updates(write, "mul_", cut=False))


@pytest.mark.parametrize("write", ["index_put", "slice", "mul_", "opaque"])
def test_a_copy_is_of_its_time_behind_a_cut(write: str) -> None:
    held(Updates(write, "index_put", cut=True), split_ops=TOY_OPS)


class One(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("a", torch.arange(32.0).view(8, 4))
        self.register_buffer("b", -torch.arange(32.0).view(8, 4))
        self.register_buffer("i", torch.tensor(INDEX))

    def forward(self, x: Tensor) -> Any:
        return self.function(self.a, self.b, self.i, x.view(4, 4))


def functional_then_other(a: Tensor, b: Tensor, i: Tensor, x: Tensor) -> Any:
    put = a.index_put((i,), x)
    a.copy_(put * 0.5)
    return put


def functional_then_more(a: Tensor, b: Tensor, i: Tensor, x: Tensor) -> Any:
    put = a.index_put((i,), x)
    a.copy_(put.index_put((i,), x * 2))
    return put[1:], put[:4]


def functional_is_new_value(a: Tensor, b: Tensor, i: Tensor, x: Tensor) -> Any:
    put = a.index_put((i,), x)
    a.copy_(put)
    return put


def swap(a: Tensor, b: Tensor, i: Tensor, x: Tensor) -> Any:
    a[i], b[i] = x, -x
    old = a.clone()
    a.copy_(b)
    b.copy_(old)
    return a + b


def other_takes_old_value(a: Tensor, b: Tensor, i: Tensor, x: Tensor) -> Any:
    b[0:, :] = a[0:, :]
    a.add_(x.sum())
    return b + 1


def shift_and_add_flipped(a: Tensor, b: Tensor, i: Tensor, x: Tensor) -> Any:
    a[i] = x
    a.add_(a.flip(0))
    b[i] = x
    b[2:].add_(b[:-2].clone())
    return a.sum(0)


def shift_fresh(a: Tensor, b: Tensor, i: Tensor, x: Tensor) -> Any:
    fresh = torch.zeros_like(a)
    fresh[i] = x
    fresh[i] = fresh[:4].clone()
    fresh[1:] = fresh[:-1].clone()
    fresh[2:] += fresh[:-2].clone()
    return fresh


def opaque_of_a_copy(a: Tensor, b: Tensor, i: Tensor, x: Tensor) -> Any:
    ops.shift(a.clone(), a)
    ops.shift(b[:-1].clone(), b[1:])
    return a.sum(0), b.sum(0)


def opaque_result(a: Tensor, b: Tensor, i: Tensor, x: Tensor) -> Any:
    total = ops.add_and_sum(a, x)
    old = a.clone()
    a.zero_()
    return total, old


def lists(a: Tensor, b: Tensor, i: Tensor, x: Tensor) -> Any:
    torch._foreach_add_([a, b], 1.0)
    return a.clone(), b * 1


def window(a: Tensor, b: Tensor, i: Tensor, x: Tensor) -> Any:
    a[:-1].copy_(a[1:].clone())
    a[-1].copy_(x.sum(0))
    return x + a.mean(0)


FUNCTIONS = (
    functional_then_other,
    functional_then_more,
    functional_is_new_value,
    swap,
    other_takes_old_value,
    shift_and_add_flipped,
    shift_fresh,
    opaque_of_a_copy,
    opaque_result,
    lists,
    window,
)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_values_as_in_eager(function: Callable[..., Any]) -> None:
    held(One(function))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.uint8, torch.int64], ids=str)
def test_copies_in_every_dtype(dtype: torch.dtype) -> None:
    def function(a: Tensor, b: Tensor, i: Tensor, x: Tensor) -> Tensor:
        a[i] = (x > 0).to(dtype)
        return a.clone()

    module = One(function)
    module.a = module.a.to(dtype)
    compiled = rung.wrap(module, dynamic={})
    result = compiled(torch.ones(4, 4))
    assert result.dtype == dtype
    assert result.data_ptr() != module.a.data_ptr()
    assert torch.equal(result.float(), module.a.float())
    assert torch.equal(result.float()[list(INDEX)], torch.ones(4, 4))
