"""Ops that a configuration names: they must exist, and those that a trace did not meet are told."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence

from rung import torch_compat
from rung.compile.plan import Step
from rung.config import CompileConfig
from rung.errors import ConfigError

UnusedOps = Mapping[str, tuple[str, ...]]  # setting -> the ops that it names in vain
_OF_TORCH = frozenset({"aten", "prim", "prims"})


def check_ops_exist(config: CompileConfig) -> None:
    """Raise `ConfigError` for the first name of `split_ops` or `row_wise_ops` under which no op is registered."""
    if not config.split_ops and not config.row_wise_ops:
        return
    known = torch_compat.op_names()
    for setting in ("split_ops", "row_wise_ops"):
        for name in getattr(config, setting):
            if name not in known:
                near = difflib.get_close_matches(name, known, n=3)
                raise ConfigError(
                    f"{setting} names {name!r}, and no such op is registered",
                    hint=(f"did you mean {' or '.join(map(repr, near))}? " if near else "")
                    + "otherwise import what registers it (torch.library, torch.ops.load_library) before the first call",
                )


def unused_ops(config: CompileConfig, steps: Sequence[Step], met: Collection[str] | None) -> UnusedOps:
    """What `config` names and a trace has not: `steps` hold the split ops that it had, `met` the ops of the proof of rows (None: there
    was none, so nothing is known of `row_wise_ops`)."""
    cut = {call.target.partition(".")[0] for step in steps for call in step.calls}
    found = {
        "split_ops": tuple(name for name in config.split_ops if name not in cut),
        "row_wise_ops": () if met is None else tuple(name for name in config.row_wise_ops if name not in met),
    }
    return {setting: names for setting, names in found.items() if names}


def unused_lines(unused: UnusedOps) -> list[str]:
    """One sentence an op, for people."""
    return [f"{setting}: {name} does not occur{_advice(setting, name)}" for setting, names in unused.items() for name in names]


def _advice(setting: str, name: str) -> str:
    if setting == "split_ops" and name.partition("::")[0] in _OF_TORCH:
        return "; only calls through torch.ops are cut at, a function of torch is not: put it into a rung.eager_break"
    return ""
