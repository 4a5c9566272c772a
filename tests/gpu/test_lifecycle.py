"""Life cycle, threads, streams and devices with CUDA graphs; wrapped modules of three kinds."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import rung
from rung.counters import Count
from rung.errors import DynamicShapeError, PaddingError
from rung.graphs import Descriptor, Dispatcher, GraphManager, GraphMode, Ladder, Shape, plan_descriptors
from rung.graphs.descriptor import ConfiguredMode
from rung.graphs.ranges import nvtx_ranges
from tests.graphs.test_wrapped import BatchNorm, Recommender, VisionBlock
from tests.graphs.toys import ToyPlan, both_modes, brk, data, fresh_break_plan, make_manager, only, piece, run_padded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = "cuda:0"
LADDER = Ladder.custom([1, 2, 4, 8, 16])
FULL_4 = Descriptor(mode=GraphMode.FULL, num_tokens=4)
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
    gc.collect()


def held_bytes() -> tuple[int, int]:
    """Bytes of tensors, and bytes that the allocator holds."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


# --- life cycle ----------------------------------------------------------------------------------------------------------------------


def test_suspended_graphs_hold_no_memory_and_come_back() -> None:
    plan = fresh_break_plan()
    manager = make_manager(plan, device=CUDA)
    manager.capture(both_modes(LADDER))
    captured = manager.captured
    manager.suspend()
    before = held_bytes()
    manager.resume()
    assert manager.pool_bytes > 0
    assert held_bytes() > before
    manager.suspend()
    assert (manager.pool_bytes, held_bytes()) == (0, before)
    manager.resume()
    assert manager.captured == captured
    for seed, descriptor in enumerate(captured):
        x = data(descriptor.num_tokens, seed, CUDA)
        manager.poison()
        torch.testing.assert_close(run_padded(manager, descriptor, x)[0], plan(x)[0])


@pytest.mark.parametrize("close", [GraphManager.release, GraphManager.suspend])
def test_five_rounds_return_to_the_starting_bytes(close: Callable[[GraphManager], None]) -> None:
    plan = fresh_break_plan()
    rounds = []
    for _ in range(6):
        manager = make_manager(plan, device=CUDA)
        manager.capture(both_modes(LADDER))
        run_padded(manager, FULL_4, data(4, 1, CUDA))
        close(manager)
        del manager
        rounds.append(held_bytes())
    assert rounds[1:] == [rounds[0]] * 5  # the first one loads kernels


def test_a_wrapped_module_returns_to_the_starting_bytes() -> None:
    module = rung.wrap(VisionBlock().eval().to(CUDA), dynamic={"x": {0: "rows"}}, graphs="full", pad=("rows",), maximum=16)
    module(torch.randn(3, 3, 8, 8, device=CUDA))
    module.rung.release()
    rounds = []
    for _ in range(6):  # torch's streams are 32, so a stream for each round would show as a workspace for each
        module(torch.randn(5, 3, 8, 8, device=CUDA))
        module.rung.release()
        rounds.append(held_bytes())
    assert rounds[1:] == [rounds[0]] * 5


def test_failure_while_resuming_leaves_the_rest_usable() -> None:
    armed = [False]

    def call(x: torch.Tensor) -> tuple[torch.Tensor]:
        if armed[0] and x.shape[0] == 4 and torch.cuda.is_current_stream_capturing():
            raise ValueError("out of luck")
        return (x + 1,)

    manager = make_manager(only(brk("break_00", call)), device=CUDA)
    manager.capture(plan_descriptors(LADDER, ConfiguredMode.FULL))
    manager.suspend()
    armed[0] = True
    with pytest.raises(Exception, match="4 tokens"):
        manager.resume()
    assert manager.failed == {FULL_4}
    dispatcher = Dispatcher(plan_descriptors(LADDER, ConfiguredMode.FULL), failed=manager.failed)
    for rows in (16, 3, 2, 1):
        x = data(rows, rows, CUDA)
        torch.testing.assert_close(run_padded(manager, dispatcher.dispatch(Shape(num_tokens=rows)).descriptor, x)[0], x + 1)


def test_recapture_reads_addresses_that_changed() -> None:
    held = [torch.ones(4, device=CUDA)]
    manager = make_manager(only(piece("piece_00", lambda x: (x * held[0],))), device=CUDA)
    manager.capture([FULL_4])
    held[0] = torch.full((4,), 3.0, device=CUDA)
    manager.recapture()
    x = data(4, 1, CUDA)
    assert torch.equal(run_padded(manager, FULL_4, x)[0], x * 3)


def test_ranges_go_to_nvtx() -> None:
    plan = fresh_break_plan()
    manager = make_manager(plan, device=CUDA, ranges=nvtx_ranges(True))
    manager.capture([FULL_4])
    x = data(4, 1, CUDA)
    torch.testing.assert_close(run_padded(manager, FULL_4, x)[0], plan(x)[0])


# --- threads, streams, devices -------------------------------------------------------------------------------------------------------


def busy_plan() -> ToyPlan:
    """Slow enough on the device that a step on another stream would overtake it."""

    def work(x: torch.Tensor) -> tuple[torch.Tensor]:
        filler = torch.ones(1024, 1024, device=x.device)
        for _ in range(30):
            filler = filler @ filler / 1024
        return (x * 2 + filler[0, 0] * 0,)

    return only(piece("piece_00", work))


def test_steps_from_several_streams_follow_each_other() -> None:
    """Each step writes the same static buffer, which the replay before may still read."""
    manager = make_manager(busy_plan(), device=CUDA)
    manager.capture([FULL_4])
    streams = [torch.cuda.Stream() for _ in range(3)]
    xs = [data(4, seed, CUDA) for seed in range(12)]
    torch.cuda.synchronize()
    got = []
    for index, x in enumerate(xs):
        with torch.cuda.stream(streams[index % 3]), manager.step():
            manager.inputs[0].write(x, {"tokens": 4})
            got.append(manager.run(FULL_4).clone()[0])
    torch.cuda.synchronize()
    assert [torch.equal(y, x * 2) for x, y in zip(xs, got, strict=True)] == [True] * 12


def test_two_threads_call_one_module_on_streams_of_their_own() -> None:
    module = rung.wrap(nn.Linear(64, 64).to(CUDA).requires_grad_(False), dynamic={"input": {0: "rows"}}, graphs="full", pad=("rows",))
    eager = nn.Linear(64, 64).to(CUDA)
    eager.load_state_dict(module.state_dict())
    module(torch.randn(3, 64, device=CUDA))
    wrong: list[Any] = []
    start = threading.Barrier(2)

    def work(seed: int) -> None:
        generator = torch.Generator(CUDA).manual_seed(seed)
        start.wait()
        kept = []
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for call in range(50):
                x = torch.randn(1 + (seed + call) % 9, 64, generator=generator, device=CUDA)
                kept.append((x, module(x)))
            torch.cuda.current_stream().synchronize()
            wrong.extend(x.shape for x, y in kept if not torch.allclose(y, eager(x), rtol=1e-2, atol=1e-2))

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []
    assert module.rung.counters["step.full.best"] == 101


@two_devices
@pytest.mark.parametrize("current", [0, 1])
def test_two_managers_on_two_devices(current: int) -> None:
    plan = fresh_break_plan()
    managers = [make_manager(plan, device=f"cuda:{index}") for index in range(2)]
    with torch.cuda.device(current):
        for manager in managers:
            manager.capture(both_modes(LADDER))
        for seed, descriptor in enumerate(both_modes(LADDER)):
            for index, manager in enumerate(managers):
                x = data(descriptor.num_tokens, seed, f"cuda:{index}")
                torch.testing.assert_close(run_padded(manager, descriptor, x)[0], plan(x)[0])
        assert torch.cuda.current_device() == current


@two_devices
@pytest.mark.parametrize("graphs", ["piecewise", "full"])
def test_a_wrapped_module_on_another_device_than_the_current_one(graphs: str) -> None:
    module = VisionBlock().eval().requires_grad_(False).to("cuda:1")
    wrapped = rung.wrap(copy.deepcopy(module), dynamic={"x": {0: "rows"}}, graphs=graphs, pad=("rows",), maximum=16)
    for rows in (3, 8, 3):
        x = torch.randn(rows, 3, 8, 8, device="cuda:1")
        torch.testing.assert_close(wrapped(x), module(x), rtol=1e-2, atol=1e-2)
    assert wrapped.rung.counters[Count.REPLAYS] == 3
    assert torch.cuda.current_device() == 0


# --- wrapped modules -----------------------------------------------------------------------------------------------------------------


def run_wrapped(module: nn.Module, dynamic: Any, make: Callable[[int], tuple[torch.Tensor, ...]], **options: Any) -> Any:
    """The wrapped copy, after calls of several sizes that agreed with the module."""
    module = module.requires_grad_(False).to(CUDA)
    wrapped = rung.wrap(copy.deepcopy(module), dynamic=dynamic, graphs="auto", pad=("rows",), maximum=64, **options)
    for rows in (64, 3, 1, 17):  # T15: going down
        inputs = make(rows)
        torch.testing.assert_close(wrapped(*inputs), module(*inputs), rtol=1e-2, atol=1e-2)
    return wrapped


def test_a_vision_block_runs_in_graphs() -> None:
    wrapped = run_wrapped(VisionBlock().eval(), {"x": {0: "rows"}}, lambda rows: (torch.randn(rows, 3, 8, 8, device=CUDA),))
    assert wrapped.rung.counters["step.full.best"] == 4


def test_a_recommender_runs_in_graphs() -> None:
    def make(rows: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(rows, 3, device=CUDA), torch.randint(0, 20, (rows, 3, 5), device=CUDA)

    wrapped = run_wrapped(Recommender().eval(), {"x": {0: "rows"}, "ids": {0: "rows"}}, make)
    assert wrapped.rung.counters["step.full.best"] == 4


def test_a_batch_norm_in_training_is_refused() -> None:
    module = rung.wrap(BatchNorm().train().requires_grad_(False).to(CUDA), dynamic={"x": {0: "rows"}}, graphs="auto", pad=("rows",))
    # Some versions of torch already decide on the number of rows when they trace it.
    with pytest.raises((PaddingError, DynamicShapeError), match=r"mix in batch_norm|decides on the size"):
        module(torch.randn(3, 3, 2, 2, device=CUDA))


def test_a_maximum_over_rows_does_not_see_stale_padding() -> None:
    """T15: 64 -> 3 -> 1 rows, everything poisoned before each step."""

    def scale(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x / (1 + x.abs().amax()),)

    manager = make_manager(only(piece("piece_00", scale)), capacity=64, device=CUDA)
    descriptors = plan_descriptors(Ladder.custom([1, 4, 64]), ConfiguredMode.FULL)
    manager.capture(descriptors)
    dispatcher = Dispatcher(descriptors)
    for rows in (64, 3, 1):
        manager.poison()
        x = data(rows, rows, CUDA)
        got = run_padded(manager, dispatcher.dispatch(Shape(num_tokens=rows)).descriptor, x)[0]
        torch.testing.assert_close(got, scale(x)[0])


def test_the_default_capture_order_needs_no_more_memory_than_others() -> None:
    """T19: within a tenth of the best."""
    held = {}
    for order in ("descending", "ascending", "shuffled"):
        descriptors = sorted(both_modes(Ladder.up_to(512)), key=lambda d: d.num_tokens, reverse=order == "descending")
        if order == "shuffled":
            descriptors = descriptors[1::2] + descriptors[::2]
        manager = make_manager(fresh_break_plan(), capacity=512, device=CUDA)
        manager.capture(descriptors, order="given")
        held[order] = manager.pool_bytes
    manager = make_manager(fresh_break_plan(), capacity=512, device=CUDA)
    manager.capture(both_modes(Ladder.up_to(512)))
    print(held, manager.pool_bytes)
    assert manager.pool_bytes <= 1.1 * min(held.values())


@pytest.mark.parametrize("rows", [17, 160])
def test_sizes_above_the_top_run_without_a_graph(rows: int) -> None:
    """T21."""
    plan = fresh_break_plan()
    manager = make_manager(plan, capacity=200, device=CUDA)
    descriptors = plan_descriptors(LADDER, ConfiguredMode.PIECEWISE)
    manager.capture(descriptors)
    dispatch = Dispatcher(descriptors).dispatch(Shape(num_tokens=rows))
    x = data(rows, 3, CUDA)
    manager.inputs[0].write(x, {"tokens": rows})
    with manager.counters.expect(**{"step.none.too_many_tokens": 1, Count.REPLAYS: 0}):
        outputs = manager.run(dispatch)
    torch.testing.assert_close(outputs.borrow()[0], plan(x)[0])
