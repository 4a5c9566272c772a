"""`rung ladder plan`: the capture sizes that serve recorded steps best."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rung.cli.command import Command
from rung.errors import ConfigError

if TYPE_CHECKING:
    from rung.graphs.planner import Outcome


@click.command(cls=Command)
@click.option(
    "--trace", type=click.Path(dir_okay=False, path_type=Path), required=True, help="Recorded steps (rung generate --step-trace)."
)
@click.option("--sizes", "count", type=click.IntRange(1), required=True, help="At most so many capture sizes.")
@click.option(
    "--max", "maximum", type=click.IntRange(1), help="Capture this size in any case and none above; default: the recorded ladder's top."
)
@click.option("--memory", type=click.IntRange(1), help="Budget for the graphs in bytes.")
@click.option(
    "--size-bytes",
    metavar="BYTES|FILE",
    help="Bytes of one size, a JSON object from size to bytes, or what rung bench --out measured; default: an assumption.",
)
@click.option(
    "--times", type=click.Path(dir_okay=False, path_type=Path), help="Measured times: the JSON of rung bench --out; default: a model."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    trace: Path, count: int, maximum: int | None, memory: int | None, size_bytes: str | None, times: Path | None, as_json: bool
) -> None:
    """Choose the capture sizes with which the recorded steps cost least. The answer is exact for the times it is given.

    The recorded ladder's top is the limit: steps above it ran without a graph and count that way."""
    from rung.graphs import Ladder
    from rung.graphs.planner import evaluate, histogram, plan_ladder
    from rung.graphs.step_cost import StepCosts, measured_curves, modelled_curves
    from rung.graphs.trace import read_trace

    runs = read_trace(trace)
    header = runs[-1].header
    curves = modelled_curves() if times is None else measured_curves(_read_json(times, "--times"))
    costs = StepCosts(curves=curves, max_waste=header.max_waste, max_num_requests=header.max_num_requests)
    steps = histogram(runs)
    limit = header.ladder[-1] if header.ladder else None
    needed = _bytes_of(size_bytes, maximum or limit or max((tokens for tokens, _ in steps), default=1))
    left = None if memory is None else memory - needed.shared
    found = plan_ladder(steps, costs, count, limit=limit, maximum=maximum, memory=left, size_bytes=needed.of)
    before = evaluate(steps, costs, Ladder.custom(header.ladder)) if header.ladder else None
    report = {
        "sizes": list(found.sizes),
        "before": None if before is None else _outcome_json(before),
        "after": _outcome_json(found.outcome),
        "bytes": needed.shared + sum(needed.of(size) for size in found.sizes),
        "bytes_from": needed.source,
        "times": "modelled" if times is None else str(times),
    }
    if as_json:
        click.echo(json.dumps(report))
        return
    click.echo(",".join(str(size) for size in found.sizes))
    _show(before, found.outcome, report)


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "num_sizes": len(outcome.sizes),
        "mean_step_us": outcome.mean_cost,
        "waste": outcome.waste,
        "steps_without_graph": outcome.steps_without_graph,
        "steps": outcome.steps,
    }


def _show(before: Outcome | None, after: Outcome, report: Mapping[str, Any]) -> None:
    """To the error stream: the output is the list alone, for --capture-sizes."""
    from rung.cli.console import console, table

    out = console(err=True)
    rows = [
        (name, len(one.sizes), f"{one.waste:.2%}", one.steps_without_graph, f"{one.mean_cost:.1f}")
        for name, one in (("recorded ladder", before), ("plan", after))
        if one is not None
    ]
    columns = ("", "sizes", "padding", "steps without a graph", "mean step us")
    out.print(f"graphs take {report['bytes'] / 2**20:.1f} MiB ({report['bytes_from']})")
    out.print(table(f"{after.steps} recorded steps, {report['times']} times", columns, rows, numbers=columns[1:]))


@dataclass(frozen=True, slots=True)
class _Bytes:
    of: Callable[[int], int]  # bytes of one size
    source: str
    shared: int = 0  # what all sizes use together


def _bytes_of(given: str | None, top: int) -> _Bytes:
    """The bytes of a size: assumed, one number, straight lines between those of a file, or the model of captured graphs in it."""
    from rung.graphs.memory import MemoryModel
    from rung.graphs.step_cost import MODELLED_SIZE_BYTES, Curve

    if given is None:
        return _Bytes(lambda size: MODELLED_SIZE_BYTES, f"assumed: {MODELLED_SIZE_BYTES >> 20} MiB a size")
    if given.isdecimal():
        return _Bytes(lambda size: int(given), "given")
    table = _read_json(Path(given), "--size-bytes")
    if isinstance(table, dict) and "graph_memory" in table:
        if not (table["graph_memory"] or {}).get("model"):
            raise ConfigError(f"--size-bytes: no graph was captured for {given!r}", hint="measure with rung bench --modes piecewise,full")
        model = MemoryModel.from_json(table["graph_memory"]["model"])
        return _Bytes(model.size_bytes, f"predicted from {given}", model.shared_pool_bytes(top))
    try:
        curve = Curve.measured({int(size): float(value) for size, value in table.items()})
    except (TypeError, ValueError, AttributeError):
        curve = Curve((), ())
    if not curve.rows or curve.values[0] < 0:
        raise ConfigError(
            f"--size-bytes: {given!r} is no JSON object from sizes to bytes", hint='for example {"8": 9000000, "512": 15000000}'
        )
    return _Bytes(lambda size: int(curve(size)), "given")


def _read_json(path: Path, option: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option}: {str(path)!r} cannot be read as JSON: {error}", hint="name a JSON file") from None
