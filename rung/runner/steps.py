"""What a step is between its calls."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rung.context import ForwardContext
from rung.graphs import Dispatch
from rung.runner.batch import Batch
from rung.runner.output import RecordedTokens
from rung.runner.sampler import StepLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """Inputs are enqueued; the model has not run."""

    batch: Batch
    dispatch: Dispatch
    context: ForwardContext


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedStep:
    """What `execute_model` leaves for `sample_tokens`."""

    batch: Batch
    dispatch: Dispatch
    logits: torch.Tensor  # [num_requests, vocab]; of the last step when a graph made several
    num_steps: int = 1
    tokens: torch.Tensor | RecordedTokens | None = None  # [num_steps, num_requests], when they are sampled and the slots advanced
    prompt_logprobs: tuple[StepLogprobs, ...] = ()  # of the prompts in the batch that asked for them
    # Kept until sampling, so that their memory is not handed out while enqueued work may still read them.
    context: ForwardContext | None = field(default=None, repr=False)
