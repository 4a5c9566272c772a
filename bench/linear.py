"""Products of a decode layer in a CUDA graph: cuBLAS and the kernels around it, against ours. Needs a GPU.

    python -m bench.linear --target llama-8b --rows 1,8,64 --out linear.json            # the configurations that rung uses
    python -m bench.linear --target llama-8b --rows 1,8,64 --sweep --out sweep.json     # tries many, all compiled first on every core
    python -m bench.linear --target llama-8b --rows 2,4,16 --sweep --near               # what is near those in use, in a minute
    python -m bench.linear --target llama-8b --rows 1,8,64 --fp8                        # e4m3 weights, and beside one row e4m3 rows

Each line is us a call, with weights that are not in the L2 cache: a graph runs one call a weight set, and the sets are 200 MB together.
The floor is the bytes of the weights at 4.2 TB/s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bench.linear_cases import Case, cases, drawn, image_of, in_use
from rung import torch_compat
from rung.launch.specialise import OPTIONS, specialise
from rung.models.random import SHAPES
from rung.passes.kernels import launches
from rung.passes.kernels.launches import Surroundings, Tiles

BYTES_A_US = 4.2e6


def tensors(case: Case, rows: int, device: str, sets: int) -> tuple[torch.Tensor, list[torch.Tensor], Surroundings]:
    make: Callable[..., torch.Tensor] = torch.empty if device == "cpu" else torch.randn
    named: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    x = make(rows, case.k, **named)
    weights = [make(case.weight_rows, case.k, **named) for _ in range(sets)]
    scales: dict[str, torch.Tensor] = {}
    if case.fp8:
        weights = [weight.to(torch.float8_e4m3fn) for weight in weights]
        scales["weight_scale"] = torch.ones(case.weight_rows, device=device)
        if rows > 1:
            x, scales["x_scale"] = x.to(torch.float8_e4m3fn), torch.ones(rows, 1, device=device)
    around = Surroundings(
        **scales,
        residual=make(rows, case.n, **named) if case.residual else None,
        norm_weight=make(case.k, **named) if case.norm else None,
        epsilon=1e-5,
        activation=case.activation,
    )
    return x, weights, around


def compile_one(job: tuple[Case, int, Tiles]) -> str | None:
    """Compile what a call needs and keep it in the store; needs no GPU. Returns why it did not compile."""
    case, rows, tiles = job
    if tiles.wide:
        return None  # NVRTC takes half a second for one; the first call does it
    launcher = launches.VECTOR if tiles.block_m == 1 else launches.PRODUCT
    calls: list[Any] = []
    launcher.run = lambda grid, *values, **named: calls.append((values, named))
    x, (weight,), around = tensors(case, rows, "cpu", 1)
    launches.product(x, weight, around, tiles)
    values, named = calls[0]
    options = {name: named.get(name, default) for name, default in OPTIONS.items()}
    constants = {name: value for name, value in named.items() if name not in OPTIONS}
    try:
        launcher.images.image(specialise(launcher.parameters, values, constants), options, 90)
    except Exception as error:
        return str(error)[:300]
    return None


def timed(calls: list[Callable[[], object]], rounds: int = 5) -> float:
    """Median us a call, all of them in one graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) * 1e3 / len(calls)


def cublas(x: torch.Tensor, weight: torch.Tensor, around: Surroundings) -> torch.Tensor:
    if around.weight_scale is None:
        return F.linear(x, weight)
    if around.x_scale is None:
        x = x.to(weight.dtype)
    scale = torch.ones(x.shape[0], 1, device=x.device) if around.x_scale is None else around.x_scale
    return torch_compat.scaled_mm(x, scale, weight, around.weight_scale, None, torch.bfloat16)


def baseline(case: Case, x: torch.Tensor, weight: torch.Tensor, around: Surroundings) -> None:
    """What ran before: the norm (with the residual added) and the activation are kernels beside cuBLAS."""
    if around.norm_weight is not None and x.dtype == torch.bfloat16:
        x, _ = launches.add_norm(x, x, around.norm_weight, around.epsilon)
    product = cublas(x, weight, around)
    if case.activation:
        launches.activate(product, case.activation)


def measure(case: Case, rows: int, tilings: list[Tiles]) -> list[dict[str, Any]]:
    x, weights, around = tensors(case, rows, "cuda", case.sets)
    floor = case.weight_bytes / BYTES_A_US
    base = {"case": case.name, "rows": rows, "n": case.n, "k": case.k, "floor_us": floor}
    found = [{**base, "how": "cublas", "us": timed([lambda w=w: cublas(x, w, around) for w in weights])}]
    if case.norm or case.activation:
        found.append({**base, "how": "cublas+kernels", "us": timed([lambda w=w: baseline(case, x, w, around) for w in weights])})
    for tiles in tilings:
        try:
            us = timed([lambda w=w, t=tiles: launches.product(x, w, around, t) for w in weights])
        except Exception as error:
            print(f"{case.name} {rows} {tiles}: {str(error)[:200]}", flush=True)
            continue
        found.append({**base, "how": "ours", "us": us, "tiles": asdict(tiles), "in_use": tiles in in_use(case, rows)})
    return found


def norms(target: str, rows: int) -> tuple[str, dict[int, float]]:
    """us of the kernel between two products, for one part, and more parts of the product before it: a text, and those of programmatic
    launches."""
    n, found, by_parts = SHAPES[target].hidden_size, [], {}
    weight, residual = (torch.randn(size, dtype=torch.bfloat16, device="cuda") for size in ((n,), (rows, n)))
    for parts in (1, 2, 3, 4, 8):
        x = torch.randn((parts, rows, n), device="cuda") if parts > 1 else residual.clone()
        for pdl in (False, True):
            us = timed([lambda x=x, p=pdl: launches.add_norm(x, residual, weight, 1e-5, programmatic=p)] * 64)
            found.append(f"{parts}{' pdl' if pdl else ''} {us:.2f}")
        by_parts[parts] = us
    return f"add_norm {rows:4}: " + ", ".join(found), by_parts


def layer(rows: int, found: list[dict[str, Any]], norm_us: dict[int, float]) -> str:
    """The sum over the products of a layer and the norms between them, by what is in use and by what was best; bf16."""
    sums = {"in use": 0.0, "best": 0.0}
    for name in {row["case"] for row in found if row["rows"] == rows and row["case"] != "head"}:
        ours = [row for row in found if (row["case"], row["rows"], row["how"]) == (name, rows, "ours")]
        # the kernel behind a product without its residual sums its parts
        us = {id(row): row["us"] + (norm_us[row["tiles"]["splits"]] if name in ("o bare", "down bare") else 0.0) for row in ours}
        sums["in use"] += min((us[id(row)] for row in ours if row["in_use"]), default=float("nan"))
        sums["best"] += min(us.values(), default=float("nan"))
    return f"layer {rows:10} | " + ", ".join(f"{name} {total:.2f}" for name, total in sums.items())


def shown(tiles: dict[str, Any] | None) -> str:
    if tiles is None:
        return ""
    text = (
        f"{'sharing ' if tiles['shares_k'] else 'wide ' if tiles['wide'] else ''}pf {tiles['prefetch']} "
        + "x".join(str(tiles[name]) for name in ("block_m", "block_n", "block_k"))
        + f" w{tiles['num_warps']} s{tiles['num_stages']}"
    )
    return text + (f" splits {tiles['splits']}" if tiles["splits"] > 1 else "") + (" swap" if tiles["swap"] else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="llama-8b", choices=sorted(SHAPES))
    parser.add_argument("--rows", default="1,4,8,16,32,64,128,256")
    parser.add_argument("--cases", default="qkv,o,gate_up,down,head")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--limit", type=int, default=100, help="candidates of a sweep for each case, drawn by chance")
    parser.add_argument("--near", action="store_true", help="of up to 16 rows try what is near the tiles that won before")
    parser.add_argument("--count", action="store_true", help="count the candidates of a sweep and stop")
    parser.add_argument("--best", type=int, default=3, help="lines shown of a sweep")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sizes = [int(rows) for rows in options.rows.split(",")]
    wanted = [case for case in cases(options.target, options.fp8) if case.name in options.cases.split(",")]
    plan = [(case, rows) for rows in sizes for whole in wanted for case in whole.variants(rows)]
    chosen = {}
    for case, rows in plan:  # what is in use is measured in every sweep
        some = drawn(case, rows, options.limit, options.near) if options.sweep else []
        chosen[case, rows] = list(dict.fromkeys([*in_use(case, rows), *some]))
    jobs = list(
        {image_of(*job): job for job in ((case, rows, tiles) for (case, rows), tilings in chosen.items() for tiles in tilings)}.values()
    )
    if options.count:
        for (case, rows), tilings in chosen.items():
            print(case.name, rows, len(tilings))
        print(sum(map(len, chosen.values())), "launches", len(jobs), "kernels")
        return
    start = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        failed = [why for why in pool.imap_unordered(compile_one, jobs, chunksize=4) if why]
    print(f"{len(jobs)} kernels compiled in {time.perf_counter() - start:.0f} s, {len(failed)} do not compile: {failed[:2]}", flush=True)
    everything = []
    between = {}
    for rows in sizes:
        text, between[rows] = norms(options.target, rows)
        print(text, flush=True)
    for (case, rows), tilings in chosen.items():
        found = measure(case, rows, tilings)
        everything += found
        others = {row["how"]: row["us"] for row in found if row["how"] != "ours"}
        ours = sorted((row for row in found if row["how"] == "ours"), key=lambda row: row["us"])[: options.best]
        used = [f"in use {row['us']:.2f} [{shown(row['tiles'])}] |" for row in found if row.get("in_use")]
        best = "; ".join([*used, *(f"{row['us']:.2f} [{shown(row['tiles'])}]" for row in ours)])
        print(
            f"{case.name:13} {rows:4} floor {found[0]['floor_us']:6.2f} {' '.join(f'{k} {v:.2f}' for k, v in others.items())} | {best}",
            flush=True,
        )
        if not options.fp8 and (case, rows) == [job for job in chosen if job[1] == rows][-1]:
            print(layer(rows, everything, between[rows]), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
