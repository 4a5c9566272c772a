"""Bytes on disk: keys, store, manifests. Knows nothing of graphs."""

from rung.cache.keys import difference, key_of
from rung.cache.store import Store

__all__ = ["Store", "difference", "key_of"]
