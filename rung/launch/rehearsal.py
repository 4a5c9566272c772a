"""A rehearsal: launches that find, or compile, the image of their kernel and end there. Nothing is loaded, no device is needed.

For a process that builds a store for others. Tensors need no memory; where they would lie is taken from their storage offsets, as if every
storage began at an aligned address, which torch's allocators see to.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from rung.launch.specialise import Specialisation, specialise

if TYPE_CHECKING:
    from rung.launch.triton_launcher import TritonLauncher

# The rehearsal that launches of this context go to; only launchers that have launched nothing yet look at it.
current_rehearsal: ContextVar[Rehearsal | None] = ContextVar("rung_rehearsal", default=None)


class Rehearsal:
    """Collects what launches on a device of `capability` (90 for 9.0) need; `build` sees to it that the store has it."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.wanted: dict[Any, tuple[TritonLauncher, Specialisation, dict[str, Any]]] = {}  # distinct images
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

    def build(self, threads: int = 1) -> tuple[int, int]:
        """(images that were compiled, images that the store had), `threads` at once: most of a compile holds no lock of Python's. Raises
        `CacheMissError` where the store requires a hit."""

        def build_one(wanted: tuple[TritonLauncher, Specialisation, dict[str, Any]]) -> bool:
            launcher, specialisation, options = wanted
            return launcher.images.find_or_compile(specialisation, options, self.capability)[1]

        for launcher, _, _ in self.wanted.values():
            launcher.images.kernel()  # importing is for one thread
        with ThreadPoolExecutor(threads) as pool:
            compiled = sum(pool.map(build_one, self.wanted.values()))
        return compiled, len(self.wanted) - compiled


@contextmanager
def rehearse_launches(capability: int) -> Iterator[Rehearsal]:
    """Inside, our Triton kernels are not launched but noted. For a process in which none of them has been launched before."""
    rehearsal = Rehearsal(capability)
    token = current_rehearsal.set(rehearsal)
    try:
        yield rehearsal
    finally:
        current_rehearsal.reset(token)


def _address(tensor: Any) -> int:
    return int(tensor.storage_offset()) * int(tensor.element_size())
