"""Inputs at addresses that kernels do not expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rung.launch.alignment import ALIGNMENT, aligned_copy, aligned_entry

SEEN: list[list[Any]] = []


def double(args: list[Any]) -> Sequence[Any]:
    SEEN.append(list(args))
    return (args[0].mul_(2),)


def unaligned() -> torch.Tensor:
    tensor = torch.arange(9.0)[1:]
    assert tensor.data_ptr() % ALIGNMENT
    return tensor


def test_aligned_inputs_go_on_as_they_are() -> None:
    entry = aligned_entry(double, (0, 1), (0,), {})
    given = [torch.ones(4), torch.ones(4), 7]
    entry(list(given))
    assert all(got is want for got, want in zip(SEEN[-1], given, strict=True))


def test_others_are_copied_and_get_back_what_was_written() -> None:
    entry = aligned_entry(double, (0, 1), (0,), {})
    first, second = unaligned(), unaligned()
    (out,) = entry([first, second, 7])
    assert all(value.data_ptr() % ALIGNMENT == 0 for value in SEEN[-1][:2])
    assert first.tolist() == out.tolist() == [2.0 * value for value in range(1, 9)]
    assert second.tolist() == list(range(1, 9))


def test_nothing_to_look_at_costs_nothing() -> None:
    assert aligned_entry(double, (), (), {}) is double


def test_copies_keep_strides_and_overlaps() -> None:
    for tensor in (torch.arange(12.0).view(3, 4).t(), torch.arange(3.0).expand(4, 3), torch.ones(0, 3), torch.tensor(5.0)):
        copy = aligned_copy(tensor)
        assert (copy.stride(), copy.shape) == (tensor.stride(), tensor.shape)
        assert torch.equal(copy, tensor)
