"""Greedy text of real weights under random scheduling and forced preemption, against tokens that transformers generated once.

    python -m tests.greedy smollm2                            # 50 prompts in every mode; prints a table
    python -m tests.greedy gemma3 --modes full --prompts 12
    python -m tests.greedy smollm2 --write                    # generate tests/references/smollm2.json anew (minutes)

`--gguf` names the file, where it is not installed. Exits with 1 when a token differs where the reference's two best logits are not close.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rung.models import LoadedModel, find_quickstart, load_model
from rung.runner import Engine, RunnerConfig, SamplingParams, StartUp, build_engine
from rung.runner.config import Mode
from tests.gemma3 import PROMPTS as TEXTS
from tests.gemma3 import gemma3_gguf, run_at_random, transformers_gemma3
from tests.models.harness import transformers_gguf
from tests.smollm2 import TOPICS, Divergence, divergences, reference_tokens

NEAR_TIE = 1e-3  # float32: below it two best tokens may change places
TOKENS = 16
MODES: tuple[str, ...] = get_args(Mode)
FOLDER = Path(__file__).parent / "references"
_MORE = (
    "To be, or not to be, that is",
    "SELECT name, age FROM people WHERE",
    "The recipe needs flour, sugar, eggs and",
    '{"city": "Berlin", "country":',
    "Roses are red, violets are",
    "3.14159",
    "Il était une fois une petite fille qui",
    "for i in range(10):\n    print(",
    "今日は天気が",
    "A",
)
_RULES = "You are a patient teacher. Answer briefly, in plain words, and say so when you do not know. "
_STORY = "The old lighthouse keeper counted the ships that passed before the storm came in from the north. "


def prompts(model: LoadedModel, name: str) -> list[list[int]]:
    """50 prompts: plain and chat, short and long, some with one beginning."""
    encode = model.tokenizer.encode
    questions = TOPICS[:20]
    if name == "smollm2":
        chats = [model.tokenizer.apply_chat([{"role": "user", "content": topic}]) for topic in questions]
    else:
        chats = [encode(f"Question: {topic}\nAnswer:") for topic in questions]
    plain = [encode(text) for text in (*TEXTS, *_MORE)]
    shared = [encode(_RULES + topic) for topic in questions[:5]]
    long = [encode(_STORY * 8)[:length] for length in (90, 130, 150)]
    return [*chats, *plain, *shared, *long]


def write_reference(name: str, model: LoadedModel, theirs: Any) -> None:
    """Generate every prompt alone with transformers, and keep tokens and the distances of the two best logits."""
    rows = []
    for prompt in prompts(model, name):
        tokens, gaps = reference_tokens(theirs, prompt, TOKENS)
        rows.append({"prompt": prompt, "tokens": tokens, "gaps": [round(gap, 5) for gap in gaps]})
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def read_reference(name: str) -> list[tuple[list[int], tuple[list[int], list[float]]]]:
    """(prompt, (tokens, gaps)) of each prompt."""
    return [(row["prompt"], (row["tokens"], row["gaps"])) for row in json.loads((FOLDER / f"{name}.json").read_text())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a mode gave."""

    mode: str
    prompts: int
    preemptions: int
    steps: dict[str, int]  # by mode
    seconds: float
    counters: dict[str, int]
    start: StartUp
    found: list[Divergence]

    @property
    def wrong(self) -> list[Divergence]:
        return [item for item in self.found if item.gap >= NEAR_TIE]


def run_mode(name: str, model: LoadedModel, mode: str, count: int | None = None, seed: int = 0) -> Run:
    """The first `count` prompts of the reference (all of them), spread over it, through a cache for about five of them."""
    reference = read_reference(name)
    if count is not None:
        reference = random.Random(0).sample(reference, count)
    config = RunnerConfig(
        max_num_requests=8,
        max_num_tokens=64,
        max_model_len=176,
        num_blocks=1 + 22,
        long_prefill_chunk=48,
        graphs=mode,  # type: ignore[arg-type]
        capture_sizes=None if mode == "none" else (8, 32, 64),
        lazy_capture=mode != "none",
        max_waste=None,
    )
    engine, runner, started = build_engine(model.module, config)
    start = time.perf_counter()
    tokens, preemptions = _tokens(engine, [prompt for prompt, _ in reference], seed)
    seconds = time.perf_counter() - start
    counters = dict(runner.counters.items())
    steps = {
        kind: sum(count for key, count in counters.items() if key.startswith(f"step.{kind}.")) for kind in ("none", "piecewise", "full")
    }
    engine.executor.shutdown()
    found = divergences(tokens, [expected for _, expected in reference])
    return Run(
        mode=mode,
        prompts=len(reference),
        preemptions=preemptions,
        steps=steps,
        seconds=seconds,
        counters=counters,
        start=started,
        found=found,
    )


def _tokens(engine: Engine, asked: Sequence[Sequence[int]], seed: int) -> tuple[list[tuple[int, ...]], int]:
    return run_at_random(engine, asked, SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True), seed=seed)


def _load(name: str, gguf: Path | None) -> tuple[LoadedModel, Path]:
    if gguf is None:
        gguf = find_quickstart() if name == "smollm2" else gemma3_gguf(Path(tempfile.mkdtemp()))
    return load_model(gguf), gguf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("smollm2", "gemma3"))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    model, path = _load(arguments.name, arguments.gguf)
    if arguments.write:
        write_reference(arguments.name, model, transformers_gguf(path) if arguments.name == "smollm2" else transformers_gemma3(path))
        return
    print(f"{'mode':20} prompts  preempted  steps none/piecewise/full  seconds  differ (prompt, position, gap)")
    failed = False
    for mode in arguments.modes.split(","):
        run = run_mode(arguments.name, model, mode, arguments.prompts, arguments.seed)
        failed |= bool(run.wrong)
        steps = "/".join(map(str, run.steps.values()))
        differ = [(item.prompt, item.position, item.gap) for item in run.found] or "-"
        print(f"{mode:20} {run.prompts:7} {run.preemptions:10} {steps:>26} {run.seconds:8.1f}  {differ}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
