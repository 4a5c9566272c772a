"""What every command has: errors of rung become one line and a hint, and `--debug` shows the traceback instead."""

from __future__ import annotations

from typing import Any

import click

from rung.errors import CacheMissError, RungError

EXIT_MISS = 3  # a hit in the store was required
EXIT_USER_ERROR = 2  # the same as click's for a wrong option
EXIT_BUG = 1


class Command(click.Command):
    """A command with `--debug`; its callback does not see that option."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(click.Option(["--debug"], is_flag=True, help="Show the traceback of an error."))

    def invoke(self, ctx: click.Context) -> Any:
        if ctx.params.pop("debug"):
            return super().invoke(ctx)
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, KeyboardInterrupt):
            raise
        except Exception as error:
            if ctx.invoked_subcommand is not None:
                raise  # the command below was asked for the traceback
            if isinstance(error, RungError):
                show_error(error.message, error.hint)
                ctx.exit(EXIT_MISS if isinstance(error, CacheMissError) else EXIT_USER_ERROR)
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
