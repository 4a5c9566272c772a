"""Stale addresses, failed captures, random numbers, streams, host code and forks with CUDA graphs."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rung
from rung.config import AddressPolicy
from rung.counters import Count, Counters
from rung.errors import AddressChangedError, CaptureError, ForkedProcessError, GeneratorError, HostCopyError, HostReadError, StreamError
from rung.graphs import Descriptor, Dispatcher, GraphMode, Ladder, Shape, plan_descriptors
from rung.graphs.descriptor import ConfiguredMode
from rung.graphs.guard import Addresses, module_tensors
from rung.runner.transfer import HostToDevice
from tests.graphs.test_addresses import Net, Tied, module_plan, rebuild_buffer
from tests.graphs.test_process import in_child
from tests.graphs.toys import PLANS, ToyPlan, both_modes, brk, data, fresh_break_plan, make_manager, only, run_padded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = "cuda:0"
SMALL = Ladder.custom([1, 2, 4, 8, 16])
FULL_4 = Descriptor(mode=GraphMode.FULL, num_tokens=4)
FULL_8 = Descriptor(mode=GraphMode.FULL, num_tokens=8)
PIECEWISE_4 = Descriptor(mode=GraphMode.PIECEWISE, num_tokens=4)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
    gc.collect()


def churn() -> None:
    blocks = [torch.full((size,), float("nan"), device=CUDA) for size in (4, 16, 64, 4096, 1 << 18)]
    del blocks


# --- outputs ---


@pytest.mark.parametrize("name", ["out_argument", "fresh", "tuple"])
def test_results_of_breaks_reach_the_graphs_behind_them(name: str) -> None:
    """T31: out-arguments, fresh results, and a tuple of which one skips a piece, with allocations in between."""
    plan = PLANS[name]()
    manager = make_manager(plan, device=CUDA)
    manager.capture(both_modes(SMALL))
    for seed in range(3):
        for descriptor in both_modes(SMALL):
            x = data(descriptor.num_tokens, seed, CUDA)
            churn()
            for mine, reference in zip(run_padded(manager, descriptor, x), plan(x), strict=True):
                torch.testing.assert_close(mine, reference)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.linear(x), "x": x, "weight": self.linear.weight.t()}


def wrapped(**options: Any) -> Any:
    return rung.wrap(Two().to(CUDA).requires_grad_(False), dynamic={"x": {0: "rows"}}, maximum=8, graphs="full", **options)


@pytest.mark.parametrize("policy", ["clone", "borrow"])
def test_kept_outputs(policy: str) -> None:
    """T29: also an output that is an argument, and one that is a view of a parameter."""
    module = wrapped(outputs=policy)
    first, second = data(3, 1, CUDA), data(3, 2, CUDA)
    kept = module(first)
    copy = {key: value.clone() for key, value in kept.items()}
    module(second)
    churn()
    assert kept["x"] is first
    assert torch.equal(kept["weight"], copy["weight"])
    assert torch.equal(kept["y"], copy["y"]) is (policy == "clone")


def test_outputs_go_into_the_callers_tensors() -> None:
    """T29."""
    module, x = wrapped(), data(3, 1, CUDA)
    y = torch.zeros(3, 4, device=CUDA)
    module.rung.into([y, None, None])(x)
    module(data(3, 2, CUDA))
    torch.testing.assert_close(y, module.linear(x))


# --- addresses ---


def move_and_back(module: Net) -> None:
    module.cpu()
    churn()
    module.to(CUDA)
    module.linear.bias.fill_(3.0)


def free_and_reload(module: Net) -> None:
    values = module.linear.weight.cpu() * 2
    module.linear.weight = None
    churn()
    torch.cuda.empty_cache()
    module.linear.weight = nn.Parameter(values.to(CUDA))


CHANGES: dict[str, Callable[[Net], None]] = {
    "linear.weight by data": lambda module: setattr(module.linear.weight, "data", torch.full((4, 4), 3.0, device=CUDA)),
    "linear.weight by setattr": lambda module: setattr(module.linear, "weight", nn.Parameter(torch.full((4, 4), 3.0, device=CUDA))),
    "transposed": rebuild_buffer,
    "linear.weight by moving": move_and_back,
    "linear.weight by reload": free_and_reload,
    "linear.weight by submodule": lambda module: setattr(module, "linear", nn.Linear(4, 4, device=CUDA)),
}


def make(policy: AddressPolicy, module: Any = None) -> tuple[Any, ToyPlan, Any]:
    net = (Net() if module is None else module).to(CUDA)
    plan = module_plan(net)
    manager = make_manager(plan, device=CUDA, addresses=Addresses(watched=lambda: module_tensors(net), on_change=policy))
    manager.capture([FULL_4, FULL_8])
    return net, plan, manager


def test_values_written_in_place_need_no_capture() -> None:
    """T34."""
    module, plan, manager = make("raise")
    module.linear.weight.copy_(torch.full((4, 4), 3.0))
    x = data(4, 1, CUDA)
    torch.testing.assert_close(run_padded(manager, FULL_4, x)[0], plan(x)[0])
    assert manager.counters[Count.CAPTURES] == 2


@pytest.mark.parametrize("policy", ["raise", "recapture", "none"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_replaced_tensor_never_gives_an_old_output(change: str, policy: AddressPolicy) -> None:
    """T34."""
    module, plan, manager = make(policy)
    CHANGES[change](module)
    churn()
    for descriptor in (FULL_4, FULL_8, FULL_4):
        x = data(descriptor.num_tokens, 1, CUDA)
        if policy == "raise":
            with pytest.raises(AddressChangedError, match=change.split()[0]):
                run_padded(manager, descriptor, x)
            with pytest.raises(AddressChangedError):
                manager.weights_changed()
        else:
            torch.testing.assert_close(run_padded(manager, descriptor, x)[0], plan(x)[0])
    torch.cuda.synchronize()


def test_tied_weights() -> None:
    """T37."""
    module, _, manager = make("recapture", Tied())
    module.linear.weight.copy_(torch.eye(4) * 2)
    x = data(4, 1, CUDA)
    torch.testing.assert_close(run_padded(manager, FULL_4, x)[0], x * 4)
    module.linear.weight = module.head.weight = nn.Parameter(torch.eye(4, device=CUDA) * 3)
    torch.testing.assert_close(run_padded(manager, FULL_4, x)[0], x * 9)
    module.head.weight = nn.Parameter(torch.eye(4, device=CUDA))
    with pytest.raises(AddressChangedError, match="no longer tied"):
        run_padded(manager, FULL_4, x)


# --- failed captures ---


def failing(kind: str) -> ToyPlan:
    """A plan that fails at 4 rows, while it is captured or before."""

    def fails_at_four(q: torch.Tensor) -> Sequence[Any]:
        if q.shape[0] == 4:
            if kind == "allocates":
                torch.empty(1 << 50, device=CUDA)
            elif torch.cuda.is_current_stream_capturing():
                if kind == "raises":
                    raise ValueError("out of luck")
                torch.cuda.synchronize()
        return (q.relu() + 1,)

    plan = fresh_break_plan()
    return ToyPlan([plan.walk[0], (brk("break_01", fails_at_four), ("q",), ("r",)), plan.walk[2]], plan.results)


@pytest.mark.parametrize("kind", ["raises", "allocates", "synchronizes"])
def test_a_failed_capture_harms_nothing_else(kind: str) -> None:
    """T67."""
    whole = failing("raises")  # which does not, outside of a capture
    manager = make_manager(failing(kind), device=CUDA)
    descriptors = plan_descriptors(SMALL, ConfiguredMode.FULL)
    with pytest.raises(CaptureError, match=r"4 tokens.*break_01") as error:
        manager.capture(descriptors)
    assert (error.value.size, error.value.piece) == (4, "break_01")
    assert error.value.__cause__ is not None
    assert manager.failed == {FULL_4}
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.empty_cache()
    dispatcher = Dispatcher(descriptors, failed=manager.failed)
    for rows in (16, 7, 4, 2, 1, 3):
        x = data(rows, rows, CUDA)
        chosen = dispatcher.dispatch(Shape(num_tokens=rows)).descriptor
        torch.testing.assert_close(run_padded(manager, chosen, x)[0], whole(x)[0])
    with pytest.raises(CaptureError):
        manager.run(FULL_4)  # never an output of another step


def test_memory_of_failed_captures_comes_back() -> None:
    """T67."""
    held = []
    for _ in range(4):
        manager = make_manager(failing("raises"), device=CUDA)
        manager.capture(plan_descriptors(SMALL, ConfiguredMode.FULL), on_failure="skip")
        manager.release()
        del manager
        gc.collect()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved())
    assert held[1:] == [held[0]] * 3


# --- what a graph must not contain ---


def test_a_read_on_the_host_is_named_with_its_line() -> None:
    """T77."""
    for read in (lambda x: x * x[0, 0].item(), lambda x: x + x.cpu().sum().to(CUDA), lambda x: x + x[x > 0].sum()):
        manager = make_manager(only(brk("break_00", lambda x, read=read: (read(x),))), device=CUDA)
        with pytest.raises(HostReadError, match=rf"reads device values.* at .*{__file__}:\d+"):
            manager.capture([FULL_4])


@pytest.mark.parametrize("pinned", [False, True])
def test_a_copy_from_host_memory_is_refused_in_a_full_graph(pinned: bool) -> None:
    """T77: the graph would read the host address again; between graphs it is fine."""
    host = torch.ones(4, 4)
    host = host.pin_memory() if pinned else host
    plan = only(brk("break_00", lambda x: (x + host.to(CUDA, non_blocking=True),)))
    manager = make_manager(plan, device=CUDA)
    with pytest.raises(HostCopyError, match=f"{'pinned' if pinned else 'pageable'} host memory"):
        manager.capture([FULL_4])
    manager.capture([PIECEWISE_4])
    x = data(4, 1, CUDA)
    host.fill_(5)
    torch.testing.assert_close(run_padded(manager, PIECEWISE_4, x)[0], x + 5)


def test_host_code_of_a_break_runs_in_every_piecewise_step() -> None:
    """T77."""
    calls = []
    plan = only(brk("break_00", lambda x: (calls.append(1), x + len(calls))[1:]))
    manager = make_manager(plan, device=CUDA)
    manager.capture([PIECEWISE_4])
    x, before = data(4, 1, CUDA), len(calls)
    for step in (1, 2):
        torch.testing.assert_close(run_padded(manager, PIECEWISE_4, x)[0], x + before + step)


def test_two_steps_in_flight_share_no_pinned_memory() -> None:
    """T77."""
    transfer = HostToDevice(torch.device(CUDA), Counters())
    targets = [torch.zeros(1024, dtype=torch.int32, device=CUDA) for _ in range(8)]
    torch.cuda._sleep(200_000_000)  # the device is busy: no copy has run when the next one is staged
    for number, target in enumerate(targets):
        transfer.copy_into(np.full(1024, number, np.int32), target)
    torch.cuda.synchronize()
    assert [int(target.unique()) for target in targets] == list(range(8))


def beside(x: torch.Tensor, stream: torch.cuda.Stream, *, fork: bool, join: bool) -> Sequence[Any]:
    current = torch.cuda.current_stream()
    if fork:
        stream.wait_stream(current)
    with torch.cuda.stream(stream):
        y = x * 2
    if join:
        current.wait_stream(stream)
    return (x + 1, y)


@pytest.mark.parametrize(("fork", "join"), [(True, False), (False, True), (False, False)])
def test_a_side_stream_that_is_not_forked_or_joined_is_named(fork: bool, join: bool) -> None:
    stream = torch.cuda.Stream()
    plan = ToyPlan([(brk("break_00", lambda x: beside(x, stream, fork=fork, join=join)), ("x",), ("y", "z"))], ("y", "z"))
    manager = make_manager(plan, device=CUDA)
    with pytest.raises(StreamError, match=rf"aten::mul.* at .*{__file__}:\d+"):
        manager.capture([FULL_4])
    assert not torch.cuda.is_current_stream_capturing()


def test_a_side_stream_that_forks_and_joins_is_captured() -> None:
    stream = torch.cuda.Stream()
    plan = ToyPlan([(brk("break_00", lambda x: beside(x, stream, fork=True, join=True)), ("x",), ("y", "z"))], ("y", "z"))
    manager = make_manager(plan, device=CUDA)
    manager.capture([FULL_4])
    x = data(4, 1, CUDA)
    y, z = run_padded(manager, FULL_4, x)
    torch.testing.assert_close(y, x + 1)
    torch.testing.assert_close(z, x * 2)


# --- random numbers ---


@pytest.mark.parametrize("private", [False, True])
def test_dropout_differs_between_replays_and_repeats_after_a_seed(private: bool) -> None:
    """T73."""
    generator = torch.Generator(CUDA) if private else None
    plan = only(brk("break_00", lambda x: (torch.empty_like(x).bernoulli_(0.5, generator=generator) * x,)))
    manager = make_manager(plan, device=CUDA, generators=[generator] if generator is not None else [])
    manager.capture([FULL_8, PIECEWISE_4])
    ones = torch.ones(8, 4, device=CUDA)
    draws = [run_padded(manager, FULL_8, ones)[0] for _ in range(3)]
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[1], draws[2])
    again = []
    for _ in range(2):
        torch.cuda.manual_seed(7) if generator is None else generator.manual_seed(7)
        again.append([run_padded(manager, FULL_8, ones)[0] for _ in range(3)])
    assert all(torch.equal(a, b) for a, b in zip(*again, strict=True))


def test_an_unregistered_generator_is_named_with_its_line() -> None:
    """T73."""
    generator = torch.Generator(CUDA)
    plan = only(brk("break_00", lambda x: (x + torch.rand(x.shape, generator=generator, device=x.device),)))
    with pytest.raises(GeneratorError, match=rf"aten::rand.* at .*{__file__}:\d+"):
        make_manager(plan, device=CUDA).capture([FULL_4])


# --- processes and finalisers ---


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_of_the_process_that_captured_is_told() -> None:
    """T75."""
    manager = make_manager(fresh_break_plan(), device=CUDA)
    manager.capture([FULL_4])
    assert in_child(lambda: manager.run(FULL_4)).startswith(ForkedProcessError.__name__)


def test_a_child_of_a_process_that_only_imported_may_capture() -> None:
    """T75."""
    code = (
        "import os, torch, rung\n"
        "module = rung.wrap(torch.nn.Linear(4, 4).requires_grad_(False), dynamic={}, graphs='full')\n"
        "assert not torch.cuda.is_initialized()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    module.to('cuda'); x = torch.ones(2, 4, device='cuda')\n"
        "    y = module(x); torch.testing.assert_close(y, torch.nn.functional.linear(x, module.weight, module.bias)); os._exit(0)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=os.getcwd())
    assert done.returncode == 0, done.stderr


def test_graphs_that_are_dropped_during_a_capture_are_freed_after_it() -> None:
    other = [make_manager(fresh_break_plan(), device=CUDA)]
    other[0].capture([FULL_4, PIECEWISE_4])

    def drops(x: torch.Tensor) -> Sequence[Any]:
        if torch.cuda.is_current_stream_capturing():
            other.clear()
            cycle: list[Any] = [torch.ones(1 << 20, device=CUDA)]
            cycle.append(cycle)
        return (x * 2,)

    manager = make_manager(only(brk("break_00", drops)), device=CUDA)
    manager.capture([FULL_4])
    x = data(4, 1, CUDA)
    torch.testing.assert_close(run_padded(manager, FULL_4, x)[0], x * 2)
