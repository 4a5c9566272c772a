"""`rung cache`: look into the artifact store, check it, bound it, ship it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rung.cli.cache_show import age, emit, entry_json, layers_json, show_table, size
from rung.cli.command import EXIT_BUG, Command, CommandGroup

JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
KINDS = ("plans", "pieces", "kernels", "kernel-parameters", "choices")


@click.group(cls=CommandGroup)
@click.option("--store", type=click.Path(path_type=Path, file_okay=False), help="The store; default: that of RUNG_CACHE_DIR.")
@click.option("--trust-store", is_flag=True, help="Also read what other users own or may write; whoever wrote it can run code as you.")
@click.pass_context
def cache(ctx: click.Context, store: Path | None, trust_store: bool) -> None:
    """Look into the artifact store, check it, bound it, ship it. KEY is the beginning of a key, or kind/key."""
    from rung.cache import use_store
    from rung.errors import ConfigError

    if store is not None and not store.is_dir() and ctx.invoked_subcommand != "import":  # which makes it
        raise ConfigError(f"--store: there is no folder {str(store)!r}", hint="name the folder of a store; `import` alone makes one")
    changes: dict[str, Any] = ({} if store is None else {"root": store}) | ({"trust": "any"} if trust_store else {})
    ctx.with_resource(use_store(**changes))


def current_store() -> Any:
    from rung.cache import open_store

    return open_store()


@cache.command(cls=Command)
@click.option("--kind", type=click.Choice(KINDS), help="Entries of one kind.")
@JSON
def ls(kind: str | None, as_json: bool) -> None:
    """Every entry, the one used last first."""
    from rung.cache.budget import usages

    rows = [entry_json(layer, usage) for layer in current_store().layers for usage in usages(layer) if kind in (None, usage.manifest.kind)]
    if as_json:
        return emit(rows)
    cells = [
        (row["kind"], row["key"][:12], row["title"], size(row["bytes"]), f"{row['seconds']:.1f} s", age(row["used"]), row["where"])
        for row in rows
    ]
    show_table("", ("kind", "key", "of", "size", "compile", "used", "where"), cells, numbers=("size", "compile"))


@cache.command(cls=Command)
@click.argument("key")
@JSON
def show(key: str, as_json: bool) -> None:
    """The manifest of an entry: its factors in order, its blobs, what making it took."""
    from rung.cache.inspect import find_entry
    from rung.cli.cache_show import manifest_json, show_manifest

    _, manifest = find_entry(current_store(), key)
    if as_json:
        return emit(manifest_json(manifest))
    show_manifest(manifest)


@cache.command(cls=Command)
@click.argument("first", metavar="KEY")
@click.argument("second", metavar="[KEY]", required=False)
@JSON
def diff(first: str, second: str | None, as_json: bool) -> None:
    """The factors in which two entries differ; with one KEY, from the entry of the same kind that is nearest to it."""
    from rung.cache import difference
    from rung.cache.inspect import find_entry
    from rung.errors import ConfigError

    store = current_store()
    _, old = find_entry(store, first)
    others = [found for _, found in store.manifests(old.kind) if found.key != old.key]
    if second is None and not others:
        raise ConfigError(f"there is no other entry of kind {old.kind}", hint="name a second KEY")
    new = find_entry(store, second)[1] if second else min(others, key=lambda other: len(difference(old.factors, other.factors)))
    found = difference(old.factors, new.factors)
    if as_json:
        return emit({"first": old.key, "second": new.key, "factors": {name: list(pair) for name, pair in found.items()}})
    rows = [(name, str(before), str(after)) for name, (before, after) in found.items()]
    show_table(f"{old.kind}/{old.key[:12]} and {new.kind}/{new.key[:12]}", ("factor", "first", "second"), rows)


@cache.command(cls=Command)
@click.argument("key", required=False)
@click.option("--last", type=click.IntRange(1), default=10, show_default=True, help="So many misses.")
@JSON
def explain(key: str | None, last: int, as_json: bool) -> None:
    """Why something was compiled: the latest misses, each with the factors that differed from the nearest entry."""
    from rung.cache.inspect import read_log
    from rung.errors import ConfigError

    top = current_store().top
    events = ("miss", "damaged", "evict")
    kind, _, start = (key or "").rpartition("/")
    found = [line for line in ([] if top is None else read_log(top)) if line["event"] in events]
    found = [line for line in found if line["key"].startswith(start) and kind in ("", line["kind"])]
    if key and not found:
        raise ConfigError(f"the log has no miss, damage or eviction of {key!r}", hint="`rung cache explain` alone shows the latest ones")
    lines = found[-last:]
    if as_json:
        return emit(lines)
    rows = [(age(line["time"]), line["event"], line["kind"], line["key"][:12], line.get("why", "")) for line in lines]
    show_table("", ("when", "what", "kind", "key", "why"), rows)


@cache.command(cls=Command)
@JSON
@click.pass_context
def verify(ctx: click.Context, as_json: bool) -> None:
    """Hash every file. What is damaged is set aside, and built again when it is needed. Exit status 1 when something was."""
    from rung.cache.inspect import verify_store

    results = list(verify_store(current_store()))
    problems = [problem for problem in results if problem is not None]
    if as_json:
        emit({"checked": len(results), "problems": [{"place": problem.place, "reason": problem.reason} for problem in problems]})
    else:
        if problems:
            show_table("", ("where", "what"), [(problem.place, problem.reason) for problem in problems])
        click.echo(f"{len(results)} files, {len(problems)} damaged or gone")
    if problems:
        ctx.exit(EXIT_BUG)


@cache.command(cls=Command)
@JSON
def stat(as_json: bool) -> None:
    """Entries, bytes and budget of each layer, and how often the store had what was asked for."""
    report = layers_json(current_store())
    if as_json:
        return emit(report)
    rows = [
        (layer["root"], layer["use"], layer["entries"], layer["blobs"], size(layer["bytes"]), layer["pinned"], layer["quarantined"])
        for layer in report["layers"]
    ]
    columns = ("store", "use", "entries", "blobs", "size", "pinned", "damaged")
    show_table("", columns, rows, numbers=columns[2:])
    budget = "no limit" if report["budget_bytes"] is None else size(report["budget_bytes"])
    events = ", ".join(f"{count} {event}" for event, count in report["events"].items()) or "nothing logged"
    click.echo(f"budget {budget}; {events}")
