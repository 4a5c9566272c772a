"""What every command has: errors become one line and a hint, and `--debug` shows the traceback instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from rung.errors import CacheMissError, InternalError, RungError

EXIT_INTERRUPTED = 130  # Ctrl-C: 128 and the number of SIGINT, as shells have it
EXIT_MISS = 3  # a hit in the store was required
EXIT_USER_ERROR = 2  # the same as click's for a wrong option
EXIT_BUG = 1
_STATUS: dict[type[RungError], int] = {CacheMissError: EXIT_MISS, InternalError: EXIT_BUG}
_DEBUG = "rung.debug"


class Command(click.Command):
    """A command with `--debug`; its callback does not see that option. What options hold is checked under the same rules as what runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        text = "Show the traceback of an error."
        self.params.append(click.Option(["--debug"], is_flag=True, is_eager=True, expose_value=False, callback=_keep_debug, help=text))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _shown(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with _shown(ctx):
            return super().invoke(ctx)


def _keep_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[_DEBUG] = True  # which a command has in common with the group that it is in


@contextmanager
def _shown(ctx: click.Context) -> Iterator[None]:
    """Errors inside the block become a line, a hint and the exit status; with `--debug` they leave it."""
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except KeyboardInterrupt:
        show_error("interrupted", "")
        ctx.exit(EXIT_INTERRUPTED)
    except Exception as error:
        if ctx.meta.get(_DEBUG):
            raise
        if isinstance(error, RungError):
            show_error(error.message, error.hint)
            ctx.exit(next((status for kind, status in _STATUS.items() if isinstance(error, kind)), EXIT_USER_ERROR))
        show_error(f"{type(error).__name__}: {error}", "this looks like a bug: run again with --debug for the traceback")
        ctx.exit(EXIT_BUG)


class CompilingCommand(Command):
    """A command that may compile; with `--require-hit` that is an error with the exit status 3."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        text = "End with status 3, and why, where something would have to be compiled."
        self.params.append(click.Option(["--require-hit"], is_flag=True, help=text))

    def invoke(self, ctx: click.Context) -> Any:
        from rung.cache import use_store

        if ctx.params.pop("require_hit"):
            ctx.with_resource(use_store(require_hit=True))
        return super().invoke(ctx)


class CommandGroup(Command, click.Group):
    """A command that also has commands below it; its callback leaves everything to the one that was called."""


def show_error(message: str, hint: str) -> None:
    """One red line on the error stream, and the hint under it."""
    click.secho("error: " + " ".join(message.split()), fg="red", err=True)
    if hint:
        click.echo("hint: " + " ".join(hint.split()), err=True)
