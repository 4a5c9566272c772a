"""The host's part of a decode step by function, around a forward pass that does nothing.

    python -m bench.host --sizes 1,64,256             # steady decoding
    python -m bench.host --sizes 64 --churn 4         # a request ends and another comes every 4 steps
    python -m bench.host --sizes 64 --text            # with SmolLM2's tokenizer and a stop text

`--churn` and `--text` show what arrivals and text add. Runs on a CPU; `bench.engine --host-profile` shows the same table for a real model.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import torch

from bench.host_profile import HostProfile, show
from rung.attention.backends.torch_reference import TorchReference
from rung.context import ForwardContext
from rung.graphs import Descriptor, Dispatch, GraphMode, exact
from rung.models import load_model, random_model
from rung.runner import Engine, Forward, InProcessExecutor, ModelRunner, RunnerConfig, SamplingParams, Scheduler
from rung.runner.batch import Batch
from rung.runner.text import Tokenizer

HIDDEN, VOCAB = 64, 256  # of the shape "tiny"
ROWS = 256


class NoForward(Forward):
    """Decodes are replays of a graph that does nothing; other steps get hidden states of zeros."""

    def __init__(self, max_num_tokens: int) -> None:
        self._hidden = torch.zeros(max_num_tokens, HIDDEN)
        self._logits = torch.zeros(ROWS, VOCAB)
        self._decode = Dispatch(Descriptor(mode=GraphMode.FULL, num_tokens=ROWS, num_requests=ROWS, uniform_query_len=1, max_query_len=1))

    def dispatch(self, batch: Batch) -> Dispatch:
        return self._decode if batch.uniform_query_len == 1 else Dispatch(exact(batch.shape))

    def advances(self, dispatch: Dispatch) -> bool:
        return dispatch is self._decode

    def advance(self, dispatch: Dispatch) -> torch.Tensor:
        return self._logits

    def run(self, dispatch: Dispatch, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return self._hidden[: dispatch.num_tokens]


def make(tokenizer: Tokenizer | None, replay_steps: int = 1) -> tuple[Engine, ModelRunner]:
    """An engine whose decode steps cost the device nothing; they all give token 0."""
    config = RunnerConfig(
        max_num_requests=ROWS, max_num_tokens=2048, max_model_len=4096, num_blocks=20000, prefix_cache=False, replay_steps=replay_steps
    )
    runner = ModelRunner(random_model("tiny"), config, backend=TorchReference, forward=NoForward(config.max_num_tokens))
    runner.decode.state.history.zero_()
    return Engine(InProcessExecutor(runner), Scheduler(config, runner.num_blocks), vocab_size=VOCAB, tokenizer=tokenizer), runner


def measure(requests: int, steps: int, churn: int, tokenizer: Tokenizer | None, replay_steps: int = 1) -> tuple[float, HostProfile]:
    """Median microseconds of a step without timers, and the profile of as many with them."""
    engine, runner = make(tokenizer, replay_steps)
    stop = ("never said",) if tokenizer is not None else ()
    forever = SamplingParams(ignore_eos=True, stop=stop)
    for _ in range(requests):
        engine.add_request([1, 2, 3], forever)
    names = list(engine.scheduler.requests)

    def run(count: int) -> list[float]:
        times = []
        for index in range(count):
            start = time.perf_counter()
            if churn and index % churn == 0:
                engine.abort(names.pop(0))
                names.append(engine.add_request([1, 2, 3], forever))
            engine.step()
            times.append((time.perf_counter() - start) * 1e6)
        return times

    run(20)
    gc.collect()
    gc.freeze()  # a collection walks all of torch, 100 to 300 ms
    median = statistics.median(run(steps))
    profile = HostProfile(engine, runner)
    with profile.recording():
        run(steps)
    return median, profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,64,256")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--churn", type=int, default=0)
    parser.add_argument("--replay-steps", type=int, default=1)
    parser.add_argument("--text", action="store_true")
    arguments = parser.parse_args()
    tokenizer = load_model("smollm2").tokenizer if arguments.text else None
    columns, medians = [], []
    for size in (int(size) for size in arguments.sizes.split(",")):
        median, profile = measure(size, arguments.steps, arguments.churn, tokenizer, arguments.replay_steps)
        columns.append((f"B={size}", profile))
        medians.append(median)
    show("host us a step", columns)
    print(f"{'without the timers, median':40}" + "".join(f"{median:12.1f}" for median in medians))


if __name__ == "__main__":
    main()
