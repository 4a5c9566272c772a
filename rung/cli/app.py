"""The program and its commands. A command imports torch when it runs, so that `rung --help` is quick."""

from __future__ import annotations

import click

from rung import __version__
from rung.cli.bench import bench
from rung.cli.cache_change import cache as cache_commands
from rung.cli.doctor import doctor
from rung.cli.explain import explain
from rung.cli.generate import generate
from rung.cli.ladder import ladder
from rung.cli.precompile import precompile
from rung.cli.verify import verify


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="rung")
def program() -> None:
    """Trace once, compile the unique pieces, capture a ladder of graphs, replay."""


for command in (generate, bench, verify, precompile, cache_commands, explain, doctor, ladder):
    program.add_command(command)
