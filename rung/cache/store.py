"""Artifacts on disk: content-addressed blobs and small JSON manifests that name them.

    <root>/blobs/<sha256>            bytes
    <root>/<kind>/<key>.json         a manifest

Everything is written to a temporary name, flushed and renamed, so a reader sees a whole file or none. Blobs are verified on every read,
before anybody interprets them. Nothing in a manifest is an absolute path.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from rung.errors import ArtifactError, CacheError


class Store:
    """One store folder. Safe for several processes: equal keys carry equal content, and renames are atomic."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put_blob(self, data: bytes) -> str:
        """Keep `data`; returns its digest. Raises `CacheError` when the disk refuses."""
        digest = hashlib.sha256(data).hexdigest()
        path = self.root / "blobs" / digest
        if not path.exists():
            self._write(path, data)
        return digest

    def get_blob(self, digest: str) -> bytes:
        """The bytes of a blob. Raises `ArtifactError` when they are absent or are not what was written; a damaged file is set aside."""
        path = self.root / "blobs" / digest
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ArtifactError(f"blob {digest[:12]} cannot be read: {error.strerror}", hint="it will be built again") from error
        if hashlib.sha256(data).hexdigest() != digest:
            with contextlib.suppress(OSError):
                path.replace(path.with_suffix(".bad"))
            raise ArtifactError(f"blob {digest[:12]} is damaged", hint="it was set aside and will be built again")
        return data

    def put_manifest(self, kind: str, key: str, manifest: dict[str, Any]) -> None:
        self._write(self._manifest(kind, key), json.dumps(manifest, indent=1, sort_keys=True).encode())

    def get_manifest(self, kind: str, key: str) -> dict[str, Any] | None:
        """The manifest under `key`, or None. Raises `ArtifactError` when it is no JSON object."""
        path = self._manifest(kind, key)
        try:
            data = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ArtifactError(f"manifest {kind}/{key[:12]} cannot be read: {error}", hint="it will be written again") from error
        if not isinstance(data, dict):
            raise ArtifactError(f"manifest {kind}/{key[:12]} holds no object", hint="it will be written again")
        return data

    def _manifest(self, kind: str, key: str) -> Path:
        return self.root / kind / f"{key}.json"

    def _write(self, path: Path, data: bytes) -> None:
        temporary = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".part-")
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            if temporary:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            raise CacheError(
                f"the artifact store at {self.root} cannot be written: {error.strerror}", hint="free space, or set RUNG_CACHE_DIR"
            ) from error
