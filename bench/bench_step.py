"""The host's part of a decode step: schedule, plan, launch, ids on the host, around a decode graph that does nothing. `bench.host` says
where it goes.

make bench ARGS="-k step"
"""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.host import make
from rung.runner import SamplingParams


@pytest.mark.parametrize("requests", [1, 64, 256])
def test_decode_step(benchmark: BenchmarkFixture, requests: int) -> None:
    engine, _ = make(None)
    for _ in range(requests):
        engine.add_request([1, 2, 3], SamplingParams(ignore_eos=True))
    for _ in range(5):
        engine.step()
    updates = benchmark.pedantic(engine.step, rounds=100, warmup_rounds=10)
    assert len(updates) == requests
