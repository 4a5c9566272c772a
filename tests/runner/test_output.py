from __future__ import annotations

import torch

from rung.runner import AsyncOutput
from rung.runner.executor import InProcessExecutor


def test_rows_are_trimmed_to_what_was_sampled() -> None:
    output = AsyncOutput(("a", "b", "c"), torch.tensor([[5, 6, 7]]), torch.tensor([[1, 0, 1]], dtype=torch.int32), None)
    assert output.get_output().sampled_token_ids == ((5,), (), (7,))


def test_steps_of_one_replay_are_joined_by_request() -> None:
    output = AsyncOutput(("a", "b"), torch.tensor([[5, -1], [6, 8]]), None, None)
    assert output.get_output().sampled_token_ids == ((5, 6), (8,))


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
