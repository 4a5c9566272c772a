"""Calls of a break that may run as one: a rotation with its cache write, and the attention of what it rotated."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, fields
from itertools import pairwise
from typing import Any

from rung.attention import AttentionCall
from rung.compile.plan import CompilePlan, OpCall, Step

ATTENTION = "rung::attention"
ROTATE = "rung::rotate_and_write"
_ARGUMENTS = tuple(field.name for field in fields(AttentionCall))
_DEFAULTS = {field.name: {"constant": field.default} for field in fields(AttentionCall) if field.default is not MISSING}


def private_values(plan: CompilePlan) -> frozenset[int]:
    """Values that a step made, that one step alone reads, and no output of the plan: neither by their number nor through another value
    with the same memory."""
    once: set[int] = set()
    more = {output["value"] for output in plan.outputs if "value" in output} | {*plan.aliased, *range(len(plan.inputs))}
    for step in plan.steps:
        more |= once & set(step.inputs)
        once |= set(step.inputs)
    return frozenset(once - more)


def joined_pairs(step: Step, private: Collection[int]) -> frozenset[int]:
    """Indices of calls that rotate queries right in front of the attention of these queries, which alone reads them: both may be one
    kernel. `private` are the values that no other step and no output of the plan reads."""
    found = set()
    for index, (rotate, attend) in enumerate(pairwise(step.calls)):
        if rotate.target.partition(".")[0] != ROTATE or attend.target.partition(".")[0] != ATTENTION or rotate.autocast or attend.autocast:
            continue
        given = attention_arguments(attend)
        made, rotated = {"value": rotate.outputs[0]} if rotate.outputs else None, rotate.args[3] if len(rotate.args) > 6 else None
        if made is None or given["written"] != made or rotated is None or given["query"] != rotated or given["layer"] != rotate.args[6]:
            continue
        besides = [value for name, value in given.items() if name not in ("query", "written")]
        besides += [*rotate.args[:3], *rotate.args[4:], *rotate.kwargs.values()]
        others = [call for at, call in enumerate(step.calls) if at not in (index, index + 1)]
        besides += [value for call in others for value in (*call.args, *call.kwargs.values())]
        read = {number for value in besides for number in numbers_in(value)} | set(step.outputs)
        if rotated["value"] in private and not read & {rotated["value"], rotate.outputs[0]}:
            found.add(index)
    return frozenset(found)


def attention_arguments(call: OpCall) -> dict[str, Any]:
    """By name, those with defaults too."""
    return {**_DEFAULTS, **dict(zip(_ARGUMENTS, call.args, strict=False)), **call.kwargs}


def numbers_in(value: Any) -> list[int]:
    """The value numbers in an argument."""
    if isinstance(value, list):
        return [number for item in value for number in numbers_in(item)]
    return [value["value"]] if "value" in value else []
