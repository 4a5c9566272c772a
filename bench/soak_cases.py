"""What a soak asks for and how it judges the answers: prompts with sampling parameters, and what each gives when it runs alone."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from rung.runner import Completion, FinishReason, Grammar, GrammarMatcher, RunnerConfig, SamplingParams, build_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A prompt with parameters, and the tokens until the context is full when nobody else runs."""

    prompt: tuple[int, ...]
    params: SamplingParams
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]  # by token, how far the model's best token leads

    @property
    def is_plain(self) -> bool:
        """Greedy, and nothing else that reads logits: its near-ties can be told by the gaps."""
        p = self.params
        return p.is_greedy and not (p.has_penalties or p.logit_bias or p.bad_words or p.allowed_token_ids or p.grammar)

    def variation(self, rng: random.Random) -> SamplingParams:
        """The same tokens, ended somewhere by their number, a stop token, or the context."""
        params = self.params
        if rng.random() < 0.8:
            params = replace(params, max_tokens=rng.randint(1, min(48, len(self.tokens))))
        if rng.random() < 0.4:
            stops = {rng.choice(self.tokens), rng.choice(self.tokens)}
            params = replace(params, stop_token_ids=stops)
        if rng.random() < 0.1:
            params = replace(params, logprobs=rng.randint(0, 3))
        return params

    def expected(self, params: SamplingParams) -> tuple[tuple[int, ...], FinishReason]:
        tokens = self.tokens[: params.max_tokens]
        end = next((at for at, token in enumerate(tokens) if token in params.stop_token_ids), None)
        return (tokens, FinishReason.LENGTH) if end is None else (tokens[: end + 1], FinishReason.STOP)


@torch.no_grad()
def enliven(module: nn.Module, seed: int) -> None:
    """Give random weights a size at which a token depends on those before it; as they are, greedy text is one token again and again."""
    for number, (name, parameter) in enumerate(module.named_parameters()):
        if parameter.dim() == 2 and "embed" not in name:
            generator = torch.Generator(parameter.device).manual_seed(seed + number)
            parameter.normal_(0.0, 1.5 * parameter.shape[1] ** -0.5, generator=generator)


def make_cases(module: nn.Module, count: int, config: RunnerConfig, vocab_size: int, rng: random.Random) -> list[Case]:
    """Prompts that often begin alike; each is run alone, uncompiled, without graphs or prefix cache, on a copy of the module."""
    alone = RunnerConfig(
        max_num_requests=1,
        max_num_tokens=config.max_num_tokens,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        num_blocks=1 + config.max_blocks_per_request,
        attention_backend=config.attention_backend,
        prefix_cache=False,
        steps_in_flight=1,
        eager=True,
    )
    engine, _, _ = build_engine(copy.deepcopy(module), alone)
    heads = [[rng.randrange(vocab_size) for _ in range(rng.randint(8, 40))] for _ in range(4)]
    cases = []
    for number in range(count):
        tail = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 20))]
        prompt = (rng.choice(heads) + tail) if rng.random() < 0.6 else tail
        params = _params(number, vocab_size, rng)
        (completion,) = engine.generate([prompt], replace(params, logprobs=2))
        gaps = tuple(entry.top[0][1] - entry.top[1][1] for entry in completion.logprobs or ())
        cases.append(Case(prompt=tuple(prompt), params=params, tokens=completion.token_ids, gaps=gaps))
    engine.executor.shutdown()
    return cases


def _params(number: int, vocab_size: int, rng: random.Random) -> SamplingParams:
    """Half of the cases are plain greedy ones, which a decode graph samples as it does those at a temperature."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": rng.getrandbits(62)},
        {},
        {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "seed": rng.getrandbits(62)},
        {},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {},
        {"temperature": 0.5, "min_p": 0.05, "logit_bias": {rng.randrange(vocab_size): 2.0}, "seed": rng.getrandbits(62)},
        {},
        {"grammar": Residues(vocab_size, rng.randint(2, 5)), "ignore_eos": False},
        {"bad_words": [[rng.randrange(vocab_size)], [1, 2]], "presence_penalty": 0.5},
    ]
    return SamplingParams(**{"ignore_eos": True, **kinds[number % len(kinds)]})


class Residues(Grammar):
    """The token at place n leaves the rest n when it is divided by `divisor`. Never ends by itself."""

    def __init__(self, vocab_size: int, divisor: int) -> None:
        self.divisor = divisor
        self.masks = [_packed(torch.arange(vocab_size) % divisor == rest) for rest in range(divisor)]

    def matcher(self) -> ResiduesMatcher:
        return ResiduesMatcher(self)


class ResiduesMatcher(GrammarMatcher):
    def __init__(self, grammar: Residues) -> None:
        self._grammar = grammar
        self._place = 0

    def accept(self, token: int) -> bool:
        allowed = token % self._grammar.divisor == self._place
        self._place = (self._place + 1) % self._grammar.divisor
        return allowed

    def fill(self, row: npt.NDArray[np.int32]) -> bool:
        row[:] = self._grammar.masks[self._place]
        return True


def _packed(allowed: torch.Tensor) -> npt.NDArray[np.int32]:
    bits = np.packbits(allowed.numpy(), bitorder="little")
    return np.pad(bits, (0, -len(bits) % 4)).view(np.int32)


@dataclass(slots=True)
class Verdict:
    """Counts and failures of a soak. `tie_gap`: below it two best tokens may change places; `diverged_share`: of the requests that are
    random or whose logits are changed, so many may differ, since their ties cannot be seen from here."""

    tie_gap: float
    diverged_share: float = 0.01
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def fail(self, text: str) -> None:
        self.failures.append(text)

    def judge(self, case: Case, params: SamplingParams, completion: Completion, *, aborted: bool) -> None:
        """Hold a finished request against the one that ran alone."""
        name, tokens = completion.request_id, completion.token_ids
        wanted, reason = case.expected(params)
        self.counts["aborted" if completion.finish_reason is FinishReason.ABORT else "finished"] += 1
        self.counts["tokens"] += len(tokens)
        self.counts["compared"] += not case.is_plain
        if completion.finish_reason is FinishReason.ABORT and aborted:
            wanted, reason = wanted[: len(tokens)], FinishReason.ABORT
        if tokens == wanted and completion.finish_reason is reason:
            return
        at = next((i for i, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b), min(len(tokens), len(wanted)))
        differ = at < min(len(tokens), len(wanted))
        if differ and case.is_plain and case.gaps[at] < self.tie_gap:
            self.counts["near ties"] += 1
        elif differ and not case.is_plain:
            self.counts["diverged"] += 1
        else:
            self.fail(
                f"{name}: {completion.finish_reason} {completion.error or ''} with {len(tokens)} tokens, expected {reason} with "
                f"{len(wanted)}; the first difference is at {at} (gap {case.gaps[at] if at < len(case.gaps) else 0:.2g})"
            )

    def close(self) -> None:
        """After the last request."""
        if self.counts["diverged"] > self.diverged_share * self.counts["compared"]:
            self.fail(
                f"{self.counts['diverged']} of {self.counts['compared']} seeded or processed requests differ from those that ran alone"
            )


def describe(cases: Sequence[Case]) -> str:
    plain = [case for case in cases if case.is_plain]
    return f"{len(cases)} cases, {len(plain)} plain, {sum(len(set(c.tokens)) for c in plain) / max(1, len(plain)):.0f} distinct tokens each"
