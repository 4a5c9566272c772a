"""Finds what a captured graph would repeat wrongly, by looking at every operation while the plan runs once before its capture.

Only code that runs in Python inside a graph is looked at: the breaks under FULL. Compiled pieces were checked when they were traced, and
kernels launched past torch (Triton, prebound launches) read no values on the host.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rung.errors import CaptureError, GeneratorError, HostCopyError, HostReadError, StreamError
from rung.graphs.device_reads import waits_for_device
from rung.graphs.side_streams import SideStreams
from rung.torch_compat import TorchDispatchMode, call_device_kernel, generator_key, is_python_op, is_user_file, place, tree_leaves

# Methods that leave no operation behind on some devices, by name.
_READS = frozenset({"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that must not be captured. `kind` is the error to raise."""

    kind: type[CaptureError]
    text: str  # the operation and what is wrong with it
    where: str  # ` at file:line (code)` of the user's source, or empty
    hint: str


class DryRun:
    """Watches code that a graph of `device` will contain. `findings` holds each problem once, in the order met.

    `stop`: raise at the first finding, before the operation runs; inside a capture it would break the capture. Otherwise all are
    collected, and `refuse` raises the first with the others as notes."""

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator] = (), *, stop: bool = False) -> None:
        self.findings: list[Finding] = []
        self._device = device
        self._registered = {generator_key(generator) for generator in generators}
        if device.type == "cpu":
            self._registered.add(generator_key(torch.default_generator))
        elif device.type == "cuda" and torch.cuda.is_available():
            current = torch.cuda.current_device()  # starts CUDA, which makes the default generators
            index = current if device.index is None else device.index
            self._registered.add(generator_key(torch.cuda.default_generators[index]))
        self._stop = stop
        self._streams = SideStreams(device, capturing=stop) if device.type == "cuda" and torch.cuda.is_available() else None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Look at what runs inside the block."""
        if self._streams is not None:
            self._streams.begin()
        with _Calls(self), _Operations(self):
            yield
        if self._streams is not None and not self._stop:
            for operation, where in self._streams.unjoined():
                self._add(StreamError, f"{operation} runs on a side stream that does not rejoin", where, _STREAM_HINT)

    def refuse(self) -> None:
        """Raise what was found."""
        if not self.findings:
            return
        error = _error(self.findings[0])
        for other in self.findings[1:]:
            error.add_note(f"also: {other.text}{other.where}")
        raise error

    # --- what is looked at ---

    def call(self, name: str, arguments: Sequence[Any], keywords: dict[str, Any]) -> None:
        """A function or method of torch, above the dispatcher."""
        tensor = arguments[0] if arguments else None
        if name in _READS and isinstance(tensor, torch.Tensor) and tensor.device.type == self._device.type:
            self._add(HostReadError, f"Tensor.{name} {_READ}", user_place(), _READ_HINT)

    def operation(self, function: Any, arguments: Sequence[Any], keywords: dict[str, Any]) -> None:
        """An operation, below it."""
        name = function._schema.name
        flat = tree_leaves((arguments, keywords))
        tensors = [value for value in flat if isinstance(value, torch.Tensor)]
        if any(tensor.device.type == self._device.type for tensor in tensors) and waits_for_device(function, arguments, keywords):
            self._add(HostReadError, f"{name} {_READ}", user_place(), _READ_HINT)
        if name in ("aten::_to_copy", "aten::copy_"):
            self._copy(name, arguments, keywords)
        for value in flat:
            if isinstance(value, torch.Generator) and self._is_unregistered(value):
                self._add(
                    GeneratorError,
                    f"{name} draws from a generator that is not registered: every replay would draw the same numbers",
                    user_place(),
                    "pass the generator to the graph manager (generators=[...])",
                )
        if self._streams is not None:
            wrong = self._streams.operation(name, user_place)
            if wrong:
                self._add(StreamError, f"{name} {wrong}", user_place(), _STREAM_HINT)

    def _is_unregistered(self, generator: torch.Generator) -> bool:
        return generator.device.type == self._device.type and generator_key(generator) not in self._registered

    def _copy(self, name: str, arguments: Sequence[Any], keywords: dict[str, Any]) -> None:
        """Between host and device; there is no such thing when the device is the host."""
        if self._device.type == "cpu":
            return
        if name == "aten::copy_":
            source, target = arguments[1].device.type, arguments[0].device.type
            on_host, element = arguments[1], arguments[1].dim() == 0
        else:
            source, target = arguments[0].device.type, torch.device(keywords.get("device") or arguments[0].device).type
            on_host, element = arguments[0], False
        if (source, target) == (self._device.type, "cpu"):
            self._add(HostReadError, f"{name} copies to the host", user_place(), _READ_HINT)
        elif (source, target) == ("cpu", self._device.type) and not element:
            pinned = "pinned" if _is_pinned(on_host) else "pageable"
            self._add(
                HostCopyError,
                f"{name} copies from {pinned} host memory: every replay would read that address again, whatever it holds by then",
                user_place(),
                'copy to the device before the step, into a static input, or mark the code with an eager break under graphs="piecewise"',
            )

    def _add(self, kind: type[CaptureError], text: str, where: str, hint: str) -> None:
        finding = Finding(kind, text, where, hint)
        if any(other.where == where and other.kind is kind for other in self.findings):
            return  # `Tensor.item` and the operation behind it are one thing
        self.findings.append(finding)
        if self._stop:
            raise _error(finding)


_READ = "reads device values on the host: the value of the capture would be repeated"
_READ_HINT = 'keep lengths and indices on the device inside a graph, or mark the code with an eager break under graphs="piecewise"'
_STREAM_HINT = "let the side stream wait for the current one (wait_stream) before its work, and the current one for it afterwards"


def user_place() -> str:
    """` at file:line (code)` of the innermost frame that belongs neither to torch nor to rung, or an empty text."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith("<") and is_user_file(filename):
            return place(filename, frame.f_lineno, linecache.getline(filename, frame.f_lineno))
        frame = frame.f_back
    return ""


def _error(finding: Finding) -> CaptureError:
    return finding.kind(f"{finding.text}{finding.where}", hint=finding.hint)


def _is_pinned(tensor: torch.Tensor) -> bool:
    return torch.cuda.is_available() and tensor.is_pinned()


class _Calls(TorchFunctionMode):
    """Sees methods such as `tolist`, which need no operation where the device is the host."""

    def __init__(self, run: DryRun) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._run.call(getattr(func, "__name__", ""), args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Sees operations, and looks into those that are written in Python."""

    def __init__(self, run: DryRun) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if is_python_op(func):
            with self:
                return call_device_kernel(func, self._run._device.type, args, keywords)
        self._run.operation(func, args, keywords)
        return func(*args, **keywords)
