"""A kernel that Inductor generated, launched by us: the `run` that a piece's source calls."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from rung.errors import KernelArgumentError, LaunchError
from rung.launch.choices import Run
from rung.launch.image import KernelImage
from rung.launch.kernel import LoadedKernel, launch_attributes
from rung.launch.packing import ParameterBuffer
from rung.launch.program import ProgramConfig, ProgramKernel


class GeneratedKernel:
    """A kernel on one device. Its machine code is loaded, so a call may be captured; any thread may call.

    `choose` decides among several configurations at the first call: it is given them as functions, and the arguments, and returns an index,
    or None when it cannot decide now, and the first then serves this call."""

    __slots__ = ("_choose", "_kernel", "_lock", "configs", "name", "run")

    def __init__(
        self,
        name: str,
        kernel: ProgramKernel,
        loaded: Sequence[LoadedKernel],
        choose: Callable[[ProgramKernel, Sequence[Run], Sequence[Any]], int | None],
    ) -> None:
        self.name = name
        self._kernel, self._choose = kernel, choose
        self._lock = threading.Lock()
        self.configs = tuple(bind(name, kernel, config, one) for config, one in zip(kernel.configs, loaded, strict=True))
        self.run: Run = self.configs[0] if len(self.configs) == 1 else self._first

    def _first(self, *arguments: Any, stream: int) -> None:
        with self._lock:
            if self.run == self._first:
                chosen = self._choose(self._kernel, self.configs, arguments)
                if chosen is not None:
                    self.run = self.configs[chosen]
        (self.configs[0] if self.run == self._first else self.run)(*arguments, stream=stream)


def bind(name: str, kernel: ProgramKernel, config: ProgramConfig, loaded: LoadedKernel) -> Run:
    """`run(*takes, stream)` for one configuration: packs the arguments, computes the grid, launches. An empty grid launches nothing.

    Raises `LaunchError` when the image needs what the program does not give."""
    image = loaded.image
    if image.global_scratch.size or image.profile_scratch.size:
        raise LaunchError(f"kernel {name} needs scratch memory", hint="report the model")
    unknown = [parameter.name for parameter in image.arguments if parameter.name not in kernel.takes]
    if unknown:
        raise LaunchError(f"kernel {name} takes {', '.join(unknown)}, which its caller does not give", hint="remove the entry")
    buffer = ParameterBuffer(image.parameters)
    packed = ", ".join(f"{p.name}.data_ptr()" if p.is_pointer else p.name for p in image.arguments)
    lines = [
        f"def run({', '.join(kernel.takes)}, stream):",
        *(f"    {line}" for line in config.before),
        *(f"    _{axis} = {size}" for axis, size in zip("xyz", config.grid, strict=True)),
        "    if not (_x and _y and _z):",
        "        return",
        "    try:",
        "        with _lock:",
        f"            _pack_into(_bytes, 0, {packed})",
        "            _launch(_x, _y, _z, stream)",
        "    except _misfits as error:",
        f"        _refuse(error, ({', '.join(kernel.takes)},))",
    ]
    lock, launch = threading.Lock(), loaded.driver.prepare(loaded.ordinal, loaded.function, launch_attributes(image), buffer.table_address)

    space = {
        "_lock": lock,
        "_bytes": buffer.bytes,
        "_pack_into": buffer.pack_into,
        "_launch": launch,
        "_misfits": (struct.error, OverflowError, TypeError, AttributeError),
        "_refuse": _refusal(name, image, kernel),
        "_keep": (buffer, loaded),  # the launcher knows addresses alone
    }
    exec("\n".join(lines), space)
    run: Run = space["run"]  # type: ignore[assignment]
    return run


def _refusal(name: str, image: KernelImage, kernel: ProgramKernel) -> Callable[[Exception, Sequence[Any]], NoReturn]:
    def refuse(error: Exception, given: Sequence[Any]) -> NoReturn:
        kinds = {parameter.name: parameter.kind for parameter in image.arguments}
        shown = ", ".join(f"{n}: {type(v).__name__} for {kinds.get(n, 'a constant')}" for n, v in zip(kernel.takes, given, strict=True))
        raise KernelArgumentError(f"kernel {name} was given {shown}: {error}", hint="report it with the files of RUNG_DUMP") from error

    return refuse
