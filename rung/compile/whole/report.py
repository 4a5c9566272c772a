"""What passes over a whole graph did to it; a part of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rung.attention import Attention


@dataclass(frozen=True, slots=True)
class WholeReport:
    """Matches by pass and near misses; and by attention layer whose output is quantised, whether its backend could write it so. A plan
    holds while these answers are the same."""

    passes: Mapping[str, Any] = field(default_factory=dict)
    fp8_outputs: Mapping[str, bool] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"passes": dict(self.passes), "fp8_outputs": dict(self.fp8_outputs)}

    def violation(self, layers: Mapping[str, Attention]) -> str:
        """What is no longer so, empty when all is."""
        for name, could in self.fp8_outputs.items():
            if name in layers and (layers[name].why_not_fp8_output is None) != could:
                return f"the backend of {name!r} could{'' if could else ' not'} write e4m3"
        return ""

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> WholeReport:
        return WholeReport(dict(data["passes"]), dict(data["fp8_outputs"]))
