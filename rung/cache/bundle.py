"""Entries of a store as one tar file, and back. Members are read by name and never extracted to a place that they choose."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rung.cache.layer import BLOBS
from rung.cache.manifest import Manifest, check_name
from rung.cache.store import Store
from rung.errors import ArtifactError, BundleError

_INDEX = "rung-bundle.json"
_FORMAT = 1
_BLOB = re.compile(rf"{BLOBS}/([0-9a-f]{{64}})")
_MANIFEST = re.compile(r"([a-z0-9-]{1,32})/([A-Za-z0-9_-]{1,128})\.json")
MAX_MEMBER_BYTES = 2 * 2**30
MAX_TOTAL_BYTES = 64 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleSummary:
    """What a bundle holds. `bytes` are those of blobs and manifests, before compression."""

    manifests: int
    blobs: int
    bytes: int


def export_bundle(store: Store, path: Path, chosen: Sequence[Manifest] | None = None) -> BundleSummary:
    """Write manifests (None: all) and their blobs, each verified, to a tar file (compressed for .gz and .xz). Equal entries give equal
    members: no times, no users. Raises `BundleError` when the file cannot be written, `ArtifactError` when a blob is damaged."""
    manifests = sorted(chosen if chosen is not None else (found for _, found in store.manifests()), key=lambda m: (m.kind, m.key))
    digests = sorted({digest for manifest in manifests for digest in manifest.blobs})
    index = json.dumps({"format": _FORMAT, "manifests": [[m.kind, m.key] for m in manifests], "blobs": len(digests)}).encode()
    total, name = 0, ""
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".bundle-")
        with os.fdopen(descriptor, "wb") as file:
            with _open(file, path) as tar:
                _add(tar, _INDEX, index)
                for digest in digests:
                    data = store.get_blob(digest)
                    total += _add(tar, f"{BLOBS}/{digest}", data)
                for manifest in manifests:
                    total += _add(tar, f"{manifest.kind}/{manifest.key}.json", manifest.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException as error:
        if name and os.path.exists(name):
            os.unlink(name)
        if isinstance(error, OSError):
            raise BundleError(f"{path} cannot be written: {error.strerror}", hint="name a file in a folder of yours") from error
        raise
    return BundleSummary(manifests=len(manifests), blobs=len(digests), bytes=total)


def import_bundle(
    store: Store, path: Path, *, max_member_bytes: int = MAX_MEMBER_BYTES, max_total_bytes: int = MAX_TOTAL_BYTES
) -> BundleSummary:
    """Put the entries of a bundle into the store. Everything is verified before the first byte is written, so a bundle is taken whole or
    refused with `BundleError`: for a path, link, device or size that no entry has, a wrong hash, or a manifest without its blobs."""
    manifests: list[Manifest] = []
    blobs: set[str] = set()
    total = 0
    for name, data in _members(path, max_member_bytes, max_total_bytes):
        total += len(data)
        found = _check(name, data)
        if isinstance(found, Manifest):
            manifests.append(found)
        else:
            blobs.add(found)
    missing = next((m for m in manifests if not blobs.issuperset(m.blobs)), None)
    if missing is not None:
        raise BundleError(f"{path}: {missing.kind}/{missing.key[:12]} names a blob that is not in the bundle", hint="export it again")
    for name, data in _members(path, max_member_bytes, max_total_bytes):
        if name.startswith(f"{BLOBS}/") and store.put_blob(data) != name.removeprefix(f"{BLOBS}/"):
            raise BundleError(f"{path} changed while it was read", hint="import it again")
    for manifest in manifests:
        store.put(manifest)
    return BundleSummary(manifests=len(manifests), blobs=len(blobs), bytes=total)


def _members(path: Path, max_member_bytes: int, max_total_bytes: int) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of every member but the index, which is the first."""
    total = 0
    try:
        with tarfile.open(path, "r:*") as tar:
            for number, member in enumerate(tar):
                if not member.isfile() or member.issparse():
                    raise BundleError(f"{path}: {member.name!r} is no plain file", hint="a bundle holds blobs and manifests alone")
                total += member.size
                if member.size > max_member_bytes or total > max_total_bytes:
                    raise BundleError(
                        f"{path}: {member.name!r} has {member.size} bytes ({total} with those before it), above the limit",
                        hint="--max-member and --max-total raise the limits",
                    )
                file = tar.extractfile(member)
                data = b"" if file is None else file.read(member.size)
                if number == 0:
                    _check_index(path, member.name, data)
                else:
                    yield member.name, data
            if not total:
                raise BundleError(f"{path} is empty", hint="make it with `rung cache export`")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise BundleError(f"{path} cannot be read: {error}", hint="make it with `rung cache export`") from error


def _check_index(path: Path, name: str, data: bytes) -> None:
    try:
        version = json.loads(data)["format"] if name == _INDEX else None
    except (ValueError, KeyError, TypeError):
        version = None
    if version != _FORMAT:
        raise BundleError(f"{path} is no bundle of format {_FORMAT}", hint="make it with `rung cache export` of this version")


def _check(name: str, data: bytes) -> Manifest | str:
    """The manifest, or the digest of the blob, that a member is."""
    if match := _BLOB.fullmatch(name):
        if hashlib.sha256(data).hexdigest() != match[1]:
            raise BundleError(f"blob {match[1][:12]} of the bundle is damaged", hint="export or copy it again")
        return match[1]
    if match := _MANIFEST.fullmatch(name):
        try:
            check_name(match[1], match[2])
            return Manifest.from_bytes(data, match[1], match[2])
        except (ArtifactError, KeyError, TypeError, ValueError) as error:
            raise BundleError(f"manifest {name!r} of the bundle is damaged", hint="export or copy it again") from error
    raise BundleError(f"{name!r} is no name of a blob or manifest", hint="a bundle holds blobs and manifests alone")


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> int:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o644
    tar.addfile(member, io.BytesIO(data))
    return len(data)


def _open(file: IO[bytes], path: Path) -> tarfile.TarFile:
    """A tar file to be written, compressed as its name says."""
    if path.suffix in (".gz", ".tgz"):
        return tarfile.open(fileobj=file, mode="w:gz")
    return tarfile.open(fileobj=file, mode="w:xz") if path.suffix == ".xz" else tarfile.open(fileobj=file, mode="w")
