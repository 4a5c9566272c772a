"""`rung explain`: what a compile did to a model, and why."""

from __future__ import annotations

import json
from typing import Any

import click

from rung.cli.command import Command, CommandGroup
from rung.cli.options import device_options, resolve_device


@click.group(cls=CommandGroup)
def explain() -> None:
    """Say what a compile did to a model, and why."""


@explain.command(cls=Command)
@click.argument("target", default="smollm2")
@click.option("--inputs", help="module:function that takes a size and returns the arguments, for a module:attr target.")
@click.option("--no-before", is_flag=True, help="Do not compile a second time without passes to count the kernels before them.")
@device_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def passes(target: str, inputs: str | None, no_before: bool, dtype: str, device: str, as_json: bool) -> None:
    """For the whole graph of TARGET and each unique piece: matches of every pass, ops and their providers, near misses, and kernels before
    and after.

    TARGET is as for `rung bench`. Kernels are counted in the code that Inductor generated; "before" is a compile without any pass."""
    from rung.cli.explain_passes import explain_passes

    place = resolve_device(device)
    pieces = explain_passes(target, inputs, dtype, place, before=not no_before)
    if as_json:
        click.echo(json.dumps({"target": target, "pieces": pieces}))
    else:
        _show(target, pieces)


def _show(target: str, pieces: list[dict[str, Any]]) -> None:
    from rung.cli.console import console, table

    rows = [
        (item["piece"], item["uses"], name, what, count)
        for item in pieces
        for name, found in item["passes"].items()
        for what, count in found.items()
        if count
    ]
    out = console()
    out.print(table(f"{target}: what the passes did", ("piece", "uses", "pass", "match", "count"), rows, numbers=("uses", "count")))
    counts = [(item["piece"], *(_text(item["kernels"][when]) for when in ("before", "after"))) for item in pieces if item["kernels"]]
    out.print(table("kernels and library calls", ("piece", "before", "after"), counts, numbers=("before", "after")))
    missed = [
        (item["piece"], miss["pattern"], f"{miss['matched']}/{miss['total']}", miss["anchor"], miss["reason"])
        for item in pieces
        for miss in item["near_misses"]
    ]
    if missed:
        out.print(table("near misses", ("piece", "pattern", "fitted", "at", "first difference"), missed))


def _text(count: int | None) -> str:
    return "-" if count is None else str(count)
