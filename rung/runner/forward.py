"""How a step's forward pass runs: the seam between the runner and compiled or captured models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from rung.context import ForwardContext, set_forward_context
from rung.runner.batch import Batch

StepMode = Literal["none", "piecewise", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """How one batch runs. `num_requests` is the padded count under FULL and None otherwise."""

    mode: StepMode
    num_tokens: int  # padded
    num_requests: int | None = None
    descriptor: Any = None


class Forward(ABC):
    """Decides how a batch runs, and runs it. The runner asks `dispatch` before it builds any input, since the answer sets the padding.

    `run` is given views of the runner's persistent buffers at the padded size; under FULL they are in place already, so replaying is all
    there is to do. The returned hidden states hold until the next `run`."""

    @abstractmethod
    def dispatch(self, batch: Batch) -> Dispatch:
        """The mode and padded sizes for this batch."""

    @abstractmethod
    def run(self, dispatch: Dispatch, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """input_ids int32 and positions int64, [dispatch.num_tokens] each -> hidden states, at least the batch's tokens first."""


class EagerForward(Forward):
    """Calls the module as it is, at the exact size."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def dispatch(self, batch: Batch) -> Dispatch:
        return Dispatch(mode="none", num_tokens=batch.num_tokens)

    def run(self, dispatch: Dispatch, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        with set_forward_context(context):
            hidden: torch.Tensor = self._module(input_ids, positions)
        return hidden
