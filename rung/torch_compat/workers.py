"""The processes in which Inductor compiles its kernels, with torch and Triton loaded. They are started once, by its import or before it.

Checked on torch 2.11.0 and 2.13.0."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def compile_workers() -> Callable[..., Future[Any]] | None:
    """`submit(function, *arguments)` to Inductor's workers, None where it was not imported or compiles in this process
    (`compile_threads` 1). torch ends the workers with this process, also when it is killed.

    Can go when torch offers its pool, or a start without Inductor has images to compile."""
    if "torch._inductor.async_compile" not in sys.modules:
        return None
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    if get_compile_threads() <= 1:
        return None
    submit: Callable[..., Future[Any]] = AsyncCompile.process_pool().submit
    return submit


def start_workers() -> None:
    """Begin to start them, which takes them seconds: each imports torch. Loads what of Inductor holds the pool; nothing in a process that
    compiles by itself. Can go with `compile_workers`."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    if get_compile_threads() > 1:
        AsyncCompile.process_pool()
