"""T17 and TV2: the arithmetic of capture sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.errors import LadderError
from rung.graphs.ladder import Ladder, ladder_cap, series


def test_series_is_the_documents() -> None:
    sizes = series(512)
    assert len(sizes) == 51
    assert sizes[:6] == (1, 2, 4, 8, 16, 24)
    assert sizes[-3:] == (480, 496, 512)


@pytest.mark.parametrize(
    ("size", "padded", "waste"),
    [(1, 1, 0), (3, 4, 25), (5, 8, 38), (13, 16, 19), (100, 104, 4), (257, 272, 6), (500, 512, 2), (300, 304, 1)],
)
def test_pad_table(size: int, padded: int, waste: int) -> None:
    ladder = Ladder.up_to(512)
    assert ladder.pad_to(size) == padded
    assert int(100 * ladder.waste(size) + 0.5) == waste


@pytest.mark.parametrize("size", [513, 2048])
def test_no_size_above_the_top(size: int) -> None:
    assert Ladder.up_to(512).pad_to(size) is None
    assert Ladder.up_to(512).waste(size) == 0


@pytest.mark.parametrize(("cap", "count"), [(8, 4), (100, 15), (256, 35)])
def test_length_of_the_raw_series(cap: int, count: int) -> None:
    assert len(series(cap)) == count


def test_cap_is_twice_the_decode_batch_at_most_512() -> None:
    assert ladder_cap(1024) == 512
    assert ladder_cap(16) == 32
    assert ladder_cap(16, decode_query_len=3) == 96


def test_token_budget_limits_the_default_ladder() -> None:
    assert Ladder.for_requests(512, max_num_tokens=100).sizes == (*series(100), 100)


LADDERS: dict[str, Callable[[int], Ladder]] = {
    "documents": Ladder.up_to,
    "unsorted": lambda maximum: Ladder.custom([max(1, maximum // 3), 1, 1], maximum),
    **{f"stride {step}": lambda maximum, step=step: Ladder.custom(range(1, maximum + 1, step), maximum) for step in (1, 2, 7, 32, 100)},
}


@pytest.mark.parametrize("build", LADDERS.values(), ids=LADDERS.keys())
def test_every_size_maps_to_the_smallest_entry_for_every_maximum(build: Callable[[int], Ladder]) -> None:
    for maximum in range(1, 601):
        ladder = build(maximum)
        assert ladder.sizes[-1] == maximum
        assert list(ladder.sizes) == sorted(set(ladder.sizes))
        expected = [entry for below, entry in zip((0, *ladder.sizes), ladder.sizes, strict=False) for _ in range(entry - below)]
        assert [ladder.pad_to(size) for size in range(1, maximum + 1)] == expected
        assert ladder.pad_to(maximum + 1) is None


@given(st.lists(st.integers(1, 600), max_size=40), st.integers(600, 700))
def test_custom_lists_are_sorted_unique_and_hold_the_maximum(sizes: list[int], maximum: int) -> None:
    assert Ladder.custom(sizes, maximum).sizes == tuple(sorted({*sizes, maximum}))


@pytest.mark.parametrize(
    ("sizes", "named"), [([4, 0], "entry 1"), ([-2], "entry 0"), ([1, 2, 9], "entry 2"), ([1, 2.0], "entry 1"), ([True], "entry 0")]
)
def test_bad_entries_are_named(sizes: list[int], named: str) -> None:
    with pytest.raises(LadderError, match=named) as error:
        Ladder.custom(sizes, 8)
    assert isinstance(error.value, ValueError)


def test_trimming_keeps_the_top() -> None:
    trimmed = Ladder.up_to(512).trimmed(8)
    assert len(trimmed) == 8
    assert trimmed.top == 512


def test_empty_ladder_pads_nothing() -> None:
    assert Ladder.up_to(0).pad_to(1) is None
