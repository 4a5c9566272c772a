"""A manifest: what lies under a key, with the factors that made the key. JSON, and it carries the hash of itself."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rung.errors import ArtifactError

FORMAT = 1
_HEAD, _MIDDLE, _TAIL = b'{"sha256": "', b'", "manifest": ', b"}\n"
_NAME = re.compile(r"[a-z0-9-]{1,32}")
_KEY = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What the store keeps under (kind, key). Everything is JSON; nothing in it names a place outside of the store."""

    kind: str  # "plans", "pieces", "kernels", ...
    key: str
    factors: Mapping[str, Any]  # what the key was made of, in the order in which it was declared
    data: Mapping[str, Any]
    blobs: tuple[str, ...] = ()  # digests of the blobs that `data` speaks of
    title: str = ""  # for people: the entry's name
    seconds: Mapping[str, float] = field(default_factory=dict)  # what making it took, by phase
    created: float = field(default_factory=time.time)  # Unix time

    def to_bytes(self) -> bytes:
        body = json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":")).encode()
        return _HEAD + hashlib.sha256(body).hexdigest().encode() + _MIDDLE + body + _TAIL

    @staticmethod
    def from_bytes(data: bytes, kind: str, key: str) -> Manifest:
        """Raises `ArtifactError` unless these are the bytes that `to_bytes` gave for (kind, key)."""
        start = len(_HEAD) + 64 + len(_MIDDLE)
        body = data[start : -len(_TAIL)]
        if data != _HEAD + hashlib.sha256(body).hexdigest().encode() + _MIDDLE + body + _TAIL:
            raise ArtifactError(f"manifest {kind}/{key[:12]} is damaged", hint="it is set aside and built again")
        found = json.loads(body)
        if (version := found.pop("format", None)) != FORMAT or (found["kind"], found["key"]) != (kind, key):
            raise ArtifactError(
                f"manifest {kind}/{key[:12]} holds {found.get('kind')}/{str(found.get('key'))[:12]} in format {version}",
                hint="it is set aside and built again",
            )
        return Manifest(**{**found, "blobs": tuple(check_digest(digest) for digest in found["blobs"])})


def check_name(kind: str, key: str) -> None:
    """Raise `ArtifactError` for what could name a file outside of its folder."""
    if not _NAME.fullmatch(kind) or not _KEY.fullmatch(key) or key.startswith("."):
        raise ArtifactError(f"{kind!r}/{key!r} is no name of an entry", hint="kinds are lower case, keys are letters, digits, - and _")


def check_digest(digest: str) -> str:
    """`digest`, or `ArtifactError` when it is none."""
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ArtifactError(f"{digest!r} is no digest of a blob", hint="the manifest that names it is from elsewhere")
    return digest
