"""Greedy text of SmolLM2 in float32 with every pass on: our model and that of transformers, against tokens of transformers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rung.models import load_model
from rung.models.hf import FlatModel
from rung.passes import defaults
from rung.passes.expectations import counts_of
from rung.passes.fusion import Projections
from rung.passes.report import merged
from rung.runner import RunnerConfig, SamplingParams, build_engine
from tests.greedy import NEAR_TIE, TOKENS, read_reference
from tests.models.harness import transformers_gguf
from tests.smollm2 import divergences

PROMPTS = slice(0, 50, 5)
LAYERS = 30


def run(model: Any) -> tuple[list[list[int]], dict[str, int]]:
    """The tokens of some prompts, and the matches of all passes; a piece counts as often as it is used."""
    rows = read_reference("smollm2")[PROMPTS]
    config = RunnerConfig(max_num_requests=16, max_num_tokens=512, max_model_len=256, num_blocks=170)
    engine, runner, start = build_engine(model, config)
    found = engine.generate([prompt for prompt, _ in rows], SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    engine.executor.shutdown()
    assert start.compile is not None
    plan = runner.forward.manager.plan.plan  # type: ignore[attr-defined]
    uses = [sum(step.piece == index for step in plan.steps) for index in range(len(plan.pieces))]
    reports = zip(start.compile.passes, uses, strict=True)
    total = merged({name: count * times for name, count in counts_of(report).items()} for report, times in reports)
    return [list(one.token_ids) for one in found], total | counts_of(start.compile.whole_passes)


def check(tokens: list[list[int]]) -> None:
    assert [one for one in divergences(tokens, [row[1] for row in read_reference("smollm2")[PROMPTS]]) if one.gap > NEAR_TIE] == []


@pytest.mark.slow
def test_our_model_with_its_products_joined(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "Projections", lambda: Projections(lambda op, args: None))  # joined ops have no provider on a CPU
    tokens, counts = run(load_model(smollm2_path, dtype=torch.float32).module)
    check(tokens)
    assert counts["linear_norm_linear"] == 2 * LAYERS - 1
    assert counts["norm_linear"] == counts["linear_norm"] == 1  # before the first product and behind the last
    assert counts["linear"] == 0


@pytest.mark.slow
def test_the_model_of_transformers(smollm2_path: Path) -> None:
    tokens, counts = run(FlatModel(transformers_gguf(smollm2_path)))
    check(tokens)
    assert counts["rope_kv_write"] == LAYERS
    assert counts["add_norm"] == 2 * LAYERS
    assert counts["silu_mul"] == LAYERS
    assert counts["rms_norm"] >= 2 * LAYERS + 1
