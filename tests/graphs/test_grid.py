"""Dispatch over the combinations of several ladders: what a wrapped module does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.graphs import ConfiguredMode, Dispatcher, GraphMode, Ladder, Reason, plan_descriptors
from rung.graphs.grid import Axis, Grid

BATCH, FRAMES = Ladder.custom([1, 4, 16]), Ladder.custom([64, 128])
SIZES = {"batch": 3, "frames": 100}


def grid(*, max_waste: float | None = 2.0) -> Grid:
    axes = [Axis(name="batch", ladder=BATCH, padded=True), Axis(name="frames", ladder=FRAMES, padded=True)]
    return Grid(GraphMode.FULL, axes, max_waste=max_waste)


def test_each_dimension_goes_to_its_next_size() -> None:
    target = grid()
    chosen = target.dispatch(target.shape(SIZES))
    assert chosen.descriptor == target.descriptor({"batch": 4, "frames": 128})
    assert (chosen.reason, chosen.padding) == (Reason.BEST, 4 * 128 - 3 * 100)


@pytest.mark.parametrize(
    ("batch", "frames", "reason"),
    [
        (17, 100, Reason.TOO_MANY_TOKENS),
        (3, 129, Reason.OTHER_DIMENSION),
        (5, 100, Reason.PADDING),
        (3, 31, Reason.PADDING),
        (0, 64, Reason.EMPTY),
        (3, 0, Reason.EMPTY),
    ],
)
def test_what_does_not_fit_runs_exactly_with_the_reason(batch: int, frames: int, reason: Reason) -> None:
    target = grid()
    chosen = target.dispatch(target.shape({"batch": batch, "frames": frames}))
    assert (chosen.mode, chosen.num_tokens, chosen.reason) == (GraphMode.NONE, batch, reason)


def test_exact_dimensions_take_any_size_or_the_given_ones() -> None:
    given_sizes = [Axis(name="batch", ladder=BATCH), Axis(name="frames")]
    target = Grid(GraphMode.FULL, given_sizes)
    assert target.dispatch(target.shape({"batch": 4, "frames": 77})).descriptor == target.descriptor({"batch": 4, "frames": 77})
    assert target.dispatch(target.shape({"batch": 3, "frames": 77})).reason is Reason.NOT_CAPTURED


@given(st.integers(1, 20), st.integers(1, 150), st.sampled_from([None, 1.5, 2.0]))
def test_a_grid_decides_as_a_dispatcher_over_all_its_descriptors(batch: int, frames: int, max_waste: float | None) -> None:
    target = grid(max_waste=max_waste)
    planned = plan_descriptors(BATCH, ConfiguredMode.FULL, symbols={"frames": FRAMES})
    listed = Dispatcher(planned, max_waste=max_waste)
    shape = target.shape({"batch": batch, "frames": frames})
    assert target.dispatch(shape).descriptor == listed.dispatch(shape).descriptor


def test_steps_of_a_cut_full_graph_say_so() -> None:
    target = Grid(GraphMode.FULL, [Axis(name="batch", ladder=BATCH, padded=True)], reason=Reason.HOST_BREAK)
    assert target.dispatch(target.shape({"batch": 4})).reason is Reason.HOST_BREAK
