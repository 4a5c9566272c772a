"""The recorded backend: aliasing, in-place calls, random numbers, reused memory, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from rung.errors import BackendUnavailableError, CaptureError
from rung.graphs import Descriptor, GraphMode, make_backend
from rung.graphs.backends.recorded import RecordedBackend
from tests.graphs.toys import ToyPlan, brk, data, make_manager, only, piece, run_padded

FULL_4 = Descriptor(mode=GraphMode.FULL, num_tokens=4)
PIECEWISE_4 = Descriptor(mode=GraphMode.PIECEWISE, num_tokens=4)
PIECEWISE_2 = Descriptor(mode=GraphMode.PIECEWISE, num_tokens=2)


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.add_(1)
    y[1:].mul_(3)
    return y


def out_variant(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.sin(x, out=out)
    return out


def resized_out(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(0)
    torch.add(x, 1, out=out)
    return out


def views(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    left, right = y.t().chunk(2)
    left.copy_(right)
    return y


def view_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.t_()
    y.add_(torch.arange(4.0))
    return y.t()


def factories(x: torch.Tensor) -> torch.Tensor:
    counter = torch.zeros(4, 4)
    counter += torch.arange(4.0)[:, None] + torch.full((4, 4), 2.0) + torch.ones_like(x)
    return counter * x


def tuples(x: torch.Tensor) -> torch.Tensor:
    values, order = x.sort(dim=1)
    top, _ = x.max(dim=1, keepdim=True)
    return values + order + top


def index_writes(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y.index_copy_(0, torch.tensor([2, 0, 3, 1]), x)
    y[torch.tensor([1])] = 7
    return torch.where(y > 0, y, y.neg())


def masked_fill(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[y < 0] = 0
    return y


def expanded(x: torch.Tensor) -> torch.Tensor:
    return (x[:, :1] + 1).expand(4, 4)


def external_view(x: torch.Tensor) -> torch.Tensor:
    return x[:, 1:3].flip(0).contiguous()


FUNCTIONS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    in_place, out_variant, resized_out, views, view_in_place, factories, tuples, index_writes, masked_fill, expanded, external_view,
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_replay_of_a_break_equals_eager(function: Callable[[torch.Tensor], torch.Tensor], mode: Any) -> None:
    manager = make_manager(only(brk("break_00", lambda x: (function(x),))))
    with mode():
        manager.capture([FULL_4, PIECEWISE_4])
    for seed, descriptor in enumerate([FULL_4, PIECEWISE_4] * 2):
        x = data(4, seed)
        assert torch.equal(run_padded(manager, descriptor, x)[0], function(x))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_replay_of_a_piece_equals_eager(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    manager = make_manager(only(piece("piece_00", lambda x: (function(x),))))
    manager.capture([PIECEWISE_4, FULL_4])
    for seed, descriptor in enumerate([PIECEWISE_4, FULL_4] * 2):
        x = data(4, seed)
        assert torch.equal(run_padded(manager, descriptor, x)[0], function(x))


def test_outputs_land_at_the_addresses_of_the_capture() -> None:
    manager = make_manager(only(piece("piece_00", lambda x: (x + 1,))))
    manager.capture([FULL_4])
    addresses = {manager.run(FULL_4).borrow()[0].data_ptr() for _ in range(3)}
    assert len(addresses) == 1


def test_writes_to_outside_memory_are_replayed() -> None:
    cache = torch.zeros(8, 4)

    def write(x: torch.Tensor) -> Sequence[Any]:
        cache[2:6] = x
        return (cache[2:6] * 2,)

    manager = make_manager(only(brk("break_00", write)))
    manager.capture([FULL_4])
    x = data(4, 5)
    assert torch.equal(run_padded(manager, FULL_4, x)[0], x * 2)
    assert torch.equal(cache[2:6], x)


def test_custom_op_with_a_python_kernel_is_recorded_inside(rung_test_library: torch.library.Library) -> None:
    scale = [2.0]
    rung_test_library.define("scaled(Tensor x, Tensor(a!) out) -> Tensor")

    def scaled(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        out.copy_(x * scale[0])
        return x + scale[0]

    rung_test_library.impl("scaled", scaled, "CompositeExplicitAutograd")

    def call(x: torch.Tensor) -> Sequence[Any]:
        out = torch.empty_like(x)
        return torch.ops.rung_test.scaled(x, out), out

    manager = make_manager(ToyPlan([(brk("break_00", call), ("x",), ("y", "out"))], ("y", "out")))
    manager.capture([FULL_4])
    scale[0] = 9.0
    x = data(4, 1)
    y, out = run_padded(manager, FULL_4, x)
    assert torch.equal(y, x + 2)
    assert torch.equal(out, x * 2)


@pytest.fixture
def rung_test_library() -> Iterator[torch.library.Library]:
    library = torch.library.Library("rung_test", "FRAGMENT")
    yield library
    library._destroy()


def test_memory_that_nothing_writes_is_poison() -> None:
    def forgets_a_row(x: torch.Tensor) -> Sequence[Any]:
        out = torch.empty_like(x)
        out[:3] = x[:3]
        return (out,)

    manager = make_manager(only(brk("break_00", forgets_a_row)))
    manager.capture([FULL_4])
    got = run_padded(manager, FULL_4, data(4, 1))[0]
    assert got[3].isnan().all()
    assert not got[:3].isnan().any()


def test_memory_given_up_by_the_plan_is_destroyed_by_later_pieces() -> None:
    """A break that keeps its argument, which it must not, finds what a later graph put there."""
    seen: list[torch.Tensor] = []

    def keeps(q: torch.Tensor) -> Sequence[Any]:
        seen[:] = [q] if torch.is_inference_mode_enabled() else seen
        return (q + 1,)

    plan = ToyPlan(
        [
            (piece("piece_00", lambda x: (x * 2,)), ("x",), ("q",)),
            (brk("break_01", keeps), ("q",), ("r",)),
            (piece("piece_02", lambda r: (r * 3,)), ("r",), ("y",)),
        ],
        ("y",),
    )
    manager = make_manager(plan)
    manager.capture([PIECEWISE_4])
    with torch.inference_mode():  # keeps only in this run
        got = run_padded(manager, PIECEWISE_4, data(4, 1))[0]
    assert got.isfinite().all()
    assert seen[0].isnan().all()


def test_memory_that_a_break_holds_through_the_capture_is_not_destroyed() -> None:
    kept: list[torch.Tensor] = []

    def keeps(q: torch.Tensor) -> Sequence[Any]:
        kept[:] = [q]
        return (q + 1,)

    plan = ToyPlan(
        [
            (piece("piece_00", lambda x: (x * 2,)), ("x",), ("q",)),
            (brk("break_01", keeps), ("q",), ("r",)),
            (piece("piece_02", lambda r: (r * 3,)), ("r",), ("s",)),
            (brk("break_03", lambda s: (s + kept[0],)), ("s",), ("y",)),
        ],
        ("y",),
    )
    manager = make_manager(plan)
    manager.capture([PIECEWISE_4])
    x = data(4, 1)
    assert torch.equal(run_padded(manager, PIECEWISE_4, x)[0], (x * 2 + 1) * 3 + x * 2)


def test_view_of_a_parameter_that_a_piece_returns_is_not_the_pools() -> None:
    weight = torch.ones(4, 4) * 3
    plan = ToyPlan(
        [
            (piece("piece_00", lambda x: (x + 1,)), ("x",), ("a",)),
            (piece("piece_01", lambda a: (a, weight.t())), ("a",), ("b", "w")),
            (piece("piece_02", lambda b, w: (b @ w,)), ("b", "w"), ("y",)),
        ],
        ("y",),
    )
    manager = make_manager(plan)
    manager.capture([PIECEWISE_4, PIECEWISE_2])
    for descriptor in (PIECEWISE_2, PIECEWISE_4, PIECEWISE_2):
        run_padded(manager, descriptor, data(descriptor.num_tokens, 1))
    assert torch.equal(weight, torch.ones(4, 4) * 3)


def test_outputs_of_another_size_are_destroyed() -> None:
    manager = make_manager(only(piece("piece_00", lambda x: (x + 1,))))
    manager.capture([PIECEWISE_4, PIECEWISE_2])
    four = manager.run(PIECEWISE_4).borrow()[0]
    assert four.isfinite().all()
    manager.run(PIECEWISE_2)
    assert four.isnan().all()
    two = manager.run(PIECEWISE_2).borrow()[0]
    manager.run(PIECEWISE_4)
    assert two.isnan().all()


def test_scrambling_can_be_switched_off() -> None:
    manager = make_manager(only(piece("piece_00", lambda x: (x + 1,))), backend=RecordedBackend(torch.device("cpu"), scramble=False))
    manager.capture([PIECEWISE_4, PIECEWISE_2])
    four = manager.run(PIECEWISE_4).borrow()[0]
    manager.run(PIECEWISE_2)
    assert four.isfinite().all()


def test_random_numbers_differ_between_replays_and_repeat_after_a_seed() -> None:
    """T73."""
    manager = make_manager(only(brk("break_00", lambda x: (x + torch.rand_like(x),))))
    manager.capture([FULL_4])
    draws = [run_padded(manager, FULL_4, torch.zeros(4, 4))[0] for _ in range(3)]
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[1], draws[2])
    torch.manual_seed(5)
    first = run_padded(manager, FULL_4, torch.zeros(4, 4))[0]
    torch.manual_seed(5)
    assert torch.equal(run_padded(manager, FULL_4, torch.zeros(4, 4))[0], first)


def test_registered_generator_advances() -> None:
    generator = torch.Generator().manual_seed(3)
    plan = only(brk("break_00", lambda x: (x + torch.rand(x.shape, generator=generator),)))
    manager = make_manager(plan, generators=[generator])
    manager.capture([FULL_4])
    generator.manual_seed(3)
    first, second = (run_padded(manager, FULL_4, torch.zeros(4, 4))[0] for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(first, torch.rand(4, 4, generator=torch.Generator().manual_seed(3)))


def test_unregistered_generator_is_refused_at_capture() -> None:
    generator = torch.Generator()
    manager = make_manager(only(brk("break_00", lambda x: (x + torch.rand(x.shape, generator=generator),))))
    with pytest.raises(CaptureError, match="generator that is not registered"):
        manager.capture([FULL_4])


@pytest.mark.parametrize(
    "reads",
    [
        lambda x: x * x.sum().item(),
        lambda x: x[x[:, 0] > 0],
        lambda x: x.nonzero(),
        lambda x: x if torch.equal(x, x) else x + 1,
        lambda x: x.repeat_interleave(torch.ones(4, dtype=torch.int64), dim=0),
    ],
    ids=["item", "mask", "nonzero", "equal", "repeat"],
)
def test_reading_device_values_on_the_host_is_refused(reads: Callable[[torch.Tensor], torch.Tensor]) -> None:
    manager = make_manager(only(brk("break_00", lambda x: (reads(x),))))
    with pytest.raises(CaptureError, match="reads device values on the host") as error:
        manager.capture([FULL_4])
    assert error.value.piece == "break_00"


def test_reading_device_values_between_graphs_is_fine() -> None:
    manager = make_manager(only(brk("break_00", lambda x: (x * x.sum().item(),))))
    manager.capture([PIECEWISE_4])
    x = data(4, 1)
    assert torch.equal(run_padded(manager, PIECEWISE_4, x)[0], x * x.sum().item())


def test_failed_capture_leaves_no_mode_behind() -> None:
    def fails(x: torch.Tensor) -> Sequence[Any]:
        raise ValueError("no")

    manager = make_manager(only(brk("break_00", fails)))
    with pytest.raises(CaptureError, match="ValueError: no"):
        manager.capture([FULL_4])
    assert torch.ones(2).sum().item() == 2  # would be refused inside a capture


def test_scalar_of_a_piece_is_frozen() -> None:
    plan = ToyPlan(
        [
            (piece("piece_00", lambda x: (x, int(x.shape[0]))), ("x",), ("a", "n")),
            (piece("piece_01", lambda a, n: (a * n,)), ("a", "n"), ("y",)),
        ],
        ("y",),
    )
    manager = make_manager(plan)
    manager.capture([FULL_4, PIECEWISE_4, PIECEWISE_2])
    for descriptor in (FULL_4, PIECEWISE_2, PIECEWISE_4):
        x = data(descriptor.num_tokens, 2)
        assert torch.equal(run_padded(manager, descriptor, x)[0], x * descriptor.num_tokens)


def test_cpu_gets_the_recorded_backend() -> None:
    assert make_backend("cpu").name == "recorded"


def test_backend_that_cannot_run_says_why() -> None:
    with pytest.raises(BackendUnavailableError, match="cuda: tensors on cpu cannot be captured"):
        make_backend("cpu", "cuda")
    with pytest.raises(BackendUnavailableError, match="no graph backend 'vulkan'"):
        make_backend("cpu", "vulkan")
