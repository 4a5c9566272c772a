"""Tensors that graphs read are replaced after the capture: the step raises, captures again or runs without graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rung.config import AddressPolicy
from rung.counters import Count
from rung.errors import AddressChangedError
from rung.graphs import Descriptor, GraphManager, GraphMode
from rung.graphs.guard import Addresses, AddressGuard, module_tensors
from tests.graphs.toys import ToyPlan, brk, data, make_manager, only, run_padded

FULL_4 = Descriptor(mode=GraphMode.FULL, num_tokens=4)
FULL_8 = Descriptor(mode=GraphMode.FULL, num_tokens=8)
PIECEWISE_4 = Descriptor(mode=GraphMode.PIECEWISE, num_tokens=4)


class Net(nn.Module):
    """A linear layer and a buffer derived from its weight."""

    transposed: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("transposed", self.linear.weight.detach().t().contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.linear.weight, self.linear.bias) + x @ self.transposed


def module_plan(module: nn.Module) -> ToyPlan:
    """Reads the module's tensors as they are when the step runs, like a plan that was bound anew."""
    return only(brk("break_00", lambda x: (module(x),)))


def copy_in_place(module: Net) -> None:
    module.linear.weight.copy_(torch.full((4, 4), 3.0))


def replace_data(module: Net) -> None:
    module.linear.weight.data = torch.full((4, 4), 3.0)


def set_parameter(module: Net) -> None:
    module.linear.weight = nn.Parameter(torch.full((4, 4), 3.0))


def rebuild_buffer(module: Net) -> None:
    module.transposed = (module.linear.weight.detach() * 3).t().contiguous()


def move_and_back(module: Net) -> None:
    """Two conversions, each of which gives every tensor new memory."""
    module.double()
    module.float()
    module.linear.bias.fill_(3.0)


def free_and_reload(module: Net) -> None:
    storage = module.linear.weight.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    other = torch.zeros(4, 4)  # may take the freed place
    storage.resize_(size)
    module.linear.weight.fill_(3.0)
    del other
    if module.linear.weight.data_ptr() == ADDRESS.get(id(module)):
        pytest.skip("the allocator gave the same memory again")


def replace_submodule(module: Net) -> None:
    module.linear = nn.Linear(4, 4)


ADDRESS: dict[int, int] = {}
CHANGES: dict[str, Callable[[Net], None]] = {
    "linear.weight by data": replace_data,
    "linear.weight by setattr": set_parameter,
    "transposed": rebuild_buffer,
    "linear.weight by conversion": move_and_back,
    "linear.weight by reload": free_and_reload,
    "linear.weight by submodule": replace_submodule,
}


def make(policy: AddressPolicy, module: nn.Module | None = None, **options: Any) -> tuple[Net, ToyPlan, GraphManager]:
    net = Net() if module is None else module
    ADDRESS[id(net)] = net.linear.weight.data_ptr()  # type: ignore[union-attr]
    plan = module_plan(net)
    manager = make_manager(plan, addresses=Addresses(watched=lambda: module_tensors(net), on_change=policy, **options))
    manager.capture([FULL_4, FULL_8])
    return net, plan, manager  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("policy", ["raise", "recapture", "none"])
def test_values_written_in_place_need_no_capture(policy: AddressPolicy) -> None:
    """T34."""
    module, plan, manager = make(policy)
    x = data(4, 1)
    run_padded(manager, FULL_4, x)
    copy_in_place(module)
    with manager.counters.expect(**{Count.CAPTURES: 0, Count.ADDRESS_CHANGES: 0, "step.full.best": 1}):
        assert torch.equal(run_padded(manager, FULL_4, x)[0], plan(x)[0])
        manager.weights_changed()


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_replaced_tensor_is_named_and_no_old_output_leaves(change: str, told: bool) -> None:
    """T34."""
    module, _, manager = make("raise")
    CHANGES[change](module)
    for _ in range(2):
        with pytest.raises(AddressChangedError, match=change.split()[0]) as error:
            manager.weights_changed() if told else run_padded(manager, FULL_4, data(4, 1))
    assert change.split()[0] in error.value.names


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_replaced_tensor_is_captured_again(change: str, told: bool) -> None:
    """T34."""
    module, plan, manager = make("recapture")
    CHANGES[change](module)
    if told:
        manager.weights_changed()
        assert manager.captured == (FULL_8, FULL_4)
    for descriptor in (FULL_4, FULL_8, FULL_4):
        x = data(descriptor.num_tokens, 2)
        assert torch.equal(run_padded(manager, descriptor, x)[0], plan(x)[0])
    assert (manager.counters[Count.CAPTURES], manager.counters[Count.ADDRESS_CHANGES]) == (4, 1)


@pytest.mark.parametrize("change", CHANGES)
def test_steps_run_without_graphs_until_the_next_capture(change: str) -> None:
    """T34."""
    module, plan, manager = make("none")
    CHANGES[change](module)
    x = data(4, 2)
    with manager.counters.expect(**{Count.CAPTURES: 0, "step.none.address_changed": 2}):
        for _ in range(2):
            assert torch.equal(run_padded(manager, FULL_4, x)[0], plan(x)[0])
    manager.capture([FULL_4])
    with manager.counters.expect(**{"step.full.best": 1}):
        assert torch.equal(run_padded(manager, FULL_4, x)[0], plan(x)[0])


def test_another_object_over_the_same_memory_is_no_change() -> None:
    module, plan, manager = make("raise")
    module.linear.weight = nn.Parameter(module.linear.weight.detach())
    x = data(4, 1)
    assert torch.equal(run_padded(manager, FULL_4, x)[0], plan(x)[0])


def test_a_tensor_that_is_put_back_runs_again() -> None:
    module, plan, manager = make("raise")
    before = module.linear.weight
    set_parameter(module)
    x = data(4, 1)
    with pytest.raises(AddressChangedError):
        run_padded(manager, FULL_4, x)
    module.linear.weight = before
    assert torch.equal(run_padded(manager, FULL_4, x)[0], plan(x)[0])


def test_captured_storages_outlive_their_owner() -> None:
    """A stale replay reads old values, not freed memory."""
    module, _, manager = make("raise")
    storage = module.linear.weight.untyped_storage()
    address, values = storage.data_ptr(), module.linear.weight.clone()
    del storage
    module.linear.weight = nn.Parameter(torch.zeros(4, 4))
    blocks = [torch.full((4, 4), 7.0) for _ in range(50)]
    assert all(block.data_ptr() != address for block in blocks)
    assert manager._guard is not None
    assert torch.equal(manager._guard._held["linear.weight"], values)


def test_another_layout_is_refused_whatever_the_policy() -> None:
    module, _, manager = make("recapture")
    module.linear.weight.data = torch.ones(4, 8)[:, ::2]
    with pytest.raises(AddressChangedError, match=r"'linear.weight' has another layout.*\nhint: put back"):
        run_padded(manager, FULL_4, data(4, 1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.head.weight = self.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.linear(x))
        return result


def test_tied_weights_updated_through_one_name_are_seen_through_both() -> None:
    """T37."""
    module, plan, manager = make("raise", Tied())
    module.linear.weight.copy_(torch.eye(4) * 2)
    x = data(4, 1)
    assert torch.equal(run_padded(manager, FULL_4, x)[0], x * 4)
    manager.weights_changed()
    assert torch.equal(plan(x)[0], x * 4)


def test_a_tie_that_is_broken_is_refused() -> None:
    """T37: the plan reads both names as one input."""
    module, _, manager = make("recapture", Tied())
    module.head.weight = nn.Parameter(torch.eye(4))  # type: ignore[attr-defined]
    with pytest.raises(AddressChangedError, match=r"'head.weight' is no longer tied to 'linear.weight'"):
        run_padded(manager, FULL_4, data(4, 1))


def test_a_tied_weight_replaced_under_both_names_is_captured_again() -> None:
    """T37."""
    module, plan, manager = make("recapture", Tied())
    module.linear.weight = module.head.weight = nn.Parameter(torch.eye(4) * 3)  # type: ignore[attr-defined]
    x = data(4, 1)
    assert torch.equal(run_padded(manager, FULL_4, x)[0], plan(x)[0])


def test_a_sweep_looks_at_a_part_and_comes_round() -> None:
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(10)))
    guard = AddressGuard(Addresses(watched=lambda: module_tensors(module), part=8))
    guard.snapshot()
    entries = 10 * 3  # weight, bias, the layer itself
    module[9].bias.data = torch.zeros(2)
    assert [bool(guard.sweep()) for _ in range(-(-entries // 8) - 1)].count(True) <= 1
    guard._next = 0
    seen = [guard.sweep() for _ in range(-(-entries // 8))]
    assert ["9.bias"] in seen


def test_a_conversion_of_the_whole_module_is_seen_by_any_part() -> None:
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(10)))
    for first in range(0, 30, 3):
        guard = AddressGuard(Addresses(watched=lambda: module_tensors(module), part=3))
        guard.snapshot()
        guard._next = first
        module.double().float()
        assert len(guard.sweep()) == 20


def test_static_inputs_are_watched_by_name() -> None:
    _, _, manager = make("recapture")
    buffer = manager.inputs[0]
    buffer._flat = buffer._flat.clone()
    with pytest.raises(AddressChangedError, match="static input x was replaced"):
        manager.weights_changed()


def test_a_step_without_a_graph_reads_what_was_bound_anew() -> None:
    """Mode NONE runs bound tensors too."""
    module = Net()
    bound = [module.linear.weight]
    plan = only(brk("break_00", lambda x: (x @ bound[0],)))

    def rebind() -> None:
        bound[0] = module.linear.weight

    addresses = Addresses(watched=lambda: module_tensors(module), on_change="none", rebind=rebind)
    manager = make_manager(plan, addresses=addresses)
    none_4 = Descriptor(mode=GraphMode.NONE, num_tokens=4)
    x = data(4, 1)
    run_padded(manager, none_4, x)
    set_parameter(module)
    assert torch.equal(run_padded(manager, none_4, x)[0], x @ module.linear.weight)


def test_a_plan_with_state_is_looked_at_before_its_replay() -> None:
    """A replay on old addresses would count twice."""
    module = Net()
    count = torch.zeros(())

    def counted(x: torch.Tensor) -> Sequence[Any]:
        count.add_(1)
        return (module(x),)

    addresses = Addresses(watched=lambda: module_tensors(module), on_change="recapture", before_replay=True)
    manager = make_manager(only(brk("break_00", counted)), addresses=addresses)
    manager.capture([FULL_4])
    replace_data(module)
    count.zero_()
    x = data(4, 1)
    assert torch.equal(run_padded(manager, FULL_4, x)[0], module(x))
    assert manager.counters[Count.REPLAYS] == 1


def test_a_lazy_capture_does_not_mix_old_and_new_addresses() -> None:
    module, plan, manager = make("recapture")
    manager.capture([PIECEWISE_4], lazy=True)
    replace_data(module)
    for descriptor in (PIECEWISE_4, FULL_4):
        x = data(4, 3)
        assert torch.equal(run_padded(manager, descriptor, x)[0], plan(x)[0])


def bound_manager(policy: AddressPolicy) -> tuple[Net, GraphManager]:
    """A plan that keeps the weight it was bound to."""
    module = Net().requires_grad_(False)
    weight = [module.linear.weight.detach()]

    def rebind() -> None:
        weight[0] = module.linear.weight.detach()

    addresses = Addresses(watched=lambda: module_tensors(module), on_change=policy, rebind=rebind)
    manager = make_manager(only(brk("break_00", lambda x: (x @ weight[0].t(),))), addresses=addresses)
    manager.capture([FULL_4])
    return module, manager


@pytest.mark.parametrize("reopen", ["resume", "recapture", "release"])
@pytest.mark.parametrize("told", [False, True])
def test_a_weight_replaced_while_nothing_is_captured_is_followed(reopen: str, told: bool) -> None:
    module, manager = bound_manager("recapture")
    if reopen == "release":
        manager.release()
    else:
        manager.suspend()
    set_parameter(module)
    if told:
        manager.weights_changed()
    if reopen == "release":
        manager.capture([FULL_4])
    else:
        getattr(manager, reopen)()
    x = data(4, 1)
    torch.testing.assert_close(run_padded(manager, FULL_4, x)[0], x @ module.linear.weight.t())


def test_a_weight_replaced_while_suspended_raises_when_that_is_the_policy() -> None:
    module, manager = bound_manager("raise")
    manager.suspend()
    set_parameter(module)
    with pytest.raises(AddressChangedError, match=r"linear\.weight"):
        manager.resume()
    manager.recapture()
    x = data(4, 1)
    torch.testing.assert_close(run_padded(manager, FULL_4, x)[0], x @ module.linear.weight.t())


def test_a_recapture_refuses_another_layout() -> None:
    module, manager = bound_manager("recapture")
    module.linear.weight = nn.Parameter(torch.ones(4, 4).t().contiguous()[:, :3], requires_grad=False)
    with pytest.raises(AddressChangedError, match="another layout"):
        manager.recapture()
