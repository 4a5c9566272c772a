from __future__ import annotations

import numpy as np
import pytest
import torch

from rung.errors import StateError
from rung.runner import AsyncOutput
from rung.runner.executor import InProcessExecutor
from rung.runner.output import RecordedTokens


def test_rows_are_trimmed_to_what_was_sampled() -> None:
    output = AsyncOutput(("a", "b", "c"), torch.tensor([[5, 6, 7]]), torch.tensor([[1, 0, 1]], dtype=torch.int32), None)
    assert output.get_output().sampled_token_ids == ((5,), (), (7,))


def test_steps_of_one_replay_are_joined_by_request() -> None:
    output = AsyncOutput(("a", "b"), torch.tensor([[5, -1], [6, 8]]), None, None)
    assert output.get_output().sampled_token_ids == ((5, 6), (8,))


@pytest.mark.parametrize(("first", "expected"), [(0, [[0, 1], [10, 11], [20, 21]]), (3, [[30, 31], [0, 1], [10, 11]])])
def test_recorded_tokens_are_read_when_they_are_asked_for(first: int, expected: list[list[int]]) -> None:
    history = np.full((4, 3), -1)
    recorded = RecordedTokens(history, first, 3, 2, lambda: first + 3)
    output = AsyncOutput(("a", "b"), recorded, None, None)
    history[:] = np.arange(4)[:, None] * 10 + np.arange(3)
    assert recorded.tolist() == expected
    assert output.get_output().sampled_token_ids == tuple(zip(*expected, strict=True))


def test_tokens_that_are_read_too_late_are_refused() -> None:
    history, steps = np.zeros((4, 1), np.int64), 9
    output = AsyncOutput(("a",), RecordedTokens(history, 5, 1, 1, lambda: steps), None, None)
    assert output.get_output().sampled_token_ids == ((0,),)
    steps = 10  # the one at hand may write row 1, where step 5 wrote
    with pytest.raises(StateError, match="more than 4 steps later"):
        output.get_output()


class Worker:
    def echo(self, value: int) -> int:
        return value

    def fail(self) -> None:
        raise ValueError("broken")

    def sample(self) -> AsyncOutput:
        return AsyncOutput(("a",), torch.tensor([[5]]), torch.tensor([[1]]), None)


def test_a_call_returns_a_resolved_future() -> None:
    future = InProcessExecutor(Worker()).collective_rpc("echo", (3,))
    assert future.done()
    assert future.result() == 3


def test_an_error_is_kept_in_the_future() -> None:
    future = InProcessExecutor(Worker()).collective_rpc("fail")
    assert isinstance(future.exception(), ValueError)


def test_an_asynchronous_output_is_read_by_the_one_who_asks() -> None:
    future = InProcessExecutor(Worker()).collective_rpc("sample")
    assert not future.done()
    assert future.result().sampled_token_ids == ((5,),)
    assert future.result() is future.result()
