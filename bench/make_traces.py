"""Makes the step traces in bench/traces: synthetic requests through rung's own scheduler and dispatcher, without a model.

Requests arrive at random (Poisson) with log-normal prompt and answer lengths. The clock advances by what a step costs in the model of
`rung.graphs.step_cost`, so that more arrive during long steps. The scheduler decides what each step runs, and the dispatcher, with the
default ladder, how. The same seed gives the same file.

    python bench/make_traces.py [FOLDER]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from random import Random

import numpy as np

from rung.attention import CaptureSupport
from rung.graphs import ConfiguredMode, Dispatcher, Shape, StepTrace, plan_descriptors, resolve_mode
from rung.graphs.step_cost import modelled_curves
from rung.runner import Request, RunnerConfig, SamplingParams, Scheduler
from rung.runner.output import ModelRunnerOutput
from rung.runner.plan import StepPlan
from rung.runner.step_trace import capture_ladder, trace_header

FOLDER = Path(__file__).parent / "traces"
SUPPORT = CaptureSupport.UNIFORM_BATCH


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Requests of one kind: lengths are the median and the spread (sigma) of a log-normal, cut at the limits."""

    share: float
    prompt: tuple[int, float]
    answer: tuple[int, float]
    longest_prompt: int
    longest_answer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What arrives, and the runner that serves it."""

    seed: int
    steps: int
    arrivals_per_second: float
    kinds: tuple[Kind, ...]
    max_num_tokens: int
    long_prefill_chunk: int | None = None


CHAT = Kind(share=1.0, prompt=(60, 0.9), answer=(160, 0.7), longest_prompt=400, longest_answer=1200)
DOCUMENT = Kind(share=1.0, prompt=(3000, 0.7), answer=(120, 0.6), longest_prompt=7000, longest_answer=500)
WORKLOADS = {
    # Answers are long beside questions: most steps decode, an arrival adds a short prompt to one of them.
    "chat": Workload(seed=1, steps=2500, arrivals_per_second=60, kinds=(CHAT,), max_num_tokens=2048),
    # Prompts of thousands of tokens are computed in chunks that fill a step up to its budget, decodes ride along.
    "long_prompts": Workload(seed=2, steps=2500, arrivals_per_second=10, kinds=(DOCUMENT,), max_num_tokens=512),
    # Both, with chunks small enough to leave the decodes of the others their speed.
    "mixed": Workload(
        seed=3,
        steps=2500,
        arrivals_per_second=25,
        kinds=(replace(CHAT, share=0.9), replace(DOCUMENT, share=0.1)),
        max_num_tokens=512,
        long_prefill_chunk=256,
    ),
}


def make_trace(workload: Workload, path: Path) -> None:
    """Simulate the workload and write its trace anew."""
    config = RunnerConfig(
        max_num_requests=512,
        max_num_tokens=workload.max_num_tokens,
        max_model_len=8192,
        long_prefill_chunk=workload.long_prefill_chunk,
        graphs="full_and_piecewise",
        prefix_cache=False,  # all prompts have the same ids
    )
    mode = ConfiguredMode(config.graphs)
    descriptors = plan_descriptors(capture_ladder(config), mode, max_num_requests=config.max_num_requests, capture_support=SUPPORT)
    dispatcher = Dispatcher(descriptors, resolved=resolve_mode(mode, SUPPORT), max_waste=config.max_waste)
    scheduler = Scheduler(config, num_blocks=1 << 17)  # memory is not what is looked at here
    about = {"made_by": "bench/make_traces.py", "workload": path.stem, "seed": workload.seed}
    path.unlink(missing_ok=True)
    trace = StepTrace(path, replace(trace_header(config, SUPPORT), about=about))
    arrivals, curves, clock = Arrivals(workload, config.max_model_len), modelled_curves(), 0.0
    for _ in range(workload.steps):
        if not scheduler.has_unfinished:
            clock = max(clock, arrivals.next_at)
        arrivals.admit(scheduler, clock)
        computed = {request_id: request.num_computed_tokens for request_id, request in scheduler.requests.items()}
        plan = scheduler.schedule()
        shape = shape_of(plan, computed)
        chosen = dispatcher.dispatch(shape)
        trace.add(shape, chosen.descriptor.mode, chosen.descriptor.num_tokens, chosen.reason)
        clock += float(curves[chosen.descriptor.mode](np.array([chosen.descriptor.num_tokens]))[0]) * 1e-6
        sample(scheduler, plan)
    trace.flush()


class Arrivals:
    """Draws requests and hands those that have arrived to the scheduler."""

    def __init__(self, workload: Workload, max_model_len: int) -> None:
        self._workload = workload
        self._max_model_len = max_model_len
        self._random = Random(workload.seed)
        self._count = 0
        self.next_at = 0.0  # seconds

    def admit(self, scheduler: Scheduler, clock: float) -> None:
        while self.next_at <= clock:
            scheduler.add(self._draw())
            self.next_at += self._random.expovariate(self._workload.arrivals_per_second)

    def _draw(self) -> Request:
        kinds = self._workload.kinds
        (kind,) = self._random.choices(kinds, [one.share for one in kinds])
        prompt = self._length(kind.prompt, kind.longest_prompt)
        answer = self._length(kind.answer, kind.longest_answer)
        self._count += 1
        return Request(
            request_id=f"request-{self._count}",
            prompt_token_ids=(0,) * prompt,
            sampling=SamplingParams(),
            max_total_tokens=min(prompt + answer, self._max_model_len),
        )

    def _length(self, distribution: tuple[int, float], longest: int) -> int:
        median, sigma = distribution
        return min(max(1, round(self._random.lognormvariate(log(median), sigma))), longest)


def shape_of(plan: StepPlan, computed: dict[str, int]) -> Shape:
    """As the runner sees the plan: one token over an existing context is a decode."""
    counts = plan.num_scheduled_tokens
    decodes = all(count == 1 and computed[request_id] > 0 for request_id, count in counts.items())
    return Shape(
        num_tokens=sum(counts.values()),
        num_requests=len(counts),
        uniform_query_len=1 if decodes else None,
        max_query_len=max(counts.values()),
    )


def sample(scheduler: Scheduler, plan: StepPlan) -> None:
    """Give every request whose prompt is complete a token."""
    ids = tuple(plan.num_scheduled_tokens)
    complete = (scheduler.requests[request_id].num_in_flight > 0 for request_id in ids)
    scheduler.update(ModelRunnerOutput(request_ids=ids, sampled_token_ids=tuple((0,) if done else () for done in complete)))


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, workload in WORKLOADS.items():
        make_trace(workload, folder / f"{name}.jsonl")
        print(f"{folder / name}.jsonl: {workload.steps} steps")
