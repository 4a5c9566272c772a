"""Tables on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

_WIDTH_OF_A_FILE = 160  # columns when the output is no terminal, so that nothing is cut


def console(*, err: bool = False) -> Console:
    """Writes to the output or error stream as it is now."""
    stream = sys.stderr if err else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else _WIDTH_OF_A_FILE, highlight=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Sequence[str] = ()) -> Table:
    """Columns named in `numbers` are aligned to the right."""
    result = Table(title=title or None, title_justify="left", title_style="bold")
    for column in columns:
        result.add_column(column, justify="right" if column in numbers else "left")
    for row in rows:
        result.add_row(*(str(cell) for cell in row))
    return result
