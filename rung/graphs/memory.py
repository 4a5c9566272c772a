"""How much memory graphs take: a model from a few captured sizes, and the account of what was predicted and what came."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rung.errors import ConfigError
from rung.graphs.capture_report import CaptureEntry
from rung.graphs.descriptor import Descriptor, GraphMode

_TELLING_BYTES = 64 * 2**20  # readings of a driver that hands out 2 MiB at a time, some from a reserve, are good from here on
_FORMAT, _VERSION = "rung.graph_memory", 1


@dataclass(frozen=True, slots=True, order=True)
class Kind:
    """Descriptors whose graphs differ in size alone, so that a few of them tell about the others."""

    mode: str
    query_len: int = 0  # of every request; 0: any
    adapters: int = 0
    variant: str = ""

    @classmethod
    def of(cls, descriptor: Descriptor) -> Kind:
        return cls(descriptor.mode.value, descriptor.uniform_query_len or 0, descriptor.adapters, descriptor.variant)


@dataclass(frozen=True, slots=True)
class Sample:
    """One captured descriptor, as the model sees it."""

    rows: int  # over all named dimensions: what activations grow with
    pool_bytes: int  # growth of the pool, in the order of the captures
    graphs: int
    nodes: int  # 0: not counted
    executable_bytes: int


@dataclass(frozen=True, slots=True)
class Prediction:
    pool_bytes: int
    executable_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.pool_bytes + self.executable_bytes


def probes(descriptors: Iterable[Descriptor]) -> tuple[Descriptor, ...]:
    """The largest, the middle and the smallest descriptor of each kind, in the order of `descriptors`."""
    descriptors = tuple(descriptors)
    chosen: set[Descriptor] = set()
    for kind in {Kind.of(one) for one in descriptors}:
        members = sorted((one for one in descriptors if Kind.of(one) == kind), key=lambda one: one.volume)
        chosen |= {members[-1], members[len(members) // 2], members[0]}
    return tuple(one for one in descriptors if one in chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Bytes of graphs that were not captured yet, from samples that were captured largest first.

    Executables: so many bytes a graph and a node, a least-squares fit. Pool: where captures share it (`shared_pool`), the largest size
    takes nearly all, the samples below it show what smaller ones add, and another top counts in proportion to its rows; where each keeps
    memory of its own, a straight line between samples, summed."""

    samples: Mapping[Kind, tuple[Sample, ...]]  # by falling rows
    bytes_per_graph: float
    bytes_per_node: float
    shared_pool: bool

    @classmethod
    def fit(cls, entries: Sequence[CaptureEntry], *, shared_pool: bool, executable_cost: tuple[float, float] | None = None) -> MemoryModel:
        """`entries` in capture order, the largest of each kind first. `executable_cost`: bytes a graph and a node that are believed until
        the entries took enough memory to tell better."""
        samples: dict[Kind, list[Sample]] = {}
        for entry in entries:
            sample = Sample(entry.descriptor.volume, entry.pool_bytes, entry.num_graphs, entry.num_nodes or 0, entry.executable_bytes)
            samples.setdefault(Kind.of(entry.descriptor), []).append(sample)
        ordered = {kind: tuple(sorted(found, key=lambda one: -one.rows)) for kind, found in samples.items()}
        per_graph, per_node = _fit_executables([_sum(found) for found in ordered.values()], executable_cost)
        return cls(samples=ordered, bytes_per_graph=per_graph, bytes_per_node=per_node, shared_pool=shared_pool)

    def predict(self, descriptors: Iterable[Descriptor]) -> Prediction:
        """What capturing all of `descriptors` takes, the largest first and in one pool."""
        descriptors = tuple(descriptors)
        return Prediction(self.pool_bytes(descriptors), sum(self.executable_bytes(one) for one in descriptors))

    def executable_bytes(self, descriptor: Descriptor) -> int:
        samples = self._samples(Kind.of(descriptor))
        return self._executable(descriptor.volume, samples) if samples else 0

    def pool_bytes(self, descriptors: Iterable[Descriptor]) -> int:
        rows: dict[Kind, list[int]] = {}
        for descriptor in descriptors:
            rows.setdefault(Kind.of(descriptor), []).append(descriptor.volume)
        return sum(self._pool_of_kind(kind, sizes) for kind, sizes in rows.items())

    def size_bytes(self, size: int) -> int:
        """What one capture size takes in all kinds that were sampled, beside the pool that sizes share."""
        own_pool = 0 if self.shared_pool else sum(self._pool_of_kind(kind, [size]) for kind in self.samples)
        return own_pool + sum(self._executable(size, samples) for samples in self.samples.values())

    def shared_pool_bytes(self, top: int) -> int:
        """What all sizes up to `top` share."""
        return sum(self._pool_of_kind(kind, [top]) for kind in self.samples) if self.shared_pool else 0

    def _executable(self, rows: int, samples: tuple[Sample, ...]) -> int:
        graphs, nodes = (_between(rows, samples, [getattr(one, name) for one in samples]) for name in ("graphs", "nodes"))
        return round(graphs * self.bytes_per_graph + nodes * self.bytes_per_node)

    def _pool_of_kind(self, kind: Kind, sizes: Sequence[int]) -> int:
        samples = self._samples(kind)
        if not samples:
            return 0
        if not self.shared_pool:
            return round(sum(_between(rows, samples, [one.pool_bytes for one in samples], extend=True) for rows in sizes))
        first = samples[0]
        smaller = sum(one.pool_bytes for one in samples[1:] if one.rows >= min(sizes) and one.rows < max(sizes))
        return round(first.pool_bytes * max(sizes) / first.rows) + smaller

    def _samples(self, kind: Kind) -> tuple[Sample, ...]:
        """Those of the kind, else of one with the same mode, else none."""
        same_mode = (found for other, found in sorted(self.samples.items()) if other.mode == kind.mode)
        return self.samples.get(kind) or next(same_mode, ())

    def as_json(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "shared_pool": self.shared_pool,
            "bytes_per_graph": self.bytes_per_graph,
            "bytes_per_node": self.bytes_per_node,
            "samples": [
                {**{name: getattr(kind, name) for name in Kind.__slots__}, **{name: getattr(one, name) for name in Sample.__slots__}}
                for kind, found in self.samples.items()
                for one in found
            ],
        }

    @classmethod
    def from_json(cls, value: Any) -> MemoryModel:
        """Raises `ConfigError` for anything else than what `as_json` gives."""
        try:
            if value["format"] != _FORMAT or value["version"] != _VERSION:
                raise ValueError(f"{value['format']} {value['version']}")
            samples: dict[Kind, list[Sample]] = {}
            for row in value["samples"]:
                kind = Kind(GraphMode(row["mode"]).value, int(row["query_len"]), int(row["adapters"]), str(row["variant"]))
                samples.setdefault(kind, []).append(Sample(*(int(row[name]) for name in Sample.__slots__)))
            return cls(
                samples={kind: tuple(found) for kind, found in samples.items()},
                bytes_per_graph=float(value["bytes_per_graph"]),
                bytes_per_node=float(value["bytes_per_node"]),
                shared_pool=bool(value["shared_pool"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"this is no memory model of graphs: {error!r}", hint="rung bench TARGET --out FILE writes one") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What the graphs of one manager hold now, and what was predicted for them."""

    pool_bytes: int
    executable_bytes: int
    buffer_bytes: int  # static inputs; they do not count against the budget
    entries: tuple[CaptureEntry, ...]
    trimmed: tuple[Descriptor, ...] = ()  # left out for the budget
    predicted: Prediction | None = None  # for what was planned and not trimmed; None: nothing was captured that tells
    budget_bytes: int | None = None
    model: MemoryModel | None = None
    nodes_missing: str | None = None  # why nodes are not counted

    @property
    def total_bytes(self) -> int:
        """Pool and executables."""
        return self.pool_bytes + self.executable_bytes

    @property
    def prediction_error(self) -> float | None:
        """(predicted - measured) / measured."""
        return None if self.predicted is None or not self.total_bytes else self.predicted.total_bytes / self.total_bytes - 1

    def as_json(self) -> dict[str, Any]:
        return {
            "pool_bytes": self.pool_bytes,
            "executable_bytes": self.executable_bytes,
            "buffer_bytes": self.buffer_bytes,
            "predicted_bytes": None if self.predicted is None else self.predicted.total_bytes,
            "budget_bytes": self.budget_bytes,
            "nodes_missing": self.nodes_missing,
            "trimmed": [str(one) for one in self.trimmed],
            "entries": [
                {
                    "descriptor": str(one.descriptor),
                    "pool_bytes": one.pool_bytes,
                    "executable_bytes": one.executable_bytes,
                    "graphs": one.num_graphs,
                    "nodes": one.num_nodes,
                    "seconds": one.seconds,
                }
                for one in self.entries
            ],
            "model": None if self.model is None else self.model.as_json(),
        }

    def __str__(self) -> str:
        mib = 2**20
        text = f"{self.total_bytes / mib:.1f} MiB for {len(self.entries)} sizes"
        text += f" (pool {self.pool_bytes / mib:.1f}, executables {self.executable_bytes / mib:.1f})"
        text += f", static buffers {self.buffer_bytes / mib:.1f} MiB"
        if self.predicted is not None:
            text += f", predicted {self.predicted.total_bytes / mib:.1f} MiB"
        if self.trimmed:
            text += f"; {len(self.trimmed)} sizes trimmed for the budget of {(self.budget_bytes or 0) / mib:.1f} MiB"
        return text


def _sum(samples: Sequence[Sample]) -> tuple[int, int, int]:
    return sum(one.graphs for one in samples), sum(one.nodes for one in samples), sum(one.executable_bytes for one in samples)


def _fit_executables(sums: Sequence[tuple[int, int, int]], believed: tuple[float, float] | None) -> tuple[float, float]:
    """(bytes a graph, bytes a node), neither below 0. `sums` are graphs, nodes and bytes of each kind: sums, because single readings are
    coarse. Kinds that are alike cannot tell the two apart; then all goes to the nodes."""
    graphs, nodes, taken = (float(sum(one[index] for one in sums)) for index in range(3))
    if believed is not None and taken < _TELLING_BYTES:
        return believed
    if len(sums) > 1 and nodes:
        matrix = np.array([one[:2] for one in sums], np.float64)
        solution, _, rank, _ = np.linalg.lstsq(
            matrix / np.array([graphs, nodes]), np.array([one[2] for one in sums], np.float64), rcond=1e-6
        )
        if rank == 2 and solution.min() >= 0:
            return float(solution[0] / graphs), float(solution[1] / nodes)
    if nodes:
        return 0.0, max(taken, 0.0) / nodes
    return (max(taken, 0.0) / graphs if graphs else 0.0), 0.0


def _between(rows: int, samples: Sequence[Sample], values: Sequence[float], *, extend: bool = False) -> float:
    """`values` of `samples` at `rows`: straight between them; beyond them constant, or in proportion to the rows (`extend`)."""
    found = float(np.interp(rows, [one.rows for one in reversed(samples)], list(reversed(values))))
    if extend and rows > samples[0].rows:
        found *= rows / samples[0].rows
    return found
