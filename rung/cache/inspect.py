"""Looking into a store: entries by the beginning of their key, every hash, and the log."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rung.cache.budget import blob_sizes
from rung.cache.layer import LOG, Layer
from rung.cache.manifest import Manifest
from rung.cache.store import Store
from rung.errors import ArtifactError, CacheError, ConfigError, UntrustedStoreError


@dataclass(frozen=True, slots=True)
class Problem:
    """A file that is not what its name says."""

    place: str
    reason: str


def find_entry(store: Store, text: str) -> tuple[Layer, Manifest]:
    """The entry whose key begins with `text`, or that is named kind/key. Raises `ConfigError` unless there is exactly one."""
    kind, _, start = text.rpartition("/")
    found = [pair for pair in store.manifests(kind or None) if pair[1].key.startswith(start)] if start else []
    if len(found) != 1:
        names = ", ".join(f"{manifest.kind}/{manifest.key[:12]}" for _, manifest in found[:5])
        what = f"begins {len(found)} keys: {names}" if found else "is no beginning of a key in the store"
        raise ConfigError(f"{text!r} {what}", hint="`rung cache ls` shows the keys; more letters, or kind/key, name one")
    return found[0]


def verify_store(store: Store) -> Iterator[Problem | None]:
    """Hash every manifest and blob: a problem, or None for what is right. What is damaged is set aside where the store may be written."""
    for layer in store.layers:
        named: set[str] = set()
        for kind, key in list(layer.names()):
            try:
                manifest = layer.manifest(kind, key)
                named.update(() if manifest is None else manifest.blobs)
                yield None
            except UntrustedStoreError:
                raise
            except ArtifactError as error:
                yield Problem(f"{layer.root.name}/{kind}/{key[:12]}", error.message)
        present = blob_sizes(layer)
        for digest in sorted({*present, *named}):
            try:
                data = layer.blob(digest) if digest in present else store.get_blob(digest)
                yield None if data is not None else Problem(digest[:12], "it is gone")
            except UntrustedStoreError:
                raise
            except CacheError as error:
                yield Problem(f"{layer.root.name}/blobs/{digest[:12]}", error.message)


def read_log(layer: Layer) -> list[dict[str, Any]]:
    """The lines of the log, oldest first; lines that were cut off are left out."""
    lines: list[dict[str, Any]] = []
    for path in (layer.root / LOG).with_suffix(".old.jsonl"), layer.root / LOG:
        with contextlib.suppress(OSError):
            for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError):
                    line = json.loads(text)
                    if isinstance(line, dict) and {"time", "event", "kind", "key"} <= line.keys():
                        lines.append(line)
    return lines
