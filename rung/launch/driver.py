"""The few driver calls that a launch needs, as a contract and through cuda-bindings."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from rung.errors import BackendUnavailableError, LaunchError
from rung.launch.grid import checked_grid
from rung.torch_compat import raw_stream_calls

_HINTS = {
    1: "check the grid, the cluster size and the parameters against the kernel image",
    2: "free device memory before kernels are loaded",
    200: "the kernel image is damaged; export the kernel again",
    201: "initialise CUDA on this device first, for example with torch.cuda.init()",
    209: "the machine code is for another kind of device; export the kernel for this device's compute capability",
    500: "the machine code has no kernel of the image's entry name; export the kernel again",
    700: "an earlier kernel read or wrote outside its memory; the process must be restarted",
    701: "the kernel needs more registers or shared memory than a block can have",
    720: "a cooperative grid must fit on the device at once; launch fewer blocks",
    900: "load and launch each kernel once before a capture begins",
    901: "an earlier call broke the capture; load and launch each kernel once before a capture begins",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchAttributes:
    """What a launch is beside its grid, for the life of a prebound kernel."""

    block: tuple[int, int, int]
    shared_bytes: int
    cluster: tuple[int, int, int] = (1, 1, 1)
    cooperative: bool = False
    programmatic: bool = False


Launcher = Callable[[int, int, int, int], None]


class Driver(ABC):
    """The driver as launches see it. Handles are opaque; every call raises `LaunchError` with the driver's code when it is refused.

    The caller names the device of a call by its ordinal; the calling thread's current device is left as it was."""

    @abstractmethod
    def capability(self, ordinal: int) -> int:
        """The compute capability of a device, 90 for 9.0."""

    @abstractmethod
    def stream_calls(self) -> tuple[Callable[[], int], Callable[[int], int]]:
        """(the current device's ordinal, the raw handle of a device's current stream), as torch has them."""

    @abstractmethod
    def device(self, ordinal: int) -> AbstractContextManager[None]:
        """Make a device the calling thread's current one inside the block."""

    @abstractmethod
    def load(self, ordinal: int, cubin: bytes) -> Any:
        """Load machine code on a device; returns the module."""

    @abstractmethod
    def unload(self, ordinal: int, module: Any) -> None:
        """Wait for the device, then unload the module."""

    @abstractmethod
    def function(self, ordinal: int, module: Any, name: str) -> Any:
        """The kernel `name` of a module."""

    @abstractmethod
    def allow_shared(self, ordinal: int, function: Any, num_bytes: int) -> None:
        """Allow launches of `function` with this much dynamic shared memory."""

    @abstractmethod
    def allow_large_clusters(self, ordinal: int, function: Any) -> None:
        """Allow launches of `function` with more than 8 blocks a cluster."""

    @abstractmethod
    def prepare(self, ordinal: int, function: Any, attributes: LaunchAttributes, table_address: int) -> Launcher:
        """A callable (grid x, y, z, stream) that launches `function` with the parameters that the table points to, as they are then.
        The caller keeps the table alive, makes the function's device current, and lets one thread launch at a time. A thread without a
        context (torch gives it one at its first call that needs it, which a launch is not) gets the device's."""


def why_no_cuda_bindings() -> str | None:
    """The reason why `CudaDriver` cannot be used here, or None. Loads nothing."""
    try:
        found = importlib.util.find_spec("cuda.bindings.driver")
    except ModuleNotFoundError:
        found = None
    return None if found else "cuda-bindings is not installed"


class CudaDriver(Driver):
    """The CUDA driver through cuda-bindings. Uses each device's primary context, the one that torch uses."""

    def __init__(self) -> None:
        if (reason := why_no_cuda_bindings()) is not None:
            raise BackendUnavailableError(f"kernels cannot be launched: {reason}", hint="pip install cuda-bindings")
        from cuda.bindings import driver

        self._cuda: ModuleType = driver
        self._contexts: dict[int, Any] = {}
        try:
            self._call(driver.cuInit, 0)
        except Exception as error:  # without a driver library cuda-bindings raise what they find fitting
            raise BackendUnavailableError(f"kernels cannot be launched: {error}", hint="install the NVIDIA driver") from error

    def capability(self, ordinal: int) -> int:
        which = self._cuda.CUdevice_attribute
        device = self._call(self._cuda.cuDeviceGet, ordinal)
        major = self._call(self._cuda.cuDeviceGetAttribute, which.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
        minor = self._call(self._cuda.cuDeviceGetAttribute, which.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
        return int(major) * 10 + int(minor)

    def stream_calls(self) -> tuple[Callable[[], int], Callable[[int], int]]:
        return raw_stream_calls()

    def load(self, ordinal: int, cubin: bytes) -> Any:
        with self.device(ordinal):
            return self._call(self._cuda.cuModuleLoadData, cubin)

    def unload(self, ordinal: int, module: Any) -> None:
        with self.device(ordinal):
            self._call(self._cuda.cuCtxSynchronize)
            self._call(self._cuda.cuModuleUnload, module)

    def function(self, ordinal: int, module: Any, name: str) -> Any:
        with self.device(ordinal):
            return self._call(self._cuda.cuModuleGetFunction, module, name.encode())

    def allow_shared(self, ordinal: int, function: Any, num_bytes: int) -> None:
        attribute = self._cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with self.device(ordinal):
            self._call(self._cuda.cuFuncSetAttribute, function, attribute, num_bytes)

    def allow_large_clusters(self, ordinal: int, function: Any) -> None:
        attribute = self._cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        with self.device(ordinal):
            self._call(self._cuda.cuFuncSetAttribute, function, attribute, 1)

    def prepare(self, ordinal: int, function: Any, attributes: LaunchAttributes, table_address: int) -> Launcher:
        config = self._cuda.CUlaunchConfig()
        config.blockDimX, config.blockDimY, config.blockDimZ = attributes.block
        config.sharedMemBytes = attributes.shared_bytes
        listed = self._listed(attributes)
        config.attrs = listed
        config.numAttrs = len(listed)
        launch, refuse = self._cuda.cuLaunchKernelEx, self._refuse
        grid, on_stream = (0, 0, 0), -1

        def launcher(x: int, y: int, z: int, stream: int) -> None:
            nonlocal grid, on_stream
            # A field costs as much as a tenth of the launch, and most launches repeat the last one's.
            if (x, y, z) != grid:
                grid = (0, 0, 0)  # a number that is refused leaves the fields half set
                _ = x | y | z  # cuda-bindings would cut a float down, silently
                config.gridDimX, config.gridDimY, config.gridDimZ = x, y, z
                grid = (x, y, z)
            if stream != on_stream:
                config.hStream = on_stream = stream
            result = launch(config, function, table_address, 0)[0]
            if result and self._give_context(ordinal):
                result = launch(config, function, table_address, 0)[0]
            if result:
                checked_grid((x, y, z))  # the driver does not say what of a launch it does not accept
                refuse("cuLaunchKernelEx", result)

        return launcher

    def _listed(self, attributes: LaunchAttributes) -> list[Any]:
        ids, found = self._cuda.CUlaunchAttributeID, []

        def add(which: Any) -> Any:
            attribute = self._cuda.CUlaunchAttribute()
            attribute.id = which
            found.append(attribute)
            return attribute.value

        if attributes.programmatic:
            add(ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION).programmaticStreamSerializationAllowed = 1
        if attributes.cooperative:
            add(ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE).cooperative = 1
        if attributes.cluster != (1, 1, 1):
            dims = add(ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION).clusterDim
            dims.x, dims.y, dims.z = attributes.cluster
            spread = self._cuda.CUclusterSchedulingPolicy.CU_CLUSTER_SCHEDULING_POLICY_SPREAD
            add(ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE).clusterSchedulingPolicyPreference = spread
        return found

    @contextmanager
    def device(self, ordinal: int) -> Iterator[None]:
        """Make the device's primary context current. It stays retained: torch holds it until the process ends, too."""
        self._call(self._cuda.cuCtxPushCurrent, self._context(ordinal))
        try:
            yield
        finally:
            self._call(self._cuda.cuCtxPopCurrent)

    def _context(self, ordinal: int) -> Any:
        if ordinal not in self._contexts:
            device = self._call(self._cuda.cuDeviceGet, ordinal)
            self._contexts[ordinal] = self._call(self._cuda.cuDevicePrimaryCtxRetain, device)
        return self._contexts[ordinal]

    def _give_context(self, ordinal: int) -> bool:
        """Whether the calling thread had no context; it has the device's now, for good."""
        if int(self._call(self._cuda.cuCtxGetCurrent) or 0):
            return False
        self._call(self._cuda.cuCtxSetCurrent, self._context(ordinal))
        return True

    def _call(self, function: Callable[..., Any], *arguments: object) -> Any:
        result, *values = function(*arguments)
        if result:
            self._refuse(function.__name__, result)
        return values[0] if values else None

    def _refuse(self, call: str, result: Any) -> None:
        text = self._cuda.cuGetErrorString(result)[1]
        described = text.decode() if isinstance(text, bytes) else str(text)
        raise LaunchError(
            f"{call} failed: {result.name} ({described})", hint=_HINTS.get(int(result), "run with CUDA_LAUNCH_BLOCKING=1"), code=int(result)
        )
