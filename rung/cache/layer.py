"""One folder of a store.

<root>/blobs/<sha256>            bytes
<root>/<kind>/<key>.json         a manifest; its modification time is that of its last use
<root>/pins/<kind>.<key>         keeps a manifest from being evicted
<root>/quarantine/...            what was damaged
<root>/locks/...                 while somebody builds
<root>/log.jsonl                 hits, misses with their reasons, damage, evictions
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rung.cache.disk import PART, Disk, read_file, refuse_foreign, write_file
from rung.cache.manifest import Manifest, check_digest, check_name
from rung.errors import ArtifactError, UntrustedStoreError

BLOBS, PINS, QUARANTINE, LOCKS = "blobs", "pins", "quarantine", "locks"
LOG = "log.jsonl"
_OURS = frozenset({BLOBS, PINS, QUARANTINE, LOCKS})


class Layer:
    """A folder with blobs and manifests. `writable` is False for a base, which is read and never changed.

    What another user could have written is refused with `UntrustedStoreError` unless `any_owner`. Whatever is read was verified against its
    hash before it is returned; damage raises `ArtifactError`, and in a writable layer the file is set aside first."""

    def __init__(self, root: Path, *, writable: bool = True, any_owner: bool = False, disk: Disk | None = None) -> None:
        self.root, self.writable, self.any_owner = root, writable, any_owner
        self.disk = disk or Disk()
        self._trusted: set[Path] = set()

    def blob_path(self, digest: str) -> Path:
        return self.root / BLOBS / check_digest(digest)

    def manifest_path(self, kind: str, key: str) -> Path:
        check_name(kind, key)
        return self.root / kind / f"{key}.json"

    def pin_path(self, kind: str, key: str) -> Path:
        check_name(kind, key)
        return self.root / PINS / f"{kind}.{key}"

    # --- reading ---------------------------------------------------------------------------------------------------------------------

    def blob(self, digest: str) -> bytes | None:
        """The bytes of a blob, None when there is none here."""
        data = self._read(self.blob_path(digest))
        if data is not None and hashlib.sha256(data).hexdigest() != digest:
            self._set_aside(self.blob_path(digest))
            raise ArtifactError(f"blob {digest[:12]} in {self.root} is damaged", hint="it is set aside and built again")
        return data

    def manifest(self, kind: str, key: str) -> Manifest | None:
        """The manifest under (kind, key), None when there is none here."""
        path = self.manifest_path(kind, key)
        data = self._read(path)
        if data is None:
            return None
        try:
            return Manifest.from_bytes(data, kind, key)
        except ArtifactError:
            self._set_aside(path)
            raise
        except (KeyError, TypeError, ValueError) as error:
            self._set_aside(path)
            raise ArtifactError(f"manifest {kind}/{key[:12]} cannot be read: {error}", hint="it is set aside and built again") from error

    def names(self) -> Iterator[tuple[str, str]]:
        """(kind, key) of every manifest."""
        for folder in _folders(self.root):
            if folder.name not in _OURS:
                yield from ((folder.name, path.stem) for path in sorted(folder.glob("*.json")) if not path.name.startswith(PART))

    def _read(self, path: Path) -> bytes | None:
        self.check_owner(path.parent)
        try:
            return read_file(path, any_owner=self.any_owner)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except UntrustedStoreError:
            raise
        except OSError as error:
            self._set_aside(path)
            raise ArtifactError(f"{path} cannot be read: {error.strerror}", hint="it is set aside and built again") from error

    def check_owner(self, folder: Path | None = None) -> None:
        """Raise `UntrustedStoreError` when others may write the root, its parent, or a folder in it."""
        for path in {self.root.parent, self.root, folder or self.root} - self._trusted:
            if self.any_owner:
                return
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                status = path.stat()
                if path != self.root.parent or status.st_mode & 0o1002 == 0o002:
                    refuse_foreign(path, status)
                self._trusted.add(path)

    # --- writing ---------------------------------------------------------------------------------------------------------------------

    def write(self, path: Path, data: bytes) -> None:
        """Raises `OSError`."""
        self.check_owner(path.parent)
        if path.is_dir() and not path.is_symlink():
            self._set_aside(path)  # no rename puts a file where a folder is
        write_file(self.disk, path, data)

    def touch(self, path: Path) -> None:
        """Note a use."""
        if self.writable:
            with contextlib.suppress(OSError):
                os.utime(path)

    def _set_aside(self, path: Path) -> None:
        if self.writable:
            aside = self.root / QUARANTINE / f"{path.parent.name}.{path.name}"
            with contextlib.suppress(OSError):
                aside.parent.mkdir(exist_ok=True, mode=0o700)
                if path.is_dir() or aside.is_dir():  # what lies there cannot be replaced
                    aside = Path(tempfile.mkdtemp(dir=aside.parent)) / aside.name
                os.replace(path, aside)


def _folders(root: Path) -> list[Path]:
    try:
        return sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())
    except (FileNotFoundError, NotADirectoryError):
        return []
