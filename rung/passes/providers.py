"""Providers from outside: another way to compute an IR op, chosen before rung's own where it takes the arguments.

Nothing is registered: a provider acts in the compiles whose configuration names it. It is traced into the piece in place of the op, so
Inductor fuses it with its neighbours; a kernel of your own is a call of an op of yours (`torch.library`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rung.errors import PassError
from rung.passes.fused_ops import FUSED_OPS
from rung.passes.identity import code_identity, digest, value_identity
from rung.passes.ir import IR_OPS, IROp

_ROWS = (1, 3, 17)
_OPS: Mapping[str, IROp] = {op.name: op for op in (*IR_OPS, *FUSED_OPS)}


def always(*args: Any) -> str | None:
    """The `why_not` of a provider that takes everything."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnProvider:
    """`run(*args)` computes the IR op `op` of these arguments in torch operations, results in the same shapes, dtypes and strides.

    `why_not(*args)` is the reason against it for such arguments, or None; it sees fake tensors and must not read their dimension 0.
    `example(rows, dtype, device)` makes arguments; for each dtype of `tolerance`, |run - meaning| / |meaning| must not exceed its bound
    before a piece is changed."""

    op: str
    name: str
    run: Callable[..., Any]
    example: Callable[[int, torch.dtype, torch.device], tuple[Any, ...]]
    tolerance: Mapping[torch.dtype, float]
    why_not: Callable[..., str | None] = always

    def __post_init__(self) -> None:
        if self.op not in _OPS:
            raise PassError(f"provider {self.name!r} is for {self.op!r}, which is no IR op", hint=f"there are {', '.join(sorted(_OPS))}")
        if not self.tolerance:
            raise PassError(f"provider {self.name!r} has no tolerance", hint="give a bound for each dtype that it takes")

    @property
    def label(self) -> str:
        """Its name in reports and in `expect`."""
        return f"{self.op}.{self.name}"

    @property
    def meaning(self) -> IROp:
        return _OPS[self.op]

    def uuid(self) -> str:
        """Identity of the source of all parts and of the parameters."""
        bounds = value_identity(sorted(self.tolerance.items(), key=str), self.label)
        return digest(self.label, code_identity(self.run, self.why_not, self.example), bounds)

    def check(self) -> None:
        """Raise `PassError` when it computes something else than the op, on a device whose arguments it takes."""
        for dtype, bound in self.tolerance.items():
            for rows in _ROWS:
                args = self._arguments(rows, dtype)
                if args is not None:
                    self._compare(f"{rows} rows of {dtype}", bound, args)

    def _arguments(self, rows: int, dtype: torch.dtype) -> tuple[Any, ...] | None:
        """Arguments that it takes, on a CPU if possible; None where there is no such device here."""
        for device in ("cpu", *(("cuda",) if torch.cuda.is_available() else ())):
            args = self.example(rows, dtype, torch.device(device))
            if self.why_not(*args) is None:
                return args
        return None

    def _compare(self, what: str, bound: float, args: tuple[Any, ...]) -> None:
        with torch.no_grad():
            results = zip(_flat(self.run(*args)), _flat(self.meaning.body(*args)), strict=False)
        for number, (found, wanted) in enumerate(results):
            if (found.shape, found.dtype, found.stride()) != (wanted.shape, wanted.dtype, wanted.stride()):
                raise PassError(
                    f"provider {self.label!r}: result {number} of {what} is {found.dtype} {list(found.shape)} with strides "
                    f"{found.stride()}, the op gives {wanted.dtype} {list(wanted.shape)} with {wanted.stride()}",
                    hint="convert it, or make it contiguous",
                )
            difference, size = (found.double() - wanted.double()).norm(), wanted.double().norm()
            if not difference <= bound * size:
                raise PassError(
                    f"provider {self.label!r}: result {number} of {what} differs by {float(difference / size):.2g} of its norm; "
                    f"{bound:.2g} is allowed",
                    hint="mend the provider, or state another tolerance with a reason",
                )


def _flat(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)
