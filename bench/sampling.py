"""What sampling costs: each feature alone on a batch of logits, and the grammar window on the host.

    python -m bench.sampling --out sampling.json                 # device and host time of `Sampler.sample`
    python -m bench.sampling --window smollm2 --device cpu       # the engine with a JSON schema; needs xgrammar
    python -m bench.sampling --tiles --rows 8,64,256 --out tiles.json    # tries tiles of greedy sampling, all compiled first on every core

Device time is the median of `--rounds` calls between two events, host time the median of calls that are not waited for; on a CPU both are
the wall clock. Every row of the batch has the feature.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.sampling_tiles import sweep
from rung.cli.options import resolve_device
from rung.counters import Counters
from rung.models import load_model
from rung.runner import GrammarCompiler, GrammarMask, RunnerConfig, SamplingParams, build_engine
from rung.runner.batch import Batch
from rung.runner.ops import default_ops
from rung.runner.sampler import Sampler
from rung.runner.slots import RequestSlots
from rung.runner.transfer import HostToDevice

LENGTH = 256
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "top_k + top_p": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    "bias (8)": {"logit_bias": dict.fromkeys(range(8), 1.0)},
    "allowed (64)": {"allowed_token_ids": range(64)},
    "min_tokens": {"min_tokens": 500},
    "penalties": {"presence_penalty": 1.0, "repetition_penalty": 1.1},
    "bad_words (4)": {"bad_words": [[1], [2, 3], [4, 5, 6], [7, 8]]},
    "grammar": {},
    "logprobs (5)": {"logprobs": 5},
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["name", "age", "tags"],
}


def measure(name: str, rows: int, vocab: int, device: torch.device, rounds: int) -> dict[str, Any]:
    """us a call on the device and on the host."""
    ops = default_ops(device)[0]
    transfer = HostToDevice(device, Counters())
    slots = RequestSlots(rows, LENGTH, transfer, ops)
    sampler = Sampler(slots, transfer, ops)
    params = SamplingParams(seed=1, **FEATURES[name])
    for row in range(rows):
        slot = slots.add(str(row), list(range(100)), 50)
        sampler.add(slot, params, [2], prompt_len=50, num_tokens=100)
    slots.apply_staged_writes()
    sampler.apply_staged_writes()
    batch = Batch(
        request_ids=tuple(map(str, range(rows))),
        idx_mapping=np.arange(rows),
        query_lens=np.ones(rows, np.int32),
        query_start_loc=np.arange(rows + 1, dtype=np.int32),
        seq_lens=np.full(rows, 100, np.int32),
        has_prefill=False,
        uniform_query_len=1,
    )
    mask = None
    if name == "grammar":
        mask = GrammarMask({str(row): row for row in range(rows)}, np.full((rows, -(-vocab // 32)), 0x0F0F0F0F, np.int32))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    logits = torch.randn(rows, vocab, dtype=dtype, device=device)
    idx_mapping, seq_lens = torch.arange(rows, device=device), torch.full((rows,), 100, dtype=torch.int32, device=device)

    def call() -> None:
        sampler.sample(logits, idx_mapping, seq_lens, batch, mask)

    for _ in range(3):
        call()
    host, whole = [], []
    for _ in range(rounds):
        if device.type == "cuda":
            torch.cuda.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(2_000_000)  # the device starts when all is enqueued, so gaps of the host do not count
            begin.record()
        start = time.perf_counter()
        call()
        host.append((time.perf_counter() - start) * 1e6)
        if device.type == "cuda":
            end.record()
            end.synchronize()
            whole.append(begin.elapsed_time(end) * 1e3)
    return {
        "feature": name,
        "rows": rows,
        "vocab": vocab,
        "device_us": statistics.median(whole or host),
        "host_us": statistics.median(host),
    }


def window(target: str, device: torch.device, requests: int, tokens: int) -> dict[str, Any]:
    """The window between `execute_model` and `sample_tokens`, and what of it makes masks, for `requests` that follow a schema."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    loaded = load_model(target, dtype=dtype, device=device)
    start = time.perf_counter()
    compiler = GrammarCompiler(loaded.tokenizer.backend, vocab_size=loaded.config.vocab_size, stop_ids=loaded.tokenizer.stop_ids)
    made = time.perf_counter()
    grammar = compiler.json_schema(SCHEMA)
    compiled = time.perf_counter()
    config = RunnerConfig(max_num_requests=requests, max_num_tokens=512, max_model_len=512, graphs="none", eager=True, steps_in_flight=2)
    engine, _, _ = build_engine(loaded.module, config, tokenizer=loaded.tokenizer)
    windows, masks = [], []
    make, original = engine._mask, GrammarMask.of

    def timed_window() -> Any:
        begin = time.perf_counter()
        result = make()
        windows.append((time.perf_counter() - begin) * 1e6)
        return result

    def timed_mask(*arguments: Any) -> Any:
        begin = time.perf_counter()
        result = original(*arguments)
        masks.append((time.perf_counter() - begin) * 1e6)
        return result

    engine._mask = timed_window  # type: ignore[method-assign]
    GrammarMask.of = timed_mask  # type: ignore[method-assign, assignment]
    prompt = loaded.tokenizer.apply_chat([{"role": "user", "content": "Describe a person as JSON."}])
    params = [SamplingParams(grammar=grammar, temperature=0.8, seed=seed, max_tokens=tokens) for seed in range(requests)]
    begin = time.perf_counter()
    done = engine.generate([prompt] * requests, params)
    GrammarMask.of = original  # type: ignore[method-assign]
    return {
        "requests": requests,
        "tokenizer_s": made - start,
        "compile_ms": (compiled - made) * 1e3,
        "window_us": statistics.median(windows),
        "mask_us": statistics.median(masks),
        "mask_us_a_request": statistics.median(masks) / requests,
        "mask_max_us": max(masks),
        "step_us": (time.perf_counter() - begin) * 1e6 / max(len(one.token_ids) for one in done),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", default="1,8,64,256")
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--window", metavar="MODEL", help="measure the grammar window with this model instead")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--tiles", action="store_true", help="measure tiles of greedy sampling instead")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sizes = [int(size) for size in options.rows.split(",")]
    if options.tiles:
        lines = sweep(sizes)
        if options.out:
            options.out.write_text(json.dumps({"torch": torch.__version__, "rows": lines}, indent=1))
        return
    device = resolve_device(options.device)
    if options.window:
        found = [window(options.window, device, size, options.tokens) for size in sizes]
    else:
        found = [measure(name, rows, options.vocab, device, options.rounds) for rows in sizes for name in FEATURES]
    if options.out:
        options.out.write_text(json.dumps({"torch": torch.__version__, "device": str(device), "rows": found}, indent=1))
    print("  ".join(f"{name:>17}" for name in found[0]))
    for row in found:
        print("  ".join(f"{value:>17.1f}" if isinstance(value, float) else f"{value:>17}" for value in row.values()))


if __name__ == "__main__":
    main()
