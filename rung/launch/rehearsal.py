"""A rehearsal: launches that find, or compile, the image of their kernel and end there. Nothing is loaded, no device is needed.

For a process that builds a store for others, and for a start that wants to build all its images at once. Tensors need no memory; where
they would lie is taken from their storage offsets, as if every storage began at an aligned address, which torch's allocators see to.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rung.launch.export import export_job
from rung.launch.image import KernelImage
from rung.launch.specialise import Specialisation, specialise

if TYPE_CHECKING:
    from rung.launch.triton_launcher import TritonLauncher

# The rehearsal that launches of this context go to.
current_rehearsal: ContextVar[Rehearsal | None] = ContextVar("rung_rehearsal", default=None)

Submit = Callable[..., Future[Any]]  # (function, *arguments): to a pool of processes


class RoadGate:
    """Lets launchers take their roads, but not while any rehearsal is open: a launcher on its road asks nobody, and would hand tensors
    without memory to the device. Threads outside of the rehearsal launch all the same, a microsecond slower."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._on_road: weakref.WeakSet[TritonLauncher] = weakref.WeakSet()
        self._open = 0

    def become(self, launcher: TritonLauncher, road: Callable[..., None]) -> None:
        with self._lock:
            if not self._open:
                launcher.run = road
                self._on_road.add(launcher)

    @contextmanager
    def closed(self) -> Iterator[None]:
        with self._lock:
            self._open += 1
            for launcher in self._on_road:
                launcher.leave_road()
            self._on_road.clear()
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1


GATE = RoadGate()  # launchers belong to the process, as the modules that hold them do; a rehearsal stops all of them


@dataclass(frozen=True, slots=True)
class Built:
    """Where the images of a rehearsal came from."""

    compiled: int = 0
    found: int = 0  # in the store
    in_workers: int = 0  # of the compiled ones, those that worker processes compiled
    worker_failures: int = 0  # that failed there and were compiled here, where an error has its own type
    reason: str = ""  # why nothing was built ahead, so that each kernel waits for its image at its first launch

    @property
    def images(self) -> int:
        return self.compiled + self.found


_Wanted = tuple["TritonLauncher", Specialisation, dict[str, Any]]


class Building:
    """Images on their way from worker processes."""

    def __init__(self) -> None:
        self.begun: set[Any] = set()  # identities of wanted images
        self.waiting: list[tuple[_Wanted, Future[Any]]] = []

    def finish(self, capability: int) -> list[_Wanted]:
        """Wait for all and keep them; those that failed are returned: an error of the kernel shows with its own type where it is compiled
        again, one of the worker (killed for memory, a module that it cannot import) costs time alone."""
        failed = []
        waiting, self.waiting = self.waiting, []
        try:
            for wanted, future in waiting:
                launcher, specialisation, options = wanted
                try:
                    data, seconds = future.result()
                    image = KernelImage.from_bytes(data)
                except Exception:
                    failed.append(wanted)
                else:
                    launcher.images.keep_ahead(specialisation, options, capability, image, seconds)
        finally:
            for _, future in waiting:
                future.cancel()  # of what an interrupt left; what runs ends by itself and is dropped
        return failed


class Rehearsal:
    """Collects what launches on a device of `capability` (90 for 9.0) need; `build` sees to it that the store has it."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.wanted: dict[Any, _Wanted] = {}  # distinct images
        self.launches = 0
        self._lock = threading.Lock()

    def launch(self, launcher: TritonLauncher, values: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Note the image that such a launch takes."""
        constants, options = launcher.constants_and_options(named)
        specialisation = specialise(launcher.parameters, values, constants, address=_address)
        identity = (launcher.module, launcher.name, specialisation.identity, tuple(options.items()))
        with self._lock:
            self.launches += 1
            self.wanted.setdefault(identity, (launcher, specialisation, options))

    def build(self, threads: int = 1, submit: Submit | None = None) -> Built:
        """Compile what the store does not have: in the processes behind `submit`, or by so many threads at once (most of a compile holds no
        lock of Python's). Launchers find the images in the store, or where it keeps nothing in memory. Raises `CacheMissError` where the
        store requires a hit, `KernelExportError` for what does not compile."""
        if submit is not None:
            building = Building()
            missing_count = self.begin(submit, building)
            failed = building.finish(self.capability)
            for wanted in failed:
                self._compile(*wanted)
            found = len(self.wanted) - missing_count
            return Built(missing_count, found, in_workers=missing_count - len(failed), worker_failures=len(failed))
        missing = [wanted for wanted in self.wanted.values() if not self._find(*wanted)]
        found = len(self.wanted) - len(missing)
        for launcher, _, _ in missing:
            launcher.images.kernel()  # importing is for one thread
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(lambda wanted: self._compile(*wanted), missing):
                pass
        return Built(len(missing), found)

    def _find(self, launcher: TritonLauncher, specialisation: Specialisation, options: Mapping[str, Any]) -> bool:
        return launcher.images.find(specialisation, options, self.capability) is not None

    def _compile(self, launcher: TritonLauncher, specialisation: Specialisation, options: Mapping[str, Any]) -> None:
        launcher.images.compile_ahead(specialisation, options, self.capability)

    def begin(self, submit: Submit, building: Building) -> int:
        """Have the processes behind `submit` build what the store does not have and `building` has not begun; how many that are."""
        begun = len(building.waiting)
        for identity, wanted in self.wanted.items():
            if identity not in building.begun and not self._find(*wanted):
                building.begun.add(identity)
                building.waiting.append((wanted, self._submit(submit, *wanted)))
        return len(building.waiting) - begun

    def _submit(self, submit: Submit, launcher: TritonLauncher, specialisation: Specialisation, options: Mapping[str, Any]) -> Future[Any]:
        try:
            return submit(export_job, launcher.module, launcher.name, specialisation, dict(options), self.capability)
        except Exception as error:  # a pool that was shut down
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed


@contextmanager
def rehearse_launches(capability: int, rehearsal: Rehearsal | None = None) -> Iterator[Rehearsal]:
    """Inside, our Triton kernels are not launched by this context but noted; by `rehearsal`, which goes on then."""
    rehearsal = Rehearsal(capability) if rehearsal is None else rehearsal
    with GATE.closed():
        token = current_rehearsal.set(rehearsal)
        try:
            yield rehearsal
        finally:
            current_rehearsal.reset(token)


def capability_of(device: Any) -> int:
    """The compute capability of a `torch.device`, as rehearsals and images have it: 90 for 9.0."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def multiprocessors(device: Any) -> int:
    """How many a `torch.device` has; a few where launches are rehearsed or interpreted without a GPU."""
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4


@functools.cache
def launches_early(device: Any) -> bool:
    """Whether a `torch.device` can launch a kernel while the one in front runs (programmatic dependent launch: Hopper and later)."""
    return device.type == "cuda" and capability_of(device) >= 90


def _address(tensor: Any) -> int:
    return int(tensor.storage_offset()) * int(tensor.element_size())
