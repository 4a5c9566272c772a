"""The toy plans through CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from rung.errors import CaptureError, StaleOutputError
from rung.graphs import Descriptor, Dispatcher, GraphMode, Ladder, Shape, make_backend, plan_descriptors
from rung.graphs.descriptor import ConfiguredMode
from tests.graphs.toys import PLANS, ToyPlan, both_modes, brk, data, fresh_break_plan, make_manager, only, piece, run_padded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = "cuda:0"
LADDER = Ladder.up_to(512)
SMALL = Ladder.custom([1, 2, 4, 8, 16])
FULL_4 = Descriptor(mode=GraphMode.FULL, num_tokens=4)
PIECEWISE_4 = Descriptor(mode=GraphMode.PIECEWISE, num_tokens=4)
PIECEWISE_8 = Descriptor(mode=GraphMode.PIECEWISE, num_tokens=8)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
    gc.collect()


def churn() -> None:
    """Make the allocator hand out memory that was free."""
    blocks = [torch.full((size,), float("nan"), device=CUDA) for size in (7, 64, 4096, 1 << 18)]
    del blocks


@pytest.mark.parametrize("name", [name for name in PLANS if name != "edges"])
def test_every_size_in_both_modes_equals_eager(name: str) -> None:
    plan = PLANS[name]()
    manager = make_manager(plan, capacity=512, device=CUDA)
    descriptors = both_modes(LADDER)
    report = manager.capture(descriptors)
    print(f"{name}: {len(report.entries)} captures, {report.seconds:.2f} s, {report.pool_bytes >> 10} KiB")
    for seed, descriptor in enumerate(descriptors):
        x = data(max(1, descriptor.num_tokens - seed % 3), seed, CUDA)
        manager.poison()
        churn()
        for mine, reference in zip(run_padded(manager, descriptor, x), plan(x), strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("descriptor", [PIECEWISE_8, Descriptor(mode=GraphMode.FULL, num_tokens=8)])
def test_breaks_at_the_edges_and_values_handed_through(descriptor: Descriptor) -> None:
    plan = PLANS["edges"]()
    manager = make_manager(plan, device=CUDA)
    manager.capture([descriptor])
    for seed in range(3):
        x = data(8, seed, CUDA)
        churn()
        e, f, same, n = run_padded(manager, descriptor, x)
        want = plan(x)
        assert n == 8
        for mine, reference in zip((e, f, same), want, strict=False):
            torch.testing.assert_close(mine, reference)


def test_host_value_of_a_break_is_stale_in_full_and_fresh_in_piecewise() -> None:
    factor = [2.0]
    manager = make_manager(only(brk("break_00", lambda x: (x * factor[0],))), device=CUDA)
    manager.capture([PIECEWISE_4, FULL_4])
    factor[0] = 5.0
    x = data(4, 1, CUDA)
    assert torch.equal(run_padded(manager, FULL_4, x)[0], x * 2)
    assert torch.equal(run_padded(manager, PIECEWISE_4, x)[0], x * 5)


def test_memory_given_up_by_the_plan_is_reused_by_later_pieces() -> None:
    """Twelve layers and a whole ladder need little more than the largest size of one layer."""
    width_bytes = 512 * 4 * 4
    walk = []
    for layer in range(12):
        walk.append((piece(f"piece_{2 * layer:02}", lambda x: (x + 1, torch.empty_like(x))), ("x",), ("q", "out")))
        walk.append((brk(f"break_{2 * layer + 1:02}", lambda q, out: (out.copy_(q), ())[1]), ("q", "out"), ()))
        walk.append((piece(f"piece_{2 * layer + 2:02}b", lambda out: (out * 1,)), ("out",), ("x",)))
    manager = make_manager(ToyPlan(walk, ("x",)), capacity=512, device=CUDA)
    report = manager.capture(plan_descriptors(LADDER, ConfiguredMode.PIECEWISE))
    print(f"pool {report.pool_bytes} bytes, one tensor of the largest size {width_bytes}")
    assert report.pool_bytes <= 4 << 20  # two segments of the allocator
    x = data(37, 1, CUDA)
    torch.testing.assert_close(run_padded(manager, Descriptor(mode=GraphMode.PIECEWISE, num_tokens=40), x)[0], x + 12)


@pytest.mark.parametrize("order", ["ascending", "descending", "shuffled"])
def test_capture_order_does_not_change_outputs(order: str) -> None:
    plan = fresh_break_plan()
    descriptors = sorted(both_modes(SMALL), key=lambda d: d.num_tokens, reverse=order == "descending")
    if order == "shuffled":
        descriptors = descriptors[1::2] + descriptors[::2]
    manager = make_manager(plan, device=CUDA)
    manager.capture(descriptors, order="given")
    for descriptor in descriptors:
        x = data(descriptor.num_tokens, 7, CUDA)
        torch.testing.assert_close(run_padded(manager, descriptor, x)[0], plan(x)[0])


@pytest.mark.parametrize("kind", ["raises", "syncs"])
def test_failure_in_the_middle_spares_the_rest(kind: str) -> None:
    """T67: after a capture that raised or was invalidated by a synchronisation."""

    def fails_at_four(q: torch.Tensor) -> Sequence[Any]:
        if q.shape[0] == 4 and torch.cuda.is_current_stream_capturing():
            if kind == "raises":
                raise ValueError("out of luck")
            q.sum().item()
        return (q.relu() + 1,)

    plan = fresh_break_plan()
    plan = ToyPlan([plan.walk[0], (brk("break_01", fails_at_four), ("q",), ("r",)), plan.walk[2]], plan.results)
    manager = make_manager(plan, device=CUDA)
    descriptors = plan_descriptors(SMALL, ConfiguredMode.FULL)
    with pytest.raises(CaptureError, match=r"4 tokens.*break_01") as error:
        manager.capture(descriptors)
    assert error.value.size == 4
    assert manager.failed == {FULL_4}
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.empty_cache()  # refused while the allocator believes in a capture
    dispatcher = Dispatcher(descriptors, failed=manager.failed)
    for rows in (16, 7, 4, 2, 1):
        x = data(rows, rows, CUDA)
        torch.testing.assert_close(run_padded(manager, dispatcher.dispatch(Shape(num_tokens=rows)).descriptor, x)[0], plan(x)[0])


def test_pool_outlives_its_graphs() -> None:
    plan = fresh_break_plan()
    pool_user = make_manager(plan, device=CUDA)
    pool_user.capture([FULL_4])
    pool_user.program(FULL_4).release()  # every graph of the pool is gone
    pool_user._programs.clear()
    pool_user.capture([FULL_4])
    x = data(4, 1, CUDA)
    torch.testing.assert_close(run_padded(pool_user, FULL_4, x)[0], plan(x)[0])


def test_five_rounds_of_capture_and_release_return_the_memory() -> None:
    plan = fresh_break_plan()
    manager = make_manager(plan, capacity=512, device=CUDA)
    held = []
    for _ in range(5):
        manager.capture(both_modes(LADDER))
        manager.release()
        gc.collect()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved())
    assert held[1:] == [held[0]] * 4


def test_clone_survives_and_borrow_turns_stale() -> None:
    plan = fresh_break_plan()
    manager = make_manager(plan, device=CUDA)
    manager.capture([FULL_4])
    a, b = data(4, 1, CUDA), data(4, 2, CUDA)
    kept = run_padded(manager, FULL_4, a)[0]
    first = manager.run(FULL_4)
    run_padded(manager, FULL_4, b)
    torch.testing.assert_close(kept, plan(a)[0])
    with pytest.raises(StaleOutputError):
        first.borrow()


@pytest.mark.parametrize("private", [False, True])
def test_random_numbers_differ_between_replays_and_repeat_after_a_seed(private: bool) -> None:
    """T73."""
    generator = torch.Generator(CUDA) if private else None
    plan = only(piece("piece_00", lambda x: (x + torch.rand(x.shape, generator=generator, device=x.device),)))
    manager = make_manager(plan, device=CUDA, generators=[generator] if generator is not None else [])
    manager.capture([FULL_4, PIECEWISE_4])

    def seed() -> None:
        torch.cuda.manual_seed(5) if generator is None else generator.manual_seed(5)

    zeros = torch.zeros(4, 4, device=CUDA)
    for descriptor in (FULL_4, PIECEWISE_4):
        draws = [run_padded(manager, descriptor, zeros)[0] for _ in range(3)]
        assert not torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[1], draws[2])
        seed()
        first = run_padded(manager, descriptor, zeros)[0]
        seed()
        assert torch.equal(run_padded(manager, descriptor, zeros)[0], first)


def test_unregistered_generator_is_an_error_at_capture() -> None:
    generator = torch.Generator(CUDA)
    manager = make_manager(only(piece("piece_00", lambda x: (x + torch.rand(x.shape, generator=generator, device=x.device),))), device=CUDA)
    with pytest.raises(CaptureError, match="piece_00"):
        manager.capture([FULL_4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint8])
def test_alias_of_pool_memory_keeps_type_and_layout(dtype: torch.dtype) -> None:
    backend = make_backend(CUDA)
    pool = backend.new_pool()
    source = torch.arange(24, device=CUDA).view(4, 6)
    with backend.session():
        source.to(dtype, copy=True)  # load the kernel
        with backend.capture(pool) as graph:
            made = source.to(dtype, copy=True).t()[1:]
        graph.replay()
        alias = pool.alias(made)
    assert alias is not made
    assert (alias.dtype, alias.shape, alias.stride(), alias.data_ptr()) == (made.dtype, made.shape, made.stride(), made.data_ptr())
    assert torch.equal(alias.to(torch.float32), source.to(dtype).t()[1:].to(torch.float32))


def test_memory_outside_of_the_pool_is_held() -> None:
    backend = make_backend(CUDA)
    outside = torch.ones(4, device=CUDA)
    pool = backend.new_pool()
    assert pool.alias(outside) is outside
    assert not pool.owns(outside)


def test_replay_goes_to_the_callers_stream() -> None:
    plan = fresh_break_plan()
    manager = make_manager(plan, device=CUDA)
    manager.capture([FULL_4])
    x = data(4, 1, CUDA)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        outputs = run_padded(manager, FULL_4, x)
    stream.synchronize()
    torch.testing.assert_close(outputs[0], plan(x)[0])
