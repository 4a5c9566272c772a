"""Which sizes of a wrapped module are captured: the grid that its options ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rung.compile.compiled import CompiledFunction
from rung.config import CompileConfig
from rung.errors import ConfigError, LadderError
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


def sizes_to_capture(
    sizes: Sequence[int | Mapping[str, int]], dims: Sequence[str], bounds: Mapping[str, int | None]
) -> list[Mapping[str, int]]:
    """The size of each dimension by name. Raises `LadderError` for a number that no call can have, `ConfigError` for other names."""
    if isinstance(sizes, str | Mapping) or not isinstance(sizes, Iterable) or not (given := list(sizes)):
        raise LadderError(f"the sizes to capture are {sizes!r}, expected a list of at least one", hint="for example capture([1, 8, 64], x)")
    found = []
    for index, size in enumerate(given):
        named = size if isinstance(size, Mapping) else {dims[0]: size}
        if set(named) != set(dims):
            raise ConfigError(
                f"entry {index} of the sizes to capture names {sorted(map(str, named))}, this module has {list(dims)}",
                hint="name every dimension",
            )
        for name, number in named.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise LadderError(f"entry {index} of the sizes to capture is {number!r}, expected an integer >= 1", hint="drop it")
            bound = bounds.get(name)
            if bound is not None and number > bound:
                raise LadderError(
                    f"entry {index} of the sizes to capture is {number}, above the maximum {bound} of {name!r}", hint="drop it"
                )
        found.append(named)
    return found


def _mode(compiled: CompiledFunction, asked: str) -> GraphMode:
    if asked == "auto":
        has_breaks = not all(step.capturable(full=False) for step in compiled.steps)
        return GraphMode.PIECEWISE if has_breaks else GraphMode.FULL
    return GraphMode(asked)


def _axis(name: str, sizes: Sequence[int] | None, padded: bool, bound: int | None) -> Axis:
    """A padded dimension has a ladder, which ends at its maximum unless that lies above `DEFAULT_TOP`; an exact one has the sizes it was
    given, or any."""
    if sizes is None and not padded:
        return Axis(name=name)
    if sizes is None:
        return Axis(name=name, ladder=Ladder.up_to(min(bound or DEFAULT_TOP, DEFAULT_TOP)), padded=True)
    ends = padded and bound is not None and bound <= DEFAULT_TOP
    return Axis(name=name, ladder=Ladder.custom(sizes, bound, append=ends), padded=padded)


def _given_sizes(config: CompileConfig, dims: Sequence[str], name: str) -> Sequence[int] | None:
    given = config.capture_sizes
    if given is None or isinstance(given, Mapping):
        return None if given is None else given.get(name)
    if len(dims) > 1:
        unnamed = any(dim.startswith("~") for dim in dims)
        raise ConfigError(
            f"capture_sizes is one list, and this module has the dimensions {list(dims)}",
            hint=f"{'name them in `dynamic`, and ' if unnamed else ''}give a list for each: "
            f"capture_sizes={{{'name' if unnamed else dims[0]!r}: (...), ...}}",
        )
    return given
