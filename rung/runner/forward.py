"""How a step's forward pass runs: the seam between the runner and compiled or captured models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from rung.context import ForwardContext, set_forward_context
from rung.counters import Counters
from rung.graphs import Dispatch, Reason, exact
from rung.runner.batch import Batch

if TYPE_CHECKING:
    from rung.runner.decode import DecodeStep


class Forward(ABC):
    """Decides how a batch runs, and runs it. The runner asks `dispatch` before it builds any input, since the answer sets the padding.

    `run` is given views of the runner's persistent buffers at the padded size; under FULL they are in place already, so replaying is all
    there is to do. The returned hidden states hold until the next `run`. The life-cycle methods do nothing where there are no graphs."""

    def static_inputs(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The buffers for input ids (int32) and positions (int64) that the forward wants the runner to fill; None: any."""
        return None

    def watch(self, tensors: Callable[[], Iterable[tuple[str, Callable[[], object]]]]) -> None:
        """Told by the runner what captured work reads besides the module's tensors: names, and how to read what bears them now."""
        return None

    def weights_changed(self) -> None:
        """Weights were replaced: whoever bound them looks at all of them."""
        return None

    def bind_decode(self, decode: DecodeStep) -> None:
        """Called once by the runner: what a forward needs to put a whole decode step into a graph."""
        return

    def advances(self, dispatch: Dispatch) -> bool:
        """Whether this dispatch runs by `advance` instead of `run`."""
        return False

    def advance(self, dispatch: Dispatch) -> torch.Tensor:
        """One whole decode step from the slots, sampling included; logits [dispatch.num_tokens, vocab], which hold until the next step."""
        raise NotImplementedError

    @abstractmethod
    def dispatch(self, batch: Batch) -> Dispatch:
        """The mode and padded sizes for this batch."""

    @abstractmethod
    def run(self, dispatch: Dispatch, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """input_ids int32 and positions int64, [dispatch.num_tokens] each -> hidden states, at least the batch's tokens first."""

    def capture_due(self, seconds: float | None = None) -> int:
        """Between two steps: capture graphs that steps asked for often enough, about `seconds` long; returns how many."""
        return 0

    def suspend(self) -> None:
        """Free graphs and their memory; steps run without until `resume`."""
        return None

    def resume(self) -> None:
        """Capture again what `suspend` freed."""
        return None

    def recapture(self) -> None:
        """Capture the same graphs again."""
        return None


class EagerForward(Forward):
    """Calls a module, or a compiled plan, as it is and at the exact size."""

    def __init__(self, module: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], counters: Counters | None = None) -> None:
        self._module = module
        self.counters = counters if counters is not None else Counters()

    def dispatch(self, batch: Batch) -> Dispatch:
        return Dispatch(exact(batch.shape), Reason.GRAPHS_OFF)

    def run(self, dispatch: Dispatch, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        self.counters.add(dispatch.counter)
        with set_forward_context(context):
            return self._module(input_ids, positions)
