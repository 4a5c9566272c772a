"""The soak itself: a short one passes, and what it looks for is found."""

from __future__ import annotations

import random

import pytest
import torch

from bench.soak import left_overs, soak
from bench.soak_cases import Case, Verdict, enliven
from rung.cli.assembly import Decoder, open_decoder
from rung.runner import Completion, FinishReason, SamplingParams
from tests.runner.tiny import make_engine

CPU = torch.device("cpu")
CASE = Case(prompt=(1, 2), params=SamplingParams(max_tokens=4), tokens=(5, 6, 7, 8, 9), gaps=(1.0, 1e-5, 1.0, 1.0, 1.0))


@pytest.fixture
def decoder() -> Decoder:
    decoder = open_decoder("tiny", torch.float32, CPU, shapes=True)
    enliven(decoder.module, 0)
    return decoder


def test_a_second_of_soak(decoder: Decoder) -> None:
    verdict = soak(decoder, CPU, seconds=1.0, seed=0, num_cases=4, variants=("eager",))
    assert verdict.failures == []
    assert min(verdict.counts[name] for name in ("finished", "drains")) > 0


@pytest.mark.slow
def test_graphs_and_replays_under_a_soak(decoder: Decoder) -> None:
    verdict = soak(decoder, CPU, seconds=10.0, seed=3, num_cases=12, variants=("decode graphs", "replays of 4"))
    assert verdict.failures == []
    wanted = ("finished", "aborted", "refused", "drains", "preempted", "prefix hit tokens", "plans of several steps")
    assert [name for name in wanted if not verdict.counts[name]] == []


@pytest.mark.parametrize(
    ("tokens", "reason", "failures", "counted"),
    [
        ((5, 6, 7, 8), FinishReason.LENGTH, 0, "finished"),
        ((5, 4, 4, 4), FinishReason.LENGTH, 0, "near ties"),
        ((5, 6, 4, 4), FinishReason.LENGTH, 1, "finished"),
        ((5, 6, 7), FinishReason.LENGTH, 1, "finished"),
        ((5, 6, 7, 8), FinishReason.STOP, 1, "finished"),
        ((5, 6), FinishReason.ABORT, 1, "aborted"),  # nobody cancelled it
    ],
)
def test_judgement_of_a_greedy_request(tokens: tuple[int, ...], reason: FinishReason, failures: int, counted: str) -> None:
    verdict = Verdict(tie_gap=1e-3)
    verdict.judge(CASE, CASE.params, completion(tokens, reason), aborted=False)
    assert (len(verdict.failures), verdict.counts[counted]) == (failures, 1)


def completion(tokens: tuple[int, ...], reason: FinishReason) -> Completion:
    return Completion(request_id="r", prompt_token_ids=CASE.prompt, token_ids=tokens, text="", finish_reason=reason, seed=0)


def test_a_stop_token_cuts_what_is_expected() -> None:
    params = SamplingParams(max_tokens=4, stop_token_ids={7, 9})
    assert CASE.expected(params) == ((5, 6, 7), FinishReason.STOP)
    assert CASE.expected(SamplingParams()) == ((5, 6, 7, 8, 9), FinishReason.LENGTH)


@pytest.mark.parametrize("seed", range(20))
def test_variations_end_a_case_earlier(seed: int) -> None:
    tokens, _ = CASE.expected(CASE.variation(random.Random(seed)))
    assert tokens
    assert tokens == CASE.tokens[: len(tokens)]


def test_random_requests_may_differ_seldom() -> None:
    case = Case(prompt=(1,), params=SamplingParams(temperature=1.0, max_tokens=2), tokens=(5, 6), gaps=(1.0, 1.0))
    verdict = Verdict(tie_gap=1e-3, diverged_share=0.5)
    verdict.judge(case, case.params, completion((5, 6), FinishReason.LENGTH), aborted=False)
    verdict.judge(case, case.params, completion((4, 6), FinishReason.LENGTH), aborted=False)
    verdict.close()
    assert verdict.failures == []
    verdict.judge(case, case.params, completion((4, 6), FinishReason.LENGTH), aborted=False)
    verdict.close()
    assert verdict.failures == ["2 of 3 seeded or processed requests differ from those that ran alone"]


def test_left_overs_are_found() -> None:
    engine, runner = make_engine()
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    assert left_overs(engine, runner) == []
    runner.slots.free_slots.pop()
    engine.scheduler.blocks.pools[0].allocate(1)
    assert [left.split(" {")[0].split(" [")[0] for left in left_overs(engine, runner)] == ["taken slots", "owned blocks", "missing blocks"]
