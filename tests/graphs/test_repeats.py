"""Attention breaks as the launches of an earlier step, on the recorded backend: kernels of a launcher that torch stands in for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rung.attention import Attention, AttentionCall, AttentionMetadata, AttentionSpec, CaptureSupport, KVCache
from rung.attention.layer import attention
from rung.compile.bound import BoundStep, Capture
from rung.context import ForwardContext, set_forward_context
from rung.errors import ContextError
from rung.graphs import Descriptor, GraphManager, GraphMode
from rung.graphs.repeats import break_lines
from rung.launch import workspace
from tests.graphs.toys import ToyPlan, data, make_manager, piece
from tests.launch.fakes import launcher_of
from tests.runner.tiny import PlainAttention

SPEC = AttentionSpec(num_heads=1, num_kv_heads=1, head_size=4, scale=1.0)
ROWS = 4
SIZE = Descriptor(mode=GraphMode.PIECEWISE, num_tokens=ROWS)
LAYERS = ("one", "two")
SLOTS = torch.zeros(ROWS, dtype=torch.int64)


class _Kernels:
    """Stand in for two Triton kernels: what they are launched with is what they compute with."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def run(query: torch.Tensor, lengths: torch.Tensor, kept: torch.Tensor, work: torch.Tensor, out: torch.Tensor, factor: int) -> None:
            work.copy_(query + lengths[: grid[0]].sum())
            out.copy_(work * factor + kept[0, 0, 0])

        return run


KERNELS = launcher_of(_Kernels())


class Launching(PlainAttention):
    """Work of launches alone, whose number is the longest query of a batch."""

    name = "launching"
    capture_support = CaptureSupport.ALWAYS
    ran = 0

    def launch_key(self, query: Any, key: Any, cache: Any, metadata: AttentionMetadata, *, fresh: bool) -> Hashable | None:
        return metadata.max_query_len

    def forward(self, query: torch.Tensor, cache: KVCache, out: torch.Tensor, metadata: AttentionMetadata) -> None:
        self.ran += 1
        work = workspace(query.shape, query.dtype, query.device)
        KERNELS.run((metadata.num_requests, 1, 1), query, metadata.seq_lens, cache.key, work, out, metadata.max_query_len)


class NothingSaid(Launching):
    def launch_key(self, *arguments: Any, **named: Any) -> Hashable | None:
        return None


class NewForward(Launching):
    """Inherits an answer that was given for another forward."""

    def forward(self, query: torch.Tensor, cache: KVCache, out: torch.Tensor, metadata: AttentionMetadata) -> None:
        super().forward(query, cache, out, metadata)


class OtherWork(Launching):
    def launch_key(self, *arguments: Any, **named: Any) -> Hashable | None:
        return super().launch_key(*arguments, **named)

    def forward(self, query: torch.Tensor, cache: KVCache, out: torch.Tensor, metadata: AttentionMetadata) -> None:
        super().forward(query, cache, out, metadata)
        out.add_(self.ran)


class Steps:
    """Two layers over two attention breaks, and the steps that a runner would make."""

    def __init__(self, backend: type[Launching] = Launching, **options: Any) -> None:
        self.backend = backend(SPEC)
        self.layers = {name: Attention(name, SPEC) for name in LAYERS}
        for number, layer in enumerate(self.layers.values()):
            cache = torch.full((2, 2, 1, 4), float(number + 1))
            layer.bind(self.backend, KVCache(cache, cache))
        self.metadata = AttentionMetadata(
            query_start_loc=torch.arange(ROWS + 1, dtype=torch.int32),
            seq_lens=torch.arange(1, ROWS + 1, dtype=torch.int32),
            block_table=torch.zeros(ROWS, 1, dtype=torch.int32),
            slot_mapping=SLOTS,
            num_requests=ROWS,
            num_actual_tokens=ROWS,
            max_query_len=1,
            max_seq_len=4,
        )
        self.manager: GraphManager = make_manager(self._plan(), **options)
        self.manager.capture([SIZE], lambda descriptor: set_forward_context(self.context(self.metadata)))
        self.backend.ran = 0
        self.counts = self.manager.counters

    def _plan(self) -> ToyPlan:
        walk: list[Any] = [(piece("piece_00", _spread), ("x",), ("q0", "out0"))]
        for number, name in enumerate(LAYERS):
            walk.append((_break(name), (f"q{number}", f"out{number}"), ()))
            walk.append((piece(f"piece_0{number + 1}", _next), (f"out{number}",), (f"q{number + 1}", f"out{number + 1}")))
        return ToyPlan(walk, ("q2",))

    def context(self, metadata: AttentionMetadata, **others: AttentionMetadata) -> ForwardContext:
        return ForwardContext(attention_metadata={**dict.fromkeys(LAYERS, metadata), **others}, attention_layers=self.layers)

    def run(self, seed: int = 0, context: ForwardContext | None = None, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(what a replay of poisoned graphs gives, what the plan itself gives). A step has metadata of its own, over the same memory."""
        context = self.context(replace(self.metadata, **changes)) if context is None else context
        x = data(ROWS, seed)
        self.manager.poison()
        self.manager.inputs[0].write(x, {"tokens": ROWS})
        with set_forward_context(context):
            got = self.manager.run(SIZE).clone()[0]
            before = self.backend.ran
            want = self.manager.plan(x)[0]
        self.backend.ran = before
        return got, want

    def check(self, *arguments: Any, **changes: Any) -> None:
        got, want = self.run(*arguments, **changes)
        assert torch.equal(got, want)


def _spread(x: torch.Tensor) -> Sequence[Any]:
    return (x * 2).view(-1, 1, 4), torch.empty(len(x), 1, 4)


def _next(out: torch.Tensor) -> Sequence[Any]:
    return out + 1, torch.empty_like(out)


def _break(name: str) -> BoundStep:
    def call(arguments: list[Any]) -> Sequence[Any]:
        query, out = arguments
        attention(query, query, query, out, name)
        return ()

    def bound(arguments: Sequence[Any]) -> AttentionCall:
        query, out = arguments
        return AttentionCall(query, query, query, out, name)

    return BoundStep("break", name, call, Capture.FULL, bound)


def test_a_step_like_an_earlier_one_runs_no_python_of_the_backend() -> None:
    steps = Steps()
    with steps.counts.expect(recorded_breaks=2, repeated_breaks=0):
        steps.check(0)
    assert steps.backend.ran == 2
    with steps.counts.expect(recorded_breaks=0, repeated_breaks=6):
        for seed in (1, 2, 3):
            steps.metadata.seq_lens.mul_(2)  # what lies on the device may change
            steps.check(seed)
    assert steps.backend.ran == 2
    assert break_lines(steps.counts) == [
        "6 attention breaks ran as the launches of an earlier step",
        "2 attention breaks ran in Python, their launches written down for steps alike",
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_requests": 2},
        {"max_query_len": 3},
        {"seq_lens": torch.tensor([7, 8, 9, 10], dtype=torch.int32)},
        {"block_table": torch.ones(ROWS, 1, dtype=torch.int32)},
        {"slot_mapping": torch.ones(ROWS, dtype=torch.int64)},
        {"query_start_loc": torch.zeros(ROWS + 1, dtype=torch.int32)},
        {"may_pad": False},
        {"settled": True},
        {"slot_mapping": SLOTS[:-1]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_step_is_recorded_anew_and_both_are_kept(changes: dict[str, Any]) -> None:
    steps = Steps()
    steps.check(0)
    with steps.counts.expect(recorded_breaks=2, repeated_breaks=0):
        steps.check(1, **changes)
    with steps.counts.expect(recorded_breaks=0, repeated_breaks=4):
        steps.check(2)
        steps.check(3, **changes)


def test_bounds_that_the_backend_does_not_name_change_nothing() -> None:
    steps = Steps()
    steps.check(0)
    with steps.counts.expect(recorded_breaks=0, repeated_breaks=2):
        steps.check(1, max_seq_len=400, num_actual_tokens=2)


@pytest.mark.parametrize(
    ("backend", "reason"), [(NothingSaid, "backend"), (NewForward, "backend"), (OtherWork, "other_work")], ids=lambda value: str(value)
)
def test_what_cannot_be_repeated_runs_and_is_counted_with_its_reason(backend: type[Launching], reason: str) -> None:
    steps = Steps(backend)
    with steps.counts.expect(recorded_breaks=0, repeated_breaks=0, **{f"python_break.{reason}": 6}):
        for seed in range(3):
            steps.run(seed)
    assert steps.backend.ran == 6
    assert [line.split(" ran ")[0] for line in break_lines(steps.counts)] == ["6 attention breaks"]


def test_layers_of_another_backend_do_not_keep_the_others_from_it() -> None:
    steps = Steps()
    two = steps.layers["two"]
    assert two.kv_cache is not None
    two.bind(NothingSaid(SPEC), two.kv_cache)
    steps.check(0)
    with steps.counts.expect(repeated_breaks=1, **{"python_break.backend": 1}):
        steps.check(1)


def test_another_cache_is_recorded_anew() -> None:
    steps = Steps()
    steps.check(0)
    steps.check(1)
    cache = torch.full((2, 2, 1, 4), 9.0)
    steps.layers["two"].bind(steps.backend, KVCache(cache, cache))
    with steps.counts.expect(recorded_breaks=2, repeated_breaks=0):
        steps.check(2)
    with steps.counts.expect(repeated_breaks=2):
        steps.check(3)


def test_layers_that_no_longer_share_metadata_are_told_apart() -> None:
    steps = Steps()
    steps.check(0)
    context = steps.context(steps.metadata, two=replace(steps.metadata, max_query_len=5))
    with steps.counts.expect(recorded_breaks=2, repeated_breaks=0):
        steps.check(1, context)
    with steps.counts.expect(repeated_breaks=2):
        steps.check(2, context)


def test_the_oldest_of_many_records_is_dropped() -> None:
    steps = Steps()
    for length in range(1, 18):
        steps.check(0, max_query_len=length)
    with steps.counts.expect(recorded_breaks=2, repeated_breaks=2):
        steps.check(0, max_query_len=17)
        steps.check(0, max_query_len=1)


def test_all_breaks_share_the_memory_of_their_kernels_and_it_is_in_the_account() -> None:
    steps = Steps()
    before = steps.manager.memory().buffer_bytes
    steps.check(0)
    once = steps.manager.memory().buffer_bytes - before
    assert once == 256  # 64 bytes, aligned
    steps.check(1, max_query_len=2)
    assert steps.manager.memory().buffer_bytes - before == once
    steps.manager.suspend()
    assert steps.manager.memory().buffer_bytes == before


def test_tools_see_the_actions_of_repeated_steps() -> None:
    steps = Steps()
    seen: list[int] = []

    def noted(runs: Sequence[Callable[[], None]]) -> Sequence[Callable[[], None]]:
        def note(index: int, run: Callable[[], None]) -> Callable[[], None]:
            return lambda: (seen.append(index), run())[1]

        return [note(index, run) for index, run in enumerate(runs)]

    steps.check(0)
    undo = steps.manager.program(SIZE).wrap(noted)
    with steps.counts.expect(recorded_breaks=2, repeated_breaks=2):
        steps.check(1)
        steps.check(2)
    assert seen == [0, 1, 2, 3, 4] * 2
    undo()
    steps.check(3)
    assert len(seen) == 10


def test_a_break_that_fails_leaves_no_record() -> None:
    steps = Steps()
    broken = ForwardContext(attention_metadata={}, attention_layers=steps.layers)
    with set_forward_context(broken), pytest.raises(ContextError, match="no metadata"):
        steps.manager.run(SIZE)
    steps.check(0)
    with steps.counts.expect(recorded_breaks=0, repeated_breaks=2):
        steps.check(1)
