"""The device's clock, power and what holds its clock down, from NVML, by ctypes: the driver brings the library, no package is needed."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

_SM_CLOCK = 1  # nvmlClockType_t, nvml.h
_REASONS = {  # nvmlClocksEventReason*, nvml.h
    0x2: "clock setting",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


@dataclass(frozen=True, slots=True)
class DeviceState:
    """One reading. The power is the driver's mean over the last moments, up to a second of them."""

    sm_mhz: int
    watts: float
    held_down_by: str  # "" for nothing, which an idle device's reason counts as

    def __str__(self) -> str:
        return f"{self.sm_mhz} MHz {self.watts:.0f} W" + (f" ({self.held_down_by})" if self.held_down_by else "")


class StateReader:
    """Reads the current CUDA device; `why` says why there are no readings, where there are none."""

    def __init__(self) -> None:
        self.why = ""
        self._handle = ctypes.c_void_p()
        try:
            if not torch.cuda.is_available():
                raise OSError("no CUDA device")
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
            self._call("nvmlInit_v2")
            uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
            self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._handle))
            self._read()
        except (OSError, AttributeError) as error:
            self.why = str(error)

    def read(self) -> DeviceState | None:
        """A reading, which takes some tens of microseconds; None where there are none."""
        try:
            return None if self.why else self._read()
        except OSError as error:
            self.why = str(error)
            return None

    def _read(self) -> DeviceState:
        clock, milliwatts, reasons = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_ulonglong()
        self._call("nvmlDeviceGetClockInfo", self._handle, ctypes.c_int(_SM_CLOCK), ctypes.byref(clock))
        self._call("nvmlDeviceGetPowerUsage", self._handle, ctypes.byref(milliwatts))
        # the name from before `...ClocksEventReasons`, which every driver still has
        self._call("nvmlDeviceGetCurrentClocksThrottleReasons", self._handle, ctypes.byref(reasons))
        held = ", ".join(name for bit, name in _REASONS.items() if reasons.value & bit)
        return DeviceState(clock.value, milliwatts.value * 1e-3, held)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._nvml, name)(*arguments)
        if status:
            raise OSError(f"{name} returned {status}")
