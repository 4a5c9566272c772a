"""Step traces: what each step needed and how it ran, as JSON lines. docs/trace.md describes the format."""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rung.attention.base import CaptureSupport
from rung.errors import ConfigError, TraceFileError
from rung.graphs.descriptor import ConfiguredMode, GraphMode, Shape
from rung.graphs.reasons import Reason

FORMAT = "rung.steps"
VERSION = 1
_FLUSH_LINES = 512  # some 60 kB: a write every few seconds of decoding
_OPTIONAL_COUNTS = ("num_requests", "uniform_query_len", "max_query_len")
_STEP_KEYS = {"num_tokens", *_OPTIONAL_COUNTS, "adapters", "variant", "symbols", "mode", "padded", "reason", "count"}
_Member = TypeVar("_Member", ConfiguredMode, GraphMode, Reason)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """The configuration under which the steps that follow ran."""

    graphs: ConfiguredMode = ConfiguredMode.NONE
    capture_support: CaptureSupport = CaptureSupport.ALWAYS  # of the attention backend
    ladder: tuple[int, ...] = ()  # capture sizes
    max_num_tokens: int | None = None
    max_num_requests: int | None = None
    max_waste: float | None = None
    about: Mapping[str, Any] = field(default_factory=dict)  # whatever else the writer wants to keep; never interpreted

    def as_json(self) -> dict[str, Any]:
        limits = {"max_num_tokens": self.max_num_tokens, "max_num_requests": self.max_num_requests, "max_waste": self.max_waste}
        return {
            "format": FORMAT,
            "version": VERSION,
            "graphs": str(self.graphs),
            "capture_support": self.capture_support.name,
            "ladder": list(self.ladder),
            "limits": limits,
            "about": dict(self.about),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """`count` equal steps in a row: what they needed, how they ran, and why not better."""

    shape: Shape
    mode: GraphMode
    padded: int  # tokens that ran, padding included
    reason: Reason
    count: int = 1

    def as_json(self) -> dict[str, Any]:
        """What does not apply is left out."""
        shape = self.shape
        line: dict[str, Any] = {"num_tokens": shape.num_tokens}
        line |= {name: value for name in _OPTIONAL_COUNTS if (value := getattr(shape, name)) is not None}
        line |= {name: value for name in ("adapters", "variant") if (value := getattr(shape, name))}
        if shape.symbols:
            line["symbols"] = dict(shape.symbols)
        line |= {"mode": str(self.mode), "padded": self.padded, "reason": str(self.reason)}
        return line | ({"count": self.count} if self.count > 1 else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRun:
    """One header and the steps behind it."""

    header: TraceHeader
    steps: tuple[TracedStep, ...]

    @property
    def num_steps(self) -> int:
        return sum(step.count for step in self.steps)


class StepTrace:
    """Appends steps to a file: a header when it is built, then a line for each step, or for several equal ones in a row.

    Lines are kept until there are enough to write, until `flush`, or until the interpreter ends. Building it raises `ConfigError` when the
    file cannot be written. `add` and `flush` never raise: a trace that cannot be written any more (a full disk) logs one warning and stops.
    Not thread-safe: the thread that runs the steps owns it."""

    def __init__(self, path: str | Path, header: TraceHeader, *, flush_lines: int = _FLUSH_LINES) -> None:
        self._file = _File(Path(path), flush_lines)
        try:
            self._file.begin(json.dumps(header.as_json()))
        except OSError as error:
            raise ConfigError(
                f"the step trace {str(path)!r} cannot be written: {error}", hint="name a file in a folder that exists"
            ) from None
        # The state is an object of its own, so that what is left can be written when this one is gone.
        weakref.finalize(self, self._file.flush)

    def add(self, shape: Shape, mode: GraphMode, padded: int, reason: Reason) -> None:
        """Count one step."""
        self._file.add(shape, mode, padded, reason)

    def flush(self) -> None:
        """Write everything that was added."""
        self._file.flush()


class _File:
    """Lines on their way to a file, which is open only while they are written."""

    def __init__(self, path: Path, flush_lines: int) -> None:
        self._path = path.absolute()  # the working directory may change
        self._flush_lines = flush_lines
        self._lines: list[str] = []
        self._last: tuple[Shape, GraphMode, int, Reason] | None = None
        self._count = 0
        self._broken = False
        self._owner = os.getpid()  # a forked child must not write its parent's lines again

    def begin(self, header: str) -> None:
        with self._path.open("ab+") as file:  # a process that was killed may have left half a line
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
            torn = size and file.read(1) != b"\n"
            file.write((("\n" if torn else "") + header + "\n").encode())

    def add(self, shape: Shape, mode: GraphMode, padded: int, reason: Reason) -> None:
        if self._broken:
            return
        step = (shape, mode, padded, reason)
        if step == self._last:
            self._count += 1
            return
        self._finish_step()
        self._last, self._count = step, 1
        if len(self._lines) >= self._flush_lines:
            self._write()

    def flush(self) -> None:
        if not self._broken and self._owner == os.getpid():
            self._finish_step()
            self._write()

    def _finish_step(self) -> None:
        if self._last is not None:
            shape, mode, padded, reason = self._last
            step = TracedStep(shape=shape, mode=mode, padded=padded, reason=reason, count=self._count)
            self._lines.append(json.dumps(step.as_json()))
            self._last = None

    def _write(self) -> None:
        if not self._lines:
            return
        text = "\n".join(self._lines) + "\n"
        self._lines.clear()
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            self._broken = True
            _log.warning("the step trace %s ends here: %s", self._path, error)


def read_trace(path: str | Path) -> tuple[TraceRun, ...]:
    """The runs of a step trace, in file order. Raises `TraceFileError` naming the line that is not one of the format."""
    headers: list[TraceHeader] = []
    steps: list[list[TracedStep]] = []
    for where, line in _lines(Path(path)):
        if "format" in line:
            headers.append(_header(line, where))
            steps.append([])
        elif not headers:
            raise TraceFileError(f"{where}: a step comes before any header", hint=f'the first line says {{"format": "{FORMAT}", ...}}')
        else:
            steps[-1].append(_step(line, where))
    if not headers:
        raise TraceFileError(f"{path} is empty", hint="record one: rung generate --step-trace FILE")
    return tuple(TraceRun(header=header, steps=tuple(run)) for header, run in zip(headers, steps, strict=True))


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) for each line that is not blank."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield f"{path}, line {number}", _object(text, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceFileError(f"the step trace {str(path)!r} cannot be read: {error}") from None


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise TraceFileError(f"{where} is no JSON: {error}", hint="drop the line; a killed process may have left half of it") from None
    if not isinstance(line, dict):
        raise TraceFileError(f"{where}: expected a JSON object, got {text.strip()[:60]!r}")
    return line


def _header(line: Mapping[str, Any], where: str) -> TraceHeader:
    if line["format"] != FORMAT or line.get("version") != VERSION:
        came = f"{line['format']!r} version {line.get('version')!r}"
        raise TraceFileError(f"{where}: expected the format {FORMAT!r} version {VERSION}, got {came}", hint="record the trace again")
    limits, ladder = line.get("limits", {}), line.get("ladder", [])
    if not isinstance(limits, dict) or not isinstance(ladder, list):
        raise TraceFileError(f"{where}: `limits` must be an object and `ladder` a list")
    max_waste = limits.get("max_waste")
    if max_waste is not None and (not isinstance(max_waste, int | float) or max_waste < 1):
        raise TraceFileError(f"{where}: `max_waste` must be a number >= 1, got {max_waste!r}")
    return TraceHeader(
        graphs=_member(ConfiguredMode, line, "graphs", where),
        capture_support=_support(line.get("capture_support", CaptureSupport.ALWAYS.name), where),
        ladder=tuple(_count({"ladder": size}, "ladder", where) for size in ladder),
        max_num_tokens=_optional_count(limits, "max_num_tokens", where),
        max_num_requests=_optional_count(limits, "max_num_requests", where),
        max_waste=max_waste,
        about=dict(line.get("about") or {}),
    )


def _support(name: object, where: str) -> CaptureSupport:
    if name not in CaptureSupport.__members__:
        raise TraceFileError(f"{where}: `capture_support` must be one of {', '.join(CaptureSupport.__members__)}, got {name!r}")
    return CaptureSupport[str(name)]


def _step(line: Mapping[str, Any], where: str) -> TracedStep:
    unknown = sorted(line.keys() - _STEP_KEYS)
    if unknown:
        raise TraceFileError(f"{where}: unknown key {unknown[0]!r}", hint=f"a step has {', '.join(sorted(_STEP_KEYS))}")
    symbols = line.get("symbols", {})
    if not isinstance(symbols, dict):
        raise TraceFileError(f"{where}: `symbols` must be an object, got {symbols!r}")
    shape = Shape(
        num_tokens=_count(line, "num_tokens", where, least=0),
        **{name: _optional_count(line, name, where) for name in _OPTIONAL_COUNTS},
        adapters=_count(line, "adapters", where, least=0, default=0),
        variant=str(line.get("variant", "")),
        symbols=tuple(sorted((name, _count(symbols, name, where)) for name in symbols)),
    )
    step = TracedStep(
        shape=shape,
        mode=_member(GraphMode, line, "mode", where),
        padded=_count(line, "padded", where, least=0),
        reason=_member(Reason, line, "reason", where),
        count=_count(line, "count", where, default=1),
    )
    if step.padded < shape.num_tokens:
        raise TraceFileError(f"{where}: {shape.num_tokens} tokens cannot run in {step.padded}", hint="`padded` includes the step's tokens")
    return step


def _count(line: Mapping[str, Any], name: str, where: str, *, least: int = 1, default: int | None = None) -> int:
    value = line.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise TraceFileError(f"{where}: `{name}` must be an integer >= {least}, got {value!r}")
    return value


def _optional_count(line: Mapping[str, Any], name: str, where: str) -> int | None:
    return None if line.get(name) is None else _count(line, name, where)


def _member(kind: type[_Member], line: Mapping[str, Any], name: str, where: str) -> _Member:
    try:
        return kind(line[name])
    except (KeyError, ValueError):
        raise TraceFileError(f"{where}: `{name}` must be one of {', '.join(kind)}, got {line.get(name)!r}") from None
