"""Seeded faults: each is planted into the manager, its programs or its buffers, and an oracle on the recorded backend must see it.

The oracle runs a plan with every kind of step through two managers, all sizes and both modes, on poisoned memory, in changing orders, and
compares with the plan run without graphs. The code without a fault passes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from rung.errors import RungError, StaleOutputError
from rung.graphs import BufferSpec, Descriptor, Dispatcher, GraphManager, GraphMode, Ladder, Outputs, Shape, StaticBuffer, make_backend
from rung.graphs import dispatch as dispatch_module
from rung.graphs.backends import recorded
from rung.graphs.backends.recorded_memory import RecordedPool
from rung.graphs.capture import _Capture
from rung.graphs.program import PreboundBreak, ReplayProgram
from tests.graphs.toys import ToyPlan, both_modes, brk, data, make_manager, piece

Patch = pytest.MonkeyPatch
SIZES = (1, 2, 4, 8)
PAD = 0.25
WEIGHT = torch.linspace(0.5, 2, 4)


def plan() -> ToyPlan:
    """Pieces, a break with an out-argument, one with a fresh result that a view carries on; the pad value reaches the sum over all rows."""

    def attend(q: torch.Tensor, out: torch.Tensor) -> Sequence[Any]:
        out.copy_(q.cumsum(0))
        return ()

    return ToyPlan(
        [
            (piece("piece_00", lambda x: (x * WEIGHT, torch.empty_like(x))), ("x",), ("q", "out")),
            (brk("break_01", attend), ("q", "out"), ()),
            (piece("piece_02", lambda out, x: (out + x, (out * 2)[:, :2])), ("out", "x"), ("h", "part")),
            (brk("break_03", lambda h: (h.relu() + 1,)), ("h",), ("r",)),
            (piece("piece_04", lambda r, part, x: (torch.cat([r, part], 1), x.sum(0))), ("r", "part", "x"), ("y", "total")),
        ],
        ("y", "total"),
    )


def manager_of(toy: ToyPlan, **options: Any) -> GraphManager:
    spec = BufferSpec(name="x", shape=("tokens", 4), dtype=torch.float32, pad=PAD)
    return GraphManager(toy, make_backend("cpu"), inputs=[StaticBuffer(spec, capacity={"tokens": 8})], **options)


def oracle() -> list[str]:
    """What is wrong, in words; nothing when all is well."""
    toy = plan()
    managers = [manager_of(toy), manager_of(toy)]
    descriptors = both_modes(Ladder.custom(SIZES))
    for manager in managers:
        manager.capture(descriptors)
    faults: list[str] = []
    for round_, order in enumerate((descriptors, descriptors[::-1], descriptors[1::2] + descriptors[::2])):
        for number, descriptor in enumerate(order):
            rows = max(1, descriptor.num_tokens - (number + round_) % 2)
            manager = managers[number % 2]
            manager.poison()
            faults += _one_step(toy, manager, descriptor, data(rows, 10 * round_ + number))
    return faults + _kept_outputs(toy, managers[0]) + _apart(toy, managers) + _chosen(descriptors) + _recaptured()


def _one_step(toy: ToyPlan, manager: GraphManager, descriptor: Descriptor, x: torch.Tensor) -> list[str]:
    manager.inputs[0].write(x, descriptor.sizes("tokens"))
    y, total = manager.run(descriptor).clone({"tokens": x.shape[0]}, ({0: "tokens"}, {}))
    padded = torch.full((descriptor.num_tokens, 4), PAD)
    padded[: x.shape[0]] = x
    want_y, want_total = toy(padded)
    if y.shape[0] != x.shape[0]:
        return [f"{descriptor}: {y.shape[0]} rows came for {x.shape[0]}"]
    equal = torch.equal(y, want_y[: x.shape[0]]) and torch.equal(total, want_total)
    return [] if equal else [f"{descriptor}: values differ"]


def _kept_outputs(toy: ToyPlan, manager: GraphManager) -> list[str]:
    """Clones are the caller's, borrowed outputs turn stale."""
    faults = []
    x = data(4, 99)
    full, piecewise = Descriptor(mode=GraphMode.FULL, num_tokens=4), Descriptor(mode=GraphMode.PIECEWISE, num_tokens=4)
    manager.inputs[0].write(x, {"tokens": 4})
    outputs = manager.run(full)
    kept = outputs.clone()
    manager.inputs[0].write(data(4, 98), {"tokens": 4})
    manager.run(piecewise)
    if not torch.equal(kept[0], toy(x)[0]):
        faults.append("a clone changed")
    try:
        outputs.borrow()
        faults.append("an overwritten output was handed out")
    except StaleOutputError:
        pass
    return faults


def _apart(toy: ToyPlan, managers: Sequence[GraphManager]) -> list[str]:
    """What one manager lent is not touched by a step of another."""
    full = Descriptor(mode=GraphMode.FULL, num_tokens=8)
    x, faults = data(8, 97), []
    for manager, other in (managers, managers[::-1]):
        manager.inputs[0].write(x, {"tokens": 8})
        lent = manager.run(full).borrow()
        other.run(full)
        if not torch.equal(lent[0], toy(x)[0]):
            faults.append("another manager's step overwrote what was lent")
    return faults


def _chosen(descriptors: Sequence[Descriptor]) -> list[str]:
    """No step is given a graph that is smaller than the step."""
    chosen = {rows: Dispatcher(descriptors, max_waste=None).dispatch(Shape(num_tokens=rows)).descriptor.num_tokens for rows in range(1, 9)}
    right = {rows: min(size for size in SIZES if size >= rows) for rows in range(1, 9)}
    return [] if chosen == right else [f"steps are padded to {chosen}"]


def _recaptured() -> list[str]:
    """Graphs captured again read what the plan reads now."""
    scale = [torch.full((4,), 3.0)]
    manager = make_manager(ToyPlan([(brk("break_00", lambda x: (x * scale[0],)), ("x",), ("y",))], ("y",)))
    full = Descriptor(mode=GraphMode.FULL, num_tokens=2)
    manager.capture([full])
    scale[0] = torch.zeros(4)
    manager.recapture()
    x = data(2, 5)
    manager.inputs[0].write(x, {"tokens": 2})
    return [] if torch.equal(manager.run(full).clone()[0], x * 0) else ["recapture kept an old address"]


# --- faults --------------------------------------------------------------------------------------------------------------------------


def wrong_pad_value(patch: Patch) -> None:
    fill = StaticBuffer._fill_outside
    patch.setattr(StaticBuffer, "_fill_outside", staticmethod(lambda target, inner, value: fill(target, inner, value + 1)))


def padding_not_filled(patch: Patch) -> None:
    patch.setattr(StaticBuffer, "_fill_outside", staticmethod(lambda target, inner, value: None))


def skipped_input_copy(patch: Patch) -> None:
    """Only the first write of a size reaches the buffer."""
    write, seen = StaticBuffer.write, set[tuple[int, int]]()

    def once(self: StaticBuffer, tensor: torch.Tensor, sizes: Any) -> torch.Tensor:
        key = (id(self), sizes["tokens"])
        if key in seen:
            return self.view(sizes)
        seen.add(key)
        return write(self, tensor, sizes)

    patch.setattr(StaticBuffer, "write", once)


def view_at_the_end_of_the_buffer(patch: Patch) -> None:
    """A size is written to other rows than its graph reads."""
    view = StaticBuffer.view
    calls = [0]

    def moving(self: StaticBuffer, sizes: Any) -> torch.Tensor:
        calls[0] += 1
        whole, part = view(self, self.capacity), view(self, sizes)
        return part if calls[0] % 2 else whole[whole.shape[0] - part.shape[0] :]

    patch.setattr(StaticBuffer, "view", moving)


def stale_scalar(patch: Patch) -> None:
    """The size of the first capture is frozen into all others."""
    views = GraphManager.views
    first: list[Any] = []

    def frozen(self: GraphManager, descriptor: Descriptor) -> list[Any]:
        first.append(descriptor)
        return views(self, first[0])

    patch.setattr(GraphManager, "views", frozen)


def wrong_pool(patch: Patch) -> None:
    """Two managers share one pool, so each destroys what the other's programs still need."""
    shared = RecordedPool(True)
    patch.setattr(recorded.RecordedBackend, "new_pool", lambda self: shared)


def kept_alias_of_freed_memory(patch: Patch) -> None:
    """The inputs of a break are not held while later pieces are captured, so their memory is given away."""
    patch.setattr(_Capture, "aliases", lambda self, values: [v.clone() if isinstance(v, torch.Tensor) else v for v in values])


def output_not_sliced(patch: Patch) -> None:
    patch.setattr(Outputs, "cut", lambda self, sizes, dims=None: self.borrow())


def output_sliced_from_the_wrong_end(patch: Patch) -> None:
    def cut(self: Outputs, sizes: Any, dims: Any = None) -> list[Any]:
        flat = self.borrow()
        return flat if sizes is None else [flat[0][-sizes["tokens"] :], *flat[1:]]

    patch.setattr(Outputs, "cut", cut)


def outputs_lent_instead_of_cloned(patch: Patch) -> None:
    patch.setattr(Outputs, "clone", lambda self, sizes=None, dims=None: self.cut(sizes, dims))


def missing_generation(patch: Patch) -> None:
    patch.setattr(Outputs, "is_stale", property(lambda self: False))


def break_bound_to_an_old_tensor(patch: Patch) -> None:
    """A break reads copies of what it was given at capture."""
    init = PreboundBreak.__init__

    def copied(self: PreboundBreak, step: Any, arguments: Sequence[Any], outputs: Sequence[Any]) -> None:
        init(self, step, [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments], outputs)

    patch.setattr(PreboundBreak, "__init__", copied)


def break_output_not_copied_back(patch: Patch) -> None:
    patch.setattr(PreboundBreak, "_land", lambda self, old, new, index: None)


def skipped_break(patch: Patch) -> None:
    patch.setattr(PreboundBreak, "run", lambda self: None)


def smaller_descriptor(patch: Patch) -> None:
    """The next smaller graph is taken."""
    patch.setattr(dispatch_module, "bisect_left", lambda sizes, value: max(0, sum(size < value for size in sizes) - 1))
    patch.setattr(dispatch_module, "misfit", lambda descriptor, shape: None)


def last_graph_left_out(patch: Patch) -> None:
    init = ReplayProgram.__init__

    def shortened(self: ReplayProgram, descriptor: Descriptor, actions: Sequence[Any], *rest: Any) -> None:
        init(self, descriptor, actions, *rest)
        if len(actions) > 1:
            self._runs = self._runs[:-1]

    patch.setattr(ReplayProgram, "__init__", shortened)


def actions_out_of_order(patch: Patch) -> None:
    def replay(self: ReplayProgram) -> None:
        for run in (*self._runs[1:], *self._runs[:1]):
            run()

    patch.setattr(ReplayProgram, "replay", replay)


def program_of_another_size(patch: Patch) -> None:
    """A buffer reused between two programs: the outputs of the one captured last are handed out for all of them."""
    init = ReplayProgram.__init__
    last: list[Any] = []

    def shared(self: ReplayProgram, descriptor: Descriptor, actions: Sequence[Any], outputs: Sequence[Any], *rest: Any) -> None:
        last.append(outputs)
        same = [o for o in last if len(o) == len(outputs) and all(a.shape == b.shape for a, b in zip(o, outputs, strict=True))]
        init(self, descriptor, actions, same[0], *rest)

    patch.setattr(ReplayProgram, "__init__", shared)


def recapture_that_captures_nothing(patch: Patch) -> None:
    patch.setattr(GraphManager, "recapture", lambda self: None)


FAULTS: tuple[Callable[[Patch], None], ...] = (
    wrong_pad_value,
    padding_not_filled,
    skipped_input_copy,
    view_at_the_end_of_the_buffer,
    stale_scalar,
    wrong_pool,
    kept_alias_of_freed_memory,
    output_not_sliced,
    output_sliced_from_the_wrong_end,
    outputs_lent_instead_of_cloned,
    missing_generation,
    break_bound_to_an_old_tensor,
    break_output_not_copied_back,
    skipped_break,
    smaller_descriptor,
    last_graph_left_out,
    actions_out_of_order,
    program_of_another_size,
    recapture_that_captures_nothing,
)


def test_the_code_as_it_is_passes() -> None:
    assert oracle() == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_is_caught(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    fault(monkeypatch)
    try:
        found = oracle()
    except (RungError, RuntimeError) as error:  # refused, or torch refused shapes that do not fit
        found = [str(error)]
    assert found
