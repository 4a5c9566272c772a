"""Random functions over views, writes and copies, as graphs that were not functionalised."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

SIZE = 4
Step = Callable[[Random, list[torch.Tensor]], torch.Tensor | None]


def _pick(random: Random, values: list[torch.Tensor]) -> torch.Tensor:
    return random.choice(values[-5:] + values[:2])


def _write(random: Random, values: list[torch.Tensor]) -> None:
    target, source = _pick(random, values), _pick(random, values)
    if 0 in target.stride():
        return  # elements share an address: eager refuses, a trace does not
    random.choice(
        (lambda: target.add_(source.clone()), lambda: target.mul_(0.5), lambda: target.copy_(source.clone()), lambda: target.zero_())
    )()


_STEPS: tuple[Step, ...] = (
    lambda random, values: _pick(random, values).clone(),
    lambda random, values: _pick(random, values).view(SIZE, SIZE),
    lambda random, values: _pick(random, values).reshape(SIZE, SIZE),
    lambda random, values: _pick(random, values).t(),
    lambda random, values: _pick(random, values)[0:SIZE],
    lambda random, values: torch.cat([_pick(random, values)]),
    lambda random, values: _pick(random, values) * 1,
    lambda random, values: _pick(random, values) - 0,
    lambda random, values: _pick(random, values) + 0,
    lambda random, values: _pick(random, values).expand(SIZE, SIZE),
    lambda random, values: _pick(random, values)[:1].expand(SIZE, SIZE),
    lambda random, values: _pick(random, values).sin(),
    lambda random, values: _pick(random, values) * 2,
    lambda random, values: _pick(random, values) + _pick(random, values),
    lambda random, values: _pick(random, values) * _pick(random, values).t(),
    lambda random, values: _pick(random, values).flip(0).contiguous(),
    _write,
    _write,
)


def random_function(seed: int, steps: int = 14) -> Callable[..., list[torch.Tensor]]:
    """Takes two square tensors, may write into them, and returns one to three tensors."""

    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        random = Random(seed)
        values = [x, y]
        for _ in range(steps):
            try:
                made = random.choice(_STEPS)(random, values)
            except RuntimeError:  # a view that the strides do not allow, or a write into expanded memory
                continue
            if made is not None:
                values.append(made)
        return random.sample(values[2:] or values, min(len(values[2:] or values), 1 + random.randrange(3)))

    return function


def traced_as_is(function: Callable[..., Any], *tensors: torch.Tensor) -> fx.GraphModule:
    """A graph with views and writes where the function has them, and dead operations too."""
    return make_fx(function, tracing_mode="fake", _disable_torch_fn_metadata_mode=True)(*tensors)


def outcome(function: Callable[..., Any], x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Outputs and inputs after a call; outputs are then written, so that wrong sharing shows in the others."""
    inputs = [x.clone(), y.clone()]
    outputs = list(function(*inputs))
    seen = [value.clone() for value in (*outputs, *inputs)]
    for index, value in enumerate(outputs):
        if 0 not in value.stride():
            value.add_(index + 1)
    return [*seen, *(value.clone() for value in (*outputs, *inputs))]
