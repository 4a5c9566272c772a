"""A compiled function: a plan bound to one module's tensors and to loaded pieces. Implements `BoundPlan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rung import torch_compat
from rung.compile.bound import BoundStep, Capture, StepCall, StepRunner, call_step, call_steps, gpu_or_first, profiled_step
from rung.compile.breaks import attention_of, break_call, break_capture, parts
from rung.compile.fake_kernels import FakeOutput, checking
from rung.compile.generated import Source
from rung.compile.joined import joined_pairs, private_values
from rung.compile.plan import CompilePlan, Step
from rung.compile.sizes import SizeRange, SizeTable
from rung.compile.stitch import last_uses, restorer, stitch


@dataclass(frozen=True, slots=True)
class _Walk:
    """Steps as graphs see them, in order."""

    steps: Sequence[Step]
    bound: Sequence[BoundStep]  # one a step
    last: Mapping[int, int]  # value number -> index of the last step that reads it


class CompiledFunction:
    """Runs a plan. Thread-safe for concurrent calls: a call keeps its state in locals.

    `weights` are the module's tensors as they were when bound; `rebind` reads them again."""

    def __init__(self, plan: CompilePlan, pieces: Sequence[StepCall], owner: Mapping[str, Any], piece_sources: Sequence[str] = ()) -> None:
        self.plan = plan
        self.piece_sources = piece_sources  # what Inductor generated for each unique piece
        self._pieces = tuple(pieces)
        # Graphs see breaks in parts: what can be captured in every mode joins the pieces beside it.
        self._private = private_values(plan)
        self._parts = {joined: self._cut(joined) for joined in (False, True)}
        self._unchecked = bool(plan.fakes)  # until the first run has looked at what breaks return
        self._by_size: BySize | None = None
        self.rebind(owner)

    def rebind(self, owner: Mapping[str, Any]) -> None:
        """Read the module's parameters and buffers again and make the stitched code anew. `owner` maps the traced name of self."""
        self.weights = {n: path.resolve(owner) for n, path in enumerate(self.plan.inputs) if path.dim is None and path.local in owner}
        holder = next(iter(owner.values()), None)
        regions = [region.call(holder) for region in self.plan.regions]
        self.region_buffers = tuple(holder.buffers()) if regions and isinstance(holder, torch.nn.Module) else ()  # what they may update
        every = (*self.plan.steps, *self._parts[False], *self._parts[True])
        breaks = {(step.name, len(step.calls)): step for step in every if step.piece is None}  # most are in two of the three, built once
        self._breaks = {key: break_call(step, regions, self._private) for key, step in breaks.items()}
        order = {path: index for index, (path, _) in enumerate(self.plan.tensors)}  # as in the signature, not as first used in the graph
        arguments = [n for n, path in enumerate(self.plan.inputs) if path.dim is None and n not in self.weights]
        self.arguments = sorted(arguments, key=lambda n: order.get(self.plan.inputs[n], n))
        calls = [self._call_of(step) for step in self.plan.steps]
        self._walks = {joined: self._walk(steps) for joined, steps in self._parts.items()}
        self.source: Source = stitch(self.plan, calls, self.weights, self.arguments)
        self.stitched = self.source.build("stitched")
        self._restore: Callable[..., Any] = restorer(self.plan, self.arguments, self.weights).build("restore")
        if self._by_size is not None:
            self._by_size.rebind(owner)

    def publish(self, sizes: SizeRange, pieces: Sequence[StepCall], owner: Mapping[str, Any], piece_sources: Sequence[str] = ()) -> None:
        """From the next call on, run these pieces for `sizes` of the only dynamic dimension; a call that runs now ends as it began."""
        variant = CompiledFunction(self.plan, pieces, owner, piece_sources)
        before = self._by_size
        made = BySize.of(self.plan, self.arguments, {**(before.functions if before else {}), sizes: variant})
        made.calls |= {} if before is None else before.calls
        self._by_size = made

    def calls_by_size(self) -> dict[SizeRange, int]:
        """How often each published variant ran."""
        return {} if self._by_size is None else dict(self._by_size.calls)

    def pieces_through(self, wrap: Callable[[StepCall], StepCall]) -> tuple[StepCall, ...]:
        """`wrap(piece)` of every unique piece, for another compiled function of this plan."""
        return tuple(wrap(piece) for piece in self._pieces)

    def _cut(self, joined: bool) -> list[Step]:
        return [part for step in self.plan.steps for part in parts(step, joined_pairs(step, self._private) if joined else ())]

    def _walk(self, steps: Sequence[Step]) -> _Walk:
        return _Walk(steps, tuple(map(self._bound, steps)), last_uses(steps, self.plan.outputs))

    def _bound(self, step: Step) -> BoundStep:
        if step.piece is not None:
            return BoundStep("piece", step.name, self._call_of(step), Capture.ALWAYS)
        return BoundStep("break", step.name, self._call_of(step), break_capture(step), attention_of(step))

    def _call_of(self, step: Step) -> StepCall:
        return self._breaks[step.name, len(step.calls)] if step.piece is None else self._pieces[step.piece]

    @property
    def steps(self) -> Sequence[BoundStep]:
        """As graphs see them where `joined` is not asked for."""
        return self._walks[False].bound

    @property
    def joined_steps(self) -> Sequence[BoundStep]:
        return self._walks[True].bound

    @property
    def joined(self) -> JoinedPlan:
        """The same function for walks that leave together what may be one kernel."""
        return JoinedPlan(self)

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the tensors that `__call__` takes, in order."""
        return tuple(self.plan.inputs[number].dotted() for number in self.arguments)

    @property
    def device(self) -> torch.device:
        """A GPU that a weight or an argument lies on; else where the first of them lies."""
        devices = [weight.device for weight in self.weights.values() if isinstance(weight, torch.Tensor)]
        return gpu_or_first([*devices, *(torch.device(spec.device) for _, spec in self.plan.tensors)])

    def __call__(self, *inputs: Any) -> Any:
        if self._by_size is not None and (variant := self._by_size.find(inputs)) is not None:
            return variant(*inputs)
        if self._unchecked:
            return self._restore(self.run_steps(inputs, call_step), inputs)
        if torch_compat.profiling():
            with torch.profiler.record_function(f"rung {self.plan.entry.rpartition(':')[2]}"):
                return self._restore(self.run_steps(inputs, profiled_step), inputs)
        return self._restore(self.stitched(*inputs), inputs)

    def restore(self, flat: Sequence[Any], inputs: Sequence[Any]) -> Any:
        return self._restore(flat, inputs)

    def run_steps(self, inputs: Sequence[Any], runner: StepRunner, *, joined: bool = False) -> list[Any]:
        """See `BoundPlan.run_steps`. `joined`: as `JoinedPlan`."""
        if self._by_size is not None and (variant := self._by_size.find(inputs)) is not None:
            return variant.run_steps(inputs, runner, joined=joined)
        walk = self._walks[joined]
        if self._unchecked:
            runner = checking(runner, self._fakes(walk.steps), self._sizes(inputs))
        values: dict[int, Any] = dict(self.weights) | dict(zip(self.arguments, inputs, strict=True))
        by_path = {(path.local, path.accesses): n for n, path in enumerate(self.plan.inputs) if path.dim is None}
        for number, path in enumerate(self.plan.inputs):
            if path.dim is not None:
                values[number] = values[by_path[(path.local, path.accesses)]].shape[path.dim]
        for index, (step, bound) in enumerate(zip(walk.steps, walk.bound, strict=True)):
            results = runner(bound, [values[number] for number in step.inputs])
            values.update(zip(step.outputs, results, strict=True))
            for number in [n for n, at in walk.last.items() if at == index and n >= len(self.plan.inputs)]:
                values.pop(number, None)
        self._unchecked = False
        return [values[output["value"]] if "value" in output else output["constant"] for output in self.plan.outputs]

    def _fakes(self, steps: Sequence[Step]) -> dict[str, dict[int, FakeOutput]]:
        """By name of a step, position in its outputs -> what a fake kernel said of it."""
        fakes = self.plan.fakes
        return {step.name: {i: fakes[n] for i, n in enumerate(step.outputs) if n in fakes} for step in steps}

    def _sizes(self, inputs: Sequence[Any]) -> dict[str, int]:
        """Sizes of the named dimensions in this call."""
        specs = dict(self.plan.tensors)
        given = [(specs[path], value) for n, value in zip(self.arguments, inputs, strict=True) if (path := self.plan.inputs[n]) in specs]
        return {name: value.shape[dim] for spec, value in given for dim, name in enumerate(spec.shape) if isinstance(name, str)}


class JoinedPlan:
    """A compiled function in whose walk calls that may be one kernel are one break; its own has them apart. Implements `BoundPlan`."""

    def __init__(self, function: CompiledFunction) -> None:
        self._function = function

    @property
    def steps(self) -> Sequence[BoundStep]:
        return self._function.joined_steps

    def __call__(self, *inputs: Any) -> Any:
        return call_steps(self, *inputs)

    def run_steps(self, inputs: Sequence[Any], runner: StepRunner) -> list[Any]:
        return self._function.run_steps(inputs, runner, joined=True)

    def restore(self, flat: Sequence[Any], inputs: Sequence[Any]) -> Any:
        return self._function.restore(flat, inputs)


class BySize:
    """Compiled functions of one plan for some sizes of its only dynamic dimension. Never changed, so whoever reads it needs no lock."""

    def __init__(self, position: tuple[int, int], functions: Mapping[SizeRange, CompiledFunction]) -> None:
        self.functions = dict(functions)
        self.calls = dict.fromkeys(functions, 0)  # how often each was found
        self._argument, self._dim = position
        self._table = SizeTable(functions)

    @staticmethod
    def of(plan: CompilePlan, arguments: Sequence[int], functions: Mapping[SizeRange, CompiledFunction]) -> BySize:
        """`arguments` are the numbers of the plan's inputs that a call passes, in order."""
        specs = dict(plan.tensors)
        places = [
            (at, dim)
            for at, number in enumerate(arguments)
            for dim, extent in enumerate(specs[plan.inputs[number]].shape if plan.inputs[number] in specs else ())
            if isinstance(extent, str)
        ]
        return BySize(places[0], functions)

    def find(self, inputs: Sequence[Any]) -> CompiledFunction | None:
        sizes = self._table.find(inputs[self._argument].shape[self._dim])
        if sizes is None:
            return None
        self.calls[sizes] += 1
        return self.functions[sizes]

    def rebind(self, owner: Mapping[str, Any]) -> None:
        for function in self.functions.values():
            function.rebind(owner)
