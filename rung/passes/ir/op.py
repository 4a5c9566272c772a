"""IR ops: functional ops whose meaning is a plain torch body, lowered to an implementation after tracing.

The kernel is registered CompositeExplicitAutograd: with CompositeImplicit the op would be decomposed before any pass sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rung import torch_compat

_library = torch.library.Library("rung", "FRAGMENT")


@dataclass(frozen=True, slots=True)
class IROp:
    """A functional op and its native body. The body is also the eager kernel and the shape function."""

    name: str
    body: Callable[..., Any]
    overload: torch_compat.OpOverload


def define_ir_op(schema: str, body: Callable[..., Any]) -> IROp:
    """Register `rung::<schema>` with `body` as its meaning."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"rung::{name}", body, lib=_library)
    return IROp(name, body, getattr(torch.ops.rung, name).default)
