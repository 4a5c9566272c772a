"""One step of the way from the model's logits to those that are sampled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

import torch

from rung.runner.sampler.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A request that enters a slot."""

    slot: int
    params: SamplingParams
    stop_token_ids: Collection[int]  # everything that ends it
    prompt_len: int
    num_tokens: int  # of the prompt, and of the output so far when it comes back


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Where the rows of a batch find their parameters."""

    slots: torch.Tensor  # int64 [rows]; 0 for rows without a request, whose result nobody reads
    seq_lens: torch.Tensor  # int64 [rows], known tokens, which is the position of the new one
    output_lens: torch.Tensor  # int64 [rows], those of them that are output


class Processor(ABC):
    """Changes logits in place, row by row, from parameters that lie on the device by slot.

    `add` hears of every request, so that it can wipe what the slot's last one left. `apply` runs when some request of the batch `wants`
    it, over all rows: a row whose request does not want it keeps its bits. Nothing waits for the device."""

    @abstractmethod
    def wants(self, params: SamplingParams) -> bool:
        """Whether a request needs this."""

    @abstractmethod
    def add(self, entry: Entry) -> None:
        """Store, or stage, the parameters of a request."""

    def apply_staged_writes(self) -> None:
        """Enqueue what was staged. The slots' tokens are on the device by now."""
        return

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        """logits float32 [rows, vocab]."""


def forbid(logits: torch.Tensor, tokens: torch.Tensor, forbidden: torch.Tensor) -> None:
    """Set `logits[row, tokens[row]]` to -inf where `forbidden`; both [rows, n]. Ids outside the vocabulary have no effect."""
    vocab = logits.shape[1]
    forbidden = forbidden & (tokens >= 0) & (tokens < vocab)
    logits.scatter_reduce_(1, tokens.clamp(0, vocab - 1), torch.where(forbidden, -torch.inf, torch.inf), "amin")
