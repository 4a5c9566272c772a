from __future__ import annotations

from typing import Any

import pytest
import torch

from rung.errors import SamplingParamsError
from rung.runner.sampler import SamplingParams, gumbel_noise
from tests.runner.sampling import Row
from tests.runner.sampling import sample as sample_rows

VOCAB = 50


def sample(
    params: list[SamplingParams], logits: torch.Tensor, positions: list[int], allowed: dict[int, list[int]] | None = None
) -> list[int]:
    """Rows whose sequences have `positions` tokens."""
    rows = [Row(one, [0] * place, allowed=(allowed or {}).get(at)) for at, (one, place) in enumerate(zip(params, positions, strict=True))]
    return sample_rows(rows, logits, max_num_requests=64)


def test_greedy_takes_the_largest_logit() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    assert sample([SamplingParams()] * 4, logits, [1, 2, 3, 4]) == logits.argmax(-1).tolist()


def test_a_draw_does_not_know_its_batch() -> None:
    logits = torch.randn(16, VOCAB, generator=torch.Generator().manual_seed(1))
    params = [
        SamplingParams(temperature=0.0 if i % 4 == 3 else 0.5 + i / 8, seed=i, top_k=(0, 5)[i % 2], top_p=(1.0, 0.8)[i // 2 % 2])
        for i in range(16)
    ]
    together = sample(params, logits, list(range(16)))
    alone = [sample([params[i]], logits[i : i + 1], [i])[0] for i in range(16)]
    assert together == alone


def test_seed_and_position_change_the_draw() -> None:
    logits = torch.zeros(64, VOCAB)
    same = sample([SamplingParams(temperature=1.0, seed=3)] * 64, logits, [9] * 64)
    by_position = sample([SamplingParams(temperature=1.0, seed=3)] * 64, logits, list(range(64)))
    by_seed = sample([SamplingParams(temperature=1.0, seed=s) for s in range(64)], logits, [9] * 64)
    assert len(set(same)) == 1
    assert len(set(by_position)) > 25
    assert len(set(by_seed)) > 25


def test_draws_follow_the_distribution() -> None:
    """Chi-square of 20000 draws from 8 tokens; 7 degrees of freedom, 24.3 is the 0.999 quantile."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0])
    count = 20000
    scores = logits + gumbel_noise(torch.full((count,), 7), torch.arange(count), 8)
    seen = scores.argmax(-1).bincount(minlength=8).double()
    expected = logits.double().softmax(0) * count
    assert ((seen - expected) ** 2 / expected).sum() < 24.3


def test_noise_is_standard_gumbel_and_finite() -> None:
    noise = gumbel_noise(torch.arange(200), torch.arange(200) * 3, 500)
    assert noise.dtype == torch.float32
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772) < 0.02
    assert abs(noise.var() - 1.6449) < 0.05


def test_top_k_keeps_k_tokens() -> None:
    logits = torch.arange(VOCAB, dtype=torch.float32).repeat(200, 1) * 0.01
    drawn = sample([SamplingParams(temperature=1.0, top_k=3, seed=s) for s in range(64)], logits[:64], [1] * 64)
    assert set(drawn) == {47, 48, 49}


def test_top_p_keeps_the_likely_ones_and_always_the_best() -> None:
    logits = torch.full((64, VOCAB), -10.0)
    logits[:, 4], logits[:, 9] = 5.0, 4.9
    assert set(sample([SamplingParams(temperature=1.0, top_p=0.6, seed=s) for s in range(64)], logits, [1] * 64)) == {4, 9}
    assert set(sample([SamplingParams(temperature=1.0, top_p=1e-9, seed=s) for s in range(64)], logits, [1] * 64)) == {4}


def test_a_bitmask_forbids_tokens() -> None:
    logits = torch.arange(VOCAB, dtype=torch.float32).repeat(2, 1)
    assert sample([SamplingParams()] * 2, logits, [1, 1], {0: list(range(32))}) == [31, 49]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("seed", 2**63),
        ("seed", "x"),
        ("max_tokens", 0),
        ("stop", ("",)),
        ("stop_token_ids", ["a"]),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("inf")),
        ("repetition_penalty", 0.0),
        ("logit_bias", {1: "much"}),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", "abc"),
        ("allowed_token_ids", [1.5]),
        ("bad_words", [1, 2]),
        ("bad_words", [[]]),
        ("bad_words", ["word"]),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("logprobs", True),
        ("prompt_logprobs", 1.5),
        ("grammar", "{}"),
    ],
)
def test_bad_parameters_are_named(name: str, value: object) -> None:
    with pytest.raises(SamplingParamsError, match=f"^{name} must be"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_minimum_above_the_maximum_is_refused() -> None:
    with pytest.raises(SamplingParamsError, match=r"min_tokens must be an integer in \[0, max_tokens=3\], got 4"):
        SamplingParams(min_tokens=4, max_tokens=3)


def test_parameters_keep_copies_of_collections() -> None:
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[4] = 2.0
    assert params.logit_bias == {3: 1.0}


def test_one_stop_text_may_be_given_alone() -> None:
    assert SamplingParams(stop="end").stop == ("end",)


@pytest.mark.parametrize("bad", [{"stop": None}, {"stop": 5}, {"stop_token_ids": 5}, {"stop_token_ids": None}])
def test_stops_of_a_wrong_type(bad: dict[str, Any]) -> None:
    with pytest.raises(SamplingParamsError, match=next(iter(bad))):
        SamplingParams(**bad)
