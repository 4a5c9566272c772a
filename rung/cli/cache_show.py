"""How entries of the store are printed."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from rung.cache import Manifest, Store, store_settings
from rung.cache.budget import Usage, blob_sizes, total_bytes, usages
from rung.cache.inspect import read_log
from rung.cache.keys import short
from rung.cache.layer import QUARANTINE, Layer

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def emit(value: Any) -> None:
    click.echo(json.dumps(value))


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, numbers: Sequence[str] = ()) -> None:
    from rung.cli.console import console, table

    console().print(table(title, columns, rows, numbers=numbers))


def size(count: float) -> str:
    for unit in _UNITS:
        if count < 1024 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def age(moment: float) -> str:
    seconds = max(0.0, time.time() - moment)
    length, unit = next(((length, unit) for length, unit in _AGES if seconds >= length), (1, "s"))
    return f"{seconds / length:.0f} {unit} ago"


def entry_json(layer: Layer, usage: Usage) -> dict[str, Any]:
    manifest = usage.manifest
    return {
        "kind": manifest.kind,
        "key": manifest.key,
        "title": manifest.title,
        "bytes": usage.bytes,
        "seconds": sum(manifest.seconds.values()),
        "created": manifest.created,
        "used": usage.used,
        "pinned": usage.pinned,
        "where": "base" if not layer.writable else "pinned" if usage.pinned else "",
    }


def manifest_json(manifest: Manifest) -> dict[str, Any]:
    return asdict(manifest)


def show_manifest(manifest: Manifest) -> None:
    rows = [(name, short(value)) for name, value in manifest.factors.items()]
    show_table(f"{manifest.kind}/{manifest.key}", ("factor", "value"), rows)
    seconds = ", ".join(f"{name} {value:.2f} s" for name, value in manifest.seconds.items())
    click.echo(f"{manifest.title or '-'}; made {age(manifest.created)}{f' in {seconds}' if seconds else ''}")
    if why := manifest.data.get("stock_only"):
        click.echo(f"only Inductor's loader can run it ({why})")
    click.echo(f"blobs: {', '.join(manifest.blobs) or 'none'}")


def layers_json(store: Store) -> dict[str, Any]:
    layers = []
    for layer in store.layers:
        found = usages(layer)
        quarantine = layer.root / QUARANTINE
        layers.append(
            {
                "root": str(layer.root),
                "use": "read and written" if layer.writable else "read",
                "entries": len(found),
                "kinds": dict(Counter(usage.manifest.kind for usage in found)),
                "blobs": len(blob_sizes(layer)),
                "bytes": total_bytes(layer),
                "pinned": sum(usage.pinned for usage in found),
                "quarantined": len(list(quarantine.iterdir())) if quarantine.is_dir() else 0,
            }
        )
    events = Counter(line["event"] for line in read_log(store.top)) if store.top is not None else Counter()
    return {"layers": layers, "budget_bytes": store_settings().budget_bytes, "events": dict(sorted(events.items()))}
