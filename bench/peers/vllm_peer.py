"""vLLM as a peer, through its public API with random weights: `python -m bench.peers.vllm_peer --model 8b --out vllm.json`.

`VLLM_ENABLE_V1_MULTIPROCESSING=0` in the environment keeps the engine in this process, where its kernels can be timed. What its compile
cache hashes is the same in every start: the model's folder, the longest request, the largest batch.

Before it waits for its turn the configuration of the model is made once. vLLM looks at the model's class for that, in a process without a
device, and remembers in its cache what it saw, so that `build` finds it there: a phase of its own, of half a minute in empty caches."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from bench.peers.asked import batch_points, context_points, max_len, max_requests, options, shape_of
from bench.peers.measure import Prompts, Report, Stamps, kernels, memory, prefill, steps, sweep


def main() -> None:
    asked = options(__doc__)
    report = Report(asked.out)
    with report.phase("import torch"):
        import torch  # noqa: F401
    with report.phase("import vllm"):
        from vllm import LLM, EngineArgs, SamplingParams
    one_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
    limit = max_len(asked)
    folder = Path(os.environ.get("VLLM_CACHE_ROOT") or tempfile.mkdtemp()) / f"shape-{asked.model}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape_of(asked)))
    wanted: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": limit,
        "max_num_seqs": max_requests(asked),
        "gpu_memory_utilization": asked.memory,
        "enable_prefix_caching": False,
    }
    with report.guarded("look at the model's class"), report.phase("look at the model"):
        EngineArgs(**wanted).create_model_config()
    report.turn(asked)
    with report.phase("build"):
        llm = LLM(**wanted)

    def generate(some: Prompts, tokens: int) -> None:
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens, detokenize=False)
        llm.generate([{"prompt_token_ids": one} for one in some], params, use_tqdm=False)

    with report.phase("first token"):
        generate([[11, 12, 13]], 1)
    report.ready()
    if asked.start_only:
        return
    chunk, stamps = _chunk(llm), Stamps(llm.llm_engine)
    report.add("note", text=f"max_model_len {limit}, {chunk} tokens a step at most")
    steps(report, generate, asked, stamps, chunk)
    sweep(report, generate, stamps, asked, batch_points(asked), chunk, max_model_len=limit)
    if asked.prefill:
        prefill(report, generate, asked, asked.prefill)
    sweep(report, generate, stamps, asked, context_points(asked), chunk, max_model_len=limit)
    memory(report, "end")
    if one_process:
        kernels(report, generate, asked)


def _chunk(llm: object) -> int:
    """Tokens of a step, vLLM's default for this device; a guess below all defaults where this version does not tell."""
    try:
        return int(llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens)  # type: ignore[attr-defined]
    except AttributeError:
        return 2048


if __name__ == "__main__":
    main()
