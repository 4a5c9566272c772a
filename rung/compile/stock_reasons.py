"""Why a piece is run by Inductor's own loader and not by ours."""

from __future__ import annotations

from enum import StrEnum


class StockReason(StrEnum):
    """A closed list; each is counted as `stock_load.<reason>`, and costs the imports of Dynamo, Inductor and Triton."""

    WRAPPER = "wrapper"  # Inductor's wrapper has a form that is not known
    NAME = "name"  # the wrapper uses a name that our runtime does not have
    KERNEL = "kernel"  # a kernel of the piece is of a kind that our launcher does not take
    DEVICES = "devices"  # the wrapper names several devices
    CONSTANTS = "constants"  # the piece holds tensors of its own
    DEVICE_TYPE = "device_type"  # neither CPU nor CUDA
    DRIVER = "driver"  # the process cannot launch kernels by itself: cuda-bindings or the driver are missing
    CPU = "cpu"  # the machine code is for a CPU with more instruction sets
    UNLOADABLE = "unloadable"  # the machine code was refused here


class NotPortableError(Exception):
    """Raised while an artifact is made; it then names the reason and has Inductor's form alone. Never reaches a user."""

    def __init__(self, reason: StockReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail
