"""Where the memory of a device goes: the terms that leave the rest to the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """All in bytes. `total_bytes` is the device's memory; on a CPU what is available, and what this runner holds of it already."""

    total_bytes: int
    fraction: float  # of the total that may be filled
    weights_bytes: int
    buffers_bytes: int  # static inputs, slots, tables, workspaces
    other_bytes: int = 0  # held outside of the allocator: the driver, loaded kernels, other processes
    activations_bytes: int | None = None  # peak of the largest step above; None: cannot be measured here, counted as 0
    graphs_bytes: int | None = None  # predicted; None: no graphs
    note: str = ""  # why a term was not measured

    @property
    def kv_budget_bytes(self) -> int:
        """What is left for the KV cache; negative when nothing is."""
        taken = self.weights_bytes + self.buffers_bytes + self.other_bytes + (self.activations_bytes or 0) + (self.graphs_bytes or 0)
        return int(self.fraction * self.total_bytes) - taken

    def as_json(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in self.__slots__}, "kv_budget_bytes": self.kv_budget_bytes}

    def __str__(self) -> str:
        terms = [("weights", self.weights_bytes), ("buffers", self.buffers_bytes), ("other", self.other_bytes)]
        terms += [
            (name, value) for name, value in (("activations", self.activations_bytes), ("graphs", self.graphs_bytes)) if value is not None
        ]
        minus = "".join(f" - {value / 2**20:.1f} {name}" for name, value in terms)
        note = f"; {self.note}" if self.note else ""
        return (
            f"{self.fraction} x {self.total_bytes / 2**20:.1f} MiB{minus} = {self.kv_budget_bytes / 2**20:.1f} MiB for the KV cache{note}"
        )
