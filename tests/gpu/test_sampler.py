"""The sampler on CUDA: against the oracle of a row, against itself with other rows, and without waiting."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rung.models import random_model
from rung.runner import Engine, FinishReason, ModelRunner, RunnerConfig, SamplingParams, build_engine
from rung.runner.ops import TorchStepOps, TritonStepOps
from rung.runner.ops.sample_base import RowFilters
from tests.gpu.sync_debug import no_waiting
from tests.runner.decode_worlds import HISTORY, SLOTS, DecodeWorld, draw
from tests.runner.grammars import OneOf
from tests.runner.sampling import Draw, SampleWorld, expected_logits, expected_token, pack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

VOCAB = 1500


def test_bitmask_equals_the_torch_twin() -> None:
    rng = np.random.default_rng(0)
    for vocab in (1, 33, 1024, 5000, 49152, 128257):
        logits = torch.from_numpy(rng.standard_normal((9, vocab)).astype(np.float32))
        bits = torch.from_numpy(np.stack([pack(np.flatnonzero(rng.random(vocab) < share).tolist(), vocab) for share in (0.5, 0.0, 0.999)]))
        rows = torch.tensor([0, -1, 2, 1, -1, 2, 2, -1, 0], dtype=torch.int32)
        on_device = logits.cuda()
        TorchStepOps().apply_bitmask(logits, bits, rows)
        TritonStepOps().apply_bitmask(on_device, bits.cuda(), rows.cuda())
        assert torch.equal(on_device.cpu(), logits), vocab


@pytest.mark.parametrize("seed", range(4))
def test_random_mixes_equal_the_oracle(seed: int) -> None:
    draw = Draw(np.random.default_rng(seed), VOCAB)
    rows, logits = draw.rows(48), draw.logits(48)
    world = SampleWorld(rows, ops=TritonStepOps(), device="cuda")
    scores, tokens = world.processed(logits), world.sample(logits).tokens.tolist()
    wanted = [expected_token(row, logits[at].numpy()) for at, row in enumerate(rows)]
    for at, row in enumerate(rows):
        assert np.array_equal(scores[at], expected_logits(row, logits[at].numpy())), at
        if row.params.is_greedy:
            assert tokens[at] == wanted[at]
    # The last bits of the noise's logarithms differ between devices, so a near tie may go the other way.
    assert sum(a != b for a, b in zip(tokens, wanted, strict=True)) <= 1


@pytest.mark.parametrize("count", [2, 24, 200])
def test_a_row_alone_is_the_row_in_a_batch(count: int) -> None:
    draw = Draw(np.random.default_rng(count), VOCAB, chance=0.3)
    rows, logits = draw.rows(count), draw.logits(count)
    tokens = SampleWorld(rows, ops=TritonStepOps(), device="cuda", max_num_requests=256).sample(logits).tokens.tolist()
    for at in range(0, count, max(1, count // 24)):
        alone = SampleWorld(rows[at : at + 1], ops=TritonStepOps(), device="cuda")
        assert alone.sample(logits[at : at + 1]).tokens.tolist() == [tokens[at]], at


def test_a_pick_outside_of_a_graph_is_that_of_the_graph() -> None:
    rng = np.random.default_rng(5)
    world = DecodeWorld(TritonStepOps(), "cuda")
    for number in range(50):
        contents, rows = draw(rng)
        contents["enabled"], contents["prefill_len"] = torch.ones(1), torch.zeros(SLOTS)
        world.load(contents)
        idx, seq_lens = world.buffers.idx_mapping[:rows].clone(), world.buffers.seq_lens[:rows]
        picked = world.ops.decode.pick(world.logits[:rows], idx, seq_lens, world.sampling, any_random=True)
        world.ops.decode.sample(world.logits[:rows], world.slots, world.buffers, world.sampling, world.state)
        recorded = world.state.history[int(world.state.step) % HISTORY, :rows]
        assert torch.equal(recorded, torch.where(idx >= 0, picked, -1)), number


def test_logprobs_and_ties() -> None:
    logits = torch.randn(33, 49152, generator=torch.Generator().manual_seed(0)).mul(3).bfloat16()  # many are equal
    tokens = logits.argmax(-1)
    ops = TritonStepOps().sampling
    found = ops.logprobs(logits.cuda(), tokens.cuda(), 20)
    exact = logits.double().log_softmax(-1)
    assert torch.allclose(found.logprobs.cpu().double(), exact.gather(1, tokens[:, None])[:, 0], atol=1e-5)
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :20]
    assert torch.equal(found.top_ids.cpu(), order)
    alone = ops.logprobs(logits[5:6].cuda(), tokens[5:6].cuda(), 3)
    assert torch.equal(alone.top_ids[0], found.top_ids[5, :3])
    assert torch.equal(found.ranks.cpu(), (logits >= logits.gather(1, tokens[:, None])).sum(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1500, 49152, 128256])
def test_filters_equal_the_torch_twin(dtype: torch.dtype, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    scores = torch.from_numpy(rng.standard_normal((64, vocab)).astype(np.float32) * 3).to(dtype)
    scores[5], scores[6, 7], scores[7, 9:] = -torch.inf, torch.nan, -torch.inf
    filters = RowFilters(
        temperature=torch.from_numpy(rng.uniform(0.3, 2, 64).astype(np.float32)),
        log_min_p=torch.from_numpy(np.where(rng.random(64) < 0.3, -4.0, -np.inf).astype(np.float32)),
        top_k=torch.from_numpy(np.where(rng.random(64) < 0.5, rng.integers(1, 2000, 64), 0)),
        top_p=torch.from_numpy(np.where(rng.random(64) < 0.6, rng.uniform(0.05, 0.99, 64), 1.0).astype(np.float32)),
    )
    on_device = RowFilters(filters.temperature.cuda(), filters.log_min_p.cuda(), filters.top_k.cuda(), filters.top_p.cuda())
    found = TritonStepOps().sampling.filter(scores.cuda(), torch.arange(64, device="cuda"), on_device).cpu()
    expected = TorchStepOps().sampling.filter(scores, torch.arange(64), filters)
    kept, wanted = found > -torch.inf, expected > -torch.inf
    assert found[6, 7].isnan()  # the row will end with an error, whatever else is kept of it
    assert expected[6, 7].isnan()
    for row in (row for row in range(64) if row != 6):
        if filters.top_p[row] == 1:
            assert torch.equal(found[row].nan_to_num(1e30), expected[row].nan_to_num(1e30)), row
        else:  # the last bits of exponentials may carry a sum of masses past top-p one token earlier or later
            assert (kept[row] ^ wanted[row]).sum() <= 2, row
            assert torch.equal(found[row][kept[row]].nan_to_num(1e30), scores[row].float()[kept[row]].nan_to_num(1e30)), row


def test_nothing_waits() -> None:
    draw = Draw(np.random.default_rng(8), VOCAB)
    rows, logits = draw.rows(32), draw.logits(32).cuda()
    SampleWorld(rows, ops=TritonStepOps(), device="cuda").sample(logits)  # loads kernels
    world = SampleWorld(rows, ops=TritonStepOps(), device="cuda")
    with no_waiting():
        sampled = world.sample(logits)
        world.sampler.penalties.count(world.idx_mapping, sampled.tokens.clamp(min=0), torch.ones_like(world.seq_lens))
    assert len(sampled.tokens.tolist()) == 32


def engine() -> tuple[Engine, ModelRunner]:
    """In float32, where other sizes of a batch turn no token."""
    module = random_model("smollm2-135m", dtype=torch.float32, device="cuda", seed=1)
    untied = torch.nn.Linear(module.config.hidden_size, module.config.vocab_size, bias=False, device="cuda", dtype=torch.float32)
    untied.weight = torch.nn.Parameter(module.embed_tokens.weight.detach().clone(), requires_grad=False)
    module.lm_head = untied  # so that a broken embedding breaks the rows that read it alone
    config = RunnerConfig(
        max_num_requests=8,
        max_num_tokens=64,
        max_model_len=256,
        num_blocks=200,
        graphs="full_and_piecewise",
        capture_sizes=(1, 2, 4, 8, 64),
    )
    built, runner, _ = build_engine(module, config)
    return built, runner


def test_whole_engine_with_graphs() -> None:
    """Greedy rows beside rows of every kind keep their tokens; a NaN row and a grammar touch nobody else."""
    target, runner = engine()
    prompts = [[at + 5, 7, 9] for at in range(6)]
    plain = [one.token_ids for one in target.generate(prompts, SamplingParams(max_tokens=12))]
    bad = 40000
    runner.module.embed_tokens.weight.data[bad] = torch.nan
    grammar = OneOf([list(range(100, 106))], 2)
    params = [
        SamplingParams(max_tokens=12),
        SamplingParams(max_tokens=12, grammar=grammar, stop_token_ids=[2]),
        SamplingParams(max_tokens=12, presence_penalty=2.0, frequency_penalty=2.0, logprobs=3),
        SamplingParams(max_tokens=12),
        SamplingParams(max_tokens=12),
        SamplingParams(max_tokens=12, temperature=1.0, seed=3, top_p=0.9, min_p=0.01, prompt_logprobs=2),
    ]
    prompts[4] = [9, 7, bad]
    mixed = target.generate(prompts, params)
    assert mixed[0].token_ids == plain[0]
    assert mixed[3].token_ids == plain[3]
    assert mixed[1].token_ids == (*range(100, 106), 2)
    assert mixed[4].finish_reason is FinishReason.ERROR
    assert mixed[4].error == "the model's logits contain NaN"
    assert mixed[2].token_ids == target.generate([prompts[2]], params[2])[0].token_ids != plain[2]
    assert mixed[2].logprobs is not None
    assert len(mixed[2].logprobs) == 12
    assert mixed[5].prompt_logprobs is not None
    assert [one is None for one in mixed[5].prompt_logprobs] == [True, False, False]
    assert [one.token_ids for one in target.generate([prompts[0], prompts[3]], SamplingParams(max_tokens=12))] == [plain[0], plain[3]]
