"""The compile plan: everything about a compiled function except machine code, as JSON.

Values are numbered: the graph's inputs first, then what the steps produce. A plan names its pieces by key and their code by blob, so it
holds no path and nothing of the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rung.compile.fake_kernels import FakeOutput
from rung.compile.guards import NO_GUARDS, GuardSet
from rung.compile.paths import Path
from rung.compile.regions import Region
from rung.compile.rows.state import Verdict
from rung.compile.sources import SourceRef
from rung.compile.template import Template
from rung.compile.whole.report import WholeReport

FORMAT = 10


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of a split op inside a break. Arguments are {"value": n}, {"constant": c} or lists of them."""

    target: str  # "namespace::name.overload"
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[int, ...]  # value numbers, empty when nothing uses the result
    is_tuple: bool = False  # the op returns several values
    autocast: tuple[tuple[Any, ...], ...] = ()  # blocks around it, outermost first: device type, dtype, enabled, whether casts are kept


@dataclass(frozen=True, slots=True)
class Step:
    """A piece (by index into `CompilePlan.pieces`) or a break (a list of op calls)."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    piece: int | None = None
    calls: tuple[OpCall, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What an argument must be: checked before every call."""

    dtype: str
    device: str  # type only: never an ordinal
    shape: tuple[int | str, ...]  # sizes, or the name of a dynamic dimension

    def to_json(self) -> list[Any]:
        return [self.dtype, self.device, list(self.shape)]

    @staticmethod
    def from_json(data: Sequence[Any]) -> TensorSpec:
        return TensorSpec(data[0], data[1], tuple(data[2]))


@dataclass(frozen=True, slots=True)
class CompilePlan:
    """See the module's docstring. `pieces` are (key, blob digest) of the unique pieces, in order of first use."""

    entry: str
    inputs: tuple[Path, ...]
    tensors: tuple[tuple[Path, TensorSpec], ...]  # every tensor argument and what it must be
    bounds: Mapping[str, int | None]  # dynamic dimension -> largest size served
    pieces: tuple[tuple[str, str], ...]
    steps: tuple[Step, ...]
    outputs: tuple[Any, ...]  # {"value": n} or {"constant": c}, one a flat output
    template: Template
    sources: tuple[SourceRef, ...]
    written: tuple[int, ...] = ()  # value numbers of the graph's inputs that are updated in place
    aliased: tuple[int, ...] = ()  # value numbers whose memory another value has too
    guards: GuardSet = NO_GUARDS  # what the trace has read besides its arguments
    rows: Mapping[str, Verdict | None] = field(default_factory=dict)  # dimension to be padded -> None when its rows are independent
    fakes: Mapping[int, FakeOutput] = field(default_factory=dict)  # value number -> what a fake kernel said of an output of a break
    regions: tuple[Region, ...] = ()  # what runs eagerly because it would not trace
    whole: WholeReport = field(default_factory=WholeReport)  # what passes over the whole graph did
    output_dims: tuple[Mapping[int, str], ...] = ()  # for each flat output the names of its dynamic dimensions
    unused_ops: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # setting -> ops that it names and the trace has not

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "entry": self.entry,
            "inputs": [path.to_json() for path in self.inputs],
            "tensors": [[path.to_json(), spec.to_json()] for path, spec in self.tensors],
            "bounds": dict(self.bounds),
            "pieces": [list(piece) for piece in self.pieces],
            "steps": [_step_to_json(step) for step in self.steps],
            "outputs": list(self.outputs),
            "template": self.template,
            "sources": [ref.to_json() for ref in self.sources],
            "written": list(self.written),
            "aliased": list(self.aliased),
            "guards": self.guards.to_json(),
            "rows": {name: verdict and verdict.to_json() for name, verdict in self.rows.items()},
            "fakes": [[number, fake.to_json()] for number, fake in self.fakes.items()],
            "regions": [region.to_json() for region in self.regions],
            "whole": self.whole.to_json(),
            "output_dims": [[[dim, name] for dim, name in dims.items()] for dims in self.output_dims],
            "unused_ops": {setting: list(names) for setting, names in self.unused_ops.items()},
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> CompilePlan:
        return CompilePlan(
            entry=data["entry"],
            inputs=tuple(Path.from_json(item) for item in data["inputs"]),
            tensors=tuple((Path.from_json(path), TensorSpec.from_json(spec)) for path, spec in data["tensors"]),
            bounds=data["bounds"],
            pieces=tuple((key, blob) for key, blob in data["pieces"]),
            steps=tuple(_step_from_json(item) for item in data["steps"]),
            outputs=tuple(data["outputs"]),
            template=data["template"],
            sources=tuple(SourceRef(*item) for item in data["sources"]),
            written=tuple(data["written"]),
            aliased=tuple(data["aliased"]),
            guards=GuardSet.from_json(data["guards"]),
            rows={name: verdict and Verdict.from_json(verdict) for name, verdict in data["rows"].items()},
            fakes={number: FakeOutput.from_json(item) for number, item in data["fakes"]},
            regions=tuple(Region.from_json(item) for item in data["regions"]),
            whole=WholeReport.from_json(data["whole"]),
            output_dims=tuple(dict(dims) for dims in data["output_dims"]),
            unused_ops={setting: tuple(names) for setting, names in data["unused_ops"].items()},
        )


def _step_to_json(step: Step) -> dict[str, Any]:
    calls = [[c.target, list(c.args), dict(c.kwargs), list(c.outputs), c.is_tuple, _blocks_to_json(c.autocast)] for c in step.calls]
    return {"name": step.name, "inputs": list(step.inputs), "outputs": list(step.outputs), "piece": step.piece, "calls": calls}


def _blocks_to_json(blocks: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
    return [[device, None if dtype is None else str(dtype), enabled, kept] for device, dtype, enabled, kept in blocks]


def _blocks_from_json(data: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple((device, dtype and getattr(torch, dtype.removeprefix("torch.")), enabled, kept) for device, dtype, enabled, kept in data)


def _step_from_json(data: Mapping[str, Any]) -> Step:
    calls = tuple(OpCall(c[0], tuple(c[1]), c[2], tuple(c[3]), c[4], _blocks_from_json(c[5])) for c in data["calls"])
    return Step(data["name"], tuple(data["inputs"]), tuple(data["outputs"]), data["piece"], calls)
