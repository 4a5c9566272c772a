"""The comparison of a piece's two entries."""

from __future__ import annotations

import torch

from rung.compile.selfcheck import _agree, _copy


def test_copies_keep_the_layout_that_a_piece_was_compiled_for() -> None:
    wide = torch.randn(3, 64)
    view = wide[:, :32].unsqueeze(1)
    copy = _copy(view)
    assert copy.stride() == view.stride() != view.clone().stride()
    assert torch.equal(copy, view)
    assert copy.data_ptr() != view.data_ptr()


def test_what_is_rounded_to_e4m3_may_differ_by_its_steps() -> None:
    want = torch.randn(64)
    assert not _agree(want, want * 1.05, 0.0)
    assert _agree(want, want * 1.05, 0.1)
    assert not _agree(want, want * 1.2, 0.1)
