"""Launching a Triton kernel of ours without Triton's own launcher."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from rung.cache import Store, open_store
from rung.errors import BackendUnavailableError, KernelArgumentError, KernelExportError
from rung.launch.cuda_source import CudaKernel
from rung.launch.driver import CudaDriver, Driver, Launcher, why_no_cuda_bindings
from rung.launch.grid import checked_grid
from rung.launch.image import GLOBAL_SCRATCH, PROFILE_SCRATCH, KernelImage, Parameter
from rung.launch.kernel import LoadedKernel, launch_attributes
from rung.launch.packing import ParameterBuffer
from rung.launch.record import current_record, run_recorded
from rung.launch.rehearsal import GATE, current_rehearsal
from rung.launch.specialise import OPTIONS, generate_run, specialise
from rung.launch.triton_images import TritonImages
from rung.torch_compat import TritonParameter, triton_interpreted, why_no_triton_export

# Who is given the launches of Triton's own road instead of Triton: a backend that records work without a GPU.
watched_launches: ContextVar[Callable[[Any, tuple[int, int, int], Sequence[Any], Mapping[str, Any]], None] | None] = ContextVar(
    "rung_watched_launches", default=None
)
_MAX_KEYS = 4096  # integers enter the key as they are, and a caller's may be endless; images do not multiply with them


def launch_road() -> str:
    """How our Triton kernels are launched in this process: "prebound", or "triton: " and the reason."""
    if triton_interpreted():
        return "triton: its interpreter is on"
    reason = why_no_cuda_bindings() or why_no_triton_export()
    return "prebound" if reason is None else f"triton: {reason}"


class TritonLauncher:
    """One Triton kernel (or a `CudaKernel`): `run(grid, *arguments, **constexprs_and_options)`, the grid always of three numbers.

    * Each specialisation has one image, compiled at the first call that needs it or taken from the store, and loaded once a device. Both
      may allocate and wait: whoever captures a call makes it once before.
    * The kernel runs on the current stream of the device of its first tensor; any thread may call.
    * Arguments are tensors, ints and floats, each of the type that it had in the first call; constexprs and options go by name.
    * Where `launch_road()` is not "prebound" (or `road` is given), Triton's own launcher runs the kernel.
    """

    def __init__(
        self, module: str, name: str, *, driver: Driver | None = None, store: Store | None = None, road: str | None = None
    ) -> None:
        self.module, self.name = module, name
        self.run: Callable[..., None] = self._first_run
        self._driver, self._store, self._road = driver, store, road
        self._lock = threading.RLock()
        self._taken: Callable[..., None] | None = None  # the road, once it was chosen
        self._by_key: dict[Any, Entry] = {}
        self._by_image: dict[Any, Entry] = {}

    @functools.cached_property
    def images(self) -> TritonImages:
        return TritonImages(self.module, self.name, self._store or open_store())

    @functools.cached_property
    def road(self) -> str:
        """How this kernel is launched, a `launch_road()`."""
        return self._road or launch_road()

    @property
    def loaded(self) -> list[LoadedKernel]:
        """The specialisations that were launched in this process."""
        return [entry.loaded for entry in self._by_image.values()]

    @functools.cached_property
    def parameters(self) -> tuple[TritonParameter, ...]:
        return self.images.parameters()

    @functools.cached_property
    def driver(self) -> Driver:
        return self._driver or CudaDriver()

    def _first_run(self, grid: tuple[int, int, int], *values: Any, **named: Any) -> None:
        """Choose the road, and become it; in a rehearsal no road is taken, and nobody becomes one."""
        rehearsal = current_rehearsal.get()
        if rehearsal is not None:
            if (record := current_record.get()) is not None:
                record.refuse("launches were rehearsed")
            if all(grid):
                rehearsal.launch(self, values, named)
            return
        with self._lock:
            if self._taken is None:
                self._taken = self._prebound(values) if self.road == "prebound" else self._through_triton()
        GATE.become(self, self._taken)
        self._taken(grid, *values, **named)

    def leave_road(self) -> None:
        """Look at each launch again before it takes the road."""
        self.run = self._first_run

    def constants_and_options(self, named: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a call gives by name, told apart and in the order in which `generate_run` does it."""
        constants = {p.name: named[p.name] for p in self.parameters if p.constexpr}
        return constants, {name: named.get(name, default) for name, default in OPTIONS.items()}

    def _through_triton(self) -> Callable[..., None]:
        kernel = self.images.kernel()
        if isinstance(kernel, CudaKernel):
            raise BackendUnavailableError(
                f"{self.name} is CUDA C++, which Triton cannot launch ({self.road})", hint="pip install cuda-bindings"
            )

        def launch(grid: tuple[int, int, int], values: Sequence[Any], named: Mapping[str, Any]) -> None:
            watch = watched_launches.get()
            if watch is None:
                kernel[grid](*values, **named)
            else:
                watch(kernel, grid, values, named)

        def run(grid: tuple[int, int, int], *values: Any, **named: Any) -> None:
            run_recorded(functools.partial(launch, grid, values, named))

        return run

    def _prebound(self, values: Sequence[Any]) -> Callable[..., None]:
        current_device, current_stream = self.driver.stream_calls()
        return generate_run(
            self.parameters,
            values,
            {
                "find": self._by_key.get,
                "miss": self._miss,
                "refused": self._refused,
                "elsewhere": self._elsewhere,
                "current_device": current_device,
                "current_stream": current_stream,
                "record": current_record.get,
                "driver": self.driver,
            },
        )

    def _miss(self, key: tuple[Any, ...], values: Sequence[Any], constants: Mapping[str, Any], options: Mapping[str, Any]) -> Entry:
        with self._lock:
            entry = self._entry(values, constants, options)
            if len(self._by_key) >= _MAX_KEYS:
                self._by_key.clear()
            self._by_key[key] = entry
            return entry

    def _entry(self, values: Sequence[Any], constants: Mapping[str, Any], options: Mapping[str, Any]) -> Entry:
        """The loaded kernel for these arguments, which all lie on one CUDA device."""
        ordinals = {value.get_device() for value in values if hasattr(value, "get_device")}
        if len(ordinals) > 1 or -1 in ordinals:
            places = ", ".join(sorted({str(value.device) for value in values if hasattr(value, "device")}))
            raise KernelArgumentError(f"{self.name}: tensors lie on {places}", hint="all tensors of a launch lie on one CUDA device")
        (ordinal,) = ordinals
        specialisation = specialise(self.parameters, values, constants)
        identity = (ordinal, specialisation.identity, tuple(options.items()))
        if identity not in self._by_image:
            image = self.images.image(specialisation, options, self.driver.capability(ordinal))
            arguments = [p.name for p in self.parameters if not p.constexpr]
            self._by_image[identity] = Entry(LoadedKernel(image, ordinal, self.driver), arguments)
        return self._by_image[identity]

    def _refused(
        self,
        ordinal: int,
        grid: tuple[int, int, int],
        entry: Entry,
        values: Sequence[Any],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """A number did not fit: one of the grid, or it needs a wider parameter, which is another image, or it is of another type."""
        checked_grid(grid)
        for parameter, value in zip(entry.buffer.parameters, values, strict=False):
            if isinstance(value, float) and parameter.kind in ("i32", "i64", "u64"):
                raise KernelArgumentError(f"{self.name}: {parameter.name} is {value}, and was an integer before", hint="pass an int")
        numbers = [value.data_ptr() if hasattr(value, "data_ptr") else value for value in values]
        with self._lock:
            wider = self._entry(values, constants, options)
        with wider.lock:
            wider.buffer.set_all(numbers)
            self._elsewhere(ordinal, wider, grid)

    def _elsewhere(self, ordinal: int, entry: Entry, grid: tuple[int, int, int]) -> None:
        """Launch on a device that need not be the current one, or numbers of another image than the key's."""
        if (record := current_record.get()) is not None:
            record.refuse(f"a launch of {self.name} on another device, or with numbers of 64 bits")
        with self.driver.device(ordinal):
            entry.launch(*grid, self.driver.stream_calls()[1](ordinal))


class Entry:
    """One specialisation on one device: the loaded kernel, its parameter bytes, its lock. Every argument of the kernel has a place in the
    bytes, so that packing is the same for all specialisations; the table lists those that the machine code takes."""

    __slots__ = ("buffer", "bytes", "launch", "loaded", "lock", "pack_into")

    def __init__(self, loaded: LoadedKernel, arguments: Sequence[str]) -> None:
        image = loaded.image
        if image.global_scratch.size or image.profile_scratch.size:
            raise KernelExportError(f"{image.entry} needs scratch memory", hint="export it, and launch it as a PreboundKernel")
        taken = {parameter.name: parameter for parameter in image.parameters}
        places = [taken.get(name, Parameter(name, "i64")) for name in arguments]  # what was specialised away is a number
        places += [Parameter(name, name) for name in (GLOBAL_SCRATCH, PROFILE_SCRATCH) if name in taken]
        index = {parameter.name: number for number, parameter in enumerate(places)}
        self.loaded = loaded
        self.lock = threading.Lock()
        self.buffer = ParameterBuffer(places, [index[parameter.name] for parameter in image.parameters])
        self.bytes, self.pack_into = self.buffer.bytes, self.buffer.pack_into
        self.launch = _launch(loaded, image, self.buffer)


def _launch(loaded: LoadedKernel, image: KernelImage, buffer: ParameterBuffer) -> Launcher:
    launcher = loaded.driver.prepare(loaded.ordinal, loaded.function, launch_attributes(image), buffer.table_address)
    blocks = image.cluster[0]
    return launcher if blocks == 1 else lambda x, y, z, stream: launcher(x * blocks, y, z, stream)
