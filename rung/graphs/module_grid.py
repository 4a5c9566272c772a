"""Which sizes of a wrapped module are captured: the grid that its options ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rung.compile.compiled import CompiledFunction
from rung.config import CompileConfig
from rung.errors import ConfigError
from rung.graphs.capture import has_host_breaks
from rung.graphs.descriptor import GraphMode
from rung.graphs.grid import Axis, Grid
from rung.graphs.ladder import DEFAULT_TOP, Ladder
from rung.graphs.reasons import Reason


def module_grid(compiled: CompiledFunction, config: CompileConfig, dims: Sequence[str], padded: frozenset[str]) -> Grid:
    """The grid over `dims`. Raises `ConfigError` for capture sizes that name no dimension where there are several."""
    mode = _mode(compiled, config.graphs)
    cut = mode is GraphMode.FULL and has_host_breaks(compiled)
    axes = [_axis(name, _given_sizes(config, dims, name), name in padded, compiled.plan.bounds.get(name)) for name in dims]
    return Grid(mode, axes, max_waste=config.max_waste, reason=Reason.HOST_BREAK if cut else Reason.BEST)


def _mode(compiled: CompiledFunction, asked: str) -> GraphMode:
    if asked == "auto":
        has_breaks = not all(step.capturable(full=False) for step in compiled.steps)
        return GraphMode.PIECEWISE if has_breaks else GraphMode.FULL
    return GraphMode(asked)


def _axis(name: str, sizes: Sequence[int] | None, padded: bool, bound: int | None) -> Axis:
    """A padded dimension has a ladder, an exact one the sizes it was given, or any."""
    if sizes is None and padded:
        return Axis(name=name, ladder=Ladder.up_to(min(bound or DEFAULT_TOP, DEFAULT_TOP)), padded=True)
    return Axis(name=name, ladder=None if sizes is None else Ladder.custom(sizes), padded=padded)


def _given_sizes(config: CompileConfig, dims: Sequence[str], name: str) -> Sequence[int] | None:
    given = config.capture_sizes
    if given is None or isinstance(given, Mapping):
        return None if given is None else given.get(name)
    if len(dims) > 1:
        raise ConfigError(
            f"capture_sizes is one list, and this module has the dimensions {list(dims)}",
            hint=f"give a list for each: capture_sizes={{{dims[0]!r}: (...), ...}}",
        )
    return given
