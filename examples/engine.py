"""A chat engine on rung's model runner, for one prompt after another on the input.

    python examples/engine.py [MODEL]          # a GGUF file, a transformers folder, or smollm2

Everything an engine needs is here: load the model, compile it and capture its graphs, add requests, step, print text as it comes.
A blank line ends a batch of prompts; they are answered together.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import torch

from rung.models import Tokenizer, load_model
from rung.runner import Engine, RunnerConfig, SamplingParams, build_engine

CONTEXT = 1024  # tokens of a prompt and its answer


def make_engine(model: str) -> tuple[Engine, Tokenizer]:
    on_gpu = torch.cuda.is_available()
    dtype, device = (torch.bfloat16, "cuda") if on_gpu else (torch.float32, "cpu")
    loaded = load_model(model, dtype=dtype, device=device)
    config = RunnerConfig(
        max_num_requests=256 if on_gpu else 8,
        max_num_tokens=2048 if on_gpu else 512,
        max_model_len=min(CONTEXT, loaded.config.max_position_embeddings),
        graphs="full_and_piecewise" if on_gpu else "piecewise",
        capture_sizes=None if on_gpu else (1, 2, 4, 8),
        lazy_capture=not on_gpu,
        freeze_heap=True,  # this process serves, and does nothing else
    )
    engine, _, start = build_engine(loaded.module, config, tokenizer=loaded.tokenizer)
    print("ready: " + ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in start.seconds.items()), file=sys.stderr)
    return engine, loaded.tokenizer


def answer(engine: Engine, model_prompts: list[list[int]]) -> None:
    """All prompts in one continuous batch; each answer is printed when it is complete."""
    params = SamplingParams(max_tokens=128)
    number_of = {engine.add_request(prompt, params): number for number, prompt in enumerate(model_prompts, 1)}
    while number_of:
        for update in engine.step():
            if update.completion is not None:
                print(f"[{number_of.pop(update.request_id)}] {update.completion.text.strip()}\n", flush=True)


def batches(lines: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for line in lines:
        if line.strip():
            batch.append(line.strip())
        elif batch:
            yield batch
            batch = []
    if batch:
        yield batch


def main() -> None:
    engine, tokenizer = make_engine(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
    for batch in batches(sys.stdin):
        answer(engine, [tokenizer.apply_chat([{"role": "user", "content": text}]) for text in batch])


if __name__ == "__main__":
    main()
