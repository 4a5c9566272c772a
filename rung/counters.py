"""Counts of everything that costs time, so that a test or a user can assert them.

A `Counters` belongs to one object (a wrapped module, a runner). The module-level `counters` is the sum over all of them, living and gone.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum


class Count(StrEnum):
    """What is counted. Steps by mode and reason are counted beside these, as `step.<mode>.<reason>`,
    loads of pieces that Inductor's loader made as `stock_load.<reason>`, pieces that were not compared as `uncompared_piece.<reason>`."""

    DYNAMO_TRACES = "dynamo_traces"
    INDUCTOR_COMPILES = "inductor_compiles"
    UNHINTED_COMPILES = "unhinted_compiles"  # pieces whose hinted compile restricted sizes, so that they were compiled without hints
    SIZE_VARIANTS = "size_variants"  # compiles for single sizes and ranges of the dynamic dimension
    VARIANT_FAILURES = "variant_failures"  # of them in the background, that failed
    PIECES = "pieces"
    UNIQUE_PIECES = "unique_pieces"
    PLAN_HITS = "plan_hits"
    PLAN_MISSES = "plan_misses"
    PIECE_HITS = "piece_hits"  # unique pieces out of the store although their plan was not there
    QUARANTINED = "quarantined"  # files of the store that were damaged
    LOCK_WAITS = "lock_waits"  # times that another process (or thread) was building the same
    EVICTIONS = "evictions"  # entries that made room in the store
    ARTIFACT_LOADS = "artifact_loads"
    PROGRAM_LOADS = "program_loads"  # of them, those that our own loader ran; the others are counted as `stock_load.<reason>`
    KERNEL_TUNINGS = "kernel_tunings"  # generated kernels whose configurations were measured
    ARTIFACT_WRITES = "artifact_writes"
    GUARD_RETRACES = "guard_retraces"  # traces made because something that an earlier one has read was changed
    UNFORESEEN_KERNELS = "unforeseen_kernels"  # times that a compile or start could not tell which kernels it needs
    EAGER_CALLS = "eager_calls"
    CAPTURES = "captures"
    LAUNCHED_PIECES = "launched_pieces"  # graphs between breaks that were captured to be replayed as launches
    REPLAYS = "replays"
    REPEATED_BREAKS = "repeated_breaks"  # attention breaks of replays that were the launches of an earlier step, without its Python
    RECORDED_BREAKS = "recorded_breaks"  # those whose Python ran while its launches were written down; others: `python_break.<reason>`
    REPEATED_INPUTS = "repeated_inputs"  # steps without a decode graph whose inputs were the launches of an earlier step
    RECORDED_INPUTS = "recorded_inputs"  # those whose Python ran while its launches were written down
    PYTHON_INPUTS = "python_inputs"  # those whose launches cannot be repeated
    ADDRESS_CHANGES = "address_changes"  # times that something graphs read had moved and the policy did not raise
    PADDING_CHECKS = "padding_checks"  # runs that compared exact with padded sizes
    UNPROVED_PADDING = "unproved_padding"  # dimensions that are padded because such a run agreed, without a proof
    HOST_TO_DEVICE_COPIES = "host_to_device_copies"
    PREFIX_TOKENS = "prefix_tokens"  # tokens of requests when they entered a slot, with the prefix cache on
    PREFIX_HIT_TOKENS = "prefix_hit_tokens"  # those of them that were in the cache


class Counters(Mapping[str, int]):
    """A thread-safe multiset of names; absent names read 0."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        _registry.register(self)

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[str(name)] += amount

    def snapshot(self) -> dict[str, int]:
        """A copy of all counts that are not 0."""
        with self._lock:
            return {name: count for name, count in self._counts.items() if count}

    def __getitem__(self, name: str) -> int:
        return self.snapshot().get(str(name), 0)

    def __contains__(self, name: object) -> bool:
        return str(name) in self.snapshot()

    def __iter__(self) -> Iterator[str]:
        return iter(self.snapshot())

    def __len__(self) -> int:
        return len(self.snapshot())

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    @contextmanager
    def expect(self, **deltas: int) -> Iterator[None]:
        """Assert that each named count grows by exactly the given amount inside the block."""
        before = self.snapshot()
        yield
        after = self.snapshot()
        wrong = {
            name: (wanted, after.get(name, 0) - before.get(name, 0))
            for name, wanted in deltas.items()
            if after.get(name, 0) - before.get(name, 0) != wanted
        }
        if wrong:
            raise AssertionError("counts differ: " + ", ".join(f"{n} expected +{w}, came +{c}" for n, (w, c) in wrong.items()))


class _Registry:
    """Knows the living counters and keeps the totals of those that are gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys = itertools.count()
        self._living: dict[int, Counter[str]] = {}
        self._retired: deque[int] = deque()  # keys whose owner is gone but whose counts are not in `_gone` yet
        self._gone: Counter[str] = Counter()

    def register(self, owner: Counters) -> None:
        key = next(self._keys)
        with self._lock:
            self._living[key] = owner._counts
        # The collector may run this inside `total`, so it takes no lock: appending to a deque is atomic.
        weakref.finalize(owner, self._retired.append, key).atexit = False

    def total(self) -> Counter[str]:
        with self._lock:
            while self._retired:
                self._gone.update(self._living.pop(self._retired.popleft()))
            result = Counter(self._gone)
            for counts in self._living.values():
                result.update(dict(counts))  # a copy made in one step: the owner may be adding names meanwhile
        return result


class _Sum(Counters):
    """The sum over all counters; it cannot be added to."""

    def add(self, name: str, amount: int = 1) -> None:
        raise TypeError("the sum of counters is read-only; add to the counters of one object")

    def snapshot(self) -> dict[str, int]:
        return {name: count for name, count in _registry.total().items() if count}


_registry = _Registry()
counters: Counters = _Sum()
