from __future__ import annotations

from typing import Any

import pytest

from rung.attention.backends.triton_paged import why_no_triton


@pytest.fixture(autouse=True)
def _interpreter_takes_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter (3.6) turns a bound of `range` into an int through `int(array of one element)`, an error since numpy 2.4.

    Can go when the oldest supported Triton uses `.item()` there."""
    import torch

    if why_no_triton(torch.device("cpu")) is not None:
        return
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
