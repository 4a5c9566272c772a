"""The `rung cache` commands that change a store, or carry it somewhere."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from rung.cli.cache import JSON, KINDS, current_store
from rung.cli.cache import cache as cache
from rung.cli.cache_show import emit, size
from rung.cli.command import Command
from rung.errors import CacheError, ConfigError


def _top() -> Any:
    """(store, the layer that may be changed). Raises `CacheError`."""
    store = current_store()
    if store.top is None:
        raise CacheError("the store is read-only or off", hint="leave RUNG_CACHE_MODE unset")
    return store, store.top


def _bytes(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """A size in bytes. Raises `ConfigError` in the words of the option."""
    from rung.cache.settings import parse_bytes

    return None if value is None else parse_bytes(value, param.opts[0])


@cache.command(cls=Command)
@click.option("--bytes", "budget", callback=_bytes, help="Least recently used entries go until the store has this size, such as 5G.")
@click.option("--older-than", type=click.FloatRange(0), metavar="DAYS", help="Entries go that were not used for so many days.")
@click.option("--dry-run", is_flag=True, help="Say what would go.")
@JSON
def prune(budget: int | None, older_than: float | None, dry_run: bool, as_json: bool) -> None:
    """Remove what is not needed: blobs that no entry names, damaged files, leftovers; and entries by size or age. Pinned ones stay."""
    from rung.cache.budget import remove, remove_unnamed, total_bytes, trim, usages
    from rung.cache.disk import remove_leftovers

    _, layer = _top()
    before = total_bytes(layer)
    limit = time.time() - (older_than or 0) * 86400
    found = usages(layer)
    old = [usage for usage in found if older_than is not None and not usage.pinned and usage.used <= limit]
    gone = [(usage.manifest.kind, usage.manifest.key) for usage in old]
    if not dry_run:
        for usage in old:
            found.remove(usage)
            remove(layer, usage.manifest, [other.manifest for other in found])
        gone += trim(layer, budget)
        remove_unnamed(layer)
        remove_leftovers(layer.root)
    elif budget is not None:
        gone = sorted({*gone, *_would_go(layer, budget)})
    freed = 0 if dry_run else before - total_bytes(layer)
    if as_json:
        return emit({"removed": [list(name) for name in gone], "freed_bytes": freed, "dry_run": dry_run})
    for kind, key in gone:
        click.echo(f"{kind}/{key[:12]}")
    click.echo(f"{len(gone)} entries would go" if dry_run else f"{len(gone)} entries removed, {size(freed)} freed")


def _would_go(layer: Any, budget: int) -> list[tuple[str, str]]:
    """The least recently used entries above a budget, shared blobs counted once."""
    from rung.cache.budget import blob_sizes, total_bytes, usages

    sizes, found, total, gone = blob_sizes(layer), usages(layer), total_bytes(layer), []
    while total > budget and (loose := [usage for usage in found if not usage.pinned]):
        usage = loose[-1]
        found.remove(usage)
        kept = {digest for other in found for digest in other.manifest.blobs}
        total -= sum(sizes.get(digest, 0) for digest in set(usage.manifest.blobs) - kept) + len(usage.manifest.to_bytes())
        gone.append((usage.manifest.kind, usage.manifest.key))
    return gone


@cache.command(cls=Command)
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@click.option("--remove", is_flag=True, help="Let it be evicted again.")
@JSON
def pin(keys: tuple[str, ...], remove: bool, as_json: bool) -> None:
    """Keep entries, and the blobs that they name, from being evicted."""
    from rung.cache.inspect import find_entry

    store, top = _top()
    done = []
    for key in keys:
        layer, manifest = find_entry(store, key)
        if layer is not top:
            raise CacheError(f"{manifest.kind}/{manifest.key[:12]} lies in a base, which nothing evicts", hint="leave it out")
        path = top.pin_path(manifest.kind, manifest.key)
        if remove:
            path.unlink(missing_ok=True)
        else:
            top.write(path, b"")
        done.append([manifest.kind, manifest.key])
    if as_json:
        return emit({"pinned": not remove, "entries": done})
    for kind, name in done:
        click.echo(f"{kind}/{name[:12]} {'may be evicted' if remove else 'is pinned'}")


@cache.command(cls=Command)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@click.option("--kind", "kinds", type=click.Choice(KINDS), multiple=True, help="Entries of this kind alone; may be given several times.")
@JSON
def export(file: Path, keys: tuple[str, ...], kinds: tuple[str, ...], as_json: bool) -> None:
    """Write entries (default: all of every layer) with their blobs to FILE, a tar; .gz and .xz are compressed."""
    from rung.cache.bundle import export_bundle
    from rung.cache.inspect import find_entry
    from rung.cli.files import check_writable

    check_writable(file, "FILE")
    store = current_store()
    chosen = [find_entry(store, key)[1] for key in keys] or [found for _, found in store.manifests() if not kinds or found.kind in kinds]
    if not chosen:
        what = "entry" if not kinds else f"entry of kind {' or '.join(kinds)}"
        raise ConfigError(f"the store has no {what}, so there is nothing to export", hint="`rung cache stat` shows where it looks")
    _say(export_bundle(store, file, chosen), f"written to {file}", as_json)


@cache.command(cls=Command)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@JSON
def tuning(file: Path, as_json: bool) -> None:
    """Write the choices that were measured on devices to FILE, as JSON for `rung precompile --tuning`."""
    from rung.cli.files import check_writable, write_text
    from rung.launch.tuning_file import tuning_of

    check_writable(file, "FILE")
    found = tuning_of(current_store())
    write_text(file, json.dumps(found, indent=1) + "\n", "FILE")
    count = len(found["choices"])
    if as_json:
        return emit({"choices": count})
    click.echo(f"{count} choices written to {file}")


@cache.command("import", cls=Command)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--max-member", callback=_bytes, default="2G", show_default=True, help="The largest file that a bundle may hold.")
@click.option("--max-total", callback=_bytes, default="64G", show_default=True, help="The largest sum of its files.")
@JSON
def import_(file: Path, max_member: int, max_total: int, as_json: bool) -> None:
    """Take the entries of a bundle. All of it is verified first, and nothing is taken if anything is wrong. A bundle is code: trust it."""
    from rung.cache.bundle import import_bundle

    store, _ = _top()
    _say(import_bundle(store, file, max_member_bytes=max_member, max_total_bytes=max_total), "taken", as_json)


def _say(summary: Any, what: str, as_json: bool) -> None:
    if as_json:
        return emit({"manifests": summary.manifests, "blobs": summary.blobs, "bytes": summary.bytes})
    click.echo(f"{summary.manifests} entries and {summary.blobs} blobs, {size(summary.bytes)}, {what}")


@cache.command(cls=Command)
@click.option("--yes", is_flag=True, help="Do not ask.")
@JSON
def clear(yes: bool, as_json: bool) -> None:
    """Remove every entry, pinned ones too, and nothing that is not of the store."""
    from rung.cache.budget import remove, remove_unnamed, total_bytes, usages

    _, layer = _top()
    before = total_bytes(layer)
    found = usages(layer)
    if not yes:
        click.confirm(f"remove {len(found)} entries ({size(before)}) from {layer.root}?", abort=True, err=True)
    for usage in found:
        remove(layer, usage.manifest, ())
    remove_unnamed(layer, young_seconds=0)
    if as_json:
        return emit({"removed": len(found), "freed_bytes": before})
    click.echo(f"{len(found)} entries removed, {size(before)} freed")
