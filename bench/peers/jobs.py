"""The processes of a run: which there are, in what order, how long each may take, and when each would have its device."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bench.peers.asked import HEAVY, batch_points, context_points, numbers, prefills, sweep_tokens
from bench.peers.shapes import FP8, prefill_operations
from bench.peers.table import START_TARGETS

_SPARE = 1.25  # a job is begun when so much of its guess for its first row is left


@dataclass(frozen=True)
class Peer:
    """`imports` and `starts` are seconds of a start, cold and warm, before the device is touched and from then to the first token."""

    module: str
    imports: tuple[float, float]
    starts: tuple[float, float]
    environment: dict[str, str] = field(default_factory=dict)
    warm: bool = False  # whether a second start, which stops at its first token, is worth a process
    compiles_each_batch: bool = False
    caches: str = ""  # the peer whose caches it starts in, when that one has filled them; its own by default
    sweeps: bool = False
    fp8: bool = False


# seconds as measured on one H200 with 16 processors; a warm start of vLLM is the one in its processes
PEERS = {
    "ours": Peer("bench.peers.ours", (4.5, 5.5), (34.0, 8.5), warm=True, sweeps=True, fp8=True),
    "vllm": Peer("bench.peers.vllm_peer", (27.0, 21.0), (58.0, 20.0), {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, sweeps=True),
    "vllm-processes": Peer("bench.peers.vllm_peer", (24.0, 24.0), (24.0, 24.0), caches="vllm"),
    "transformers": Peer("bench.peers.transformers_peer", (15.0, 15.0), (53.0, 53.0), compiles_each_batch=True),
}
_INSPECTS = 28.0  # seconds of vLLM's first look at a model's class; later starts find it in its cache
_STEP = {"8b": (4.3, 0.02), "8b-fp8": (2.7, 0.014), "135m": (1.5, 0.006)}  # ms: of a step, and of each request in it


@dataclass(frozen=True)
class Job:
    """One process. `after` is the tag of the job whose caches it starts in; seconds are what the plan expects."""

    peer: str
    model: str
    start: str  # "cold" or "warm"
    after: str | None
    seconds: float  # on the device
    imports: float = 0.0  # before it
    first: float = 0.0  # of `seconds`, until its first row of a step

    @property
    def tag(self) -> str:
        return f"{self.model}-{self.peer}-{self.start}"

    @property
    def least(self) -> float:
        """Seconds that must be left when it gets its device."""
        return _SPARE * (self.first or self.seconds)

    @property
    def alone(self) -> bool:
        """Whether its start has targets, so that no other process is begun while it starts."""
        return self.peer == "ours" and any(key[:2] == (self.model, self.start) for key in START_TARGETS)


def plan(options: argparse.Namespace) -> list[Job]:
    """The jobs in the order in which they are begun. vLLM's stand behind the next model's first job, in which they import; then its second
    way to run a model, whose caches are filled by then. Last come peers that compile for each batch size, and that second way for models
    that are not measured in full."""
    found, second, third, slow, last = list[Job](), list[Job](), list[Job](), list[Job](), list[Job]()
    for model in options.models.split(","):
        jobs, full = _of_model(model, options), model in options.full_models.split(",")
        slow += [job for job in jobs if PEERS[job.peer].compiles_each_batch]
        jobs = [job for job in jobs if job not in slow]
        in_others = [job for job in jobs if job.start == "cold" and PEERS[job.peer].caches]
        own = [job for job in jobs if job not in in_others]
        found += [*own[:1], *second]
        second, third = [*third, *own[1:]], in_others if full else []
        last += [] if full else in_others
    return _with_inspection([*found, *second, *third, *slow, *last])


def _of_model(model: str, options: argparse.Namespace) -> list[Job]:
    slow = model in options.slow_models.split(",")
    wanted = [name for name in PEERS if name in options.peers.split(",")]
    names = [name for name in wanted if (PEERS[name].fp8 or model not in FP8) and (slow or not PEERS[name].compiles_each_batch)]
    warm = [name for name in names if PEERS[name].warm and not options.no_warm and model in options.full_models.split(",")]
    return [_job(name, model, start, names, options) for start, some in (("cold", names), ("warm", warm)) for name in some]


def _with_inspection(jobs: Sequence[Job]) -> list[Job]:
    """The first start of vLLM in a run looks at the model's class; all models have the same."""
    first = next((job for job in jobs if job.peer.startswith("vllm")), None)
    return [replace(job, imports=job.imports + _INSPECTS) if job is first else job for job in jobs]


def _job(name: str, model: str, start: str, names: Sequence[str], options: argparse.Namespace) -> Job:
    peer, warm = PEERS[name], start == "warm"
    after = f"{model}-{name}-cold" if warm else f"{model}-{peer.caches}-cold" if peer.caches in names else None
    begin = peer.starts[warm] if peer.caches in ("", *names) else PEERS[peer.caches].starts[0]
    measured = [0.0] if warm else _seconds(name, model, options)
    return Job(name, model, start, after, begin + sum(measured) + 1.0, peer.imports[warm], begin + measured[0])


def _seconds(name: str, model: str, options: argparse.Namespace) -> list[float]:
    """Guesses at what is measured after the start, the first row of a step first: a step's time by `_STEP`, prompts at 550 TFLOP/s."""
    peer, part = PEERS[name], of_model(name, model, options)
    base, each = _STEP.get(model, (1.5, 0.006))

    def seconds(batch: int, context: int, tokens: int, prompts: int) -> float:
        return tokens * (base + each * batch) * 1e-3 + prompts * batch * prefill_operations(model, context) / 5.5e14

    found = []
    for at, batch in enumerate(numbers(part.batches)):
        short = part.rounds + 1 if peer.compiles_each_batch else 1  # it shows no steps, so a step is a difference
        begin = peer.starts[0] if peer.compiles_each_batch and at else 0.0
        found.append(begin + seconds(batch, part.context, part.short * short + part.long * part.rounds, short + part.rounds))
        found.append(1.0)  # the profiler
    found.append(10.0 if name == "ours" else 0.0)  # piecewise beside full, an engine for each, and the host's time
    for point in [*batch_points(part), *context_points(part)]:
        times = 1 if point.batch * point.context > HEAVY else part.rounds
        found.append(seconds(point.batch, point.context, times * (sweep_tokens(part, point, 8192) + prefills(point, 8192)), times))
    if name == "ours":
        largest = max(numbers(part.batches))
        large, long = any(point.batch > largest for point in batch_points(part)), bool(part.prefill or context_points(part))
        found.append(3.0 * (large + long + (large or long)))  # an engine for each, and one for the profiler
    found.append(seconds(1, part.prefill, 1, part.rounds + 1) if part.prefill else 0.0)
    return found


def of_model(name: str, model: str, options: argparse.Namespace) -> argparse.Namespace:
    """What a peer measures of a model: long prompts and the sweep only of the models that get all, and the sweep by peers that can."""
    part = argparse.Namespace(**{**vars(options), "model": model})
    full = model in options.full_models.split(",")
    if PEERS[name].compiles_each_batch:
        part.batches = options.slow_batches
    if not full or not PEERS[name].sweeps:
        part.sweep_batches = part.sweep_contexts = ""
    if not full or PEERS[name].compiles_each_batch:
        part.prefill = 0
    return part


def timetable(jobs: Sequence[Job], devices: int, *, ahead: bool = True) -> list[tuple[Job, float, float]]:
    """Each job with the seconds at which it would get its device and be over, where guesses hold: as `bench.peers.queue` runs them, but one
    that is listed before a job that starts alone is not held up by it."""
    left, over, found = list(jobs), dict[str, float](), list[tuple[Job, float, float]]()
    alone = list[tuple[float, float]]()  # when a job starts alone, no other is launched or gets its turn

    def allowed(time: float) -> float:
        return next((allowed(end) for begin, end in alone if begin <= time < end), time)

    places = [(0.0, 0.0)] * devices  # of each device: when its next process can be launched, and when it is free
    while left:
        place = min(range(devices), key=lambda at: places[at][1])
        launch, free = places[place]
        ready = {job.tag: 0.0 if job.after is None else over.get(job.after, math.inf) for job in left}
        if not any(time <= launch for time in ready.values()):
            launch = max(free, min(ready.values()))
        launch = allowed(launch)
        job = next(job for job in left if ready[job.tag] <= launch)
        left.remove(job)
        begin = allowed(max(free, launch + job.imports))
        if job.alone:
            alone.append((launch if launch >= free else begin, begin + job.first))
        over[job.tag] = begin + job.seconds
        found.append((job, begin, over[job.tag]))
        places[place] = (begin + job.first if job.alone else begin) if ahead else over[job.tag], over[job.tag]
    return found
