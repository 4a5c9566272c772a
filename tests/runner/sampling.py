"""Batches of requests with every kind of sampling parameter, and what each row must become, written row by row from the definitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from rung.counters import Counters
from rung.runner.batch import Batch
from rung.runner.grammar import GrammarMask, num_words
from rung.runner.ops import StepOps, TorchStepOps
from rung.runner.sampler import Sampled, Sampler, SamplingParams, gumbel_noise
from rung.runner.slots import RequestSlots
from rung.runner.transfer import HostToDevice

LENGTH = 64


@dataclass(frozen=True)
class Row:
    """A request that samples its next token."""

    params: SamplingParams
    prompt: Sequence[int] = (0,)
    output: Sequence[int] = ()
    stops: Sequence[int] = ()
    allowed: Sequence[int] | None = None  # what its grammar allows now


class SampleWorld:
    """A sampler whose slots hold the rows, in an order that is not theirs."""

    def __init__(self, rows: Sequence[Row], *, ops: StepOps | None = None, device: str = "cpu", max_num_requests: int = 64) -> None:
        self.rows = rows
        self.device = torch.device(device)
        ops = ops or TorchStepOps()
        transfer = HostToDevice(self.device, Counters())
        self.slots = RequestSlots(max_num_requests, LENGTH, transfer, ops)
        self.sampler = Sampler(self.slots, transfer, ops)
        order = [(7 * number + 3) % len(rows) for number in range(len(rows))] if len(rows) % 7 else list(range(len(rows)))
        slot_of = {}
        for number in order:
            row = rows[number]
            tokens = [*row.prompt, *row.output]
            slot_of[number] = self.slots.add(str(number), tokens, len(row.prompt))
            self.sampler.add(slot_of[number], row.params, row.stops, prompt_len=len(row.prompt), num_tokens=len(tokens))
        self.slots.apply_staged_writes()
        self.sampler.apply_staged_writes()
        slots = np.array([slot_of[number] for number in range(len(rows))])
        lens = np.array([len(row.prompt) + len(row.output) for row in rows], np.int32)
        self.batch = Batch(
            request_ids=tuple(map(str, range(len(rows)))),
            idx_mapping=slots,
            query_lens=np.ones(len(rows), np.int32),
            query_start_loc=np.arange(len(rows) + 1, dtype=np.int32),
            seq_lens=lens,
            has_prefill=False,
            uniform_query_len=1,
        )
        self.idx_mapping = torch.from_numpy(slots).to(self.device)
        self.seq_lens = torch.from_numpy(lens).to(self.device)

    def sample(self, logits: torch.Tensor) -> Sampled:
        return self.sampler.sample(logits.to(self.device), self.idx_mapping, self.seq_lens, self.batch, self.mask(logits.shape[1]))

    def processed(self, logits: torch.Tensor) -> npt.NDArray[np.float32]:
        """The logits [rows, vocab] before the temperature."""
        needs = self.sampler._needs(self.batch.idx_mapping)
        mask = self.mask(logits.shape[1])
        return self.sampler._process(logits.to(self.device), self.idx_mapping, self.seq_lens, self.batch, needs, mask).cpu().numpy()

    def mask(self, vocab: int) -> GrammarMask | None:
        named = {str(number): row.allowed for number, row in enumerate(self.rows) if row.allowed is not None}
        if not named:
            return None
        return GrammarMask({name: at for at, name in enumerate(named)}, np.stack([pack(one, vocab) for one in named.values()]))


def pack(allowed: Sequence[int], vocab: int) -> npt.NDArray[np.int32]:
    """int32 [ceil(vocab / 32)] with a bit for each allowed token."""
    words = np.zeros(num_words(vocab), np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words.view(np.int32)


def sample(rows: Sequence[Row], logits: torch.Tensor, **where: object) -> list[int]:
    return SampleWorld(rows, **where).sample(logits).tokens.tolist()  # type: ignore[arg-type]


# --- the oracle ---

Logits = npt.NDArray[np.float32]


def expected_logits(row: Row, logits: Logits) -> Logits:
    """All that comes before the temperature, in order, in float32."""
    params, out = row.params, logits.astype(np.float32).copy()
    vocab = len(out)
    if row.allowed is not None:
        out[[token for token in range(vocab) if token not in set(row.allowed)]] = -np.inf
    if params.allowed_token_ids is not None:
        out[[token for token in range(vocab) if token not in params.allowed_token_ids]] = -np.inf
    if len(row.output) < params.min_tokens:
        out[list(row.stops)] = -np.inf
    for token, bias in params.logit_bias.items():
        out[token] += np.float32(bias)
    repetition, frequency, presence = map(np.float32, (params.repetition_penalty, params.frequency_penalty, params.presence_penalty))
    for token in range(vocab):
        count = list(row.output).count(token)
        if count or token in row.prompt:
            out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
        out[token] -= np.float32(count) * frequency
        out[token] -= presence if count else np.float32(0)
    for *before, last in params.bad_words:
        if len(before) <= len(row.output) and list(row.output)[len(row.output) - len(before) :] == before:
            out[last] = -np.inf
    return out


def expected_filter(row: Row, logits: Logits) -> Logits:
    """Temperature, min-p, top-k, top-p."""
    params, out = row.params, logits / np.float32(row.params.temperature)
    if params.min_p > 0:
        out[out < out.max() + np.log(np.float32(params.min_p))] = -np.inf
    order = sorted(range(len(out)), key=lambda token: (-out[token], token))
    if params.top_k > 0:
        out[order[params.top_k :]] = -np.inf
    if params.top_p < 1:
        weights = np.exp(out.astype(np.float64) - out.max())
        mass = 0.0
        for place, token in enumerate(order):
            if place > 0 and mass >= params.top_p:
                out[token] = -np.inf
            mass += weights[token] / weights.sum()
    return out


def expected_token(row: Row, logits: Logits) -> int:
    scores = expected_logits(row, logits)
    if row.params.temperature > 0:
        place = torch.tensor([len(row.prompt) + len(row.output)])
        noise = gumbel_noise(torch.tensor([row.params.seed or 0]), place, len(scores))[0].numpy()
        scores = expected_filter(row, scores) + noise
    return int(np.argmax(scores))


@dataclass
class Draw:
    """Random rows; each parameter is left out about as often as it is set."""

    rng: np.random.Generator
    vocab: int
    chance: float = 0.4
    names: tuple[str, ...] = field(
        default=("allowed", "min_tokens", "bias", "penalties", "bad_words", "temperature", "min_p", "top_k", "top_p", "grammar")
    )

    def rows(self, count: int) -> list[Row]:
        return [self.row(seed) for seed in range(count)]

    def logits(self, count: int) -> torch.Tensor:
        return torch.from_numpy((self.rng.standard_normal((count, self.vocab)) * 3).astype(np.float32))

    def row(self, seed: int) -> Row:
        rng, vocab = self.rng, self.vocab
        on = {name: rng.random() < self.chance for name in self.names}
        few = [int(token) for token in rng.integers(0, vocab, 6)]  # so that prompt, output and lists meet
        prompt = [int(token) for token in rng.choice(few + list(range(5)), int(rng.integers(1, 9)))]
        output = [int(token) for token in rng.choice(few, int(rng.integers(0, 9)))]
        some = [int(token) for token in rng.choice(vocab, vocab // 2, replace=False)]
        temperature = float(rng.random() * 1.5 + 0.2) if on["temperature"] else 0.0
        params = SamplingParams(
            temperature=temperature,
            seed=seed * 977 - 50,
            top_k=int(rng.integers(1, 12)) if on["top_k"] else 0,
            top_p=float(rng.random() * 0.9 + 0.05) if on["top_p"] else 1.0,
            min_p=float(rng.random() * 0.3) if on["min_p"] else 0.0,
            allowed_token_ids=some if on["allowed"] else None,
            min_tokens=int(rng.integers(1, 12)) if on["min_tokens"] else 0,
            logit_bias={int(t): float(rng.normal() * 4) for t in few[: rng.integers(1, 6)]} if on["bias"] else {},
            presence_penalty=float(rng.random() * 4 - 2) if on["penalties"] else 0.0,
            frequency_penalty=float(rng.random() * 4 - 2) if on["penalties"] else 0.0,
            repetition_penalty=float(rng.random() + 0.5) if on["penalties"] else 1.0,
            bad_words=self._bad_words(few, output) if on["bad_words"] else (),
        )
        stops = [int(token) for token in rng.integers(0, vocab, int(rng.integers(0, 12)))]
        return Row(params, prompt, output, stops, some[::-1][: vocab // 3] + some[:4] if on["grammar"] else None)

    def _bad_words(self, few: list[int], output: list[int]) -> list[list[int]]:
        words = [[int(t) for t in self.rng.choice(few, int(self.rng.integers(1, 4)))] for _ in range(int(self.rng.integers(1, 4)))]
        return [*words, [*output[-2:], few[0]]]  # one that matches
