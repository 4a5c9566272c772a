"""rung as a peer: `python -m bench.peers.ours --model 8b --out ours.json`."""

from __future__ import annotations

import time
from dataclasses import replace

from bench.peers.measure import Prompts, Report, max_model_len, memory, numbers, options, prefill, shape_of, steps
from bench.peers.shapes import TARGETS


def main() -> None:
    asked = options(__doc__)
    report = Report(asked.out)
    begin = time.perf_counter()
    with report.phase("import torch"):
        import torch
    with report.phase("import rung"):
        import rung  # noqa: F401
        from rung.models import SHAPES, random_model
        from rung.runner import RunnerConfig, SamplingParams, build_engine
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    memory(report, "before")
    with report.phase("weights"):
        shape = replace(SHAPES[TARGETS[asked.model]], max_position_embeddings=shape_of(asked)["max_position_embeddings"])
        module = random_model(shape, dtype=torch.bfloat16 if on_gpu else torch.float32, device=device)
        if on_gpu:
            torch.cuda.synchronize()
    batches, context = numbers(asked.batches), max(numbers(asked.contexts))
    limit = max_model_len(asked)
    config = RunnerConfig(
        max_num_requests=max(batches),
        max_num_tokens=max(2048 if on_gpu else 64, max(batches)),
        max_model_len=limit,
        num_blocks=max(batches) * -(-(context + asked.long) // 16) + -(-limit // 16) + 1,
        graphs="full_and_piecewise",
        capture_sizes=None if on_gpu else tuple(batches),
        prefix_cache=False,
        freeze_heap=True,  # so do engines that serve, vLLM's too
    )
    with report.phase("build"):
        engine, _, start = build_engine(module, config)
    for name, seconds in start.seconds.items():
        report.add("phase", name=f"build: {name}", seconds=seconds)
    if start.compile is not None:
        for name, seconds in start.compile.seconds.items():
            report.add("phase", name=f"compile: {name}", seconds=seconds)
    report.add("note", text=f"attention {start.attention}; launches {start.kernel_launches}")

    def generate(some: Prompts, tokens: int) -> None:
        engine.generate(some, SamplingParams(max_tokens=tokens, ignore_eos=True))

    with report.phase("first token"):
        generate([[11, 12, 13]], 1)
    report.add("phase", name="ready", seconds=time.perf_counter() - begin)
    memory(report, "ready")
    if asked.start_only:
        return
    steps(report, generate, asked)
    if asked.prefill:
        prefill(report, generate, asked, min(asked.prefill, limit - 1))
    memory(report, "end")


if __name__ == "__main__":
    main()
