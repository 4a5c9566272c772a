"""A compiled piece as it lies in the store, and its two loaders.

An artifact is a small JSON text that names blobs: what Inductor serialised (`stock`), its source as text, and, where it can be had, a
`Program` with its machine code, which `rung.launch` runs without importing a compiler.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rung import torch_compat
from rung.compile.bound import StepCall
from rung.compile.stock_reasons import NotPortableError, StockReason
from rung.compile.wrapper_source import portable_source
from rung.errors import ArtifactError, BackendUnavailableError, LaunchError
from rung.launch import (
    Chooser,
    CudaDriver,
    Driver,
    KernelImage,
    Parameter,
    PieceRuntime,
    Program,
    ProgramConfig,
    ProgramKernel,
    run_source,
)
from rung.launch.image import GLOBAL_SCRATCH, PROFILE_SCRATCH
from rung.launch.machine_code import code_digest
from rung.launch.native_library import cpu_flags

VERSION = 1
_DEVICE = re.compile(r"\b_DeviceGuard\((\d+)\)")
_PATHS = re.compile(r"^# kernel path: .*\n", re.MULTILINE)  # of the machine that compiled
Put = Callable[[bytes], str]  # keeps bytes, returns their digest
Read = Callable[[str], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """Digests of the forms of one piece; `program` is None when `reason` says why only Inductor's loader can run it."""

    stock: str
    text: str
    program: Program | None = None
    reason: StockReason | None = None
    detail: str = ""
    ordinal: int | None = None  # the GPU that the stock form is for; a program serves every one

    def serves(self, device: torch.device) -> bool:
        """Whether some form of it runs on a device, as far as its ordinal counts."""
        return self.program is not None or self.ordinal in (None, ordinal_of(device))

    @property
    def blobs(self) -> tuple[str, ...]:
        """Everything that must be there for both loaders, without duplicates."""
        own = self.program.blobs() if self.program is not None else ()
        return tuple(dict.fromkeys((self.stock, self.text, *own)))

    def to_bytes(self) -> bytes:
        program = None if self.program is None else self.program.to_json()
        reason = None if self.reason is None else str(self.reason)
        data = {"version": VERSION, "stock": self.stock, "text": self.text, "program": program, "reason": reason, "detail": self.detail}
        data["ordinal"] = self.ordinal
        return json.dumps(data, sort_keys=True).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Artifact:
        """Raises `ArtifactError` for what is no artifact of this version."""
        try:
            found = json.loads(data)
            if found.pop("version") != VERSION:
                raise ValueError("another version")
            program = None if found["program"] is None else Program.from_json(found["program"])
            reason = None if found["reason"] is None else StockReason(found["reason"])
            if "ordinal" not in found and reason is StockReason.DEVICES:
                raise ValueError("it is for some GPU, and does not say for which")
            return Artifact(**{**found, "program": program, "reason": reason})
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ArtifactError(f"a stored piece is no artifact of version {VERSION}: {error}", hint="it is built again") from error


def make_artifact(serialized: bytes, put: Put) -> Artifact:
    """Keep what Inductor serialised and, as far as they can be had, the parts that run without it. Loads it once."""
    loaded = torch_compat.deserialize_artifact(serialized)
    source = torch_compat.artifact_source(loaded)
    named = _DEVICE.search(source)
    ordinal = None if named is None else int(named[1])
    stock, text = put(serialized), put(_PATHS.sub("", source).encode())
    try:
        return Artifact(stock=stock, text=text, program=_program(loaded, put), ordinal=ordinal)
    except NotPortableError as refused:
        return Artifact(stock=stock, text=text, reason=refused.reason, detail=refused.detail, ordinal=ordinal)


def _program(loaded: Any, put: Put) -> Program:
    try:
        code = torch_compat.generated_code(loaded)
    except torch_compat.GeneratedCodeError as error:
        raise NotPortableError(StockReason(error.kind), str(error)) from error
    device = "cuda" if "empty_strided_cuda(" in code.source or code.kernels or "_DeviceGuard(" in code.source else "cpu"
    machine_code = {*code.kernels, *code.libraries}
    source = portable_source(code.source, machine_code, on_cuda=device == "cuda")
    try:
        run_source(source, dict.fromkeys((*torch_compat.wrapper_names(None), *machine_code)))
    except Exception as error:
        raise NotPortableError(StockReason.WRAPPER, f"what is left of it does not run: {error}") from error
    return Program(
        device=device,
        source=source,
        kernels={name: _kernel(kernel, put) for name, kernel in code.kernels.items()},
        libraries={name: put(torch_compat.without_folders(data)) for name, data in code.libraries.items()},
        checked=code.checked,
        written=code.written,
        cpu_flags=cpu_flags() if code.libraries else (),
    )


def _kernel(kernel: torch_compat.GeneratedKernel, put: Put) -> ProgramKernel:
    try:
        configs = tuple(
            ProgramConfig(put(_image(config).to_bytes()), code_digest(config.cubin), config.grid, config.before)
            for config in kernel.configs
        )
    except ArtifactError as error:  # a parameter of a kind that launches do not know
        raise NotPortableError(StockReason.KERNEL, error.message) from error
    return ProgramKernel(kernel.takes, configs, kernel.written)


def _image(config: torch_compat.GeneratedConfig) -> KernelImage:
    halves = [name for name, kind in config.parameters if kind in ("fp16", "bf16")]
    if halves:
        raise ArtifactError(f"{config.entry} takes {halves[0]}, a 16-bit float", hint="report the model")
    scratch = [name for name, present in zip((GLOBAL_SCRATCH, PROFILE_SCRATCH), config.scratch, strict=True) if present]
    return KernelImage(
        cubin=config.cubin,
        entry=config.entry,
        capability=config.capability,
        parameters=tuple(Parameter(n, kind) for n, kind in (*config.parameters, *((name, name) for name in scratch))),
        num_warps=config.num_warps,
        shared_bytes=config.shared_bytes,
    )


class PieceLoader:
    """Binds artifacts to one device. `read` gives verified blobs; machine code that pieces share is loaded once."""

    def __init__(self, device: torch.device, read: Read, *, driver: Driver | None = None) -> None:
        self.read = read
        self._device = device
        self._why, self._runtime = _runtime(device, read, driver)
        self._flags: frozenset[str] | None = None

    def bind(self, artifact: Artifact, chooser: Chooser) -> tuple[StepCall, StockReason | None]:
        """The piece's function, which takes a list, clears it, and returns a sequence; and why Inductor's loader runs it, None when ours
        does. Raises `ArtifactError` when neither can, or a blob is missing or damaged."""
        refused = self._refused(artifact)
        if refused is None and artifact.program is not None and self._runtime is not None:
            try:
                return self._runtime.load(artifact.program, chooser), None
            except LaunchError:
                refused = StockReason.UNLOADABLE
        if artifact.ordinal not in (None, ordinal_of(self._device)):
            raise ArtifactError(
                f"Inductor's form of a piece is for cuda:{artifact.ordinal} and not for {self._device}, and ours cannot run: {refused}",
                hint="it is built again",
            )
        return stock_call(self.read(artifact.stock)), refused

    def unload(self) -> None:
        """Unload all machine code from a GPU; nothing that was bound may be called any more."""
        if self._runtime is not None:
            self._runtime.unload()

    def _refused(self, artifact: Artifact) -> StockReason | None:
        program = artifact.program
        if program is None:
            return artifact.reason or StockReason.WRAPPER
        if self._runtime is None:
            return self._why
        if program.device == "cuda" and self._runtime.ordinal is None:
            return StockReason.DEVICE_TYPE
        if program.libraries:
            self._flags = frozenset(cpu_flags()) if self._flags is None else self._flags
            if not program.cpu_flags or not self._flags.issuperset(program.cpu_flags):
                return StockReason.CPU
        return None


def _runtime(device: torch.device, read: Read, driver: Driver | None) -> tuple[StockReason | None, PieceRuntime | None]:
    if device.type == "cpu":
        return None, PieceRuntime(read)
    if device.type != "cuda":
        return StockReason.DEVICE_TYPE, None
    try:
        driver = driver or CudaDriver()
    except BackendUnavailableError:
        return StockReason.DRIVER, None
    return None, PieceRuntime(read, ordinal=ordinal_of(device), driver=driver)


def ordinal_of(device: torch.device) -> int | None:
    """Which GPU a device is, None for another device."""
    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index


def stock_call(serialized: bytes) -> StepCall:
    """Inductor's own entry, below AOTAutograd's runtime wrapper of 7 to 11 us a call. Unpickles: the bytes were verified."""
    call = torch_compat.raw_callable(torch_compat.deserialize_artifact(serialized))
    if call is None:
        raise ArtifactError("an artifact has no callable inside", hint="remove the folder that `rung doctor` names as the store")
    return call


class Sources(Sequence[str]):
    """What Inductor generated for each unique piece, read when somebody asks: empty where the store no longer has it."""

    def __init__(self, artifacts: Sequence[Artifact], read: Read) -> None:
        self._artifacts, self._read = artifacts, read

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        with contextlib.suppress(ArtifactError):
            return self._read(self._artifacts[index].text).decode()
        return ""

    def __len__(self) -> int:
        return len(self._artifacts)
