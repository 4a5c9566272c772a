"""`rung bench`: what each mode costs at each size, and what really ran."""

from __future__ import annotations

import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import click

from rung.cli.command import CompilingCommand
from rung.cli.files import check_writable, write_text
from rung.cli.options import device_options, fp8_options, integers, resolve_device, resolve_dtype
from rung.errors import ConfigError

BENCH_MODES = ("eager", "compiled", "piecewise", "full")


def _modes(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    modes = tuple(dict.fromkeys(value.split(",")))
    unknown = [mode for mode in modes if mode not in BENCH_MODES]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(BENCH_MODES)}", ctx, param)
    return modes


@click.command(cls=CompilingCommand)
@click.argument("target", default="smollm2")
@click.option(
    "--inputs", help="module:function that takes a size and returns the arguments (tensor, tuple or dict), for a module:attr target."
)
@click.option(
    "--sizes",
    metavar="N,N,...",
    callback=integers,
    help="Requests in a decode step, or sizes for the builder; default: 1,8,64,256, or 1,4 on a CPU.",
)
@click.option("--modes", metavar="MODE,...", default=",".join(BENCH_MODES), show_default=True, callback=_modes, help="What to compare.")
@click.option(
    "--context", type=click.IntRange(1), default=128, show_default=True, help="Prompt tokens behind each request of a decode step."
)
@click.option("--max-model-len", type=int, help="Context that the runner is built for.")
@click.option("--repeats", type=click.IntRange(1), help="Measured rounds for each set of inputs; default 20, on a CPU 5.")
@click.option("--sets", type=click.IntRange(1), default=3, show_default=True, help="Sets of different inputs.")
@fp8_options
@device_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the JSON to this file too.")
def bench(
    target: str,
    inputs: str | None,
    sizes: tuple[int, ...] | None,
    modes: tuple[str, ...],
    context: int,
    max_model_len: int | None,
    repeats: int | None,
    sets: int,
    quantize: str | None,
    kv_cache_dtype: Literal["auto", "fp8"],
    dtype: str,
    device: str,
    as_json: bool,
    out: Path | None,
) -> None:
    """Time TARGET in each mode: a model (folder, GGUF file or smollm2), a shape with random weights (llama-8b, smollm2-135m, tiny), or
    module:attr with --inputs.

    For a language model a step is one decode step of a batch: schedule, inputs, forward, logits, greedy sampling, ids on the host. Times
    are medians over interleaved rounds; step counts to the result, host until everything is enqueued, device between events, busy adds up
    the kernels."""
    from rung.cli.targets import is_module_target, open_module

    check_writable(out, "--out")
    place = resolve_device(device)
    on_gpu = place.type == "cuda"
    sizes = sizes or ((1, 8, 64, 256) if on_gpu else (1, 4))
    repeats = repeats or (20 if on_gpu else 5)
    work: Any
    if is_module_target(target):
        from rung.cli.bench_module import ModuleBench

        if quantize is not None or kv_cache_dtype != "auto":
            raise ConfigError("--quantize and --kv-cache-dtype are for models", hint="quantise the module where it is built")

        module, build = open_module(target, inputs, None if dtype == "auto" else resolve_dtype(dtype, place), place)
        work = ModuleBench(module, build, sizes, modes, repeats=repeats, sets=sets, device=place)
    else:
        from rung.cli.assembly import open_decoder
        from rung.cli.bench_decoder import DecoderBench

        if inputs is not None:
            raise ConfigError(f"--inputs goes with a module:attr target, and {target!r} is a model", hint="leave --inputs out")
        decoder = open_decoder(target, resolve_dtype(dtype, place), place, shapes=True, quantize=quantize)
        work = DecoderBench(
            decoder, sizes, modes, context=context, repeats=repeats, sets=sets, max_model_len=max_model_len, kv_cache_dtype=kv_cache_dtype
        )
    rows = []
    for size in sizes:
        click.echo(f"size {size} ...", err=True)
        rows += [{"size": size, "mode": mode, **timing.as_json()} for mode, timing in work.run(size).items()]
    report = {**_setting(target, work, place), "rows": rows}
    if as_json:
        click.echo(json.dumps(report))
    else:
        _show(report, on_gpu)
    if out is not None:
        write_text(out, json.dumps(report, indent=2) + "\n", "--out")


def _setting(target: str, work: Any, device: Any) -> dict[str, Any]:
    """What a figure means nothing without."""
    from rung.cli.doctor import devices, version_of

    memory = getattr(work, "graph_memory", None)
    name = devices()[0] if device.type == "cpu" else devices()[1 + (device.index or 0)]
    return {
        "target": target,
        "device": name,
        "versions": {package: version_of(package) for package in ("rung", "torch", "triton")},
        "command": shlex.join(["rung", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "attention": getattr(work, "attention", None),
        "phases_seconds": work.phases.seconds,
        "graph_memory": memory and memory.as_json(),
    }


_TIMES = ("step ms", "host ms", "device ms", "busy ms")
_COUNTS = ("launches", "kernels")


def _show(report: dict[str, Any], on_gpu: bool) -> None:
    from rung.cli.console import console, table

    columns = ("size", "mode", "ran", *_TIMES, *_COUNTS)
    rows = []
    for row in report["rows"]:
        ran = ", ".join(name if len(row["ran"]) == 1 else f"{name} x{count}" for name, count in row["ran"].items())
        times = [_cell(row[name.replace(" ", "_")], ".3f") for name in _TIMES]
        rows.append((row["size"], row["mode"], ran, *times, *(_cell(row[name], "d") for name in _COUNTS)))
    out = console()
    out.print(table(f"{report['target']}: one step, medians", columns, rows, numbers=("size", *_TIMES, *_COUNTS)))
    spent = [(name, f"{seconds:.3f}") for name, seconds in report["phases_seconds"].items() if seconds]
    out.print(table("start-up", ("phase", "s"), spent, numbers=("s",)))
    if (memory := report["graph_memory"]) is not None:
        held = memory["pool_bytes"] + memory["executable_bytes"]
        out.print(
            f"graphs of {len(memory['entries'])} sizes hold {held / 2**20:.1f} MiB, predicted {memory['predicted_bytes'] / 2**20:.1f}"
        )
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    out.print(f"{report['device']}; {versions}; {report['date']}")
    if not on_gpu:
        out.print(f"{', '.join((*_TIMES[2:], *_COUNTS))} need a GPU; graphs ran on the recorded backend, which shows behaviour, not speed")


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
