"""The filters and log-probabilities of the sampler: Triton against its torch twin, and the twin against the definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rung.runner.ops import StepOps, TorchStepOps
from rung.runner.ops.sample_base import RowFilters, SampleOps
from rung.runner.ops.triton_sample import MAX_TOP, TritonSampleOps
from rung.runner.sampler.logprobs import LogprobTensors

SLOTS = 8
ROWS = 6


def filters(rng: np.random.Generator, *, top_k: float = 0.5, top_p: float = 0.5, min_p: float = 0.3) -> RowFilters:
    """Random ones by slot, each parameter set with the given chance; slot 0 is greedy, slot 1 has none."""
    temperature = torch.from_numpy(rng.uniform(0.3, 2, SLOTS).astype(np.float32))
    temperature[0] = 0
    few, many = rng.integers(1, 12, SLOTS), rng.integers(1, 400, SLOTS)
    tops = torch.from_numpy(np.where(rng.random(SLOTS) < top_k, np.where(rng.random(SLOTS) < 0.5, few, many), 0))
    masses = torch.from_numpy(np.where(rng.random(SLOTS) < top_p, rng.uniform(0.01, 0.99, SLOTS), 1.0).astype(np.float32))
    least = torch.from_numpy(np.where(rng.random(SLOTS) < min_p, np.log(rng.uniform(1e-4, 0.3, SLOTS)), -math.inf).astype(np.float32))
    tops[1], masses[1], least[1] = 0, 1, -math.inf
    return RowFilters(temperature=temperature, log_min_p=least, top_k=tops, top_p=masses)


def scores_of(kind: str, rng: np.random.Generator, vocab: int) -> torch.Tensor:
    scores = rng.standard_normal((ROWS, vocab)) * 3
    if kind == "ties":
        scores = np.round(scores)
    elif kind == "equal":
        scores = np.broadcast_to(rng.integers(-3, 3, (ROWS, 1)).astype(float), scores.shape)
    elif kind == "masked":
        scores = np.where(rng.random(scores.shape) < 0.8, -np.inf, scores)
        scores[3], scores[4, 5], scores[5, 7] = -np.inf, np.inf, np.nan
    elif kind == "wide":
        scores = scores * 10.0 ** rng.integers(-20, 20, scores.shape)
    return torch.from_numpy(np.ascontiguousarray(scores, dtype=np.float32))


def small(ops: SampleOps) -> list[SampleOps]:
    """Also with so little room that rows are searched in passes."""
    return [ops, TritonSampleOps(block=256, ways=4, room=16)] if isinstance(ops, TritonSampleOps) else [ops]


@pytest.mark.parametrize(("kind", "vocab"), [("normal", 1), *((kind, 500) for kind in ("normal", "ties", "equal", "masked", "wide"))])
def test_filters_equal_the_torch_twin(triton_ops: StepOps, kind: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for ops in small(triton_ops.sampling):
        scores, chosen = scores_of(kind, rng, vocab), filters(rng)
        slots = torch.from_numpy(rng.integers(-1, SLOTS, ROWS))
        expected = TorchStepOps().sampling.filter(scores, slots, chosen)
        assert torch.equal(ops.filter(scores, slots, chosen).nan_to_num(1e30), expected.nan_to_num(1e30))


@pytest.mark.parametrize("top_k", [0, 60])
def test_top_p_keeps_the_least_tokens_that_reach_it(step_ops: StepOps, top_k: int) -> None:
    rng = np.random.default_rng(3)
    scores = scores_of("normal", rng, 300)
    chosen = RowFilters(
        temperature=torch.full((ROWS,), 0.7),
        log_min_p=torch.full((ROWS,), -math.inf),
        top_k=torch.full((ROWS,), top_k),
        top_p=torch.linspace(0.02, 0.98, ROWS),
    )
    kept = step_ops.sampling.filter(scores, torch.arange(ROWS), chosen)
    for row in range(ROWS):
        values, order = (scores[row].double() / 0.7).sort(descending=True)
        mass = values[: top_k or 300].softmax(0).cumsum(0)
        count = int((mass < chosen.top_p[row].double()).sum()) + 1
        assert set(kept[row].isfinite().nonzero().flatten().tolist()) == set(order[:count].tolist()), row
        assert torch.equal(kept[row][kept[row].isfinite()], scores[row][kept[row].isfinite()])


def test_of_equal_scores_the_first_are_kept(step_ops: StepOps) -> None:
    scores = torch.zeros(1, 300)
    scores[0, 70] = 1.0
    none = torch.tensor([-math.inf])
    for ops in small(step_ops.sampling):
        by_rank = RowFilters(temperature=torch.ones(1), log_min_p=none, top_k=torch.tensor([4]), top_p=torch.ones(1))
        assert ops.filter(scores, torch.zeros(1, dtype=torch.int64), by_rank).isfinite().nonzero()[:, 1].tolist() == [0, 1, 2, 70]
        half = RowFilters(temperature=torch.ones(1), log_min_p=none, top_k=torch.tensor([0]), top_p=torch.tensor([0.5]))
        kept = ops.filter(scores, torch.zeros(1, dtype=torch.int64), half).isfinite().nonzero()[:, 1].tolist()
        needed = math.ceil(0.5 * (299 + math.e) - math.e)
        assert kept == sorted({70, *[at for at in range(300) if at != 70][:needed]})


def test_a_row_does_not_know_the_others_and_strides_are_followed(step_ops: StepOps) -> None:
    rng = np.random.default_rng(9)
    wide = scores_of("ties", rng, 200)
    scores, chosen, slots = wide[:, :150], filters(rng), torch.from_numpy(rng.integers(0, SLOTS, ROWS))
    together = step_ops.sampling.filter(scores, slots, chosen)
    for row in (0, 5):
        alone = step_ops.sampling.filter(scores[row : row + 1].contiguous(), slots[row : row + 1], chosen)
        assert torch.equal(alone[0], together[row])


def equal(found: LogprobTensors, expected: LogprobTensors) -> None:
    for name in ("token_ids", "ranks", "top_ids"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert torch.allclose(found.logprobs, expected.logprobs, atol=1e-5)
    assert torch.allclose(found.top_logprobs, expected.top_logprobs, atol=1e-5)


@pytest.mark.parametrize(("vocab", "num_top"), [(3, 5), (2500, 0), (2500, 5), (2500, MAX_TOP + 1)])
def test_logprobs_equal_the_torch_twin(triton_ops: StepOps, vocab: int, num_top: int) -> None:
    rng = np.random.default_rng(num_top)
    logits = torch.cat([scores_of(kind, rng, vocab)[:2] for kind in ("normal", "ties")])
    logits[1, 0] = -torch.inf
    tokens = torch.from_numpy(rng.integers(1, vocab, 4))
    found = triton_ops.sampling.logprobs(logits, tokens, num_top)
    equal(found, TorchStepOps().sampling.logprobs(logits, tokens, num_top))
    assert found.top_ids.shape == (4, min(num_top, vocab))


def test_logprobs_where_the_best_are_masked(triton_ops: StepOps) -> None:
    logits = torch.full((2, 5000), -torch.inf)
    logits[0, 3], logits[0, 4000], logits[1, 2] = 1.0, 1.0, -0.0
    tokens = torch.tensor([4000, 2])
    equal(triton_ops.sampling.logprobs(logits, tokens, 2), TorchStepOps().sampling.logprobs(logits, tokens, 2))
