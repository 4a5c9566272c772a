"""The guards that Dynamo noted while it traced: what of the program the trace has read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class DynamoGuard:
    """One guard, not yet turned into a check: what it asserts, of what, and the arguments of the assertion."""

    kind: str  # name of the method of Dynamo's GuardBuilder, e.g. "CONSTANT_MATCH"
    source: str  # Dynamo's source expression, e.g. "L['self'].eps"; empty for modes
    arguments: dict[str, Any] = field(default_factory=dict)


def dynamo_guards(output_graph: Any) -> list[DynamoGuard]:
    """The guards of a capture, in a fixed order. `fullgraph_capture` only notes them; building their checks would cost as much again."""
    found = {_read(guard) for guard in output_graph.guards}
    return [DynamoGuard(kind, source, dict(arguments)) for kind, source, arguments in sorted(found, key=repr)]


def _read(guard: Any) -> tuple[str, str, tuple[tuple[str, Any], ...]]:
    name = guard.name() if callable(guard.name) else guard.name
    create = guard.create_fn
    arguments: dict[str, Any] = {}
    while isinstance(create, functools.partial):
        arguments.update(create.keywords)
        create = create.func
    other = arguments.pop("source_b", None)
    if other is not None:
        arguments["other"] = other.name() if callable(other.name) else other.name
    return create.__name__, str(name), tuple(sorted((key, value) for key, value in arguments.items() if _is_plain(value)))


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | bytes | type(None))


def global_hooks() -> tuple[dict[Any, Any], ...]:
    """The tables of hooks that run at the call of every module; no trace is made while they hold any."""
    from torch.nn.modules import module

    return module._global_forward_hooks, module._global_forward_pre_hooks


def hook_registrations() -> Any:
    """The class whose `next_id` grows with every hook that anybody registers on a module or tensor (torch.utils.hooks)."""
    from torch.utils.hooks import RemovableHandle

    return RemovableHandle


def function_modes() -> tuple[str, ...]:
    """Names of the torch function modes that are active, outermost first; a default device is one."""
    import torch

    names = []
    for index in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(index)
        names.append(f"{type(mode).__qualname__} {getattr(mode, 'device', '')}")
    return tuple(names)


def mode_checks() -> dict[str, Callable[[], Any]]:
    """Queries of global modes without the Python around them, which costs more than they do: whether autocast holds for any device,
    whether algorithms are deterministic, how many torch function modes are active."""
    import torch

    return {
        "autocast": torch._C._is_any_autocast_enabled,
        "deterministic": torch._C._get_deterministic_algorithms,
        "function_modes": torch._C._len_torch_function_stack,
    }
