"""What a step costs by mode and size, measured or modelled, and what a captured size costs in memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rung.errors import ConfigError
from rung.graphs.descriptor import GraphMode
from rung.graphs.ladder import DEFAULT_MAX_WASTE, FREE_PADDING

Sizes = npt.NDArray[np.int64]
Costs = npt.NDArray[np.float64]

# Microseconds of a decode step, (fixed, for each row): a line through a prototype's steps of 1 to 64 rows of an 8B decoder on an H200,
# where full, piecewise and no graphs took 4.01, 4.65 and 7.0 ms at one row. With one slope for all modes a plan minimises padded rows; the
# fixed parts only weigh them against steps that run without a graph.
MODELLED_MICROSECONDS: Mapping[GraphMode, tuple[float, float]] = {
    GraphMode.FULL: (4010.0, 6.3),
    GraphMode.PIECEWISE: (4650.0, 6.3),
    GraphMode.NONE: (7000.0, 6.3),
}
# An assumption, to be replaced by a measurement of the model at hand: a full and a piecewise graph of 650 kernels each, 8 KiB for a kernel.
# It is the same at every size: graphs of one ladder have about as many kernels and share one memory pool.
MODELLED_SIZE_BYTES = 10 * 2**20


@dataclass(frozen=True, slots=True)
class Curve:
    """A function of the number of rows that never falls: straight between its points, and with its last slope beyond them."""

    rows: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def affine(cls, fixed: float, per_row: float) -> Curve:
        return cls((0.0, 1.0), (fixed, fixed + per_row))

    @classmethod
    def measured(cls, points: Mapping[int, float]) -> Curve:
        """Through `points`. A larger size never counts as cheaper than a smaller one, whatever was measured."""
        rows = sorted(points)
        values = np.maximum.accumulate([points[size] for size in rows])
        return cls(tuple(float(size) for size in rows), tuple(float(value) for value in values))

    def __call__(self, rows: npt.ArrayLike) -> Costs:
        asked = np.asarray(rows, np.float64)
        inside = np.interp(asked, self.rows, self.values)
        if len(self.rows) < 2:
            return inside
        slope = (self.values[-1] - self.values[-2]) / (self.rows[-1] - self.rows[-2])
        return inside + slope * np.maximum(asked - self.rows[-1], 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """The cost of a step of n tokens when `size` is the smallest captured size that holds it: non-decreasing in `size`.

    That is the cost of its mode at the padded size, or where the waste cap forbids so much padding, the cost without a graph. The latter
    never counts as less than the most padding that the cap allows, else a cap could make a larger size look better."""

    curves: Mapping[GraphMode, Curve]
    max_waste: float | None = DEFAULT_MAX_WASTE
    max_num_requests: int | None = None  # full decode graphs end here, so a decode is padded no further

    def of(self, tokens: Sizes, mode: GraphMode, size: int) -> Costs:
        """For each of `tokens`, all of them at most `size`."""
        padded = self.padded(tokens, mode, size)
        cost = self.curves[mode](padded)
        allowed = self._allowed(tokens)
        if allowed is None:
            return cost
        return np.where(padded <= allowed, cost, np.maximum(self.without_graph(tokens), self.curves[mode](allowed)))

    def padded(self, tokens: Sizes, mode: GraphMode, size: int) -> Sizes:
        """The rows that run, not regarding the waste cap."""
        if mode is GraphMode.FULL and self.max_num_requests is not None and size > self.max_num_requests:
            return np.maximum(tokens, self.max_num_requests)
        return np.full_like(tokens, size)

    def in_graph(self, tokens: Sizes, mode: GraphMode, size: int) -> npt.NDArray[np.bool_]:
        """Which of `tokens` the waste cap lets run in a graph."""
        allowed = self._allowed(tokens)
        return np.ones(tokens.shape, np.bool_) if allowed is None else self.padded(tokens, mode, size) <= allowed

    def without_graph(self, tokens: Sizes) -> Costs:
        return self.curves[GraphMode.NONE](tokens)

    def _allowed(self, tokens: Sizes) -> Sizes | None:
        if self.max_waste is None:
            return None
        allowed: Sizes = np.maximum(np.floor(self.max_waste * tokens).astype(np.int64), FREE_PADDING)
        return allowed


def modelled_curves() -> dict[GraphMode, Curve]:
    """Costs in microseconds from `MODELLED_MICROSECONDS`."""
    return {mode: Curve.affine(*line) for mode, line in MODELLED_MICROSECONDS.items()}


def measured_curves(report: Mapping[str, Any]) -> dict[GraphMode, Curve]:
    """Costs in microseconds from the JSON of `rung bench --out`.

    A time belongs to the padded size that ran. A graph mode that was not measured takes the times of the other one, and steps without
    graphs (`compiled`) those of the slower graphs. Raises `ConfigError` when no graph was measured."""
    points: dict[GraphMode, dict[int, float]] = {mode: {} for mode in GraphMode}
    for index, row in enumerate(_rows(report)):
        try:
            size, asked, milliseconds, ran = int(row["size"]), row["mode"], float(row["step_ms"]), max(row["ran"], key=row["ran"].get)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ConfigError(f"row {index} of the times has no size, mode, step_ms or ran: {row!r}", hint=_HINT) from None
        if asked == "compiled" and ran == "compiled":
            points[GraphMode.NONE][size] = milliseconds * 1e3
        elif (match := re.fullmatch(r"(full|piecewise)(?: (\d+))?", ran)) and match[1] == asked:
            points[GraphMode(match[1])][int(match[2] or size)] = milliseconds * 1e3
    curves = {mode: Curve.measured(values) for mode, values in points.items() if values}
    graphs = [mode for mode in (GraphMode.FULL, GraphMode.PIECEWISE) if mode in curves]
    if not graphs:
        raise ConfigError("the times hold no step that ran in a full or piecewise graph", hint=_HINT)
    for mode in GraphMode:
        curves.setdefault(mode, curves[graphs[-1]])
    return curves


_HINT = "measure with rung bench TARGET --sizes 1,8,64,256 --modes compiled,piecewise,full --out FILE"


def _rows(report: Mapping[str, Any]) -> Sequence[Any]:
    rows = report.get("rows") if isinstance(report, Mapping) else None
    if not isinstance(rows, list):
        raise ConfigError("the times have no list `rows`", hint=_HINT)
    return rows
