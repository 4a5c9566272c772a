"""Generate the Python function that runs a plan: callees and weights in closure cells, dead locals deleted.

Measured over 65 segments with trivial callees: 0.09 us a segment, against 0.5 for an interpreted list of steps and 2 for an FX module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rung.compile.generated import Source
from rung.compile.plan import CompilePlan, Step
from rung.compile.template import render


def last_uses(steps: Sequence[Step], outputs: Sequence[Any]) -> dict[int, int]:
    """Value number -> index of the last step that reads it. Flat outputs are not listed: they live to the end."""
    last: dict[int, int] = {}
    for index, step in enumerate(steps):
        for number in step.inputs:
            last[number] = index
        for number in step.outputs:
            last.setdefault(number, index)
    for output in outputs:
        if "value" in output:
            last.pop(output["value"], None)
    return last


def stitch(
    plan: CompilePlan, calls: Sequence[Callable[[list[Any]], Sequence[Any]]], weights: Mapping[int, Any], arguments: Sequence[int]
) -> Source:
    """`stitched(*tensors) -> list of flat outputs`; `weights` are the bound graph inputs by value number, `arguments` the others."""
    source = Source("stitched", ", ".join(f"v{number}" for number in arguments))
    for number, value in weights.items():
        source.bind(value, f"v{number}")
    by_path = {(path.local, path.accesses): number for number, path in enumerate(plan.inputs) if path.dim is None}
    for number, path in enumerate(plan.inputs):
        if path.dim is not None:
            source.lines.append(f"v{number} = v{by_path[(path.local, path.accesses)]}.shape[{path.dim}]")
    names = {id(call): f"call_{index}" for index, call in reversed(list(enumerate(calls)))}
    for call in calls:
        source.bind(call, names[id(call)])
    last = last_uses(plan.steps, plan.outputs)
    for index, (step, call) in enumerate(zip(plan.steps, calls, strict=True)):
        targets = "".join(f"v{number}, " for number in step.outputs)
        arguments_text = ", ".join(f"v{number}" for number in step.inputs)
        source.lines.append(f"{targets + '= ' if targets else ''}{names[id(call)]}([{arguments_text}])")
        dead = [f"v{number}" for number, at in last.items() if at == index and number >= len(plan.inputs)]
        if dead:
            source.lines.append(f"del {', '.join(dead)}")
    source.lines.append(f"return [{', '.join(value_text(output) for output in plan.outputs)}]")
    return source


def value_text(output: Mapping[str, Any]) -> str:
    return f"v{output['value']}" if "value" in output else repr(output["constant"])


def restorer(plan: CompilePlan, arguments: Sequence[int], weights: Mapping[int, Any]) -> Source:
    """`restore(flat, inputs)`: the user's structure from flat outputs and the passed tensors."""
    source = Source("restore", "flat, inputs")
    positions = {number: index for index, number in enumerate(arguments)}
    outputs = [f"flat[{index}]" for index in range(len(plan.outputs))]
    inputs = [
        f"inputs[{positions[number]}]" if number in positions else source.bind(weights[number]) if number in weights else "None"
        for number in range(len(plan.inputs))
    ]
    source.lines.append(f"return {render(plan.template, outputs, inputs, source.bind)}")
    return source
