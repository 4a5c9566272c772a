"""Plans in the store. Several may lie under one key: for other sources (another branch), or other sizes that a trace fixed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from rung.cache import Factors, Manifest, Store
from rung.compile.paths import Path
from rung.compile.plan import CompilePlan
from rung.compile.sources import current_digest
from rung.errors import ArtifactError

KIND = "plans"
_MAX_CANDIDATES = 4


@dataclass(frozen=True, slots=True)
class Found:
    """A plan, the seconds that making it took and what the passes did; or None and why there is none."""

    plan: CompilePlan | None
    reason: str
    seconds: float = 0.0
    passes: list[dict[str, Any]] = field(default_factory=list)


class StoredPlans:
    """Finds the candidate under a key that holds now, and keeps new ones in front of the others."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def find(
        self, key: str, factors: Factors, tensors: Sequence[tuple[Path, torch.Tensor]], violation: Callable[[CompilePlan], str]
    ) -> Found:
        """A plan whose sources and sizes are those of now, and whose guards hold: `violation` tells which does not, or nothing."""
        try:
            manifest = self.store.get(KIND, key)
        except ArtifactError as error:
            _warn(error.message)
            return Found(None, error.message)
        if manifest is None:
            values = factors.values()
            return Found(None, self.store.explain_miss(KIND, values, title=values["entry"]))
        reason = "no plan lies under this key"
        for data in manifest.data["plans"]:
            try:
                plan = CompilePlan.from_json(data)
            except (KeyError, TypeError, IndexError, ValueError):
                reason = "the plan under this key is damaged"
                _warn(reason)
                continue
            changed = _changed(plan)
            if not _fits(plan, tensors):
                reason = "the plan under this key serves another size"
            elif changed:
                reason = f"the source of {changed} changed or cannot be found"
            elif violated := violation(plan):
                reason = f"the plan under this key was traced when {violated}"
            else:
                return Found(plan, "", sum(data["seconds"].values()), list(data["passes"]))
        lost = manifest.data.get("lost")
        return Found(None, f"not cacheable: nothing leads to the source of {lost} from another process" if lost else reason)

    def keep(
        self, key: str, factors: Factors, plan: CompilePlan, seconds: Mapping[str, float], passes: Sequence[Any], blobs: Collection[str]
    ) -> None:
        """`blobs` are all that the plan's pieces need. A plan that no process could find again is not kept, only the reason. Raises
        `CacheError` when the disk refuses."""
        older: list[Any] = []
        with suppress(ArtifactError):
            found = self.store.get(KIND, key)
            older = [] if found is None else found.data["plans"]
        lost = _changed(plan)
        kept = {**plan.to_json(), "seconds": dict(seconds), "passes": list(passes), "blobs": list(blobs)}
        plans = older if lost else [kept, *older[: _MAX_CANDIDATES - 1]]
        named = tuple(dict.fromkeys(digest for data in plans for digest in data["blobs"]))
        data = {"plans": plans, **({"lost": lost} if lost else {})}
        self.store.put(Manifest(kind=KIND, key=key, title=plan.entry, factors=factors.values(), seconds=seconds, blobs=named, data=data))


def _warn(damage: str) -> None:
    warnings.warn(f"a stored plan could not be used and is built again: {damage}", RuntimeWarning, stacklevel=3)


def _changed(plan: CompilePlan) -> str:
    """The first function of a plan whose source is another one now, or cannot be found; an empty text when there is none."""
    return next((ref.name for ref in plan.sources if current_digest(ref) != ref.digest), "")


def _fits(plan: CompilePlan, tensors: Sequence[tuple[Path, torch.Tensor]]) -> bool:
    """Whether the tensors have the sizes that the trace fixed although they might have been dynamic."""
    specs = dict(plan.tensors)
    return all(
        path in specs and all(extent in (size, str(extent)) for extent, size in zip(specs[path].shape, tensor.shape, strict=True))
        for path, tensor in tensors
    )
