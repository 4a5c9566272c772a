"""Artifacts on disk: content-addressed blobs, and small JSON manifests that name them. The layout stands in `layer.py`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rung.cache.budget import trim
from rung.cache.disk import Disk, remove_leftovers
from rung.cache.keys import describe, difference
from rung.cache.layer import LOCKS, LOG, Layer
from rung.cache.lock import key_lock
from rung.cache.manifest import Manifest
from rung.counters import Count, Counters
from rung.errors import ArtifactError, CacheError, UntrustedStoreError

_LOG_BYTES = 2**20
_NEAREST = 200  # manifests that are compared to explain a miss, the latest ones
_Found = TypeVar("_Found")


class Store:
    """A folder that is written, and bases below it that are only read. Safe for several processes and threads.

    Equal keys carry equal content, and files appear whole or not at all. Every read is verified before anybody interprets it; what is
    damaged is set aside, counted, and looked for in the next layer. `root` None is a store that keeps nothing and touches no file;
    `read_only` reads the root like a base. A write that the disk refuses raises `CacheError` and leaves no half entry."""

    def __init__(
        self,
        root: Path | None,
        *,
        bases: Sequence[Path] = (),
        read_only: bool = False,
        any_owner: bool = False,
        budget_bytes: int | None = None,
        require_hit: bool = False,
        lock_seconds: float = 600.0,
        counters: Counters | None = None,
        disk: Disk | None = None,
    ) -> None:
        self.require_hit = require_hit
        self.counters = Counters() if counters is None else counters
        self.layers = [] if root is None else [Layer(root, writable=not read_only, any_owner=any_owner, disk=disk)]
        self.layers += [Layer(base, writable=False, any_owner=any_owner) for base in bases]
        self._budget_bytes = budget_bytes
        self._lock_seconds = lock_seconds
        self._damaged: set[tuple[Path, str]] = set()  # blobs of bases, which cannot be set aside
        self._swept = False

    @property
    def top(self) -> Layer | None:
        """The layer that is written, None when nothing is."""
        return self.layers[0] if self.layers and self.layers[0].writable else None

    # --- blobs -----------------------------------------------------------------------------------------------------------------------

    def put_blob(self, data: bytes) -> str:
        """Keep `data`; returns its digest. Raises `CacheError` when the disk refuses."""
        digest = hashlib.sha256(data).hexdigest()
        if self.top is not None and not any(self._has_blob(layer, digest, len(data)) for layer in self.layers):
            self._write(self.top, self.top.blob_path(digest), data)
        return digest

    def get_blob(self, digest: str) -> bytes:
        """The bytes of a blob. Raises `ArtifactError` when no layer has them undamaged."""
        data = self._first(lambda layer: layer.blob(digest), digest)
        if data is None:
            raise ArtifactError(f"blob {digest[:12]} cannot be read: there is none", hint="it will be built again")
        return data

    def _has_blob(self, layer: Layer, digest: str, size: int) -> bool:
        if (layer.root, digest) in self._damaged:
            return False
        try:
            return layer.blob_path(digest).stat().st_size == size
        except OSError:
            return False

    # --- manifests -------------------------------------------------------------------------------------------------------------------

    def put(self, manifest: Manifest) -> None:
        """Keep a manifest whose blobs were put before. Raises `CacheError` when the disk refuses."""
        if self.top is not None:
            self._write(self.top, self.top.manifest_path(manifest.kind, manifest.key), manifest.to_bytes())
            self._sweep()
            evicted = trim(self.top, self._budget_bytes, keep=(manifest.kind, manifest.key))
            for kind, key in evicted:
                self.log("evict", kind, key)
            self.counters.add(Count.EVICTIONS, len(evicted))

    def get(self, kind: str, key: str) -> Manifest | None:
        """The manifest under (kind, key), or None. Raises `ArtifactError` when all there are is damaged."""

        def read(layer: Layer) -> Manifest | None:
            found = layer.manifest(kind, key)
            if found is not None:
                layer.touch(layer.manifest_path(kind, key))
            return found

        return self._first(read, f"{kind}/{key}")

    def remove(self, kind: str, key: str) -> None:
        """Take a manifest out of the layer that is written, if it lies there; its blobs go with the next that are trimmed."""
        if self.top is not None:
            with contextlib.suppress(OSError):
                self.top.manifest_path(kind, key).unlink()

    def manifests(self, kind: str | None = None) -> Iterator[tuple[Layer, Manifest]]:
        """Every manifest that can be read, an upper layer hiding the same key in those below."""
        seen: set[tuple[str, str]] = set()
        for layer in self.layers:
            for found in layer.names():
                if found in seen or (kind is not None and found[0] != kind):
                    continue
                with contextlib.suppress(ArtifactError):
                    manifest = layer.manifest(*found)
                    if manifest is not None:
                        seen.add(found)
                        yield layer, manifest

    def explain_miss(self, kind: str, factors: Mapping[str, Any], *, title: str = "") -> str:
        """Why nothing lies under these factors: what differs from the nearest manifest (of the same title, if one is given)."""
        wanted = json.loads(json.dumps(factors))
        candidates = [manifest for _, manifest in self._latest(kind) if manifest.title == title]
        if not candidates:
            return f"the store has no {kind} of {title}" if title else f"the store has no {kind}"
        found = min((difference(manifest.factors, wanted) for manifest in candidates), key=len)
        return describe(found) or "the entry is damaged or was removed"

    def _latest(self, kind: str) -> list[tuple[Layer, Manifest]]:
        found = sorted(self.manifests(kind), key=lambda pair: pair[1].created, reverse=True)
        return found[:_NEAREST]

    # --- one writer a key ------------------------------------------------------------------------------------------------------------

    @contextmanager
    def lock(self, kind: str, key: str) -> Iterator[bool]:
        """Hold the key inside the block; yields whether there was somebody to wait for, so that looking again may pay."""
        if self.top is None:
            yield False
            return
        with key_lock(self.top.root / LOCKS / f"{kind}.{key}", limit_seconds=self._lock_seconds) as contested:
            if contested:
                self.counters.add(Count.LOCK_WAITS)
            yield contested

    def log(self, event: str, kind: str, key: str, why: str = "") -> None:
        """Append to the store's log, which `rung cache explain` and `stat` read; a log that cannot be written is no error."""
        if self.top is None:
            return
        path = self.top.root / LOG
        line = {"time": round(time.time(), 3), "event": event, "kind": kind, "key": key} | ({"why": why} if why else {})
        with contextlib.suppress(OSError):
            if path.exists() and path.stat().st_size > _LOG_BYTES:
                os.replace(path, path.with_suffix(".old.jsonl"))
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                os.write(descriptor, (json.dumps(line) + "\n").encode())  # one write: lines of several processes do not mix
            finally:
                os.close(descriptor)

    # ---------------------------------------------------------------------------------------------------------------------------------

    def _first(self, read: Callable[[Layer], _Found | None], name: str) -> _Found | None:
        """What the uppermost layer has that can be read. Raises the first damage when no layer has it."""
        damage: ArtifactError | None = None
        for layer in self.layers:
            try:
                found = read(layer)
            except UntrustedStoreError:
                raise
            except ArtifactError as error:
                damage = damage or error
                self._damaged.add((layer.root, name))
                self.counters.add(Count.QUARANTINED)
                kind, _, key = name.rpartition("/")
                self.log("damaged", kind or "blobs", key, error.message)
                continue
            if found is not None:
                return found
        if damage is not None:
            raise damage
        return None

    def _write(self, layer: Layer, path: Path, data: bytes) -> None:
        try:
            layer.write(path, data)
        except OSError as error:
            raise CacheError(
                f"the artifact store at {layer.root} cannot be written: {error.strerror}", hint="free space, or set RUNG_CACHE_DIR"
            ) from error

    def _sweep(self) -> None:
        """Once a process: remove what died writers left."""
        if not self._swept and self.top is not None:
            self._swept = True
            remove_leftovers(self.top.root)
