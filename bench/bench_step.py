"""The host's part of a decode step: schedule, inputs, sampling, ids on the host, around a forward pass that does nothing.

make bench ARGS="-k step"
"""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from rung.attention.backends.torch_reference import TorchReference
from rung.context import ForwardContext
from rung.graphs import Dispatch, exact
from rung.models import random_model
from rung.runner import Engine, Forward, InProcessExecutor, ModelRunner, RunnerConfig, SamplingParams, Scheduler
from rung.runner.batch import Batch

HIDDEN = 64  # of the shape "tiny"


class NoForward(Forward):
    """Hidden states of zeros at the exact size."""

    def __init__(self, max_num_tokens: int) -> None:
        self._hidden = torch.zeros(max_num_tokens, HIDDEN)

    def dispatch(self, batch: Batch) -> Dispatch:
        return Dispatch(exact(batch.shape))

    def run(self, dispatch: Dispatch, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return self._hidden[: dispatch.num_tokens]


@pytest.mark.parametrize("requests", [1, 64, 256])
def test_decode_step(benchmark: BenchmarkFixture, requests: int) -> None:
    config = RunnerConfig(max_num_requests=256, max_num_tokens=2048, max_model_len=4096, num_blocks=8192)
    runner = ModelRunner(random_model("tiny"), config, backend=TorchReference, forward=NoForward(config.max_num_tokens))
    engine = Engine(InProcessExecutor(runner), Scheduler(config, runner.num_blocks), vocab_size=256)
    for _ in range(requests):
        engine.add_request([1, 2, 3], SamplingParams(ignore_eos=True))
    for _ in range(5):
        engine.step()
    updates = benchmark.pedantic(engine.step, rounds=100, warmup_rounds=10)
    assert len(updates) == requests
