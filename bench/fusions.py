"""Each fusion switched off alone: kernels a layer and us a layer in a CUDA graph. Needs a GPU; two minutes with 16 cores.

    python -m bench.fusions --out fusions.json
    python -m bench.fusions --groups "plain 8b,plain fp8 8b" --rows 1,64

A few layers of the 8B shape and of one like Qwen3-0.6B, with random weights, in these forms: `plain` (bench/plain_decoder.py, as
unmodified models are written), `ours` (joined projections, rung's own ops), and both in FP8 with static activations. 1 and 64 rows are
decodes with 128 keys behind them, 1024 rows one prompt. Processes beside this one compile first (`bench.fusion_builds`); all variants of a
model are then captured and replayed in turns. us: events around replays, the median over several inputs; everything of the model is counted
(embedding and last norm too) and divided by the layers.

A line is what is lost without a pass, against the same model with it; `given` passes are left out on both sides, where they would do the
same work. A pass that found nothing in a model is not measured there. The passes that lose go into `OFF_BY_DEFAULT` of
rung/passes/defaults.py. The JSON has the kernels by name.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.fusion_builds import Builders, Variant
from bench.fusion_measure import Found, measure
from bench.fusion_models import SHAPES, choose_attention, model_of
from rung.counters import Counters
from rung.runner.build import compile_model

CUDA = torch.device("cuda")
PRETENDED = {"NVIDIA H200": "h200"}  # devices that children can compile for


@dataclass(frozen=True, slots=True)
class Line:
    """A pass switched off, where the `given` ones are off already."""

    off: str
    given: tuple[str, ...] = ()

    @property
    def before(self) -> tuple[str, ...]:
        return tuple(sorted(self.given))

    @property
    def without(self) -> tuple[str, ...]:
        return tuple(sorted((*self.given, self.off)))

    def __str__(self) -> str:
        return self.off + (f" (without {', '.join(self.given)})" if self.given else "")


APART = ("projections", "siblings")  # off: products as Inductor has them
JOINED = ("projections",)
LINES: dict[str, tuple[Line, ...]] = {  # the most telling first
    "plain": (
        Line("siblings"),
        Line("projections"),
        Line("projections", ("siblings",)),
        Line("rope_kv_write"),
        Line("qk_norm_rope", ("rope_kv_write",)),
        Line("flat_rows"),
        Line("act_mul"),
        Line("residual_add", APART),
        Line("add_norm", APART),
    ),
    "plain fp8": (
        Line("siblings"),
        Line("projections"),
        Line("attention_quant"),
        Line("duplicates"),
        Line("norm_quant", APART),
        Line("act_quant", APART),
    ),
    "ours": (Line("projections"), Line("residual_add", JOINED), Line("add_norm", JOINED)),
    "ours fp8": (Line("projections"), Line("attention_quant"), Line("norm_quant", JOINED), Line("act_quant", JOINED)),
}
GROUPS = (  # form and shape, the most telling first
    ("plain", "8b"),
    ("plain fp8", "8b"),
    ("ours", "8b"),
    ("ours fp8", "8b"),
    ("plain", "qwen3-0.6b"),
    ("ours", "qwen3-0.6b"),
)


def lines_of(form: str, shape: str) -> list[Line]:
    return [line for line in LINES[form] if line.off != "qk_norm_rope" or SHAPES[shape].qk_norm]


def variants_of(form: str, shape: str) -> list[Variant]:
    """What is compiled of a group, once each; what others are compared with first."""
    lines = lines_of(form, shape)
    wanted = [(), *(line.before for line in lines), *(line.without for line in lines)]
    return [Variant(form, shape, without) for without in dict.fromkeys(wanted)]


def matches(passes: Sequence[Mapping[str, Any]], whole: Mapping[str, Any], name: str) -> int:
    """How often a pass changed something in a model, by the reports of its pieces and of the whole graph."""
    found = [report.get(name, {}) for report in (*passes, whole)]
    return sum(count for one in found for what, count in one.items() if not what.startswith(("near miss", "already fused")))


@dataclass(slots=True)
class Group:
    """What was measured of a model: by variant and number of rows."""

    form: str
    shape: str
    rows: Sequence[int]
    found: dict[tuple[str, ...], list[Found]]
    counts: dict[Line, int]

    def numbers(self, without: tuple[str, ...]) -> dict[str, Any]:
        layers, found = SHAPES[self.shape].num_layers, self.found[without]
        return {
            "kernels": [round(one.launches / layers, 2) for one in found],
            "us": [round(one.us / layers, 2) for one in found],
            "spread": [round(one.spread, 3) for one in found],
            "names": [
                {name: [round(count / layers, 2), round(us / layers, 2)] for name, (count, us) in one.kernels.items()} for one in found
            ],
        }

    def lost(self, line: Line) -> list[float]:
        layers = SHAPES[self.shape].num_layers
        pairs = zip(self.found[line.before], self.found[line.without], strict=True)
        return [round((without.us - before.us) / layers, 2) for before, without in pairs]

    def as_json(self) -> dict[str, Any]:
        variants = [{"without": without, **self.numbers(without)} for without in self.found]
        lines = [
            {"off": line.off, "given": line.given, "matches": count, "lost": self.lost(line) if count else None}
            for line, count in self.counts.items()
        ]
        return {"form": self.form, "shape": self.shape, "rows": list(self.rows), "lines": lines, "variants": variants}


def table(group: Group) -> list[str]:
    rows = "/".join(map(str, group.rows))
    shown = [
        "",
        f"{group.form}, {group.shape}: {SHAPES[group.shape].num_layers} layers; a layer at {rows} rows",
        f"{'off':44} {'matches':>8}  {'kernels':26} {'us':26} lost",
    ]
    base = group.numbers(())
    shown.append(f"{'(all on)':44} {'':8} {_text(base['kernels'], 2)} {_text(base['us'], 1)}")
    for line, count in group.counts.items():
        if count:
            numbers = group.numbers(line.without)
            shown.append(f"{line!s:44} {count:8} {_text(numbers['kernels'], 2)} {_text(numbers['us'], 1)} {_text(group.lost(line), 1)}")
        else:
            shown.append(f"{line!s:44} no match")
    for count, names, spread in zip(group.rows, base["names"], base["spread"], strict=True):
        parts = ", ".join(f"{name} {launches:g} x {us:.1f}" for name, (launches, us) in list(names.items())[:8])
        shown.append(f"  {count} rows, launches and us of all: {parts}; spread {spread:.1%}")
    return shown


def _text(values: Sequence[float], digits: int) -> str:
    return " ".join(f"{value:8.{digits}f}" for value in values)


def error(found: Found, wanted: Found) -> float:
    assert found.hidden is not None
    assert wanted.hidden is not None
    return float((found.hidden - wanted.hidden).norm() / wanted.hidden.norm())


class Bench:
    """Takes what the children have built, or compiles here, and measures group after group."""

    def __init__(self, rows: list[int], waiting: Mapping[Variant, Future[dict[str, Any]]], show: Callable[[str], None]) -> None:
        self._rows, self._waiting, self._show = rows, waiting, show
        self.compiled_here = self.found = 0

    def group(self, form: str, shape: str) -> Group:
        model = model_of(form, SHAPES[shape], CUDA)
        choose_attention(model, CUDA)
        compiled: dict[Any, Any] = {}
        reports: dict[Any, Any] = {}

        def take(without: tuple[str, ...]) -> None:
            if without not in compiled:
                self._wait(Variant(form, shape, without))
                compiled[without], reports[without] = compile_model(model, CUDA, max(self._rows), Counters(), without_passes=without)
                self.found += reports[without].cache == "hit"
                self.compiled_here += reports[without].cache != "hit"

        take(())
        counts: dict[Line, int] = {}
        for line in lines_of(form, shape):
            take(line.before)
            report = reports[line.before]
            counts[line] = matches(report.passes, report.whole_passes, line.off)
            if counts[line]:
                take(line.without)
        by_rows = [measure(model, compiled, SHAPES[shape].vocab_size, count) for count in self._rows]
        return Group(form, shape, self._rows, {without: [found[without] for found in by_rows] for without in compiled}, counts)

    def _wait(self, variant: Variant) -> None:
        built = self._waiting[variant].result() if variant in self._waiting else {}
        if "failed" in built:
            self._show(f"{variant} was not built ahead: {built['failed']}")


def run(groups: Sequence[tuple[str, str]], rows: list[int], jobs: int, seconds: float, show: Callable[[str], None]) -> list[dict[str, Any]]:
    start, results = time.perf_counter(), []
    place = PRETENDED.get(torch.cuda.get_device_name())
    builders = Builders(place, jobs, rows) if place is not None and jobs else None
    waiting = {}
    if builders is not None:
        waiting = {variant: builders.submit(variant) for group in groups for variant in variants_of(*group)}
        builders.close()
    bench = Bench(rows, waiting, show)
    whole: dict[tuple[str, str], Found] = {}
    for form, shape in groups:
        if time.perf_counter() - start > seconds:
            show(f"left out for want of time: {form} {shape}")
            continue
        group = bench.group(form, shape)
        most = group.found[()][-1]
        whole[form, shape] = most
        found = group.as_json() | {"error": None}
        for line in table(group):
            show(line)
        if (form.removesuffix(" fp8"), shape) in whole and form.endswith("fp8"):
            found["error"] = error(most, whole[form.removesuffix(" fp8"), shape])
            show(f"  relative error of the hidden states against bf16, {rows[-1]} rows: {found['error']:.4f}")
        results.append(found)
        gc.collect()
        torch.cuda.empty_cache()
        show(f"  {time.perf_counter() - start:.0f} s; plans found {bench.found}, compiled here {bench.compiled_here}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default=",".join(f"{form} {shape}" for form, shape in GROUPS))
    parser.add_argument("--rows", default="1,64,1024")
    parser.add_argument(
        "--jobs", type=int, default=max(1, min(12, (os.cpu_count() or 2) - 2)), help="processes that compile ahead; 0: none"
    )
    parser.add_argument("--seconds", type=float, default=150, help="start no further group after so long")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    asked = options.groups.split(",")
    groups = [group for group in GROUPS if " ".join(group) in asked]
    rows = [int(count) for count in options.rows.split(",")]
    results = run(groups, rows, options.jobs, options.seconds, lambda text: print(text, flush=True))
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
