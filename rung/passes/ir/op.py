"""IR ops: functional ops whose meaning is a plain torch body, and the providers that may compute them in another way.

The kernel is registered CompositeExplicitAutograd: with CompositeImplicit the op would be decomposed before any pass sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rung import torch_compat
from rung.launch import current_rehearsal
from rung.passes.kernels.support import wants_gradient

_library = torch.library.Library("rung", "FRAGMENT")


@dataclass(frozen=True, slots=True)
class Provider:
    """One way to compute an op.

    `why_not(*args)` is the reason against it for such arguments, or None; it reads devices, dtypes, strides and static sizes, never the
    number of rows, so that one answer holds for every size that a trace serves. `most_rows(rows, *args)` is the largest number of rows of
    the first argument that it is for, None for any; asked about `rows`, it may give another number on the same side of them. Of the
    providers that take the arguments, the first that is for so many rows runs. That is decided at each call, and a captured graph keeps
    what was decided for its size. `describe(*args)` says what `run` will do. Where a gradient is wanted only those with `gradients` are
    asked: kernels record nothing for it."""

    name: str
    why_not: Callable[..., str | None]
    run: Callable[..., Any]
    describe: Callable[..., str]
    most_rows: Callable[..., int | None] | None = None
    gradients: bool = False


@dataclass(frozen=True, slots=True)
class IROp:
    """A functional op, its native body, and its providers, the first that fits being chosen. The body is the meaning, the shape
    function, and what the op becomes where no provider fits: then it is spliced into the graph, and Inductor fuses it with its neighbours.

    `tolerance` bounds |provider - body| / |body| (Frobenius) for each dtype that a provider takes; `sample(rows, dtype, device)` makes
    arguments to test that on."""

    name: str
    body: Callable[..., Any]
    overload: torch_compat.OpOverload
    providers: tuple[Provider, ...] = ()
    tolerance: Mapping[torch.dtype, float] = field(default_factory=dict)
    sample: Callable[[int, torch.dtype, torch.device], tuple[Any, ...]] | None = None

    def choose(self, *args: Any) -> tuple[Provider | None, dict[str, str]]:
        """The provider for such arguments and the fewest rows (None: the body), and why not those before it."""
        refused: dict[str, str] = {}
        for provider in self.providers:
            reason = provider.why_not(*args)
            if reason is None:
                return provider, refused
            refused[provider.name] = reason
        return None, refused

    def plan(self, *args: Any) -> list[tuple[int | None, Provider]]:
        """Which provider runs up to how many rows (None: any), in their order. Empty: the body runs."""
        found: list[tuple[int | None, Provider]] = []
        for provider in self.providers:
            if provider.why_not(*args) is None:
                most = _most_rows(provider, None, args)
                if most is None or not found or most > (found[-1][0] or 0):
                    found.append((most, provider))
                if most is None:
                    break
        return found

    def describe(self, *args: Any) -> str:
        """What runs for such arguments, by number of rows; what is recorded in the report of a piece."""
        plan = self.plan(*args)
        if len(plan) == 1 and plan[0][0] is None:
            return f"{plan[0][1].name}: {plan[0][1].describe(*args)}"
        ranges = [f"{provider.name} {'beyond' if most is None else f'to {most}'}" for most, provider in plan]
        return f"{', '.join(ranges)}: {plan[-1][1].describe(*args)}"


def _most_rows(provider: Provider, rows: int | None, args: tuple[Any, ...]) -> int | None:
    return None if provider.most_rows is None else provider.most_rows(rows, *args)


def _choose(providers: tuple[Provider, ...], args: tuple[Any, ...]) -> Provider | None:
    """The provider for these arguments and this number of rows."""
    rows = args[0].shape[0]
    for provider in providers:
        if provider.why_not(*args) is None:
            most = _most_rows(provider, rows, args)
            if most is None or rows <= most:
                return provider
    return None


def define_ir_op(
    schema: str,
    body: Callable[..., Any],
    providers: tuple[Provider, ...] = (),
    *,
    tolerance: Mapping[torch.dtype, float] | None = None,
    sample: Callable[[int, torch.dtype, torch.device], tuple[Any, ...]] | None = None,
    shapes: Callable[..., Any] | None = None,
) -> IROp:
    """Register `rung::<schema>` with `body` as its meaning. `shapes` says what the body would return, where running it on tensors without
    memory is too slow."""
    name = schema.partition("(")[0]
    with_gradients = tuple(provider for provider in providers if provider.gradients)

    def call(*args: Any) -> Any:
        provider = _choose(with_gradients if wants_gradient(args) else providers, args)
        return (body if provider is None else provider.run)(*args)

    def fake(*args: Any) -> Any:
        """On tensors without memory; in a rehearsal what the device would run, so that its kernels are known."""
        return ((shapes or body) if current_rehearsal.get() is None else call)(*args)

    _library.define(schema)
    _library.impl(name, call if providers else body, "CompositeExplicitAutograd")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")  # what the body calls records gradients
    torch.library.register_fake(f"rung::{name}", fake, lib=_library)
    return IROp(name, body, getattr(torch.ops.rung, name).default, providers, tolerance or {}, sample)
