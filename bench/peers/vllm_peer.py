"""vLLM as a peer, through its public API with random weights: `python -m bench.peers.vllm_peer --model 8b --out vllm.json`.

`VLLM_ENABLE_V1_MULTIPROCESSING=0` in the environment keeps the engine in this process, where its kernels can be timed."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

from bench.peers.measure import Prompts, Report, max_model_len, memory, numbers, options, prefill, shape_of, steps


def main() -> None:
    asked = options(__doc__)
    report = Report(asked.out)
    begin = time.perf_counter()
    with report.phase("import torch"):
        import torch  # noqa: F401
    with report.phase("import vllm"):
        from vllm import LLM, SamplingParams
    one_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
    limit = max_model_len(asked)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape_of(asked)))
        with report.phase("build"):
            llm = LLM(
                model=folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                dtype="bfloat16",
                max_model_len=limit,
                max_num_seqs=max(numbers(asked.batches)),
                gpu_memory_utilization=asked.memory,
                enable_prefix_caching=False,
            )

        def generate(some: Prompts, tokens: int) -> None:
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens, detokenize=False)
            llm.generate([{"prompt_token_ids": one} for one in some], params, use_tqdm=False)

        with report.phase("first token"):
            generate([[11, 12, 13]], 1)
        report.add("phase", name="ready", seconds=time.perf_counter() - begin)
        memory(report, "ready")
        if asked.start_only:
            return
        steps(report, generate, asked, profiled=one_process)
        if asked.prefill:
            prefill(report, generate, asked, min(asked.prefill, limit - 1))
        memory(report, "end")


if __name__ == "__main__":
    main()
