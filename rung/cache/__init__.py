"""Bytes on disk: keys, store, manifests, bundles. Knows nothing of graphs and imports no torch."""

from rung.cache.keys import Factor, Factors, FactorSource, difference, key_of
from rung.cache.manifest import Manifest
from rung.cache.settings import StoreSettings, open_store, store_settings, use_store
from rung.cache.store import Store

__all__ = [
    "Factor",
    "FactorSource",
    "Factors",
    "Manifest",
    "Store",
    "StoreSettings",
    "difference",
    "key_of",
    "open_store",
    "store_settings",
    "use_store",
]
