"""Values that a piece is compared on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rung.compile.synthetic import check_indices, copy_of, values_of


def test_copies_keep_the_layout_that_a_piece_was_compiled_for() -> None:
    wide = torch.randn(3, 64)
    view = wide[:, :32].unsqueeze(1)
    copy = copy_of(view)
    assert copy.stride() == view.stride() != view.clone().stride()
    assert torch.equal(copy, view)
    assert copy.data_ptr() != view.data_ptr()


def _made_up(value: torch.Tensor, integer: int = 0) -> torch.Tensor:
    node: Any = SimpleNamespace(meta={"example_value": value})
    (made,) = values_of([node], [None], 3, torch.Generator().manual_seed(0), integer)
    assert (made.shape, made.stride(), made.dtype) == (value.shape, value.stride(), value.dtype)
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_expanded_tensors_have_values(dtype: torch.dtype) -> None:
    rows = _made_up(torch.ones(1, 8, dtype=dtype).expand(3, 8), integer=1)
    assert rows.any()
    assert torch.equal(rows[0], rows[2])
    assert _made_up(torch.ones(0, 1, dtype=dtype).expand(0, 8)).numel() == 0


def test_indices_are_looked_at_where_a_kernel_would_end_the_process() -> None:
    rows, ids = torch.zeros(4, 8), torch.tensor([0, 3])
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("embedding", (ids, rows), {}),
        ("embedding", (rows, ids), {}),
        ("index_select", (rows, 0, ids), {}),
        ("gather", (rows,), {"dim": 0, "index": ids}),
        ("getitem", (rows, ids), {}),
        ("getitem", (rows, (slice(None), ids)), {}),
        ("getitem", (rows, (None, ids)), {}),
        ("setitem", (rows, (ids, slice(None)), 1.0), {}),
    ]
    for name, args, kwargs in calls:
        check_indices(name, args, kwargs)
        ids += 5  # one past the end of both dimensions
        with pytest.raises(IndexError, match="an index is not in"):
            check_indices(name, args, kwargs)
        ids -= 5
    check_indices("getitem", (rows, rows > 0), {})
    check_indices("getitem", (rows, (..., ids)), {})
    check_indices("getitem", ((rows, rows), 1), {})
    check_indices("getitem", (rows, ids - 4), {})
    with pytest.raises(IndexError):
        check_indices("embedding", (ids - 1, rows), {})
