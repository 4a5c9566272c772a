"""Programs of pieces on a device: machine code loaded, names bound. Imports neither Dynamo, Inductor nor Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rung.errors import ArtifactError
from rung.launch.alignment import Call, aligned_entry
from rung.launch.choices import Chooser
from rung.launch.driver import Driver
from rung.launch.generated_kernel import GeneratedKernel
from rung.launch.image import KernelImage
from rung.launch.kernel import LoadedKernel
from rung.launch.native_library import load_function
from rung.launch.program import Program
from rung.torch_compat import wrapper_names

Read = Callable[[str], bytes]  # verified bytes by their digest


class PieceRuntime:
    """Loads programs onto one device. Machine code that several programs share is loaded once.

    `ordinal` is the GPU, None for a CPU, which needs no driver; `read` gives blobs."""

    def __init__(self, read: Read, *, ordinal: int | None = None, driver: Driver | None = None) -> None:
        self._read = read
        self.ordinal, self.driver = ordinal, driver
        self.loaded: dict[str, LoadedKernel] = {}
        self._functions: dict[str, Callable[..., Any]] = {}

    def load(self, program: Program, chooser: Chooser) -> Call:
        """The piece's function: takes a list, which it clears, and returns a sequence. All machine code is on the device when this returns.

        Raises `LaunchError` for machine code that is refused, and what `read` raises."""
        names = wrapper_names(self.ordinal)
        for name, kernel in program.kernels.items():
            known = chooser.known(kernel) if len(kernel.configs) > 1 else None
            kernel = kernel if known is None else replace(kernel, configs=(kernel.configs[known],))
            names[name] = GeneratedKernel(name, kernel, [self._image(config.image) for config in kernel.configs], chooser.measure)
        for name, digest in program.libraries.items():
            names[name] = self._function(digest)
        return aligned_entry(run_source(program.source, names), program.checked, program.written, names)

    def unload(self) -> None:
        """Unload the machine code of a GPU, after waiting for it. Functions that `load` gave can be called no more."""
        for loaded in self.loaded.values():
            loaded.unload()
        self.loaded.clear()

    def _image(self, digest: str) -> LoadedKernel:
        if digest not in self.loaded:
            if self.driver is None or self.ordinal is None:
                raise ArtifactError("a piece for a GPU is loaded without one", hint="name the device")
            self.loaded[digest] = LoadedKernel(KernelImage.from_bytes(self._read(digest)), self.ordinal, self.driver)
        return self.loaded[digest]

    def _function(self, digest: str) -> Callable[..., Any]:
        if digest not in self._functions:
            self._functions[digest] = load_function(self._read(digest), digest)
        return self._functions[digest]


def run_source(source: str, names: dict[str, Any]) -> Call:
    """`call` of a program's source over these names. The source is code from the store: its hash was verified."""
    exec(compile(source, "<piece>", "exec"), names)
    call: Call = names["call"]
    return call
