"""Sampling parameters through the whole engine."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from rung.errors import SamplingParamsError
from rung.graphs import ConfiguredMode
from rung.runner import FinishReason, SamplingParams
from tests.runner.sampling import Row, expected_token
from tests.runner.test_engine import assert_nothing_left, count_preemptions
from tests.runner.test_graph_forward import make
from tests.runner.tiny import VOCAB, TinyModel, make_engine


def expected(model: TinyModel, prompt: list[int], params: SamplingParams, count: int) -> list[int]:
    """Token by token with the model without a cache and the oracle of a row."""
    output: list[int] = []
    for _ in range(count):
        logits = model.without_cache(prompt + output).numpy()
        output.append(expected_token(Row(params, prompt, tuple(output), tuple(params.stop_token_ids)), logits))
    return output


def mixes(chance: random.Random, count: int) -> list[SamplingParams]:
    def one(seed: int) -> SamplingParams:
        some = [chance.randrange(VOCAB) for _ in range(6)]
        kinds: list[dict[str, Any]] = [
            {},
            {"temperature": 1.2},
            {"presence_penalty": 1.5, "frequency_penalty": 0.7},
            {"repetition_penalty": 1.8, "temperature": 0.9, "min_p": 0.05},
            {"logit_bias": dict.fromkeys(some, 5.0), "bad_words": [[some[0]], [some[1], some[2]], [some[2], some[1]]]},
            {"allowed_token_ids": range(20, 60), "temperature": 2.0, "top_k": 9},
        ]
        return SamplingParams(seed=seed, max_tokens=14, **kinds[seed % len(kinds)])

    return [one(seed) for seed in range(count)]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_random_mixes_across_preemptions_equal_the_oracle(steps_in_flight: int) -> None:
    model, chance = TinyModel(), random.Random(6)
    engine, runner = make_engine(model, num_blocks=13, block_size=4, max_model_len=48, max_num_tokens=16, steps_in_flight=steps_in_flight)
    preemptions = count_preemptions(engine)
    params = mixes(chance, 12)
    prompts = [[chance.randrange(VOCAB) for _ in range(chance.randint(5, 20))] for _ in params]
    completions = engine.generate(prompts, params)
    for prompt, one, completion in zip(prompts, params, completions, strict=True):
        assert list(completion.token_ids) == expected(model, prompt, one, 14)
    penalised = [at for at, one in enumerate(params) if one.has_penalties]
    assert any(preemptions.get(completions[at].request_id, 0) for at in penalised)
    assert_nothing_left(engine, runner)


@pytest.mark.parametrize("replay_steps", [1, 4])
def test_decode_graphs_with_mixes(replay_steps: int) -> None:
    """Rows that a graph cannot sample, beside rows that it could, and steps with the latter alone."""
    engine, _, _ = make(ConfiguredMode.FULL_AND_PIECEWISE, decode_in_graph=True, replay_steps=replay_steps)
    params = [
        SamplingParams(max_tokens=20),
        SamplingParams(max_tokens=5, presence_penalty=1.5, frequency_penalty=1.0),
        SamplingParams(max_tokens=12, bad_words=[[3]], min_tokens=4, stop_token_ids=[5]),
    ]
    alone = [make(ConfiguredMode.NONE)[0].generate([[at + 1, 2]], one)[0].token_ids for at, one in enumerate(params)]
    together = [one.token_ids for one in engine.generate([[at + 1, 2] for at in range(3)], params)]
    assert together == alone


def test_min_tokens_holds_the_end_back() -> None:
    model = TinyModel()
    plain = model.greedy([3, 4], 20)
    engine, _ = make_engine(model)
    stop, many = plain[2], [plain[2], *range(60, 80)]  # more than a decode graph looks at
    (early,) = engine.generate([[3, 4]], SamplingParams(max_tokens=20, stop_token_ids=[stop]))
    assert len(early.token_ids) == plain.index(stop) + 1
    params = SamplingParams(max_tokens=20, stop_token_ids=many, min_tokens=8)
    (late,) = engine.generate([[3, 4]], params)
    assert len(late.token_ids) >= 9
    assert not set(late.token_ids[:8]) & set(many)
    assert list(late.token_ids) == expected(model, [3, 4], params, len(late.token_ids))


def test_a_request_past_its_minimum_is_sampled_by_the_graph() -> None:
    _, runner, _ = make(ConfiguredMode.FULL_AND_PIECEWISE, decode_in_graph=True)
    sampler, slots = runner.sampler, np.array([0, 1])
    sampler.add(0, SamplingParams(min_tokens=3), prompt_len=5)
    sampler.add(1, SamplingParams(temperature=1.0), prompt_len=5)
    assert not sampler.fits_graph(slots, np.array([7, 99], np.int32))
    assert sampler.fits_graph(slots, np.array([8, 99], np.int32))
    for name, value in {"top_k": 3, "min_p": 0.1}.items():
        sampler.add(1, SamplingParams(temperature=1.0, **{name: value}), prompt_len=5)
        assert not sampler.fits_graph(slots, np.array([8, 99], np.int32)), name
        sampler.add(1, SamplingParams(**{name: value}), prompt_len=5)  # says nothing to a greedy row
        assert sampler.fits_graph(slots, np.array([8, 99], np.int32)), name
    for name, value in {"logprobs": 0, "prompt_logprobs": 0, "logit_bias": {1: 1.0}, "bad_words": [[1]], "repetition_penalty": 2.0}.items():
        sampler.add(1, SamplingParams(**{name: value}), prompt_len=5)  # type: ignore[arg-type]
        assert not sampler.fits_graph(slots, np.array([8, 99], np.int32)), name


BAD = 50  # no token of the prompts, nor of what the model answers to them


class Poisoned(TinyModel):
    """Logits become NaN in rows whose last token is BAD."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(input_ids, positions)
        return torch.where((input_ids == BAD).unsqueeze(1), torch.nan, hidden)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"top_k": 3, "temperature": 1.0}, {"logit_bias": {1: 9.0}}, {"logprobs": 1}])
@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_nan_rows_end_alone(params: dict[str, Any], steps_in_flight: int) -> None:
    model = TinyModel()
    poisoned = Poisoned()
    engine, runner = make_engine(poisoned, steps_in_flight=steps_in_flight)
    bad = SamplingParams(max_tokens=9, seed=1, **params)
    first = engine.generate([[2, BAD], [3, 4], [5, 6, BAD]], [bad, SamplingParams(max_tokens=9), SamplingParams(max_tokens=4)])
    assert [one.finish_reason for one in first] == [FinishReason.ERROR, FinishReason.LENGTH, FinishReason.ERROR]
    assert first[0].error == "the model's logits contain NaN"
    assert first[0].token_ids == ()
    assert list(first[1].token_ids) == model.greedy([3, 4], 9)
    assert_nothing_left(engine, runner)
    assert list(engine.generate([[8, 9]], SamplingParams(max_tokens=7))[0].token_ids) == model.greedy([8, 9], 7)


def test_nan_after_some_tokens_keeps_them() -> None:
    engine, _ = make_engine(Poisoned())
    params = SamplingParams(max_tokens=9, logit_bias={BAD: 50.0}, bad_words=[[BAD, BAD]])
    (completion,) = engine.generate([[2, 3]], params)
    assert completion.token_ids == (BAD,)
    assert completion.finish_reason is FinishReason.ERROR


def test_a_nan_under_a_mask_is_reported() -> None:
    engine, _ = make_engine(Poisoned())
    (completion,) = engine.generate([[2, BAD]], SamplingParams(max_tokens=3, allowed_token_ids=[5]))
    assert completion.error == "the model's logits contain NaN"


@pytest.mark.parametrize("replay_steps", [1, 4])
def test_nan_in_a_decode_graph(replay_steps: int) -> None:
    engine, runner, _ = make(ConfiguredMode.FULL_AND_PIECEWISE, decode_in_graph=True, replay_steps=replay_steps)
    plain = runner.module.greedy([3, 4], 20)
    fresh = make(ConfiguredMode.NONE)[0].generate([[7, 8]], SamplingParams(max_tokens=20))[0].token_ids
    bad = next(token for token in plain[4:] if token not in fresh and token not in (3, 4, 7, 8))
    with torch.no_grad():
        runner.module.tokens.weight[bad] = torch.nan
    broken, fine = engine.generate([[3, 4], [7, 8]], SamplingParams(max_tokens=20))
    assert broken.finish_reason is FinishReason.ERROR
    assert broken.error == "the model's logits contain NaN"
    assert list(broken.token_ids) == plain[: plain.index(bad) + 1]
    assert fine.token_ids == fresh


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias has token {VOCAB}"),
        ({"allowed_token_ids": [1, -1]}, "allowed_token_ids has token -1"),
        ({"bad_words": [[1, 500]]}, "bad_words has token 500"),
        ({"stop_token_ids": [VOCAB]}, f"stop_token_ids has token {VOCAB}"),
        ({"logprobs": VOCAB + 1}, f"logprobs is {VOCAB + 1}"),
        ({"prompt_logprobs": 1000}, "prompt_logprobs is 1000"),
    ],
)
def test_what_the_vocabulary_does_not_have_is_refused_and_harms_nobody(params: dict[str, Any], text: str) -> None:
    model = TinyModel()
    engine, _ = make_engine(model)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=5), request_id="good")
    engine.step()
    with pytest.raises(SamplingParamsError, match=f"request 'bad': {text}"):
        engine.add_request([1], SamplingParams(**params), request_id="bad")
    done = {}
    while engine.has_work:
        done |= {update.request_id: update.completion for update in engine.step() if update.completion}
    assert list(done["good"].token_ids) == model.greedy([1, 2, 3], 5)
