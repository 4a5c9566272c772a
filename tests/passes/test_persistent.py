"""The kernel of several products against float32, in Triton's interpreter (see `test_product_interpreted.py`)."""

from __future__ import annotations

import pytest
import torch

from bench.persistent_launch import BLOCKS, Rows, Setting, Sizes, Weights, reference, run
from rung.attention.backends.triton_paged import why_no_triton

pytestmark = pytest.mark.skipif(why_no_triton(torch.device("cpu")) is not None, reason="needs Triton's interpreter")
SIZES = Sizes(hidden=72, query=40, inner=192, qkv=88)


@pytest.mark.parametrize("warps", [4, 16])
@pytest.mark.parametrize("rows_count", [1, 4])
def test_each_phase_by_many_programs(rows_count: int, warps: int) -> None:
    weights, rows = Weights.make(SIZES, "cpu", torch.float32), Rows.make(SIZES, rows_count, "cpu", torch.float32)
    wanted = reference((0, 3), weights, rows)
    for phase in range(4):
        run((phase, phase), weights, rows, Setting(programs=7, num_warps=warps, words=False), wait=False)
    for name, tensor in wanted.items():
        torch.testing.assert_close(getattr(rows, name), tensor, atol=1e-4, rtol=1e-4)


def check_launches(name: str, rows_count: int, *, words: bool, ahead: int) -> None:
    """Two launches of a block by one program, over different rows: words of the first must not be taken for those of the second."""
    weights, rows = Weights.make(SIZES, "cpu", torch.float16), Rows.make(SIZES, rows_count, "cpu", torch.float16)
    kept = {"activated", "hidden"} if words else set()  # what stays within the launch
    before = {inner: getattr(rows, inner).clone() for inner in kept}
    for launch in (1, 2):
        for tensor in (rows.attended, rows.residual, *(() if words else (rows.activated,)), *((rows.hidden,) if name == "A" else ())):
            tensor.normal_()
        before["hidden"] = rows.hidden.clone()
        wanted = reference(BLOCKS[name], weights, rows)
        run(BLOCKS[name], weights, rows, Setting(programs=1, words=words, ahead=ahead), wait=False)
        for output in wanted.keys() - kept:
            torch.testing.assert_close(getattr(rows, output).float(), wanted[output], atol=2e-2, rtol=2e-2)
        assert rows.state[0] == (launch if words else 0)
        assert all(torch.equal(getattr(rows, inner), before[inner]) for inner in kept)


@pytest.mark.parametrize("words", [False, True], ids=["counter", "words"])
@pytest.mark.parametrize("rows_count", [1, 2, 8])
@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_phases_hand_rows_on(name: str, rows_count: int, words: bool) -> None:
    check_launches(name, rows_count, words=words, ahead=1)


@pytest.mark.parametrize("words", [False, True], ids=["counter", "words"])
@pytest.mark.parametrize("ahead", [0, 3])
def test_weights_may_be_loaded_late_and_early(ahead: int, words: bool) -> None:
    check_launches("C", 1, words=words, ahead=ahead)
