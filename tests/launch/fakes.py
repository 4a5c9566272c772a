"""A driver that records what a launch would hand to CUDA, tensors that are only an address, and images without a compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from rung.cache import Store
from rung.errors import LaunchError
from rung.launch.driver import Driver, LaunchAttributes, Launcher
from rung.launch.image import KernelImage, Parameter
from rung.launch.specialise import Specialisation
from rung.launch.triton_images import TritonImages
from rung.launch.triton_launcher import TritonLauncher
from rung.torch_compat import TritonParameter

MODULE = "tests.launch.toy_kernels"


@dataclass(frozen=True)
class Launched:
    """One launch: the bytes of each parameter as the driver would read them through the table."""

    function: str
    attributes: LaunchAttributes
    grid: tuple[int, int, int]
    stream: int
    parameters: tuple[bytes, ...]
    addresses: tuple[int, ...]


@dataclass
class FakeDriver(Driver):
    """Knows the sizes of the parameters from `images`, by entry, where a real driver knows them from the machine code."""

    images: dict[str, KernelImage] = field(default_factory=dict)
    launches: list[Launched] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    refuse: int = 0  # the error of the next launch
    current: int = 0
    strict: bool = False  # refuse numbers of a grid as `CudaDriver` does: those that are no unsigned 32 bits

    def capability(self, ordinal: int) -> int:
        return 90

    def stream_calls(self) -> tuple[Callable[[], int], Callable[[int], int]]:
        return lambda: self.current, lambda ordinal: 1000 + ordinal

    @contextmanager
    def device(self, ordinal: int) -> Iterator[None]:
        before, self.current = self.current, ordinal
        yield
        self.current = before

    def load(self, ordinal: int, cubin: bytes) -> Any:
        self.calls.append(("load", ordinal, cubin))
        return cubin

    def unload(self, ordinal: int, module: Any) -> None:
        self.calls.append(("unload", ordinal, module))

    def function(self, ordinal: int, module: Any, name: str) -> Any:
        return name

    def allow_shared(self, ordinal: int, function: Any, num_bytes: int) -> None:
        self.calls.append(("allow_shared", ordinal, function, num_bytes))

    def allow_large_clusters(self, ordinal: int, function: Any) -> None:
        self.calls.append(("allow_large_clusters", ordinal, function))

    def prepare(self, ordinal: int, function: Any, attributes: LaunchAttributes, table_address: int) -> Launcher:
        def launch(x: int, y: int, z: int, stream: int) -> None:
            if self.refuse:
                code, self.refuse = self.refuse, 0
                raise LaunchError("refused", code=code)
            if self.strict and not 0 <= x | y | z < 2**32:
                raise OverflowError("value too large to convert to unsigned int")
            parameters = self.images[function].parameters
            table = (ctypes.c_void_p * len(parameters)).from_address(table_address)
            read = tuple(ctypes.string_at(address or 0, p.size) for address, p in zip(table, parameters, strict=True))
            self.launches.append(Launched(function, attributes, (x, y, z), stream, read, tuple(address or 0 for address in table)))

        return launch


@dataclass
class FakeTensor:
    address: int
    dtype: torch.dtype = torch.float32
    ordinal: int = 0

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return self.ordinal

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.ordinal < 0 else torch.device("cuda", self.ordinal)


def image_of(*kinds: str, entry: str = "kernel", **fields: Any) -> KernelImage:
    parameters = tuple(Parameter(f"p{index}" if kind[0] in "*iubf" else kind, kind) for index, kind in enumerate(kinds))
    return KernelImage(cubin=b"code", entry=entry, capability=90, parameters=parameters, num_warps=fields.pop("num_warps", 4), **fields)


def driver_for(*images: KernelImage) -> FakeDriver:
    return FakeDriver({image.entry: image for image in images})


class FakeImages(TritonImages):
    """Images without a compiler: the parameters that Triton would keep."""

    made: list[Specialisation]

    def __init__(self, driver: FakeDriver, store: Store) -> None:
        super().__init__(MODULE, "scale_kernel", store)
        self.driver, self.made = driver, []

    def parameters(self) -> tuple[TritonParameter, ...]:
        return (
            TritonParameter("x", False, True, False),
            TritonParameter("out", False, True, True),
            TritonParameter("count", False, False, False),
            TritonParameter("stride", False, True, True),
            TritonParameter("factor", False, True, True),
            TritonParameter("BLOCK", True, True, True),
        )

    def image(self, specialisation: Specialisation, options: Any, capability: int) -> KernelImage:
        entry = f"kernel{len(self.made)}"
        self.made.append(specialisation)
        kinds = {**specialisation.kinds, "global_scratch": "global_scratch", "profile_scratch": "profile_scratch"}
        image = KernelImage(
            cubin=b"code",
            entry=entry,
            capability=capability,
            parameters=tuple(Parameter(name, kind) for name, kind in kinds.items()),
            num_warps=options["num_warps"],
        )
        self.driver.images[entry] = image
        return image


def launcher_of(kernel: object, name: str = "kernel") -> TritonLauncher:
    """A launcher on the road of Triton's own, with `kernel[grid](...)` in the place of Triton's kernel."""
    launcher = TritonLauncher("a test", name, road="triton: a test")
    launcher.__dict__["images"] = type("Images", (), {"kernel": lambda self: kernel})()
    return launcher
