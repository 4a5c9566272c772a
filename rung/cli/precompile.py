"""`rung precompile`: fill a store before anybody runs the model."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import click

from rung.cli.cache_show import emit, show_table
from rung.cli.command import Command
from rung.cli.options import DTYPES, integers
from rung.cli.precompile_jobs import TARGETS, Job, run_jobs
from rung.errors import BackendUnavailableError, ConfigError


def _ranges(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...]:
    """The upper ends of ranges such as 1:2048,1:8192; a number alone is an upper end."""
    try:
        ends = tuple(int(part.removeprefix("1:")) for part in (value or "").split(",") if part)
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of ranges such as 1:2048,1:8192; ranges begin at 1", ctx, param) from None
    if ends and min(ends) < 1:
        raise click.BadParameter(f"{value!r} holds a range without a size", ctx, param)
    return ends


@click.command(cls=Command)
@click.argument("target", default="smollm2")
@click.option("--inputs", help="module:function that takes a size and returns the arguments, for a module:attr target.")
@click.option("--sizes", metavar="N,N,...", callback=integers, help="Sizes that graphs will be captured for.")
@click.option("--ranges", metavar="1:N,...", callback=_ranges, help="Sizes that compiled code serves; default: as `generate` and `bench`.")
@click.option("--target", "targets", type=click.Choice(TARGETS), multiple=True, help="Device to compile for; default: native.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="The store to fill; default: that of RUNG_CACHE_DIR.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="So many compiles at once.")
@click.option(
    "--requests", metavar="N,N,...", callback=integers, help="Request slots of runners whose kernels are built for a GPU; default: 16,64."
)
@click.option("--tuning", type=click.File(encoding="utf-8"), help="Choices measured on the devices of --target: `rung cache tuning`.")
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", help="auto: bfloat16 for a GPU, else float32.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
def precompile(
    target: str,
    inputs: str | None,
    sizes: tuple[int, ...] | None,
    ranges: tuple[int, ...],
    targets: tuple[str, ...],
    out: Path | None,
    jobs: int,
    requests: tuple[int, ...] | None,
    tuning: IO[str] | None,
    dtype: str,
    as_json: bool,
) -> None:
    """Compile TARGET into a store: a model (as for `rung generate`), a named shape with random weights (as for `rung bench`), or a
    module:attr with --inputs. What the store has already is not compiled again. Weights do not matter to the artifacts, their shapes do."""
    from rung.cache import open_store, use_store
    from rung.cli.targets import is_module_target, missing_inputs

    elsewhere = [name for name in targets if name != "native"]
    if elsewhere:
        from rung.torch_compat import why_no_pretending

        reason = why_no_pretending()
        if reason is not None:
            raise BackendUnavailableError(f"--target {elsewhere[0]}: {reason}", hint="install torch's CUDA build; it needs no GPU")
    if is_module_target(target):
        if inputs is None:
            raise missing_inputs(target)
    elif inputs is not None:
        raise ConfigError(f"--inputs goes with a module:attr target, and {target!r} is a model", hint="leave --inputs out")
    job = Job(target=target, inputs=inputs, dtype=dtype, sizes=tuple(sizes or ()), requests=tuple(requests or (16, 64)))
    ends: tuple[int | None, ...] = ranges or (None,)
    wanted = [replace(job, place=place, maximum=end) for place in targets or ("native",) for end in ends]
    wanted = [replace(one, threads=max(1, jobs // len(wanted))) for one in wanted]
    start = time.perf_counter()
    with use_store(**({} if out is None else {"root": out, "bases": ()})):
        top = open_store().top
        if top is None:
            raise ConfigError("the store is read-only or off, so nothing can be kept", hint="leave RUNG_CACHE_MODE unset")
        tuned = _keep_tuning(tuning, elsewhere)
        results = run_jobs(wanted, at_once=jobs)
    seconds = time.perf_counter() - start
    if as_json:
        return emit({"store": str(top.root), "seconds": seconds, "tuned_kernels": tuned, "results": results})
    _show(results)
    if tuning is not None:
        click.echo(f"{tuned} choices of --tuning are for these targets", err=True)
    click.echo(f"{seconds:.1f} s; the store is {top.root}", err=True)


def _keep_tuning(tuning: IO[str] | None, places: list[str]) -> int:
    """Put what the file says of the devices to be built for into the store; returns how many choices."""
    if tuning is None:
        return 0
    from rung.cache import open_store
    from rung.cli.files import read_text
    from rung.launch.tuning_file import keep_tuning, read_tuning
    from rung.torch_compat import GPUS

    choices = read_tuning(read_text(tuning, "--tuning"), f"--tuning: {tuning.name}")
    return sum(keep_tuning(open_store(), choices, GPUS[place].name) for place in dict.fromkeys(places))


def _show(results: list[dict[str, Any]]) -> None:
    rows = [
        (
            result["job"],
            result["cache"],
            result["pieces"],
            result["unique_pieces"],
            result["hit_pieces"],
            result["kernels"],
            result["hit_kernels"],
            f"{result['seconds']:.1f} s",
            f"{result['saved_seconds']:.1f} s",
            "yes" if result["run_on_device"] else "no",
        )
        for result in results
    ]
    columns = ("what", "store", "pieces", "unique", "of them stored", "kernels", "of them stored", "took", "saved", "run on one")
    show_table("", columns, rows, numbers=columns[2:-1])
