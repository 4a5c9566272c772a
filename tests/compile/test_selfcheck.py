"""The comparison of a piece's two entries."""

from __future__ import annotations

import torch

from rung.compile.selfcheck import _copy


def test_copies_keep_the_layout_that_a_piece_was_compiled_for() -> None:
    wide = torch.randn(3, 64)
    view = wide[:, :32].unsqueeze(1)
    copy = _copy(view)
    assert copy.stride() == view.stride() != view.clone().stride()
    assert torch.equal(copy, view)
    assert copy.data_ptr() != view.data_ptr()
