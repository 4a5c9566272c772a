"""`rung ladder`: the capture sizes, and the rows that padding to them costs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from rung.cli.command import CommandGroup
from rung.cli.ladder_lint import lint
from rung.cli.ladder_plan import plan
from rung.cli.options import integers

if TYPE_CHECKING:
    from rung.graphs import Ladder


_LARGEST = 1 << 20  # every step up to it is looked at


@click.group(cls=CommandGroup, invoke_without_command=True)
@click.option("--max", "maximum", type=int, help="The largest size that will ever come; default: the largest of --sizes, else 512.")
@click.option("--sizes", metavar="N,N,...", callback=integers, help="Capture these sizes instead of the default series.")
@click.option("--trim", type=int, help="Keep at most this many sizes, those that cost the least padding.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def ladder(ctx: click.Context, maximum: int | None, sizes: tuple[int, ...] | None, trim: int | None, as_json: bool) -> None:
    """Print the capture sizes and their padding; check them, or choose them for recorded steps."""
    if ctx.invoked_subcommand is not None:
        return
    from rung.errors import LadderError
    from rung.graphs.ladder import DEFAULT_TOP, Ladder

    top = max(maximum or 0, *(sizes or (0,)))
    if top > _LARGEST:
        raise LadderError(f"--{'max' if top == maximum else 'sizes'}: {top} is above {_LARGEST}", hint="no step has that many tokens")
    chosen = Ladder.custom(sizes, maximum) if sizes else Ladder.up_to(DEFAULT_TOP if maximum is None else maximum)
    if trim is not None:
        chosen = chosen.trimmed(trim)
    rows = _intervals(chosen)
    if as_json:
        click.echo(
            json.dumps({"sizes": list(chosen), "mean_waste": _mean_waste(chosen), "worst_waste": max((r[3] for r in rows), default=0)})
        )
        return
    from rung.cli.console import console, table

    shown = [(size, first if first == size else f"{first}..{size}", f"{mean:.1%}", f"{worst:.1%}") for size, first, mean, worst in rows]
    console().print(table("", ("capture size", "serves", "mean waste", "worst waste"), shown, numbers=("capture size", "serves")))
    mean = f"{_mean_waste(chosen):.1%}"
    click.echo(f"{len(chosen)} sizes up to {chosen.top}; {mean} of the rows are padding when all of them come equally often")


ladder.add_command(lint)
ladder.add_command(plan)


def _intervals(ladder: Ladder) -> list[tuple[int, int, float, float]]:
    """(size, smallest step that it serves, mean and worst share of padded rows) for each size."""
    result = []
    first = 1
    for size in ladder:
        wastes = [ladder.waste(step) for step in range(first, size + 1)]
        result.append((size, first, sum(wastes) / len(wastes), max(wastes)))
        first = size + 1
    return result


def _mean_waste(ladder: Ladder) -> float:
    """Padded rows over all rows, for one step of each size."""
    padded = [ladder.pad_to(step) or step for step in range(1, ladder.top + 1)]
    return 1 - sum(range(1, ladder.top + 1)) / sum(padded) if padded else 0.0
