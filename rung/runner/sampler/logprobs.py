"""Log-probabilities of sampled tokens and of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One position of a request, under the model alone: before bias, penalties, temperature and filters."""

    token_id: int  # the token that stands there
    logprob: float
    rank: int  # tokens that are at least as likely, itself included
    top: tuple[tuple[int, float], ...]  # (token id, log-probability) of the most likely tokens, best first, equal ones by id


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobTensors:
    """Log-probabilities of N positions."""

    token_ids: torch.Tensor  # int64 [N]
    logprobs: torch.Tensor  # float32 [N]
    ranks: torch.Tensor  # int64 [N]
    top_ids: torch.Tensor  # int64 [N, n]
    top_logprobs: torch.Tensor  # float32 [N, n]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> LogprobTensors:
        return _of([change(tensor) for tensor in self.tensors])

    @classmethod
    def cat(cls, parts: Sequence[LogprobTensors]) -> LogprobTensors:
        return parts[0] if len(parts) == 1 else _of([torch.cat(each) for each in zip(*(part.tensors for part in parts), strict=True)])

    def read(self, first: int, count: int, num_top: int) -> list[TokenLogprobs]:
        """Positions `first` to `first + count`, on the host."""
        rows = slice(first, first + count)
        columns = [tensor[rows].tolist() for tensor in (self.token_ids, self.logprobs, self.ranks)]
        tops = [tensor[rows, :num_top].tolist() for tensor in (self.top_ids, self.top_logprobs)]
        return [
            TokenLogprobs(token, logprob, rank, tuple(zip(ids, values, strict=True)))
            for token, logprob, rank, ids, values in zip(*columns, *tops, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """The positions of one request among those of a step."""

    request_id: str
    first: int
    count: int
    num_top: int
    position: int  # of the first one, in the request


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """What requests of one step asked for, on its way to the host."""

    tensors: LogprobTensors
    rows: tuple[LogprobRows, ...]


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
    """Of logits [N, vocab]: log-softmax in float32 at `token_ids` [N] and at the `num_top` best. A row does not depend on the others."""
    scores = logits.float()
    total = scores.logsumexp(dim=-1, keepdim=True)  # [N, 1]
    chosen = scores.gather(1, token_ids.unsqueeze(1))
    top_ids = _best(scores, num_top)
    return LogprobTensors(
        token_ids=token_ids,
        logprobs=(chosen - total).squeeze(1),
        ranks=(scores >= chosen).sum(dim=-1),
        top_ids=top_ids,
        top_logprobs=scores.gather(1, top_ids) - total,
    )


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [N, count]. Among equal scores, common in low precision, `topk` prefers none: so keys that are never equal."""
    vocab = scores.shape[1]
    bits = (scores + 0.0).view(torch.int32)  # +0.0 makes -0.0 equal to 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # in the order of the floats
    keys = (ordered.to(torch.int64) << 32) | torch.arange(vocab - 1, -1, -1, device=scores.device)
    return vocab - 1 - (keys.topk(min(count, vocab), dim=-1).values & 0xFFFFFFFF)


def _of(tensors: Sequence[torch.Tensor]) -> LogprobTensors:
    token_ids, logprobs, ranks, top_ids, top_logprobs = tensors
    return LogprobTensors(token_ids=token_ids, logprobs=logprobs, ranks=ranks, top_ids=top_ids, top_logprobs=top_logprobs)
