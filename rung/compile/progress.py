"""A bar on the terminal while several pieces are compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def piece_progress(name: str, total: int, *, wanted: bool) -> Iterator[Callable[[], None]]:
    """Inside, call what is yielded behind each piece. Nothing is shown for one piece, where it is not `wanted`, and where the error stream
    is no terminal; what was shown is gone at the end, also when the block raises."""
    if not wanted or total < 2 or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task(f"rung compiles {name}", total=total)
        yield lambda: progress.advance(task)
