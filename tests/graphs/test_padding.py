"""The two-padding check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from rung.errors import InputMismatchError, PaddingError
from rung.graphs import BufferSpec, check_padding

SPEC = BufferSpec(name="x", shape=("rows", 4), dtype=torch.float32)
IDS = BufferSpec(name="ids", shape=("rows",), dtype=torch.int64, valid=(0, 10))


def check(function: Callable[..., Sequence[Any]], spec: BufferSpec = SPEC, **options: Any) -> tuple[dict[int, str], ...]:
    value = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)) if spec is SPEC else torch.arange(3)
    return check_padding(lambda inputs: function(*inputs), [spec], [value], {"rows": 8}, **options)


def test_row_wise_modules_pass_and_say_where_rows_are() -> None:
    grown = check(lambda x: (x.relu(), x.t(), x.softmax(1), torch.ones(2), 7))
    assert grown == ({0: "rows"}, {1: "rows"}, {0: "rows"}, {}, {})


def test_embedding_passes() -> None:
    table = torch.randn(10, 4)
    assert check(lambda ids: (table[ids],), IDS) == ({0: "rows"},)


@pytest.mark.parametrize(
    "mixes",
    [
        lambda x: x - x.mean(0),
        lambda x: x.softmax(0),
        lambda x: torch.nn.functional.batch_norm(x, None, None, training=True),
        lambda x: x / x.abs().amax(),
        lambda x: x.flip(0),
        lambda x: x / x.shape[0],
        lambda x: x.sum(0),
    ],
    ids=["mean", "softmax", "batch_norm", "amax", "flip", "row_count", "sum"],
)
def test_modules_that_mix_rows_are_refused(mixes: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(PaddingError, match=r"output 0 differs .* first in row 0"):
        check(lambda x: (mixes(x),))


def test_every_output_is_looked_at_and_named() -> None:
    with pytest.raises(PaddingError, match="state differs"):
        check(lambda x: (x, x.cumsum(0), x.mean(0)), names=["y", "sums", "state"])


def test_first_differing_row_is_named() -> None:
    def second_row_mixes(x: torch.Tensor) -> Sequence[Any]:
        y = x.clone()
        y[1] = x.sum(0)
        return (y,)

    with pytest.raises(PaddingError, match="row 1"):
        check(second_row_mixes)


def test_sizes_that_pad_nothing_are_refused() -> None:
    with pytest.raises(InputMismatchError, match="cannot be padded"):
        check_padding(lambda inputs: inputs, [SPEC], [torch.ones(3, 4)], {"rows": 3})


def test_output_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(PaddingError, match="cannot be cut off"):
        check(lambda x: (torch.cat([x, x]),))
