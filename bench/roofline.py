"""Where the device time of a decode step goes: each kind of kernel beside its floor, gaps between kernels, ramps and tails. Needs a GPU.

    python -m bench.roofline --targets llama-8b,smollm2-135m --sizes 1,8,64,256 --out roofline.json

The floor of a kernel is its bytes at 4.2 TB/s or its operations at 790 TFLOP/s, whichever takes longer. Kernels are read from the
profiler over replays of the full decode graph. `span` goes from the first kernel of a step to its last, `gaps` is the time in it without
any kernel, and what kernels take beyond their floor is ramps and tails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rung.cli.assembly import open_decoder
from rung.models import SHAPES, LlamaConfig

BYTES_A_SECOND, OPERATIONS_A_SECOND = 4.2e12, 790e12
STEPS = 10
PRODUCTS = ("qkv", "o", "gate_up", "down")

_KINDS = (  # the first that a name matches; order matters
    ("rope + cache write", r"rope|rotary|rotat|write|reshape_and_cache|_cat_|_cos|_sin"),
    ("combine", r"combine|reduce_splits|merge"),
    ("attention", r"flash|attention|paged|fmha|FlashAttn|attn"),
    ("sampling", r"sample|pick|argmax|filter_kernel"),
    ("input building", r"decode_inputs|positions|slot_mapping|prefill_ids|last_sampled|gather_block|embedding"),
    ("split reduction", r"splitKreduce|split_reduce"),
    ("product", r"nvjet|gemm|gemv|cutlass|xmma|linear|matmul|_mm|cublas"),
    ("activation", r"silu|sigmoid|swiglu"),
    ("norm", r"rsqrt|norm"),
    ("copy or fill", r"Memcpy|Memset|copy|fill|zero"),
)


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    start_us: float
    us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.us


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def kinds(names: Sequence[str], layers: int) -> list[str]:
    """The kind of each kernel of a step, in the order of their starts. Products get their place in the layer where their number says it."""
    found = [kind_of(name) for name in names]
    products = [at for at, kind in enumerate(found) if kind == "product"]
    if len(products) == len(PRODUCTS) * layers + 1:
        for number, at in enumerate(products):
            found[at] = PRODUCTS[number % len(PRODUCTS)] if number < len(PRODUCTS) * layers else "head"
        for at, kind in enumerate(found):
            if kind == "split reduction":  # it belongs to the product before
                found[at] = next((one for one in reversed(found[:at]) if one in (*PRODUCTS, "head")), kind)
    return found


def floors(config: LlamaConfig, batch: int, context: int, element: int = 2) -> dict[str, tuple[float, float]]:
    """(bytes, operations) of a whole step, by kind."""
    hidden, layers, inner = config.hidden_size, config.num_layers, config.intermediate_size
    query, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size

    def product(rows: int, columns: int, times: int = 1) -> tuple[float, float]:
        weights = rows * columns
        return times * element * (weights + batch * (rows + columns)), times * 2.0 * batch * weights

    cached = batch * context * 2 * keys * element
    return {
        "qkv": product(hidden, query + 2 * keys, layers),
        "o": product(query, hidden, layers),
        "gate_up": product(hidden, 2 * inner, layers),
        "down": product(inner, hidden, layers),
        "head": product(hidden, config.vocab_size),
        "attention": (layers * (cached + 2 * batch * query * element), layers * 4.0 * batch * context * query),
        "rope + cache write": (layers * batch * (query + 2 * keys) * element * 2.0, 0.0),
        "activation": (layers * batch * 3.0 * inner * element, 0.0),
        "norm": ((2 * layers + 1) * batch * 4.0 * hidden * element, 0.0),
        "sampling": (batch * config.vocab_size * float(element), 0.0),
    }


def floor_us(work: tuple[float, float]) -> float:
    return 1e6 * max(work[0] / BYTES_A_SECOND, work[1] / OPERATIONS_A_SECOND)


def split_steps(kernels: Sequence[Kernel], steps: int) -> list[list[Kernel]]:
    """The kernels of each step that has the usual ones; the host waits between steps, so the longest gaps are those."""
    ordered = sorted(kernels, key=lambda one: one.start_us)
    between = sorted(range(1, len(ordered)), key=lambda at: ordered[at - 1].end_us - ordered[at].start_us)[: steps - 1]
    bounds = [0, *sorted(between), len(ordered)]
    found = [ordered[first:last] for first, last in itertools.pairwise(bounds)]
    usual = Counter(tuple(one.name for one in step) for step in found).most_common(1)[0][0]
    return [step for step in found if tuple(one.name for one in step) == usual]


def gaps_us(step: Sequence[Kernel]) -> list[float]:
    """Time without a kernel before each kernel but the first; 0 where they overlap."""
    found, end = [], step[0].end_us
    for one in step[1:]:
        found.append(max(0.0, one.start_us - end))
        end = max(end, one.end_us)
    return found


def table(config: LlamaConfig, batch: int, context: int, steps: Sequence[Sequence[Kernel]]) -> dict[str, Any]:
    """Medians over steps."""
    names = [one.name for one in steps[0]]
    of = kinds(names, config.num_layers)
    us = [statistics.median(step[at].us for step in steps) for at in range(len(names))]
    gaps = [gaps_us(step) for step in steps]
    work = floors(config, batch, context)
    rows = []
    for kind in dict.fromkeys(of):
        mine = [at for at, one in enumerate(of) if one == kind]
        floor = floor_us(work[kind]) if kind in work else 0.0
        measured = sum(us[at] for at in mine)
        examples = dict.fromkeys(names[at][:80] for at in mine)
        rows.append(
            {
                "kind": kind,
                "kernels": len(mine),
                "bytes": work.get(kind, (0.0, 0.0))[0],
                "floor_us": floor,
                "us": measured,
                "over_us": measured - floor,
                "each_us": measured / len(mine),
                "names": list(examples)[:4],
            }
        )
    missing = [kind for kind in work if kind not in of]
    total = sum(us)
    floor = sum(floor_us(one) for one in work.values())
    gap = statistics.median(sum(one) for one in gaps)
    return {
        "batch": batch,
        "context": context,
        "rows": sorted(rows, key=lambda row: -float(row["us"])),
        "without a kernel of their own": {kind: floor_us(work[kind]) for kind in missing},
        "kernels": len(names),
        "kernels_a_layer": (len(names) - sum(kind in ("head", "sampling", "input building") for kind in of)) / config.num_layers,
        "floor_us": floor,
        "kernels_us": total,
        "gaps_us": gap,
        "gap_each_us": gap / max(1, len(names) - 1),
        "ramps_and_tails_us": total - floor,
        "span_us": statistics.median(step[-1].end_us - step[0].start_us for step in steps),
    }


def record(target: str, batch: int, context: int) -> list[list[Kernel]]:
    """The kernels of some replays of the full decode graph."""
    from torch.profiler import DeviceType, ProfilerActivity, profile

    from rung.cli.bench_decoder import DecoderBench

    decoder = open_decoder(target, torch.bfloat16, torch.device("cuda"), shapes=True)
    bench = DecoderBench(decoder, (batch,), ("full",), context=context, repeats=STEPS, sets=1, max_model_len=None)
    one = next(bench.input_sets(batch))["full"]
    for _ in range(3):
        one.start()()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(STEPS):
            one.start()()
            torch.cuda.synchronize()
    kernels = [
        Kernel(event.name, float(event.time_range.start), float(event.time_range.elapsed_us()))
        for event in recorded.events() or []
        if event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    ]
    return split_steps(kernels, STEPS)


def show(target: str, found: dict[str, Any]) -> str:
    lines = [
        f"{target} B={found['batch']} at {found['context']}: span {found['span_us']:.0f} us = kernels {found['kernels_us']:.0f} "
        f"(floor {found['floor_us']:.0f}, ramps and tails {found['ramps_and_tails_us']:.0f}) + gaps {found['gaps_us']:.0f} "
        f"({found['gap_each_us']:.2f} each); {found['kernels']} kernels, {found['kernels_a_layer']:.2f} a layer",
        f"{'kind':20} {'kernels':>7} {'MB':>8} {'floor':>8} {'us':>8} {'over':>8} {'each':>7}",
    ]
    lines += [
        f"{row['kind']:20} {row['kernels']:7} {row['bytes'] / 1e6:8.1f} {row['floor_us']:8.1f} {row['us']:8.1f} {row['over_us']:8.1f} "
        f"{row['each_us']:7.2f}  {row['names'][0][:60]}"
        for row in found["rows"]
    ]
    if found["without a kernel of their own"]:
        rest = found["without a kernel of their own"].items()
        lines.append("in other kernels, floor us: " + ", ".join(f"{kind} {floor:.1f}" for kind, floor in rest))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="llama-8b,smollm2-135m")
    parser.add_argument("--sizes", default="1,8,64,256")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = []
    for target in options.targets.split(","):
        for size in (int(one) for one in options.sizes.split(",")):
            try:
                one = table(SHAPES[target], size, options.context, record(target, size, options.context))
            except Exception:
                traceback.print_exc()
                continue
            found.append({"target": target, **one})
            print(show(target, one) + "\n", flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(found, indent=1) + "\n")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
