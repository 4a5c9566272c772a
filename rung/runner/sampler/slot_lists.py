"""Lists of token ids by slot, of any length, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rung.runner.ops.base import StepOps
from rung.runner.staging import StagedWrites
from rung.runner.transfer import HostToDevice

_MIN_WIDTH = 8


class SlotLists:
    """Numbers by slot in a table [R, width] that is padded with `fill`.

    Allocated when the first list that is not empty comes, and widened when a longer one comes, so that requests without lists cost
    nothing; no graph may read it, since its address changes."""

    def __init__(self, max_num_requests: int, dtype: torch.dtype, fill: float, transfer: HostToDevice, ops: StepOps) -> None:
        self.table = torch.empty(max_num_requests, 0, dtype=dtype, device=transfer.device)
        self._fill = fill
        self._transfer = transfer
        self._ops = ops
        self._staged: StagedWrites | None = None
        self._pending: dict[int, Sequence[float]] = {}

    @property
    def width(self) -> int:
        return self.table.shape[1]

    def set(self, slot: int, values: Sequence[float]) -> None:
        """The list of a request that enters `slot`; an empty one wipes that of the last request."""
        if values or self.width:
            self._pending[slot] = values
        else:
            self._pending.pop(slot, None)

    def apply_staged_writes(self) -> None:
        if not self._pending:
            return
        pending, self._pending = self._pending, {}  # first, so that a list that cannot be written is gone when this raises
        self._widen(max(map(len, pending.values())))
        if self._staged is not None:
            for slot, values in pending.items():
                self._staged.stage(slot, 0, [*values, *[self._fill] * (self.width - len(values))])
            self._staged.apply()

    def _widen(self, needed: int) -> None:
        if needed <= self.width:
            return
        width = max(_MIN_WIDTH, 1 << (needed - 1).bit_length())
        table = torch.full((self.table.shape[0], width), self._fill, dtype=self.table.dtype, device=self.table.device)
        table[:, : self.width] = self.table
        self.table = table
        self._staged = StagedWrites(table, self._transfer, self._ops)
