"""The kernel that rotates and writes, in Triton's interpreter; see `test_triton_interpreted`."""

from __future__ import annotations

import pytest
import torch

from rung.attention.backends.triton_paged import TritonPaged, why_no_triton
from rung.errors import ConfigError
from tests.attention.cases import make_spec
from tests.attention.rotary_cases import HEADS, SLOTS, Heads, check, project

REASON = why_no_triton(torch.device("cpu"))
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
BACKEND = TritonPaged(make_spec())  # rotation needs nothing of the spec


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_kernel_equals_float64(heads: Heads) -> None:
    projection = project(heads, SLOTS["padded"])
    projection.run(BACKEND)
    check(projection, 1e-5)


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS.keys())
def test_slots(slots: list[int]) -> None:
    projection = project(Heads(num_heads=3, num_kv_heads=1, head_size=16, rotary=8), slots)
    projection.run(BACKEND)
    check(projection, 1e-5)


def test_half_precision() -> None:
    projection = project(Heads(offset=1.0), SLOTS["padded"], dtype=torch.float16)
    projection.run(BACKEND)
    check(projection, 2e-3)


def test_strided_last_dimension_is_refused() -> None:
    projection = project(Heads(), SLOTS["one"])
    with pytest.raises(ConfigError, match="query: the last dimension must be contiguous"):
        BACKEND.rotate_and_write(
            projection.query.transpose(1, 2),
            projection.key,
            projection.value,
            projection.rotation,
            projection.rotated,
            projection.cache,
            projection.slots,
        )
