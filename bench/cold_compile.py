"""Where the time of a cold compile goes, beside torch.compile: new processes with empty caches, a decoder whose attention is a copy.

    python -m bench.cold_compile --target llama-8b --device cuda --runs 3
    python -m bench.cold_compile --layers 4 --hidden 256

One column a process: `rung`, `torch` (torch.compile with all its guards) and `unguarded` (with all of them skipped), `--beside` runs of
those. "call to ready" is from the first call, Dynamo and Inductor imported (rows of their own), to code that can serve: for rung until its
variant is there, for torch.compile until the first call has returned, which is the earliest it says so. Weights are zero: no figure
depends on them.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
KINDS = ("rung", "torch", "unguarded")
TIME_LIMIT = 120  # seconds for a process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a named shape such as llama-8b; else --layers and --hidden")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--beside", type=int, default=1, help="runs of each way of torch.compile; 0: rung alone")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="folder for cold_compile.json")
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options)))
        return
    runs = [(kind, in_new_process(options, kind)) for kind in KINDS for _ in range(options.runs if kind == "rung" else options.beside)]
    show(runs)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        columns = [{"kind": kind, "seconds": seconds} for kind, seconds in runs]
        shape = options.target or {"layers": options.layers, "hidden": options.hidden}
        (options.out / "cold_compile.json").write_text(json.dumps({"shape": shape, "device": options.device, "runs": columns}, indent=1))


def show(runs: list[tuple[str, dict[str, float]]]) -> None:
    names = list(dict.fromkeys(name for _, seconds in runs for name in seconds))
    names.sort(key=lambda name: name == "call to ready")  # the sum is the last row
    width = max(map(len, names))
    print(f"{'seconds':<{width}}" + "".join(f"{kind:>11}" for kind, _ in runs))
    for name in names:
        print(f"{name:<{width}}" + "".join(f"{seconds[name]:11.2f}" if name in seconds else f"{'-':>11}" for _, seconds in runs))


def in_new_process(options: argparse.Namespace, kind: str) -> dict[str, float]:
    """The phases of one process, `failed` where it did not end well."""
    command = [sys.executable, "-m", "bench.cold_compile", "--child", kind, "--device", options.device]
    command += ["--target", options.target] if options.target else ["--layers", str(options.layers), "--hidden", str(options.hidden)]
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: f"{folder}/{name.lower()}" for name in ("RUNG_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        environment = {**os.environ, **caches, "RUNG_CACHE_BASE": ""}
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired:
            print(f"{kind} ran past {TIME_LIMIT} s", flush=True)
            return {"failed": 1.0}
    if done.returncode:
        print(f"{kind} ended with {done.returncode}: {done.stderr[-1500:]}", flush=True)
        return {"failed": 1.0}
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(options: argparse.Namespace) -> dict[str, float]:
    """The phases of this process, in order."""
    found: dict[str, float] = {}
    last = time.perf_counter()

    def mark(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        found[name], last = now - last, now

    import torch

    mark("import torch")
    import rung  # noqa: F401
    from rung.models import SHAPES, LlamaConfig
    from rung.models.build import empty_model

    mark("import rung")
    config = SHAPES[options.target] if options.target else small(LlamaConfig, options)
    on_gpu = options.device.startswith("cuda")
    module = empty_model(config, torch.bfloat16 if on_gpu else torch.float32, options.device)
    for parameter in module.parameters():
        parameter.zero_()
    if on_gpu:
        torch.cuda.synchronize()
    mark("weights")
    ids = torch.zeros(8, dtype=torch.int64, device=options.device)
    unguarded = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    ways = {"rung": ours, "torch": theirs, "unguarded": functools.partial(theirs, options=unguarded)}
    return found | ways[options.child](module, (ids, torch.arange(8, device=options.device)))


def small(kind: Any, options: argparse.Namespace) -> Any:
    heads = max(1, options.hidden // 64)
    return kind(
        vocab_size=1024,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_layers=options.layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )


def ours(module: Any, arguments: tuple[Any, ...]) -> dict[str, float]:
    import torch

    import rung

    rung.wrap(module, dynamic={"input_ids": {0: "tokens"}, "positions": {0: "tokens"}}, maximum=2048)
    start = time.perf_counter()
    with torch.no_grad():
        module.rung._entry.prepare_call(*arguments)
    ready = time.perf_counter() - start
    phases: dict[str, float] = module.rung.report()[0]["seconds"]
    imports = {name: seconds for name, seconds in phases.items() if name.startswith("import ")}
    work = {name: seconds for name, seconds in phases.items() if name not in imports}
    ready -= sum(imports.values())
    return {**imports, **work, "rest": ready - sum(work.values()), "call to ready": ready}


def theirs(module: Any, arguments: tuple[Any, ...], options: dict[str, Any] | None = None) -> dict[str, float]:
    import torch

    from rung.context import set_forward_context

    start = time.perf_counter()
    import torch._dynamo.convert_frame

    dynamo = time.perf_counter()
    import torch._inductor.compile_fx

    inductor = time.perf_counter()
    for tensor in arguments:
        torch._dynamo.mark_dynamic(tensor, 0)
    compiled = torch.compile(module, fullgraph=True, options=options)
    begin = time.perf_counter()
    with torch.no_grad(), set_forward_context(copying(module)):
        compiled(*arguments)
    ready = time.perf_counter() - begin
    seconds = {name: sum(spent) for name, spent in torch._dynamo.utils.compilation_time_metrics.items()}
    below = seconds.get("OutputGraph.call_user_compiler", 0.0)
    guards = seconds.get("build_guards", 0.0)
    phases = {"trace": seconds.get("bytecode_tracing", 0.0), "compile": below, "guards": guards}
    imports = {"import Dynamo": dynamo - start, "import Inductor": inductor - dynamo}
    return {**imports, **phases, "rest": ready - sum(phases.values()), "call to ready": ready}


def copying(module: Any) -> Any:
    """A forward context in which attention copies its queries."""
    from types import SimpleNamespace

    import torch

    from rung.attention import AttentionBackend, KVCache, attention_layers
    from rung.context import ForwardContext

    class Copying(AttentionBackend):
        @classmethod
        def why_not(cls, *arguments: Any) -> str | None:
            return None

        def write_kv(self, *arguments: Any) -> None:
            return None

        def rotate_and_write(self, query: Any, key: Any, value: Any, rotation: Any, rotated: Any, *others: Any) -> None:
            rotated.copy_(query)

        def forward(self, query: Any, cache: Any, out: Any, metadata: Any) -> None:
            out.copy_(query)

    layers = attention_layers(module)
    nothing = torch.empty(1, 16, 1, 1, device=next(module.parameters()).device)
    for layer in layers.values():
        layer.bind(Copying(layer.spec), KVCache(nothing, nothing))
    metadata = dict.fromkeys(layers, SimpleNamespace(slot_mapping=None))
    return ForwardContext(attention_layers=layers, attention_metadata=metadata)


if __name__ == "__main__":
    main()
