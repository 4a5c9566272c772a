"""What a layer holds, and which of it goes when it grows too large."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from rung.cache.layer import BLOBS, QUARANTINE, Layer
from rung.cache.manifest import Manifest
from rung.errors import ArtifactError

_YOUNG_SECONDS = 3600.0  # a blob that no manifest names may belong to one that is being written


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """One manifest as it lies in a layer."""

    manifest: Manifest
    used: float  # Unix time of its last use
    bytes: int  # of the manifest and of its blobs, shared ones counted in full
    pinned: bool


def usages(layer: Layer) -> list[Usage]:
    """Every readable manifest of the layer, the one used last first."""
    sizes = blob_sizes(layer)
    found = []
    for kind, key in layer.names():
        with contextlib.suppress(ArtifactError, OSError):
            path = layer.manifest_path(kind, key)
            status = path.stat()
            manifest = layer.manifest(kind, key)
            if manifest is not None:
                size = status.st_size + sum(sizes.get(digest, 0) for digest in dict.fromkeys(manifest.blobs))
                pinned = layer.pin_path(kind, key).exists()
                found.append(Usage(manifest=manifest, used=status.st_mtime, bytes=size, pinned=pinned))
    return sorted(found, key=lambda usage: usage.used, reverse=True)


def blob_sizes(layer: Layer) -> dict[str, int]:
    return {path.name: size for path, size, _ in _files(layer.root / BLOBS) if len(path.name) == 64}


def total_bytes(layer: Layer) -> int:
    """Of all blobs and manifests."""
    kinds = {kind for kind, _ in layer.names()}
    return sum(size for folder in (BLOBS, *kinds) for _, size, _ in _files(layer.root / folder))


def trim(
    layer: Layer, budget_bytes: int | None, *, keep: tuple[str, str] | None = None, young_seconds: float = _YOUNG_SECONDS
) -> list[tuple[str, str]]:
    """Remove least recently used manifests that are not pinned, and the blobs that only they name, until the layer fits the budget.

    Returns (kind, key) of what went. `keep` stays whatever the budget. A process that reads meanwhile finds a blob gone and builds it."""
    if budget_bytes is None or total_bytes(layer) <= budget_bytes:
        return []
    found = usages(layer)
    evicted = []
    while total_bytes(layer) > budget_bytes:
        loose = [usage for usage in found if not usage.pinned and (usage.manifest.kind, usage.manifest.key) != keep]
        if not loose:
            break
        oldest = loose[-1]
        found.remove(oldest)
        remove(layer, oldest.manifest, [usage.manifest for usage in found])
        evicted.append((oldest.manifest.kind, oldest.manifest.key))
    remove_unnamed(layer, young_seconds=young_seconds)
    return evicted


def remove(layer: Layer, manifest: Manifest, others: Collection[Manifest]) -> None:
    """Remove a manifest, then the blobs that none of the others names."""
    _unlink(layer.manifest_path(manifest.kind, manifest.key))
    _unlink(layer.pin_path(manifest.kind, manifest.key))
    named = {digest for other in others for digest in other.blobs}
    for digest in set(manifest.blobs) - named:
        _unlink(layer.blob_path(digest))


def remove_unnamed(layer: Layer, *, young_seconds: float = _YOUNG_SECONDS) -> int:
    """Remove blobs that no manifest names and what was set aside; returns the bytes. Younger files stay: their manifest may follow."""
    named = {digest for usage in usages(layer) for digest in usage.manifest.blobs}
    before = time.time() - young_seconds
    loose = [file for file in _files(layer.root / BLOBS) if file[0].name not in named]
    freed = 0
    for path, size, changed in [*loose, *_files(layer.root / QUARANTINE)]:
        if changed <= before:
            _unlink(path)
            freed += size
    return freed


def _files(folder: Path) -> list[tuple[Path, int, float]]:
    """(path, bytes, time of the last change) of the files in a folder."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                status = path.stat(follow_symlinks=False)
                found.append((path, status.st_size, status.st_mtime))
    return found


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
