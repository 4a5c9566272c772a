"""Rotation and cache write in plain torch: what the kernels are held against."""

from __future__ import annotations

import pytest
import torch

from rung.attention import Rotation, rotate
from rung.attention.backends.torch_reference import TorchReference
from rung.attention.rotation import rotated_query_and_key
from tests.attention.cases import make_spec
from tests.attention.rotary_cases import HEADS, SLOTS, Heads, check, project

REFERENCE = TorchReference(make_spec())  # rotation needs nothing of the spec


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS.keys())
def test_reference_equals_complex_products(heads: Heads, slots: list[int]) -> None:
    projection = project(heads, slots)
    projection.run(REFERENCE)
    check(projection, 1e-5)


def test_float32_is_rotated_exactly_as_by_single_operations() -> None:
    projection = project(Heads(), SLOTS["one"])
    query, key = rotated_query_and_key(projection.query, projection.key, projection.rotation)
    cos, sin = projection.rotation.cos, projection.rotation.sin
    assert torch.equal(query, rotate(projection.query, cos, sin))
    assert torch.equal(key, rotate(projection.key, cos, sin))


def test_half_precision_is_rounded_once() -> None:
    heads = Heads(offset=0.0)
    projection = project(heads, list(range(64)), dtype=torch.bfloat16)
    projection.run(REFERENCE)
    rotation = projection.rotation
    weights = [weight.double() for weight in (rotation.query_weight, rotation.key_weight) if weight is not None]
    wide = Rotation(
        cos=rotation.cos.double(), sin=rotation.sin.double(), query_weight=weights[0], key_weight=weights[1], epsilon=rotation.epsilon
    )
    exact, _ = rotated_query_and_key(projection.query.double(), projection.key.double(), wide)
    off = (projection.rotated != exact.to(torch.bfloat16)).float().mean()
    assert off < 1e-3  # a float32 result on the other side of a tie
