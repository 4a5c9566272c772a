"""The command line: generate, bench, doctor, ladder. Importing this package imports neither torch nor the commands."""

from __future__ import annotations


def main() -> None:
    """The entry point of the `rung` program."""
    from rung.cli.app import program

    program(prog_name="rung")


__all__ = ["main"]
