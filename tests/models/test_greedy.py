"""Greedy text of SmolLM2 through compiled pieces and recorded graphs, against tokens of transformers' own generate on the same weights."""

from __future__ import annotations

from typing import Any

import pytest

from rung.counters import Count
from rung.models import LoadedModel
from tests.greedy import MODES, TOKENS, prompts, read_reference, run_mode
from tests.smollm2 import reference_tokens

NAME = "smollm2"


def test_reference_is_of_these_prompts(smollm2: LoadedModel) -> None:
    reference = read_reference(NAME)
    assert [prompt for prompt, _ in reference] == prompts(smollm2, NAME)
    assert len(reference) == 50
    assert {len(tokens) for _, (tokens, _) in reference} == {TOKENS}


@pytest.mark.slow
def test_reference_is_what_transformers_generates(smollm2: LoadedModel, their_smollm2: Any) -> None:
    """Two of its prompts; `python -m tests.greedy smollm2 --write` makes it anew."""
    for prompt, (tokens, gaps) in read_reference(NAME)[4:48:43]:
        now, gaps_now = reference_tokens(their_smollm2, prompt, TOKENS)
        assert now == tokens
        assert gaps_now == pytest.approx(gaps, abs=1e-2)


@pytest.mark.slow
def test_50_prompts_under_random_scheduling_equal_generate(smollm2: LoadedModel, record_property: Any) -> None:
    run = run_mode(NAME, smollm2, "full_and_piecewise")
    compiled = run.start.compile
    assert compiled is not None
    assert (compiled.pieces, compiled.unique_pieces <= 4) == (31, True)
    assert run.preemptions >= 3
    assert run.steps["full"] > 50
    assert run.steps["piecewise"] > 20
    assert run.steps["none"] == 0
    assert run.counters[Count.PREFIX_HIT_TOKENS] > 0
    assert run.counters.get(Count.DYNAMO_TRACES, 0) + run.counters.get(Count.PLAN_HITS, 0) == 1
    record_property("divergences", [str(item) for item in run.found])
    assert run.wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "full_and_piecewise"])
def test_other_modes_equal_generate(smollm2: LoadedModel, mode: str) -> None:
    """A few prompts; `python -m tests.greedy smollm2` runs all."""
    run = run_mode(NAME, smollm2, mode, count=6, seed=1)
    used = {"none": {"none"}, "piecewise": {"piecewise"}, "full": {"full"}, "full_decode_only": {"full", "none"}}[mode]
    assert {kind for kind, steps in run.steps.items() if steps} == used
    assert run.wrong == []
