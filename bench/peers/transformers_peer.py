"""transformers with a static cache as a peer: `generate`, whose decode step it compiles by itself on a GPU, or with `BARE=1` in the
environment the decode call alone under `torch.compile(mode="reduce-overhead")`, without sampling or the read of the ids.

    python -m bench.peers.transformers_peer --model 135m --batches 1,8 --out transformers.json
"""

from __future__ import annotations

import inspect
import os
import statistics
import time
from typing import Any

from bench.peers.asked import numbers, options, shape_of
from bench.peers.measure import Prompts, Report, busy, kernels, memory, on_gpu, prefill, prompts, steps

_CALLS = 40


def main() -> None:
    asked = options(__doc__)
    report = Report(asked.out)
    begin = time.perf_counter()
    with report.phase("import torch"):
        import torch
    with report.phase("import transformers"):
        from transformers import LlamaConfig, LlamaForCausalLM
    config = {name: value for name, value in shape_of(asked).items() if name not in ("architectures", "model_type", "torch_dtype")}
    with report.phase("weights"), torch.device("cuda" if on_gpu() else "cpu"):
        torch.set_default_dtype(torch.bfloat16 if on_gpu() else torch.float32)
        model = LlamaForCausalLM(LlamaConfig(**config)).eval()
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        if os.environ.get("BARE") == "1":
            for batch in numbers(asked.batches):
                with report.guarded(f"decode call of {batch}"):
                    _bare(report, model, batch, asked)
            memory(report, "end")
            return
        caches: dict[tuple[int, int], Any] = {}

        def generate(some: Prompts, tokens: int) -> None:
            ids = torch.tensor(some, device=model.device)
            length = -(-(max(ids.shape[1], asked.context) + asked.long) // 256) * 256  # one for all decode rows: each is a compile
            key = (ids.shape[0], length)
            if key not in caches:
                caches[key] = _cache(model, length)
            caches[key].reset()
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                **{_cache_name(model): caches[key]},
            )
            out.tolist()

        with report.phase("first tokens"):
            generate(prompts(1, 3, asked.model), 2)
        report.add("phase", name="ready", seconds=time.perf_counter() - begin)
        memory(report, "ready")
        if asked.start_only:
            return
        steps(report, generate, asked)
        if asked.prefill:
            prefill(report, generate, asked, min(asked.prefill, config["max_position_embeddings"] - asked.long))
        memory(report, "end")
        kernels(report, generate, asked)


def _bare(report: Report, model: Any, batch: int, asked: Any) -> None:
    import torch

    context = asked.context
    cache = _cache(model, context + 4 * _CALLS + 64)
    ids = torch.tensor(prompts(batch, context, asked.model), device=model.device)
    place = _cache_name(model)
    model(ids, use_cache=True, logits_to_keep=1, **{place: cache})
    compiled = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    token, position = ids[:, :1].contiguous(), torch.full((batch, 1), context, device=model.device)

    def calls(count: int) -> None:
        for _ in range(count):
            torch.compiler.cudagraph_mark_step_begin()
            compiled(token, position_ids=position, use_cache=True, **{place: cache})
            position.add_(1)

    start = time.perf_counter()
    calls(4)
    report.add("phase", name=f"compile and capture of {batch}", seconds=time.perf_counter() - start)
    found = []
    for _ in range(min(3, asked.rounds)):
        if on_gpu():
            torch.cuda.synchronize()
        start = time.perf_counter()
        calls(_CALLS)
        if on_gpu():
            torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / _CALLS * 1e3)
    report.add("step", batch=batch, context=context, wall_ms=statistics.median(found), min_ms=min(found), max_ms=max(found))
    if on_gpu():
        milliseconds, count = busy(lambda: calls(8))
        report.add("kernels", batch=batch, context=context, device_ms=milliseconds / 8, kernels=count / 8)
    torch.compiler.reset()


def _cache(model: Any, length: int) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=length)


def _cache_name(model: Any) -> str:
    """The parameter that takes a cache; its name changed during transformers 5."""
    return "past_key_values" if "past_key_values" in inspect.signature(model.forward).parameters else "cache"


if __name__ == "__main__":
    main()
