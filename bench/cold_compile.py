"""Where the time of a cold compile goes: new processes with empty caches, a decoder of random weights, phases as rows and runs as columns.

python -m bench.cold_compile --layers 4 --hidden 256 --runs 3 [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="folder for cold_compile.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(_measure(options)))
        return
    columns = [_in_new_process(options) for _ in range(options.runs)]
    names = list(dict.fromkeys(name for column in columns for name in column))
    for name in names:
        print(f"{name:<18}" + "".join(f"{column.get(name, 0.0):9.2f}" for column in columns))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "cold_compile.json").write_text(json.dumps(columns, indent=1))


def _in_new_process(options: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: f"{folder}/{name.lower()}" for name in ("RUNG_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        command = [sys.executable, "-m", "bench.cold_compile", "--child", "--device", options.device]
        command += ["--layers", str(options.layers), "--hidden", str(options.hidden)]
        output = subprocess.run(command, env={**os.environ, **caches}, check=True, capture_output=True, text=True).stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    import torch

    torch_seconds = time.perf_counter() - start
    start = time.perf_counter()
    import rung
    from rung.models import LlamaConfig, LlamaForCausalLM

    rung_seconds = time.perf_counter() - start
    heads = max(1, options.hidden // 64)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_layers=options.layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=64,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    module = LlamaForCausalLM(config, torch.float32).to(options.device).eval().requires_grad_(False)
    rung.wrap(module, dynamic={"input_ids": {0: "tokens"}, "positions": {0: "tokens"}})
    arguments = (torch.zeros(8, dtype=torch.int64, device=options.device), torch.arange(8, device=options.device))
    start = time.perf_counter()
    with torch.no_grad():
        module.rung._entry.prepare_call(*arguments)
    ready = time.perf_counter() - start
    phases: dict[str, float] = module.rung.report()[0]["seconds"]
    rest = ready - sum(phases.values())
    return {"import torch": torch_seconds, "import rung": rung_seconds, **phases, "rest": rest, "call to ready": ready}


if __name__ == "__main__":
    main()
