"""Each fusion switched off alone: kernels a layer and us a layer in a CUDA graph. Needs a GPU; under four minutes.

    python -m bench.fusions --out fusions.json
    python -m bench.fusions --shapes qwen3-0.6b --rows 1,64

A few layers of the 8B shape and of one like Qwen3-0.6B, with random weights, in these forms: `plain` (bench/plain_decoder.py, as
unmodified models are written), `ours` (joined projections, rung's own ops), and both in FP8 with static activations. 1 and 64 rows are
decodes with 128 keys behind them, 1024 rows one prompt. us: events around replays, the median over several inputs; everything of the model
is counted (embedding and last norm too) and divided by the layers. "(all on)" is the default; a line is what is lost without the passes it
names. The passes that lose go into `OFF_BY_DEFAULT` of rung/passes/defaults.py.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from bench.plain_decoder import PlainDecoder
from rung.attention import AttentionMetadata, KVCache, attention_layers
from rung.attention.backends.triton_paged import TritonPaged
from rung.compile.compiled import CompiledFunction
from rung.context import ForwardContext, set_forward_context
from rung.counters import Counters
from rung.models import calibrate_input_scales, quantize_fp8, random_model
from rung.models.config import LlamaConfig
from rung.runner.build import compile_model

CUDA = torch.device("cuda")
SHAPES = {
    "8b": LlamaConfig(
        vocab_size=4096, hidden_size=4096, intermediate_size=14336, num_layers=4, num_heads=32, num_kv_heads=8, head_size=128,
        max_position_embeddings=2048, rms_norm_eps=1e-6, tie_word_embeddings=True,
    ),
    "qwen3-0.6b": LlamaConfig(
        vocab_size=4096, hidden_size=1024, intermediate_size=3072, num_layers=6, num_heads=16, num_kv_heads=8, head_size=128,
        max_position_embeddings=2048, rms_norm_eps=1e-6, tie_word_embeddings=True, qk_norm=True,
    ),
}  # fmt: skip
PLAIN = ("rope_kv_write", "act_mul", "flat_rows", "projections", "add_norm", "residual_add")
# Form -> the switches: passes that are left out together, most telling first.
FORMS: dict[str, list[tuple[str, ...]]] = {
    "plain": [(), *((name,) for name in PLAIN), ("rope_kv_write", "qk_norm_rope")],
    "plain fp8": [
        (),
        ("attention_quant",),
        ("projections",),
        *(("projections", name) for name in ("norm_quant", "act_quant", "duplicates")),
    ],
    "ours": [(), ("projections",)],
    "ours fp8": [(), ("projections",)],
}  # fmt: skip
BLOCK, CONTEXT, SETS, ROUNDS = 16, 128, 3, 15


def model_of(form: str, shape: LlamaConfig) -> nn.Module:
    torch.manual_seed(0)
    if form.startswith("ours"):
        model: nn.Module = random_model(shape, dtype=torch.bfloat16, device=CUDA)
    else:
        with CUDA:
            model = PlainDecoder(shape).bfloat16()
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                nn.init.normal_(parameter, std=0.02)
    model.requires_grad_(False)
    if form.endswith("fp8"):
        prompts = [torch.randint(0, shape.vocab_size, (64,)).tolist() for _ in range(2)]
        quantize_fp8(model, "per_tensor", input_scales=calibrate_input_scales(model, prompts))
    for layer in attention_layers(model).values():
        layer.choose(TritonPaged, CUDA)
    return model


def bind(model: nn.Module, rows: int) -> ForwardContext:
    """Caches with values in them, and a step: decodes of `rows` requests, or beyond 64 rows one prompt."""
    requests, length = (rows, CONTEXT + 1) if rows <= 64 else (1, rows)
    blocks = -(-length // BLOCK)
    table = torch.arange(requests * blocks, dtype=torch.int32, device=CUDA).view(requests, blocks)
    for layer in attention_layers(model).values():
        size = (requests * blocks, BLOCK, layer.spec.num_kv_heads, layer.spec.head_size)
        layer.bind(TritonPaged(layer.spec), KVCache(*(torch.randn(size, device=CUDA).bfloat16() for _ in range(2))))  # type: ignore[arg-type]
    each = rows // requests
    place = (length - each + torch.arange(each, device=CUDA)).repeat(requests)
    owner = torch.arange(requests, device=CUDA).repeat_interleave(each)
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(0, rows + 1, each, dtype=torch.int32, device=CUDA),
        seq_lens=torch.full((requests,), length, dtype=torch.int32, device=CUDA),
        block_table=table,
        slot_mapping=table[owner, place // BLOCK].long() * BLOCK + place % BLOCK,
        num_requests=requests,
        num_actual_tokens=rows,
        max_query_len=each,
        max_seq_len=length,
        may_pad=False,
    )
    layers = attention_layers(model)
    return ForwardContext(attention_layers=layers, attention_metadata=dict.fromkeys(layers, metadata), num_actual_tokens=rows)


def measure(model: nn.Module, compiled: CompiledFunction, shape: LlamaConfig, rows: int) -> tuple[float, float, torch.Tensor]:
    """Kernels a layer, us a layer, and the hidden states of the first inputs."""
    generator = torch.Generator(CUDA).manual_seed(1)
    ids = torch.empty(rows, dtype=torch.int32, device=CUDA)
    first = 0 if rows > 64 else CONTEXT
    positions = (torch.arange(rows, device=CUDA) if rows > 64 else torch.full((rows,), first, device=CUDA)).long()
    draws = [torch.randint(0, shape.vocab_size, (rows,), generator=generator, device=CUDA, dtype=torch.int32) for _ in range(SETS)]
    context = bind(model, rows)  # kept to the end: the graph reads its tensors
    with torch.no_grad(), set_forward_context(context):
        ids.copy_(draws[0])
        for _ in range(3):
            compiled(ids, positions)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = compiled(ids, positions)
    graph.replay()
    hidden = out.clone()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        graph.replay()
        torch.cuda.synchronize()
    kernels = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in recorded.events())
    medians = []
    for draw in draws:
        ids.copy_(draw)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
        graph.replay()
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
        medians.append(statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) * 1e3)
    del context
    return kernels / shape.num_layers, statistics.median(medians) / shape.num_layers, hidden


def plan(shapes: list[str], forms: list[str]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    for form, shape in itertools.product(forms, shapes):
        for without in FORMS[form]:
            needless = "qk_norm_rope" in without and not SHAPES[shape].qk_norm
            if not needless and not (form.endswith("fp8") and shape != shapes[0]):
                yield form, shape, without


def _text(values: list[float], digits: int) -> str:
    return " ".join(f"{value:8.{digits}f}" for value in values)


def run(shapes: list[str], forms: list[str], rows: list[int], seconds: float, show: Callable[[str], None]) -> list[dict[str, Any]]:
    start, results = time.perf_counter(), []
    key: tuple[str, str] | None = None
    model: nn.Module = nn.Identity()
    base: list[float] = []
    wide: dict[str, torch.Tensor] = {}
    for form, shape, without in plan(shapes, forms):
        if time.perf_counter() - start > seconds:
            show(f"left out for want of time: {form} {shape} {without}")
            continue
        if key != (form, shape):
            key, model = (form, shape), nn.Identity()
            gc.collect()
            torch.cuda.empty_cache()
            model = model_of(form, SHAPES[shape])
            show(f"\n{form}, {shape}: {SHAPES[shape].num_layers} layers; rows {rows}")
            show(f"{'off':32} {'kernels a layer':>26} {'us a layer':>26}  lost")
        compiled, report = compile_model(model, CUDA, max(rows), Counters(), without_passes=without)
        found = [measure(model, compiled, SHAPES[shape], count) for count in rows]
        kernels, us = [one[0] for one in found], [one[1] for one in found]
        base = us if not without else base
        lost = [after - before for before, after in zip(base, us, strict=True)]
        error = None
        if not without and form.endswith("fp8"):
            plain = wide.get(f"{form.removesuffix(' fp8')} {shape}")
            error = None if plain is None else float((found[-1][2].float() - plain).norm() / plain.norm())
        elif not without:
            wide[f"{form} {shape}"] = found[-1][2].float()
        show(f"{', '.join(without) or '(all on)':32} {_text(kernels, 2)} {_text(us, 2)}  {_text(lost, 2) if without else ''}")
        if error is not None:
            show(f"relative error of the hidden states against bf16, {rows[-1]} rows: {error:.4f}")
        results.append(
            {
                "form": form, "shape": shape, "without": without, "rows": rows, "kernels": kernels, "us": us, "error": error,
                "matches": [{name: found for name, found in one.items() if name != "near_misses"} for one in report.passes],
                "whole": report.whole_passes,
            }
        )  # fmt: skip
    show(f"\n{time.perf_counter() - start:.0f} s")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--rows", default="1,64,1024")
    parser.add_argument("--seconds", type=float, default=210, help="start no further line after so long")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    rows = [int(count) for count in options.rows.split(",")]
    results = run(options.shapes.split(","), options.forms.split(","), rows, options.seconds, lambda text: print(text, flush=True))
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
