"""Everything between the model's logits and the temperature, against an oracle that knows one row, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rung.counters import Counters
from rung.runner.ops import StepOps, TorchStepOps
from rung.runner.sampler import SamplingParams
from rung.runner.sampler.slot_lists import SlotLists
from rung.runner.transfer import HostToDevice
from tests.runner.sampling import Draw, Row, SampleWorld, expected_logits, expected_token, pack, sample

VOCAB = 75  # not a multiple of 32


def assert_processed(rows: list[Row], logits: torch.Tensor) -> None:
    processed = SampleWorld(rows).processed(logits)
    for at, row in enumerate(rows):
        assert np.array_equal(processed[at], expected_logits(row, logits[at].numpy())), at


@pytest.mark.parametrize("name", ["allowed", "min_tokens", "bias", "penalties", "bad_words", "grammar"])
def test_each_processor_equals_the_oracle_beside_rows_without_it(name: str) -> None:
    rng = np.random.default_rng(1)
    with_it = Draw(rng, VOCAB, chance=1.0)
    rows = [with_it.row(seed) for seed in range(12)]
    others = ("allowed", "min_tokens", "bias", "penalties", "bad_words", "temperature", "min_p", "top_k", "top_p", "grammar")
    rows = [keep_only(row, name) for row in rows] + Draw(rng, VOCAB, chance=0.0, names=others).rows(4)
    logits = with_it.logits(len(rows))
    assert_processed(rows, logits)
    changed = SampleWorld(rows).processed(logits) != logits.numpy()
    assert changed[:12].any(axis=1).sum() >= 4
    assert not changed[12:].any()


def keep_only(row: Row, name: str) -> Row:
    params = row.params
    kept = {
        "allowed": {"allowed_token_ids": params.allowed_token_ids},
        "min_tokens": {"min_tokens": params.min_tokens},
        "bias": {"logit_bias": params.logit_bias},
        "penalties": {
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "repetition_penalty": params.repetition_penalty,
        },
        "bad_words": {"bad_words": params.bad_words},
        "grammar": {},
    }[name]
    return Row(SamplingParams(**kept), row.prompt, row.output, row.stops, row.allowed if name == "grammar" else None)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(25))
def test_random_mixes_equal_the_oracle(seed: int) -> None:
    draw = Draw(np.random.default_rng(seed), VOCAB)
    rows = draw.rows(1 + seed * 2)
    logits = draw.logits(len(rows))
    assert_processed(rows, logits)
    assert sample(rows, logits) == [expected_token(row, logits[at].numpy()) for at, row in enumerate(rows)]


@pytest.mark.parametrize("seed", range(10))
def test_a_row_alone_is_the_row_in_a_batch(seed: int) -> None:
    draw = Draw(np.random.default_rng(100 + seed), VOCAB, chance=0.3)
    rows = draw.rows(24)
    logits = draw.logits(24)
    together = SampleWorld(rows)
    scores, tokens = together.processed(logits), together.sample(logits).tokens.tolist()
    for at, row in enumerate(rows):
        alone = SampleWorld([row])
        assert np.array_equal(alone.processed(logits[at : at + 1])[0], scores[at])
        assert alone.sample(logits[at : at + 1]).tokens.tolist() == [tokens[at]]


def test_the_order_is_bias_before_penalties_before_bad_words() -> None:
    """A bias that turns the sign decides whether the repetition penalty divides; a bias does not bring back what is forbidden."""
    logits = torch.full((3, VOCAB), -9.0)
    logits[0, 4] = -1.0
    rows = [
        Row(SamplingParams(logit_bias={4: 3.0}, repetition_penalty=4.0), prompt=[4]),
        Row(SamplingParams(logit_bias={5: 100.0}, allowed_token_ids=[6])),
        Row(SamplingParams(logit_bias={7: 100.0}, bad_words=[[7]])),
    ]
    scores = SampleWorld(rows).processed(logits)
    assert scores[0, 4] == 0.5  # (-1 + 3) / 4
    assert scores[1, 5] == scores[2, 7] == -np.inf


def test_the_logits_stay_as_they_are() -> None:
    draw = Draw(np.random.default_rng(3), VOCAB)
    rows, logits = draw.rows(16), draw.logits(16)
    before = logits.clone()
    sample(rows, logits)
    assert torch.equal(logits, before)


def test_a_slot_that_is_used_again_keeps_nothing() -> None:
    full = Draw(np.random.default_rng(4), VOCAB, chance=1.0)
    world = SampleWorld(full.rows(5), max_num_requests=6)
    logits = full.logits(5)
    world.sample(logits)
    plain = [Row(SamplingParams()), *full.rows(4)]
    for at, row in enumerate(plain):
        slot = int(world.batch.idx_mapping[at])
        tokens = [*row.prompt, *row.output]
        world.slots.remove(str(at))
        assert world.slots.add(str(at), tokens, len(row.prompt)) == slot
        world.sampler.add(slot, row.params, row.stops, prompt_len=len(row.prompt), num_tokens=len(tokens))
    world.slots.apply_staged_writes()
    world.sampler.apply_staged_writes()
    world.rows = plain
    lens = np.array([len(row.prompt) + len(row.output) for row in plain], np.int32)
    world.batch.seq_lens[:] = lens
    world.seq_lens.copy_(torch.from_numpy(lens))
    scores = world.processed(logits)
    for at, row in enumerate(plain):
        assert np.array_equal(scores[at], expected_logits(row, logits[at].numpy())), at


def test_penalty_counts_are_allocated_by_the_first_request_with_penalties() -> None:
    plain = SampleWorld([Row(SamplingParams(logit_bias={1: 1.0}))])
    plain.sample(torch.zeros(1, VOCAB))
    assert plain.sampler.penalties.counts is None
    world = SampleWorld([Row(SamplingParams(presence_penalty=1.0), output=[3, 3])], max_num_requests=4)
    world.sample(torch.zeros(1, VOCAB))
    assert world.sampler.penalties.counts is not None
    assert world.sampler.penalties.counts[world.idx_mapping[0]].nonzero().tolist() == [[3]]


def test_token_ids_outside_the_vocabulary_do_nothing() -> None:
    """Admission refuses them; on a device they must not reach memory that is not theirs."""
    params = SamplingParams(logit_bias={500: 3.0}, bad_words=[[500]], allowed_token_ids=[2, 500], min_tokens=3)
    assert sample([Row(params, stops=[500])], torch.zeros(1, VOCAB)) == [2]


@pytest.mark.parametrize("values", [[5], list(range(9)), list(range(40))])
def test_lists_are_widened_and_keep_their_contents(values: list[int]) -> None:
    lists = SlotLists(3, torch.int64, -1, HostToDevice(torch.device("cpu"), Counters()), TorchStepOps())
    lists.set(0, [])
    lists.apply_staged_writes()
    assert lists.width == 0
    lists.set(0, [7, 8])
    lists.apply_staged_writes()
    lists.set(2, values)
    lists.apply_staged_writes()
    table = [[token for token in row if token != -1] for row in lists.table.tolist()]
    assert table == [[7, 8], [], values]


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1500, 5000])
def test_bitmask_touches_the_rows_that_have_one(step_ops: StepOps, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.standard_normal((5, vocab)).astype(np.float32))
    logits[1, 0] = torch.nan
    allowed = [[int(t) for t in np.flatnonzero(rng.random(vocab) < 0.5)] for _ in range(2)]
    bits = torch.from_numpy(np.stack([pack(one, vocab) for one in allowed]))
    rows = torch.tensor([1, -1, 0, -1, 1], dtype=torch.int32)
    expected = logits.clone()
    for row, source in enumerate(rows.tolist()):
        if source >= 0:
            forbidden = sorted(set(range(vocab)) - set(allowed[source]))
            expected[row, forbidden] = -torch.inf
    step_ops.apply_bitmask(logits, bits, rows)
    assert torch.equal(logits.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
