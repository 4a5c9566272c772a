"""The grid of a launch: what CUDA accepts."""

from __future__ import annotations

import operator
from typing import Any

from rung.errors import KernelArgumentError

_LIMITS = (2**31, 2**16, 2**16)  # blocks of x, y and z stay below (CUDA C++ Programming Guide, compute capabilities)


def checked_grid(grid: Any, cluster: tuple[int, int, int] = (1, 1, 1)) -> tuple[int, int, int]:
    """The blocks of a grid that counts clusters. Raises `KernelArgumentError` for what is no grid of three numbers within the limits."""
    try:
        x, y, z = (operator.index(size) * blocks for size, blocks in zip(grid, cluster, strict=True))
    except (TypeError, ValueError):
        raise KernelArgumentError(f"the grid is {grid!r}, expected three integers", hint="give (x, y, z), 1 for what is not used") from None
    for axis, size, limit in zip("xyz", (x, y, z), _LIMITS, strict=True):
        if not 0 <= size < limit:
            raise KernelArgumentError(
                f"the grid has {size} blocks in {axis}, expected 0 to {limit - 1}", hint="let a block do more, or move blocks to x"
            )
    return x, y, z
