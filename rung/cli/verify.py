"""`rung verify`: whether every mode computes what the module computes, and which piece does not."""

from __future__ import annotations

import json
from typing import Any

import click

from rung.cli.command import EXIT_BUG, CompilingCommand
from rung.cli.options import device_options, integers, resolve_device, resolve_dtype
from rung.errors import ConfigError


@click.command(cls=CompilingCommand)
@click.argument("target", default="smollm2")
@click.option(
    "--inputs", help="module:function that takes a size and returns the arguments (tensor, tuple or dict), for a module:attr target."
)
@click.option("--sizes", metavar="N,N,...", callback=integers, help="Capture sizes; default: the ladder up to 64, or up to 8 on a CPU.")
@click.option("--sets", type=click.IntRange(1), default=2, show_default=True, help="Sets of different data; every other one is padded.")
@click.option(
    "--context", type=click.IntRange(1), default=32, show_default=True, help="Prompt tokens behind each request of a decode step."
)
@click.option("--pieces/--no-pieces", default=True, help="Compare each unique piece with its trace, which is made once more for that.")
@click.option("--tolerance", type=click.FloatRange(0), help="Relative error allowed against the module without rung.")
@device_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
@click.pass_context
def verify(
    ctx: click.Context,
    target: str,
    inputs: str | None,
    sizes: tuple[int, ...] | None,
    sets: int,
    context: int,
    pieces: bool,
    tolerance: float | None,
    dtype: str,
    device: str,
    as_json: bool,
) -> None:
    """Run TARGET eagerly, compiled, in piecewise and in full graphs at every size and compare. TARGET is as for `rung bench`.

    Each unique piece is compared with its trace, run eagerly on the values that a run gives it (float32 1e-4, float16 1e-2, bfloat16 3e-2,
    with e4m3 inside 1e-1).

    A graph must equal its plan at the same padded size bit by bit, with padding and pool poisoned; everything must agree with the module
    itself within a relative error (norm of the difference over the norm; float32 1e-4, float16 1e-2, bfloat16 3e-2). A graph that differs
    is bisected to the first piece or break. Exit status 1 on a difference."""
    from rung.cli.targets import is_module_target
    from rung.graphs import Ladder

    place = resolve_device(device)
    sizes = tuple(sorted(sizes or Ladder.up_to(64 if place.type == "cuda" else 8).sizes))
    work: Any
    if is_module_target(target):
        work = _module(target, inputs, sizes, dtype, place, sets=sets, tolerance=tolerance, by_piece=pieces)
    else:
        from rung.cli.assembly import open_decoder
        from rung.cli.verify_decoder import DecoderVerify

        if inputs is not None:
            raise ConfigError(f"--inputs goes with a module:attr target, and {target!r} is a model", hint="leave --inputs out")
        decoder = open_decoder(target, resolve_dtype(dtype, place), place, shapes=True)
        work = DecoderVerify(decoder, sizes, context=context, sets=sets, tolerance=tolerance, by_piece=pieces)
    checks = []
    for size in sizes:
        click.echo(f"size {size} ...", err=True)
        checks += list(work.run(size))
    if as_json:
        report = {"target": target, "padding": work.padding, "passed": all(check.passed for check in checks)}
        click.echo(json.dumps({**report, "checks": [check.as_json() for check in checks]}))
    else:
        _show(target, work.padding, checks)
    if not all(check.passed for check in checks):
        ctx.exit(EXIT_BUG)


def _module(target: str, inputs: str | None, sizes: tuple[int, ...], dtype: str, place: Any, **options: Any) -> Any:
    from rung.cli.targets import open_module
    from rung.cli.verify_module import ModuleVerify

    module, build = open_module(target, inputs, None if dtype == "auto" else resolve_dtype(dtype, place), place)
    return ModuleVerify(module, build, sizes, device=place, **options)


def _show(target: str, padding: str, checks: list[Any]) -> None:
    from rung.cli.console import console, table

    rows = [
        (check.size, check.mode, check.data, check.rows, _bits(check.bits), f"{check.error:.1e}", f"{check.tolerance:.0e}", check.verdict)
        for check in checks
    ]
    columns = ("size", "mode", "data", "rows", "equals its plan", "error", "allowed", "verdict")
    out = console()
    out.print(table(f"{target}: against the module without rung", columns, rows, numbers=("size", "data", "rows", "error", "allowed")))
    wrong = sum(not check.passed for check in checks)
    out.print(f"{len(checks)} checks, {wrong} wrong; {padding}")


def _bits(bits: bool | None) -> str:
    return "-" if bits is None else "bit by bit" if bits else "NO"
