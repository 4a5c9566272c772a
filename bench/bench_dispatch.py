"""From a batch to the graph that runs it, among all graphs of a full ladder.

make bench ARGS="-k dispatch"
"""

from __future__ import annotations

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from rung.graphs import ConfiguredMode, Dispatcher, GraphMode, Ladder, Shape, plan_descriptors
from rung.runner.batch import dummy_batch

REQUESTS = 512
CASES = {
    "decode": (Shape(num_tokens=37, num_requests=37, uniform_query_len=1, max_query_len=1), GraphMode.FULL, 40),
    "mixed": (Shape(num_tokens=300, num_requests=3, max_query_len=298), GraphMode.PIECEWISE, 304),
    "too_large": (Shape(num_tokens=2048, num_requests=1, max_query_len=2048), GraphMode.NONE, 2048),
}


@pytest.mark.parametrize("case", CASES)
def test_dispatch(benchmark: BenchmarkFixture, case: str) -> None:
    shape, mode, num_tokens = CASES[case]
    ladder = Ladder.for_requests(REQUESTS)
    dispatcher = Dispatcher(plan_descriptors(ladder, ConfiguredMode.FULL_AND_PIECEWISE, max_num_requests=REQUESTS))
    chosen = benchmark(dispatcher.dispatch, shape).descriptor
    assert (chosen.mode, chosen.num_tokens) == (mode, num_tokens)


def test_dispatch_of_a_batch(benchmark: BenchmarkFixture) -> None:
    """As the runner does it: what is asked is read from the batch."""
    ladder = Ladder.for_requests(REQUESTS)
    dispatcher = Dispatcher(plan_descriptors(ladder, ConfiguredMode.FULL_AND_PIECEWISE, max_num_requests=REQUESTS))
    batch = dummy_batch(np.ones(37, np.int32), decode=True)
    assert benchmark(lambda: dispatcher.dispatch(batch.shape)).descriptor.num_tokens == 40


def test_first_dispatch_of_a_shape(benchmark: BenchmarkFixture) -> None:
    """Without what is remembered: mixed batches that never came before."""
    ladder = Ladder.for_requests(REQUESTS)
    dispatcher = Dispatcher(plan_descriptors(ladder, ConfiguredMode.FULL_AND_PIECEWISE, max_num_requests=REQUESTS))
    shape = CASES["mixed"][0]
    assert benchmark(dispatcher._decide, shape, GraphMode.FULL).descriptor.num_tokens == 304
