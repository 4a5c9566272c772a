"""What becomes of the kernel of several products when it is compiled; needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.persistent_launch import BLOCKS, LAYER, Rows, Setting, Sizes, Weights, arguments
from rung.attention.backends.triton_paged import why_no_triton
from rung.launch.specialise import OPTIONS, specialise

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(why_no_triton(torch.device("cpu")) is None, reason="Triton's interpreter is on, and compiles nothing"),
    pytest.mark.filterwarnings("ignore:AnnAssign.__init__ missing:DeprecationWarning"),  # Triton 3.8's own sum, under Python 3.13
]


@pytest.mark.parametrize("words", [False, True], ids=["counter", "words"])
def test_weights_go_from_memory_to_registers(words: bool) -> None:
    """Rows and sums pass through shared memory, weights (54 KB a program) do not: their layout is that of the product from the load on."""
    sizes = Sizes(hidden=576, query=576, inner=1536, qkv=960)
    values, named = arguments(
        BLOCKS["C"], Weights.make(sizes, "cpu"), Rows.make(sizes, 1, "cpu"), Setting(programs=132, words=words), wait=True
    )
    options: dict[str, Any] = {name: named.get(name, default) for name, default in OPTIONS.items()}
    constants = {name: value for name, value in named.items() if name not in OPTIONS}
    image = LAYER.images.image(specialise(LAYER.parameters, values, constants), options, 90)
    assert image.programmatic
    assert 0 < image.shared_bytes <= 4096
