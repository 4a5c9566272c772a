"""Log-probabilities are those of the model: log-softmax of its logits, before anything is applied to them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from rung.graphs import ConfiguredMode
from rung.runner import Completion, SamplingParams, TokenLogprobs
from rung.runner.sampler.logprobs import gather_logprobs
from tests.runner.sampling import Draw, Row, SampleWorld
from tests.runner.test_engine import count_preemptions
from tests.runner.test_graph_forward import make
from tests.runner.tiny import VOCAB, TinyModel, make_engine


def test_values_ranks_and_order_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.integers(-6, 6, (20, 50)).astype(np.float32))  # many are equal
    logits[0, 3] = -torch.inf
    tokens = torch.from_numpy(rng.integers(0, 50, 20))
    found = gather_logprobs(logits, tokens, 7).read(0, 20, 7)
    exact = logits.double().log_softmax(-1)
    for row, one in enumerate(found):
        order = sorted(range(50), key=lambda token: (-float(logits[row, token]), token))
        assert one.token_id == tokens[row]
        assert one.logprob == pytest.approx(float(exact[row, one.token_id]), abs=1e-5)
        assert one.rank == int((logits[row] >= logits[row, one.token_id]).sum())
        assert [token for token, _ in one.top] == order[:7]
        assert [value for _, value in one.top] == pytest.approx([float(exact[row, token]) for token in order[:7]], abs=1e-5)


def test_low_precision_logits_are_read_in_float32() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = gather_logprobs(logits, torch.tensor([1, 2, 3]), 1)
    assert torch.allclose(found.logprobs, logits.float().log_softmax(-1)[range(3), [1, 2, 3]], atol=1e-5)


def test_more_than_the_vocabulary_gives_the_vocabulary() -> None:
    assert len(gather_logprobs(torch.zeros(1, 5), torch.tensor([0]), 9).read(0, 1, 9)[0].top) == 5


def test_each_row_gets_what_it_asked_for_whatever_else_is_in_the_batch() -> None:
    draw = Draw(np.random.default_rng(2), 60)
    rows = [
        Row(SamplingParams(logprobs=count, logit_bias={3: 50.0}, temperature=0.5 * (at % 2), seed=at), prompt=[1] * (at + 1))
        for at, count in enumerate([None, 0, 3, None, 9])
    ]
    logits = draw.logits(5)
    together = SampleWorld(rows).sample(logits).logprobs
    assert together is not None
    assert [(one.request_id, one.num_top) for one in together.rows] == [("1", 0), ("2", 3), ("4", 9)]
    for one in together.rows:
        at = int(one.request_id)
        (found,) = together.tensors.read(one.first, one.count, one.num_top)
        alone = SampleWorld([rows[at]]).sample(logits[at : at + 1]).logprobs
        assert alone is not None
        assert alone.tensors.read(0, 1, one.num_top) == [found]
        assert found.token_id == 3  # the bias decides what is sampled, and nothing about its probability
        assert found.logprob == pytest.approx(float(logits[at].log_softmax(-1)[3]), abs=1e-5)


def assert_follows(model: TinyModel, completion: Completion, num_top: int) -> None:
    assert completion.logprobs is not None
    assert [one.token_id for one in completion.logprobs] == list(completion.token_ids)
    ids = list(completion.prompt_token_ids)
    for one in completion.logprobs:
        assert_is(one, model.without_cache(ids), num_top)
        ids.append(one.token_id)


def assert_is(found: TokenLogprobs, logits: torch.Tensor, num_top: int) -> None:
    exact = logits.log_softmax(-1)
    assert found.logprob == pytest.approx(float(exact[found.token_id]), abs=2e-4)
    assert [value for _, value in found.top] == pytest.approx(exact.topk(num_top).values.tolist(), abs=2e-4)


def assert_prompt(model: TinyModel, completion: Completion, num_top: int) -> None:
    prompt = completion.prompt_token_ids
    assert completion.prompt_logprobs is not None
    assert len(completion.prompt_logprobs) == len(prompt)
    assert completion.prompt_logprobs[0] is None
    for place, one in enumerate(completion.prompt_logprobs):
        if one is not None:
            assert one.token_id == prompt[place]
            assert_is(one, model.without_cache(prompt[:place]), num_top)


def test_completions_and_updates_carry_them() -> None:
    model = TinyModel()
    engine, _ = make_engine(model, max_num_tokens=16)
    params = [
        SamplingParams(max_tokens=6, logprobs=4),
        SamplingParams(max_tokens=6),
        SamplingParams(max_tokens=8, logprobs=0, temperature=1.0),
    ]
    streamed: dict[int, list[TokenLogprobs]] = {0: [], 1: [], 2: []}
    completions: dict[int, Completion] = {}
    for index, update in engine.stream([[1, 2, 3], [4], [5] * 30], params):
        streamed[index] += update.logprobs or ()
        assert (update.logprobs is None) == (index == 1)
        if update.completion:
            completions[index] = update.completion
    assert_follows(model, completions[0], 4)
    assert_follows(model, completions[2], 0)
    assert completions[1].logprobs is None
    assert streamed == {index: list(one.logprobs or ()) for index, one in completions.items()}


def test_prompts_in_chunks_with_preemptions() -> None:
    model, chance = TinyModel(), random.Random(6)
    engine, _ = make_engine(model, num_blocks=13, block_size=4, max_model_len=48, max_num_tokens=16)
    preemptions = count_preemptions(engine)
    prompts = [[chance.randrange(VOCAB) for _ in range(chance.randint(1, 20))] for _ in range(7)]
    completions = engine.generate(prompts, SamplingParams(max_tokens=14, logprobs=2, prompt_logprobs=3))
    assert sum(preemptions.values()) > 0
    for completion in completions:
        assert_follows(model, completion, 2)
        assert_prompt(model, completion, 3)


def test_a_prompt_longer_than_a_part_of_the_projection() -> None:
    model = TinyModel()
    engine, _ = make_engine(model, max_num_tokens=128)
    (completion,) = engine.generate([[at % VOCAB for at in range(100)]], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert_prompt(model, completion, 0)
    assert max(model.projected) == 64


@pytest.mark.parametrize("replay_steps", [1, 4])
def test_decode_graphs_and_chunks_of_one_token(replay_steps: int) -> None:
    engine, runner, _ = make(ConfiguredMode.FULL_AND_PIECEWISE, decode_in_graph=True, replay_steps=replay_steps, long_prefill_chunk=1)
    params = [SamplingParams(max_tokens=9, logprobs=3, prompt_logprobs=2), SamplingParams(max_tokens=9)]
    asked, free = engine.generate([[5, 6, 7, 8], [3, 4]], params)
    assert_follows(runner.module, asked, 3)
    assert_prompt(runner.module, asked, 2)
    assert list(free.token_ids) == runner.module.greedy([3, 4], 9)


def test_a_stop_within_several_steps_cuts_them() -> None:
    engine, runner, _ = make(ConfiguredMode.FULL_AND_PIECEWISE, decode_in_graph=True, replay_steps=4)
    plain = runner.module.greedy([3, 4], 20)
    stop = next(token for token in plain[3:] if plain.index(token) % 4 == 2)
    (completion,) = engine.generate([[3, 4]], SamplingParams(max_tokens=20, logprobs=1, stop_token_ids=[stop]))
    assert list(completion.token_ids) == plain[: plain.index(stop) + 1]
    assert_follows(runner.module, completion, 1)
