"""Build the callable of a break: its op calls one after another, attention ops entered through their Python implementation.

An op called through the dispatcher costs 2 us, a direct call 0.1: a Llama of 32 layers makes 64 of them a step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Any

import torch

from rung.attention import AttentionCall
from rung.attention.layer import attention, kv_cache_write, rotate_and_attend, rotate_and_write
from rung.compile.bound import Capture
from rung.compile.generated import Source
from rung.compile.joined import ATTENTION, ROTATE, attention_arguments, joined_pairs, numbers_in
from rung.compile.plan import OpCall, Step
from rung.compile.regions import TARGET

_DIRECT: dict[str, Callable[..., Any]] = {
    ATTENTION: attention,
    "rung::kv_cache_write": kv_cache_write,
    ROTATE: rotate_and_write,
}

_SIZES = {"operator": operator, "torch": torch}  # size arithmetic, which is no registered op


# What a graph may hold of our own ops: the writes read slots that lie at one address in every step of a size, attention reads lengths.
_CAPTURE: dict[str, Capture] = {
    "rung::kv_cache_write": Capture.ALWAYS,
    "rung::rotate_and_write": Capture.ALWAYS,
    "rung::attention": Capture.FULL,
}


def break_capture(step: Step) -> Capture:
    """What the ops of a break allow together. A user's op that is tagged `cudagraph_unsafe` is never captured."""
    declared = [_op_capture(call.target) for call in step.calls]
    return next((kind for kind in (Capture.NEVER, Capture.FULL) if kind in declared), Capture.ALWAYS)


def attention_of(step: Step) -> Callable[[Sequence[Any]], AttentionCall] | None:
    """For a break that is one call of our attention, alone or behind the rotation that it is joined with, and returns nothing: a function
    from the break's inputs to the call. What orders it behind that rotation is no input."""
    targets = [call.target.partition(".")[0] for call in step.calls]
    if targets not in ([ATTENTION], [ROTATE, ATTENTION]) or step.outputs:
        return None
    *before, call = step.calls
    place: dict[int, int | None] = {number: index for index, number in enumerate(step.inputs)}
    place |= dict.fromkeys(number for rotate in before for number in rotate.outputs)
    arguments = (*call.args, *call.kwargs.values())
    if not all(isinstance(value, dict) and ("constant" in value or value.get("value") in place) for value in arguments):
        return None

    def bind(inputs: Sequence[Any]) -> AttentionCall:
        def of(value: Any) -> Any:
            if "value" not in value:
                return value["constant"]
            index = place[value["value"]]
            return None if index is None else inputs[index]

        return AttentionCall(*map(of, call.args), **{name: of(value) for name, value in call.kwargs.items()})

    return bind


def parts(step: Step, joined: Collection[int] = ()) -> tuple[Step, ...]:
    """A break cut between ops of different `Capture`, in order; together the parts do what the break does. Calls at `joined` stay with the
    next one. A part is named by the place of its first call, which with the number of its calls says which part it is."""
    keys = [_part_of(call) for call in step.calls]
    for index in joined:
        keys[index] = keys[index + 1]
    groups = [tuple(places) for _, places in groupby(range(len(keys)), key=keys.__getitem__)]
    if len(groups) < 2:
        return (step,)
    cut: list[Step] = []
    wanted = set(step.outputs)
    for places in reversed(groups):
        calls = tuple(step.calls[at] for at in places)
        made = {number for call in calls for number in call.outputs if number >= 0}
        read = dict.fromkeys(number for call in calls for value in (*call.args, *call.kwargs.values()) for number in numbers_in(value))
        inputs = tuple(number for number in read if number not in made)
        cut.append(Step(f"{step.name}.{places[0]}", inputs, tuple(sorted(made & wanted)), calls=calls))
        wanted |= set(inputs)
    return tuple(reversed(cut))


def _part_of(call: OpCall) -> tuple[Capture, int]:
    """Equal for neighbours that stay together. A call of our attention stays alone, so that its launches can be repeated."""
    return _op_capture(call.target), id(call) if call.target.partition(".")[0] == ATTENTION else 0


def _op_capture(target: str) -> Capture:
    qualified, _, _ = target.partition(".")
    if qualified.partition("::")[0] == TARGET:
        return Capture.NEVER
    if qualified in _CAPTURE:
        return _CAPTURE[qualified]
    if qualified.partition("::")[0] in _SIZES:
        return Capture.ALWAYS  # numbers that are the same in every step of one size
    tags: Sequence[torch.Tag] = getattr(_implementation(target), "tags", ())
    return Capture.NEVER if torch.Tag.cudagraph_unsafe in tags else Capture.FULL


def break_call(
    step: Step, regions: Sequence[Callable[..., Any]] = (), private: Collection[int] = ()
) -> Callable[[list[Any]], Sequence[Any]]:
    """A function that takes the step's inputs as one list and returns its outputs as a tuple. `regions` are those of the plan, bound;
    `private` as for `joined_pairs`."""
    joined = joined_pairs(step, private)
    source = Source("call", "inputs")
    if step.inputs:
        source.lines.append("".join(f"v{number}, " for number in step.inputs) + "= inputs")
    for index, call in enumerate(step.calls):
        if index - 1 in joined:
            continue
        line = _joined_line(call, step.calls[index + 1], source) if index in joined else _call_line(call, source, regions)
        # a new object each time: it keeps what was before, and threads may call at once
        blocks = [f"{source.bind(torch.autocast)}(*{source.bind(settings)})" for settings in call.autocast]
        source.lines.append(f"with {', '.join(blocks)}: {line}" if blocks else line)
    source.lines.append(f"return ({''.join(f'v{number}, ' for number in step.outputs)})")
    return source.build(step.name)


def _call_line(call: OpCall, source: Source, regions: Sequence[Callable[..., Any]]) -> str:
    namespace, _, index = call.target.partition("::")
    name = source.bind(regions[int(index)] if namespace == TARGET else _implementation(call.target))
    arguments = [_text(value, source) for value in call.args]
    arguments += [f"{key}={_text(value, source)}" for key, value in call.kwargs.items()]
    targets = ", ".join(f"v{number}" if number >= 0 else "_" for number in call.outputs)
    if call.is_tuple and targets:
        targets += ","
    return f"{targets + ' = ' if targets else ''}{name}({', '.join(arguments)})"


def _joined_line(rotate: OpCall, attend: OpCall, source: Source) -> str:
    given = {name: _text(value, source) for name, value in attention_arguments(attend).items()}
    arguments = [_text(value, source) for value in rotate.args] + [f"{key}={_text(value, source)}" for key, value in rotate.kwargs.items()]
    arguments += [f"given=({given['key']}, {given['value']})", *(f"{name}={given[name]}" for name in ("out", "fresh", "out_scale"))]
    return f"{source.bind(rotate_and_attend)}({', '.join(arguments)})"


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
