"""Functions that run between captures."""

from __future__ import annotations

import pytest
import torch

import rung
from rung.errors import ConfigError, TraceError

SEEN: list[tuple[int, ...]] = []


@rung.eager_break
def log(x: torch.Tensor) -> None:
    SEEN.append(tuple(x.shape))


@rung.eager_break(out="x")
def on_the_host(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return torch.from_numpy(x.numpy() * scale)


@rung.eager_break
def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x[:, :2], x[:, 2:] + 1  # the first shares memory with x


def function(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    log(y)
    left, right = halves(on_the_host(y + 1, scale=3.0))
    left.add_(1)
    return left + right


@pytest.mark.parametrize("graphs", ["none", "full"])
def test_runs_at_every_call_between_the_pieces(graphs: str) -> None:
    compiled = rung.wrap(function, dynamic={"x": {0: "rows"}}, graphs=graphs)
    compiled(torch.ones(2, 4))
    SEEN.clear()
    for rows in (2, 2, 1):
        x = torch.randn(rows, 4)
        compiled(x)
    calls = list(SEEN)
    torch.testing.assert_close(compiled(x), function(x))
    assert [shape for shape in calls if shape[0] == 2] == [(2, 4)] * 2
    assert (1, 4) in calls  # the first call of a size with graphs runs more than once
    assert compiled.rung.report()[0]["steps"] == ["piece_00", "log_00", "piece_01", "halves_01", "piece_02"]


def test_outside_of_a_wrapped_module_it_is_the_function() -> None:
    left, _ = halves(x := torch.zeros(1, 4))
    left.add_(1)
    assert torch.equal(x, torch.zeros(1, 4))  # except that outputs are new memory, there as here


def test_a_signature_without_annotations_is_refused() -> None:
    with pytest.raises(ConfigError, match="annotate every parameter"):
        rung.eager_break(lambda x: x)


def test_an_argument_that_is_not_there_is_refused() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with pytest.raises(ConfigError, match="no argument 'y'"):
        rung.eager_break(double, out="y")


def test_one_function_defined_twice_is_two_ops() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    first, second = rung.eager_break(double), rung.eager_break(double)
    assert torch.equal(first(torch.ones(1)), second(torch.ones(1)))


@pytest.mark.parametrize("take", [lambda x: x[x > 0], lambda x: torch.nonzero(x) + 1], ids=["mask", "nonzero"])
def test_a_size_that_depends_on_values_is_an_error_with_the_line(take: object) -> None:
    with pytest.raises(TraceError, match=r"size depends on values at .*test_eager_break.py:\d+"):
        rung.wrap(take, dynamic={})(torch.randn(5))
