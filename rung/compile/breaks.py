"""Build the callable of a break: its op calls one after another, attention ops entered through their Python implementation.

An op called through the dispatcher costs 2 us, a direct call 0.1: a Llama of 32 layers makes 64 of them a step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rung.attention.layer import attention, kv_cache_write
from rung.compile.plan import OpCall, Step
from rung.compile.stitch import Source

_DIRECT: dict[str, Callable[..., Any]] = {"rung::attention": attention, "rung::kv_cache_write": kv_cache_write}

_SIZES = {"operator": operator, "torch": torch}  # size arithmetic, which is no registered op


def break_call(step: Step) -> Callable[[list[Any]], Sequence[Any]]:
    """A function that takes the step's inputs as one list and returns its outputs as a tuple."""
    source = Source("call", "inputs")
    if step.inputs:
        source.lines.append("".join(f"v{number}, " for number in step.inputs) + "= inputs")
    for call in step.calls:
        source.lines.append(_call_line(call, source))
    source.lines.append(f"return ({''.join(f'v{number}, ' for number in step.outputs)})")
    return source.build(step.name)


def _call_line(call: OpCall, source: Source) -> str:
    name = source.bind(_implementation(call.target))
    arguments = [_text(value, source) for value in call.args]
    arguments += [f"{key}={_text(value, source)}" for key, value in call.kwargs.items()]
    targets = ", ".join(f"v{number}" if number >= 0 else "_" for number in call.outputs)
    if call.is_tuple and targets:
        targets += ","
    return f"{targets + ' = ' if targets else ''}{name}({', '.join(arguments)})"


def _text(value: Any, source: Source) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_text(item, source) for item in value) + "]"
    if "value" in value:
        return f"v{value['value']}"
    if "torch" in value:
        return source.bind(_torch_object(value["torch"]))
    constant = value["constant"]
    return source.bind(constant) if isinstance(constant, float) else repr(constant)


def _torch_object(text: str) -> Any:
    return getattr(torch, text.removeprefix("torch.")) if text.startswith("torch.") else torch.device(text)


def _implementation(target: str) -> Callable[..., Any]:
    qualified, _, overload = target.partition(".")
    direct = _DIRECT.get(qualified)
    if direct is not None:
        return direct
    namespace, _, name = qualified.partition("::")
    if namespace in _SIZES:
        function: Callable[..., Any] = getattr(_SIZES[namespace], name)
        return function
    result: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    return result
