"""Static buffers: one address, any size, declared padding."""

from __future__ import annotations

import pytest
import torch

from rung.errors import ConfigError, InputMismatchError
from rung.graphs import BufferSpec, StaticBuffer


def buffer(dtype: torch.dtype = torch.float32, pad: float = 0, valid: tuple[int, int] | None = None) -> StaticBuffer:
    return StaticBuffer(BufferSpec(name="x", shape=("tokens", 2), dtype=dtype, pad=pad, valid=valid), capacity={"tokens": 8})


def test_views_share_one_address_and_are_contiguous() -> None:
    x = buffer()
    views = [x.view({"tokens": size}) for size in (1, 5, 8)]
    assert len({view.data_ptr() for view in views}) == 1
    assert [list(view.shape) for view in views] == [[1, 2], [5, 2], [8, 2]]
    assert all(view.is_contiguous() for view in views)


def test_write_copies_and_pads_up_to_the_size_only() -> None:
    x = buffer(pad=-1)
    x.view({"tokens": 8}).fill_(7)
    x.write(torch.ones(3, 2), {"tokens": 4})
    assert x.view({"tokens": 8})[:, 0].tolist() == [1, 1, 1, -1, 7, 7, 7, 7]


def test_two_dynamic_dimensions_are_padded_on_all_sides() -> None:
    spec = BufferSpec(name="x", shape=("batch", "frames"), dtype=torch.int64, pad=9)
    x = StaticBuffer(spec, capacity={"batch": 4, "frames": 5})
    x.poison()
    assert x.write(torch.zeros(1, 2, dtype=torch.int64), {"batch": 2, "frames": 3}).tolist() == [[0, 0, 9], [9, 9, 9]]


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(5, 2), torch.ones(3, 1), torch.ones(3, 2, dtype=torch.float64), torch.ones(3)],
    ids=["rows", "columns", "dtype", "dims"],
)
def test_wrong_tensors_are_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(InputMismatchError, match="input 'x'"):
        buffer().write(tensor, {"tokens": 4})


def test_size_above_the_capacity_is_refused() -> None:
    with pytest.raises(InputMismatchError, match=r"size 9 .* above the capacity 8"):
        buffer().view({"tokens": 9})


def test_missing_dimension_is_named() -> None:
    with pytest.raises(ConfigError, match="'tokens'"):
        buffer().view({"rows": 4})


def test_poison_is_nan_random_valid_or_the_pad_value() -> None:
    floats, ids, slots = buffer(), buffer(torch.int32, valid=(3, 6)), buffer(torch.int64, pad=-1)
    for one in (floats, ids, slots):
        one.poison(torch.Generator().manual_seed(1))
    assert floats.view({"tokens": 8}).isnan().all()
    assert set(ids.view({"tokens": 8}).flatten().tolist()) == {3, 4, 5}
    assert set(slots.view({"tokens": 8}).flatten().tolist()) == {-1}
