"""Keys: ordered, named factors and their hash. The factors lie beside the entry, so that a miss can be explained."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping


def key_of(factors: Mapping[str, object]) -> str:
    """Hash of named factors; the order in which they were given does not matter. Values must be JSON."""
    return hashlib.sha256(json.dumps(factors, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def difference(old: Mapping[str, object], new: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """The factors that differ: name -> (old, new)."""
    return {name: (old.get(name), new.get(name)) for name in sorted({*old, *new}) if old.get(name) != new.get(name)}
