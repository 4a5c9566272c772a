"""Declared environment variables and the resolved configuration of a compile.

Precedence: argument, then environment, then default. Only the variables of `VARIABLES` are ever read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, get_args

from rung.errors import ConfigError

VARIABLES: Mapping[str, str] = {
    "RUNG_CACHE_BASE": "stores that are only read, below the one of RUNG_CACHE_DIR; separated like PATH",
    "RUNG_CACHE_BYTES": "size of the store above which the least recently used entries go, such as 20G; default: 32G; none: no limit",
    "RUNG_CACHE_DIR": "folder of the artifact store; default: rung under the XDG cache directory",
    "RUNG_CACHE_MODE": "read-write (default), read-only, or off: no file of the store is touched",
    "RUNG_CACHE_TRUST": "any: use a store that other users own or may write; default: owner",
    "RUNG_DISABLE": "1: wrapped modules run eagerly",
    "RUNG_DUMP": "folder that receives graphs, pieces, generated code and stitching of every compile",
    "RUNG_FLASH_ATTN_LIBRARY": "path of a library that registers FlashAttention-3 as a torch op",
    "RUNG_REQUIRE_HIT": "1: what would have to be compiled is an error",
}


def variable(name: str) -> str | None:
    """The value of a declared variable; an empty one counts as unset."""
    if name not in VARIABLES:
        raise ConfigError(f"{name} is not a declared variable", hint=f"declared are {sorted(VARIABLES)}")
    return os.environ.get(name) or None


def disabled() -> bool:
    return variable("RUNG_DISABLE") not in (None, "0")


def cache_dir() -> Path:
    """Where artifacts are kept: RUNG_CACHE_DIR, or `rung` under XDG_CACHE_HOME."""
    asked = variable("RUNG_CACHE_DIR")
    if asked:
        return Path(asked)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rung"


GRAPH_MODES = ("none", "piecewise", "full", "auto")
OUTPUT_POLICIES = ("clone", "borrow")
AddressPolicy = Literal["raise", "recapture", "none"]
GuardPolicy = Literal["retrace", "raise"]
BreakPolicy = Literal["explicit", "auto"]
# What a trace has read, by kind (see `rung.compile.guards.Kind`); "submodules" are compared table by table.
GUARD_KINDS = (
    "value",
    "object",
    "type",
    "length",
    "keys",
    "contains",
    "attribute",
    "override",
    "hooks",
    "tensor",
    "tied",
    "result",
    "submodules",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileConfig:
    """How one module is compiled and run. Frozen and validated when built."""

    dynamic: Mapping[str, Mapping[int, str]] | None = None  # argument -> {dim: name}; None: dim 0 of every tensor argument
    maximum: int | None = None  # largest size of a dynamic dimension; None: any
    split_ops: tuple[str, ...] = ()  # ops to cut at, beside rung's attention ops
    breaks: BreakPolicy = "explicit"  # "auto": a function or submodule that will not trace runs eagerly between pieces
    method: str = "forward"
    graphs: str = "none"  # one of GRAPH_MODES
    pad: tuple[str, ...] = ()  # names of the dimensions that may be padded to a capture size
    pad_unproved: bool = False  # pad dimensions whose rows nothing mixes in a test run, though some operation has no rule
    row_wise_ops: tuple[str, ...] = ()  # custom ops ("namespace::name") whose row i depends on row i of their arguments alone
    capture_sizes: tuple[int, ...] | Mapping[str, tuple[int, ...]] | None = None  # by dimension if several; None: to `maximum` or 512
    capture_after: int = 1  # calls of a size until its graph is captured; those before run without
    step_trace: str | Path | None = None  # append a line for each call of a module with graphs to this file (docs/trace.md)
    nvtx: bool = False  # NVTX ranges around pieces, breaks and replays
    max_waste: float | None = 2.0  # pad a dimension to at most so many times its size, else run without a graph; None: no cap
    graph_memory_bytes: int | None = None  # for pool and executables; sizes beyond run without a graph; None: no limit
    outputs: str = "clone"  # who owns the outputs of a replay: one of OUTPUT_POLICIES
    on_address_change: AddressPolicy = "recapture"  # when a tensor that graphs read was replaced
    on_guard_violation: GuardPolicy = "retrace"  # when something that the trace has read was changed; `max_variants` bounds the traces
    drop_guards: tuple[str, ...] = ()  # kinds of GUARD_KINDS that are not checked
    max_variants: int = 8  # traces kept for other dtypes, ranks, constant arguments and states of the module
    variants: tuple[int | tuple[int, int], ...] = ()  # sizes and ranges (low, high) of the dynamic dimension that get code of their own
    background_variants: bool = False  # compile them in a thread, while the code for all sizes serves
    progress: bool = True  # a bar while several pieces are compiled, if the error stream is a terminal
    inductor: Mapping[str, Any] = field(default_factory=dict)  # Inductor settings for the pieces
    factors: Mapping[str, Any] = field(default_factory=dict)  # what else the code depends on, such as a variable that a custom op reads
    batch_invariant: bool = False  # the bits of a row do not depend on the number of rows; an error for what cannot be so
    passes: tuple[Any, ...] = ()  # passes beside rung's own: objects, "package.module:attribute", or entry points of rung.passes
    providers: tuple[Any, ...] = ()  # of IR ops, before rung's own: objects, "package.module:attribute", or entry points of rung.providers
    without_passes: tuple[str, ...] = ()  # names of passes that do not run
    with_passes: tuple[str, ...] = ()  # names of passes that run although they are off by default
    expect: Mapping[str, int] = field(default_factory=dict)  # pass or pattern -> least number of matches; fewer fail the compile

    def __post_init__(self) -> None:
        _one_of("graphs", self.graphs, GRAPH_MODES)
        _one_of("outputs", self.outputs, OUTPUT_POLICIES)
        _one_of("on_guard_violation", self.on_guard_violation, get_args(GuardPolicy))
        _one_of("breaks", self.breaks, get_args(BreakPolicy))
        for kind in self.drop_guards:
            _one_of("drop_guards", kind, GUARD_KINDS, hint=f"name some of {', '.join(GUARD_KINDS)}; () checks everything")
        _one_of("on_address_change", self.on_address_change, get_args(AddressPolicy))
        if self.maximum is not None and (not is_integer(self.maximum) or self.maximum < 1):
            raise ConfigError(
                f"maximum must be an integer of at least 1, got {self.maximum!r}", hint="give the largest size of the dynamic dimension"
            )
        if self.capture_after < 1:
            raise ConfigError(f"capture_after must be at least 1, got {self.capture_after}", hint="1 captures at the first call of a size")
        if self.graphs == "none" and (self.nvtx or self.step_trace is not None):
            raise ConfigError("nvtx and step_trace have no effect without graphs", hint='pass graphs="piecewise", "full" or "auto"')
        if not isinstance(self.expect, Mapping) or any(not is_integer(count) or count < 0 for count in self.expect.values()):
            raise ConfigError(f"expect must give numbers of matches by pass, got {self.expect!r}", hint='for example {"add_norm": 64}')
        if not isinstance(self.factors, Mapping) or not all(isinstance(name, str) for name in self.factors):
            raise ConfigError(f"factors must give values by name, got {self.factors!r}", hint='for example {"MY_OP_TILE": 64}')
        seam = next((name for name in self.inductor if name in ("post_grad_custom_pre_pass", "joint_custom_pre_pass")), None)
        if seam is not None:
            raise ConfigError(f"inductor names {seam}, where rung's own passes enter", hint="give the pass as passes=(...)")
        if self.max_variants < 1:
            raise ConfigError(f"max_variants must be at least 1, got {self.max_variants}", hint="leave it at the default of 8")
        if self.max_waste is not None and self.max_waste < 1:
            raise ConfigError(f"max_waste must be at least 1, got {self.max_waste}", hint="2.0 pads to at most twice the size")
        if self.graph_memory_bytes is not None and self.graph_memory_bytes < 0:
            raise ConfigError(
                f"graph_memory_bytes must be at least 0, got {self.graph_memory_bytes}", hint="leave it at the default of None for no limit"
            )
        if self.pad and self.graphs == "none":
            raise ConfigError("pad has no effect without graphs", hint='pass graphs="piecewise", "full" or "auto"')
        check_op_names("split_ops", self.split_ops)
        check_op_names("row_wise_ops", self.row_wise_ops)
        if (self.row_wise_ops or self.pad_unproved) and not self.pad:
            name = "row_wise_ops" if self.row_wise_ops else "pad_unproved"
            raise ConfigError(f"{name} has no effect without pad", hint='name the dimensions to be padded, for example pad=("rows",)')
        if self.step_trace is not None and not isinstance(self.step_trace, str | Path):
            raise ConfigError(f"step_trace must be a path, got {self.step_trace!r}", hint="name the file that lines are appended to")
        self._check_variants()
        _check_dynamic(self.dynamic)
        names = {name for dims in (self.dynamic or {}).values() for name in dims.values()}
        for given in self.capture_sizes.values() if isinstance(self.capture_sizes, Mapping) else (self.capture_sizes,):
            check_sizes("capture_sizes", given)
        sized = tuple(self.capture_sizes) if isinstance(self.capture_sizes, Mapping) else ()
        for field_name, used in (("pad", self.pad), ("capture_sizes", sized)):
            other = [name for name in used if name not in names]
            if other:
                hint = f"dynamic names {sorted(names)}" if names else 'name it there, for example dynamic={"x": {0: "rows"}}'
                raise ConfigError(f"{field_name} names {other[0]!r}, which is no dimension of `dynamic`", hint=hint)

    def _check_variants(self) -> None:
        if not isinstance(self.variants, tuple | list):
            raise ConfigError(f"variants must be a tuple of sizes and ranges, got {self.variants!r}", hint="for example (1, 8, (16, 64))")
        for given in self.variants:
            ends = given if isinstance(given, tuple | list) else (given, given)
            if len(ends) != 2 or not all(type(end) is int for end in ends):
                raise ConfigError(f"variants has {given!r}, neither a size nor a range (low, high)", hint="for example (1, 8, (16, 64))")
            low, high = ends
            if not 1 <= low <= high or (self.maximum is not None and high > self.maximum):
                limit = "" if self.maximum is None else f" and at most {self.maximum}"
                raise ConfigError(
                    f"variants has {given!r}; sizes are at least 1{limit}, and ranges are (low, high)", hint="for example (1, 8, (16, 64))"
                )
        if self.background_variants and not self.variants:
            raise ConfigError("background_variants has no effect without variants", hint="name sizes or ranges in `variants`")
        if self.background_variants and self.graphs != "none":
            raise ConfigError(
                "graphs keep the code that they were captured with, so a variant must be there before them",
                hint="leave out background_variants, or graphs",
            )


def is_integer(value: object) -> bool:
    """Whether a setting is a whole number; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_dynamic(value: object) -> None:
    """Raises `ConfigError` unless `value` is None or gives names of dimensions by argument and dimension. Names with "~" are rung's own."""
    if value is None:
        return
    arguments: Mapping[Any, Any] = value if isinstance(value, Mapping) else {"": value}
    for argument, dims in arguments.items():
        good = isinstance(argument, str) and isinstance(dims, Mapping) and all(map(is_integer, dims))
        if not good or not all(isinstance(name, str) and name and not name.startswith("~") for name in dims.values()):
            raise ConfigError(
                f"dynamic must give the name of each dimension by argument and number, got {value!r}", hint='for example {"x": {0: "rows"}}'
            )


def check_sizes(field_name: str, value: object) -> None:
    """Raises `ConfigError` unless `value` is None or a list of integers, at least one. Their values are the ladder's matter."""
    if value is None:
        return
    if isinstance(value, str) or not isinstance(value, Iterable) or not (sizes := list(value)) or not all(map(is_integer, sizes)):
        raise ConfigError(
            f"{field_name} must be a list of at least one size, got {value!r}",
            hint='for example (1, 8, 64); graphs="none" captures nothing, None leaves the sizes to rung',
        )


def check_op_names(field_name: str, value: object) -> None:
    """Raises `ConfigError` unless `value` is a tuple or list of names in the form of "namespace::name". Whether there are such ops is seen
    when something is compiled: they may be registered until then."""
    example = 'for example ("mylib::attention",)'
    if not isinstance(value, tuple | list):
        raise ConfigError(f"{field_name} must be a tuple of names of ops, got {value!r}", hint=example)
    for name in value:
        if not isinstance(name, str):
            raise ConfigError(f"{field_name} has {name!r}, which is no name of an op", hint=f'give it as "namespace::name", {example}')
        namespace, separator, rest = name.partition("::")
        meant = ""
        if not separator and namespace.count(".") == 1:
            meant = namespace.replace(".", "::")
        elif separator and "." in rest:
            meant = f"{namespace}::{rest.partition('.')[0]}"  # all overloads of an op are meant
        if meant or not (separator and namespace and rest):
            raise ConfigError(
                f'{field_name} has {name!r}, which has not the form "namespace::name"', hint=f"write {meant!r}" if meant else example
            )


def _one_of(field_name: str, value: str, allowed: tuple[str, ...], hint: str = "") -> None:
    if value not in allowed:
        text = f"{field_name} must be one of {', '.join(allowed)}; got {value!r}"
        raise ConfigError(text, hint=hint or f"use {allowed[0]!r} if unsure")
