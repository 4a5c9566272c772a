"""`rung ladder lint`: what is wrong with a list of capture sizes, and how recorded steps fared with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rung.cli.command import Command
from rung.cli.options import integers

if TYPE_CHECKING:
    from rung.graphs.coverage import Coverage
    from rung.graphs.lint import LintReport
    from rung.graphs.trace import TraceHeader, TraceRun

MODES = ("none", "piecewise", "full", "full_decode_only", "full_and_piecewise")


def _given(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """As `integers`, duplicates kept: they are one of the things to find."""
    return None if integers(ctx, param, value) is None or value is None else tuple(int(part) for part in value.split(","))


@click.command(cls=Command)
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), help="Recorded steps (rung generate --step-trace).")
@click.option("--sizes", metavar="N,N,...", callback=_given, help="Check these sizes; default: the trace's, else the default ladder.")
@click.option("--max-num-tokens", type=click.IntRange(1), help="Token budget of a step; default: the trace's, else 2048.")
@click.option("--max-num-requests", type=click.IntRange(1), help="Requests that decode together; default: the trace's, else 64.")
@click.option("--graphs", type=click.Choice(MODES), help="Configured mode; default: the trace's, else full_and_piecewise.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def lint(
    ctx: click.Context,
    trace: Path | None,
    sizes: tuple[int, ...] | None,
    max_num_tokens: int | None,
    max_num_requests: int | None,
    graphs: str | None,
    as_json: bool,
) -> None:
    """Check capture sizes, and with a trace how its steps fared. Exit status 1 when there is a problem.

    Without other options the steps count as they were recorded; with some, as they would run under these."""
    from rung.graphs.coverage import replay
    from rung.graphs.lint import lint as check
    from rung.graphs.trace import read_trace

    runs = read_trace(trace) if trace is not None else ()
    setup = _setup(runs, sizes, max_num_tokens, max_num_requests, graphs)
    if runs and any(option is not None for option in (sizes, max_num_tokens, max_num_requests, graphs)):
        runs = tuple(replay(run, setup) for run in runs)
    report = check(setup.ladder if sizes is None else sizes, setup, runs)
    if as_json:
        click.echo(json.dumps(_as_json(report)))
    else:
        _show(report)
    ctx.exit(1 if report.problems else 0)


def _setup(
    runs: tuple[TraceRun, ...], sizes: tuple[int, ...] | None, max_num_tokens: int | None, max_num_requests: int | None, graphs: str | None
) -> TraceHeader:
    """What is checked: the last run's configuration, or a runner's defaults, with the options on top."""
    from rung.graphs import ConfiguredMode, Ladder
    from rung.graphs.trace import TraceHeader
    from rung.runner import RunnerConfig

    usual = RunnerConfig()
    setup = TraceHeader(
        graphs=ConfiguredMode.FULL_AND_PIECEWISE,
        max_num_tokens=usual.max_num_tokens,
        max_num_requests=usual.max_num_requests,
        max_waste=usual.max_waste,
    )
    if runs:
        setup = runs[-1].header
    setup = replace(
        setup,
        graphs=setup.graphs if graphs is None else ConfiguredMode(graphs),
        max_num_tokens=max_num_tokens or setup.max_num_tokens,
        max_num_requests=max_num_requests or setup.max_num_requests,
    )
    if sizes is not None:
        return replace(setup, ladder=Ladder.custom(sizes).sizes)
    if runs and setup.ladder:
        return setup
    return replace(
        setup, ladder=Ladder.for_requests(setup.max_num_requests or usual.max_num_requests, max_num_tokens=setup.max_num_tokens).sizes
    )


def _as_json(report: LintReport) -> dict[str, Any]:
    findings = [{"rule": str(one.rule), "problem": one.is_problem, "message": one.message, "advice": one.advice} for one in report.findings]
    coverage = None if report.coverage is None else _coverage_json(report.coverage)
    return {"sizes": list(report.sizes), "ok": not report.problems, "findings": findings, "coverage": coverage}


def _coverage_json(coverage: Coverage) -> dict[str, Any]:
    others = [
        {"mode": str(mode), "reason": str(reason), "steps": count, "advice": reason.advice}
        for (mode, reason), count in coverage.others.most_common()
    ]
    hits = {str(size): count for size, count in sorted(coverage.hits.items())}
    return {"steps": coverage.steps, "share": coverage.share, "waste": coverage.waste, "hits": hits, "others": others}


def _show(report: LintReport) -> None:
    from rung.cli.console import console, table

    out = console()
    if report.coverage is not None:
        coverage = report.coverage
        click.echo(
            f"{coverage.share:.2%} of {coverage.steps} steps ran in the best mode their configuration allows; "
            f"{coverage.waste:.1%} of the rows in graphs were padding"
        )
        if coverage.others:
            rows = [(mode, reason.sentence, count, reason.advice) for (mode, reason), count in coverage.others.most_common()]
            out.print(table("other steps", ("mode", "why", "steps", "what to do"), rows, numbers=("steps",)))
    for one in report.findings:
        click.secho(f"{'problem' if one.is_problem else 'note'} ({one.rule}): {one.message}", fg="red" if one.is_problem else None)
        click.echo(f"  {one.advice}")
    click.echo(f"{len(report.sizes)} sizes, {len(report.problems)} problems")
