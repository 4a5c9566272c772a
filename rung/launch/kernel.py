"""Kernels on a device: loaded once, bound to arguments once, launched many times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from rung.errors import KernelArgumentError, LaunchError
from rung.launch.driver import Driver, LaunchAttributes
from rung.launch.dtypes import accepts
from rung.launch.grid import checked_grid
from rung.launch.image import GLOBAL_SCRATCH, KernelImage, Parameter, Scratch
from rung.launch.packing import ParameterBuffer

_SHARED_WITHOUT_ASKING = 48 * 1024
_PORTABLE_CLUSTER = 8
_THREADS_A_WARP = 32


class HasAddress(Protocol):
    """A tensor, as far as a launch knows it."""

    def data_ptr(self) -> int: ...


Value: TypeAlias = int | float | HasAddress
Allocate = Callable[[int, int], HasAddress]  # (bytes, stream) -> memory that stays valid for work enqueued on the stream


class LoadedKernel:
    """A kernel image on one device.

    The module stays loaded until `unload()` or the end of the process. No finaliser unloads it, so collecting one of these objects during
    a capture calls nothing. `unload()` waits for the device; the caller has released every graph that holds launches of the kernel."""

    def __init__(self, image: KernelImage, ordinal: int, driver: Driver) -> None:
        self.image, self.ordinal, self.driver = image, ordinal, driver
        self._module: Any = driver.load(ordinal, image.cubin)
        self.function: Any = None
        try:
            self.function = driver.function(ordinal, self._module, image.entry)
            if image.shared_bytes > _SHARED_WITHOUT_ASKING:
                driver.allow_shared(ordinal, self.function, image.shared_bytes)
            if image.cluster[0] * image.cluster[1] * image.cluster[2] > _PORTABLE_CLUSTER:
                driver.allow_large_clusters(ordinal, self.function)
        except LaunchError:
            self.unload()
            raise

    def unload(self) -> None:
        """Unload the module; a second call does nothing. Later launches raise `LaunchError`."""
        module, self._module, self.function = self._module, None, None
        if module is not None:
            self.driver.unload(self.ordinal, module)

    def check_loaded(self) -> None:
        if self._module is None:
            raise LaunchError(f"kernel {self.image.entry} was unloaded", hint="load the image again")


class PreboundKernel:
    """A loaded kernel with its arguments packed: `set` patches one in place, `launch` enqueues.

    * Arguments are numbers, addresses, or tensors, of which only the address is kept: the caller keeps them alive.
    * One thread at a time sets and launches. The kernel's device is the current one at `launch`.
    * `programmatic` overrides the image's word: with it the kernel may start before its predecessor on the stream has ended, so only a
      kernel that waits by itself may have it.
    * Scratch is allocated at each launch by `allocate`, and only for kernels that need it.
    """

    def __init__(
        self,
        loaded: LoadedKernel,
        arguments: Sequence[Value],
        grid: tuple[int, int, int],
        *,
        programmatic: bool | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        loaded.check_loaded()
        image = loaded.image
        self._loaded, self._allocate = loaded, allocate
        self.grid = grid
        self._buffer = ParameterBuffer(image.parameters)
        self._slots = [index for index, parameter in enumerate(image.parameters) if not parameter.is_scratch]
        self._scratch = [(index, _scratch_of(image, p)) for index, p in enumerate(image.parameters) if p.is_scratch]
        self._scratch = [(index, scratch) for index, scratch in self._scratch if scratch.size]
        if self._scratch and allocate is None:
            raise LaunchError(f"kernel {image.entry} needs scratch memory", hint="pass allocate=torch_scratch(device)")
        if len(arguments) != len(self._slots):
            names = ", ".join(parameter.name for parameter in image.arguments)
            raise KernelArgumentError(
                f"{image.entry} takes {len(self._slots)} arguments ({names}), got {len(arguments)}", hint="give one value for each"
            )
        for index, value in enumerate(arguments):
            self.set(index, value)
        self._launch = loaded.driver.prepare(
            loaded.ordinal, loaded.function, launch_attributes(image, programmatic=programmatic), self._buffer.table_address
        )

    def set(self, index: int, value: Value) -> None:
        """Replace argument `index`. Raises `KernelArgumentError` for an index, value, dtype or device that does not fit."""
        if not 0 <= index < len(self._slots):
            raise KernelArgumentError(
                f"{self._loaded.image.entry} has no argument {index}, it takes {len(self._slots)}", hint="arguments count from 0"
            )
        slot = self._slots[index]
        parameter = self._buffer.parameters[slot]
        self._buffer.set(slot, value if isinstance(value, int | float) else address_of(value, parameter, index, self._loaded.ordinal))

    def launch(self, stream: int) -> None:
        """Enqueue the kernel on `stream`, a raw handle. Works in a capture, which keeps the arguments as they are now."""
        if self._loaded.function is None:
            self._loaded.check_loaded()
        x, y, z = self._blocks
        if not (x and y and z):
            return
        if self._scratch:
            kept = [self._lend_scratch(index, scratch, x * y * z, stream) for index, scratch in self._scratch]
            self._launch(x, y, z, stream)
            del kept  # memory of the stream: whoever gets it next comes after this launch
        else:
            self._launch(x, y, z, stream)

    @property
    def grid(self) -> tuple[int, int, int]:
        """The grid in clusters; with clusters of one block, as usual, in blocks. An empty one launches nothing. Setting it raises
        `KernelArgumentError` for one that CUDA does not accept."""
        return self._grid

    @grid.setter
    def grid(self, grid: tuple[int, int, int]) -> None:
        self._blocks = checked_grid(grid, self._loaded.image.cluster)
        self._grid = grid

    def _lend_scratch(self, index: int, scratch: Scratch, blocks: int, stream: int) -> HasAddress:
        assert self._allocate is not None
        memory = self._allocate(blocks * scratch.size + scratch.alignment - 1, stream)
        self._buffer.set(index, -(-memory.data_ptr() // scratch.alignment) * scratch.alignment)
        return memory


def launch_attributes(image: KernelImage, *, programmatic: bool | None = None) -> LaunchAttributes:
    return LaunchAttributes(
        block=(image.num_warps * _THREADS_A_WARP, 1, 1),
        shared_bytes=image.shared_bytes,
        cluster=image.cluster,
        cooperative=image.cooperative,
        programmatic=image.programmatic if programmatic is None else programmatic,
    )


def torch_scratch(ordinal: int) -> Allocate:
    """Scratch from torch's allocator, which gives freed memory to later work of the same stream alone; a capture takes it from its pool."""

    def allocate(num_bytes: int, stream: int) -> HasAddress:
        import torch

        device = torch.device("cuda", ordinal)
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device)):
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    return allocate


def address_of(value: Any, parameter: Parameter, index: int, ordinal: int) -> int:
    """The address of a tensor for `parameter`. Raises `KernelArgumentError` when its dtype or device is another."""
    where = f"argument {index} ({parameter.name})"
    if not parameter.is_pointer:
        raise KernelArgumentError(
            f"{where} must be a number of kind {parameter.kind}, got {type(value).__name__}", hint="pass an int or a float"
        )
    if not hasattr(value, "data_ptr"):
        raise KernelArgumentError(
            f"{where} must be a tensor or an address, got {type(value).__name__}", hint="pass a tensor, or its data_ptr()"
        )
    if hasattr(value, "dtype") and not accepts(parameter.kind, value.dtype):
        raise KernelArgumentError(
            f"{where} is of dtype {value.dtype}, the kernel was compiled for {parameter.kind}",
            hint="convert it, or export the kernel for that type",
        )
    device = getattr(value, "device", None)
    if device is not None and (device.type, device.index) != ("cuda", ordinal):
        raise KernelArgumentError(f"{where} lies on {device}, the kernel on cuda:{ordinal}", hint="move it, or load the kernel there")
    return int(value.data_ptr())


def _scratch_of(image: KernelImage, parameter: Parameter) -> Scratch:
    return image.global_scratch if parameter.kind == GLOBAL_SCRATCH else image.profile_scratch
