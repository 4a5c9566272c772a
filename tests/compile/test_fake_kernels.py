"""Fake kernels that say something else than the op does: found by name at the first run, or while a piece is compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rung.compile.fake_kernels import CheckedInterpreter
from rung.compile.paths import Path
from rung.compile.plan import TensorSpec
from rung.errors import FakeKernelError
from tests.compile.cases import TOY_OPS, double, uncompiled

LIES = {
    "lies_size": r"output 0 of rungtest::lies_size is torch.float32 \[3, 4\], but its fake kernel said torch.float32 \[3, 5\]",
    "lies_rows": r"output 1 of rungtest::lies_rows is torch.float32 \[2, 5\], but its fake kernel said torch.float32 \[3, 5\]",
    "lies_dtype": r"output 0 of rungtest::lies_dtype is torch.float64 \[3, 5\], but its fake kernel said torch.float32 \[3, 5\]",
    "lies_stride": r"output 0 of rungtest::lies_stride is strides \[1, 3\], but its fake kernel said a contiguous tensor",
}
X = torch.ones(3, 5)


def around(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    op = getattr(torch.ops.rungtest, name)

    def function(x: torch.Tensor) -> torch.Tensor:
        made: Any = op(x * 2)
        return (made[1] if isinstance(made, tuple) else made) + 1

    return function


@pytest.mark.parametrize("name", LIES)
def test_a_split_op_is_found_at_the_first_run(name: str) -> None:
    compiled, _ = uncompiled(around(name), X, split_ops=(f"rungtest::{name}",))
    compiled.plan = replace(compiled.plan, tensors=((Path("x"), TensorSpec("torch.float32", "cpu", ("rows", 5))),))
    for _ in range(2):  # and at the next, as long as it lies
        with pytest.raises(FakeKernelError, match=LIES[name]):
            compiled(X)


@pytest.mark.parametrize("name", ["lies_size", "lies_dtype"])
def test_an_op_inside_of_a_piece_is_found_when_it_is_compared(name: str) -> None:
    _, graph = uncompiled(around(name), X, split_ops=())
    (piece,) = graph.pieces
    with pytest.raises(FakeKernelError, match=f"output 0 of rungtest::{name}"):
        CheckedInterpreter(piece.graph_module).run(X)


def test_honest_ops_are_looked_at_once() -> None:
    compiled, _ = uncompiled(lambda x: double(x) + 1, X, split_ops=TOY_OPS)
    (fake,) = compiled.plan.fakes.values()
    assert (fake.op, fake.shape, fake.contiguous) == ("rungtest::double", ("rows", 5), True)
    assert compiled._unchecked
    assert torch.equal(compiled(X), X * 2 + 1)
    assert not compiled._unchecked
