"""A compiled piece as data: the source of its function, and where the machine code lies that it calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ProgramConfig:
    """One compiled configuration of a generated kernel."""

    image: str  # digest of a `KernelImage`
    code: str  # hash of what of it runs, equal on all machines that compile it
    grid: tuple[str, str, str]  # Python expressions over what the kernel takes
    before: tuple[str, ...] = ()  # statements that they need


@dataclass(frozen=True, slots=True)
class ProgramKernel:
    """A generated kernel. `takes` are the arguments of its `run`, in order, before the stream; machine code takes some of them."""

    takes: tuple[str, ...]
    configs: tuple[ProgramConfig, ...]  # several: the first call on a device measures them, unless somebody recorded which is best
    written: tuple[str, ...] = ()  # tensors that it updates in place


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What a piece is without its compiler. `source` defines `call(list) -> tuple` over the names of `torch_compat.wrapper_names`, the
    kernels' and the libraries'."""

    device: str  # type only
    source: str
    kernels: Mapping[str, ProgramKernel] = field(default_factory=dict)
    libraries: Mapping[str, str] = field(default_factory=dict)  # name of a function -> digest of the shared library that has it
    checked: tuple[int, ...] = ()  # inputs that kernels take for aligned
    written: tuple[int, ...] = ()  # inputs that are updated in place
    cpu_flags: tuple[str, ...] = ()  # instruction sets of the machine that compiled the libraries for itself

    def blobs(self) -> Iterator[str]:
        """Digests of all machine code."""
        for kernel in self.kernels.values():
            yield from (config.image for config in kernel.configs)
        yield from self.libraries.values()

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "source": self.source,
            "kernels": {
                name: [list(kernel.takes), [[c.image, c.code, list(c.grid), list(c.before)] for c in kernel.configs], list(kernel.written)]
                for name, kernel in self.kernels.items()
            },
            "libraries": dict(self.libraries),
            "checked": list(self.checked),
            "written": list(self.written),
            "cpu_flags": list(self.cpu_flags),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Program:
        return Program(
            device=data["device"],
            source=data["source"],
            kernels={
                name: ProgramKernel(
                    tuple(takes), tuple(ProgramConfig(c[0], c[1], tuple(c[2]), tuple(c[3])) for c in configs), tuple(written)
                )
                for name, (takes, configs, written) in data["kernels"].items()
            },
            libraries=data["libraries"],
            checked=tuple(data["checked"]),
            written=tuple(data["written"]),
            cpu_flags=tuple(data["cpu_flags"]),
        )
