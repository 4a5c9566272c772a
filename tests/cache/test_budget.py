from __future__ import annotations

import os
from pathlib import Path

import pytest

from rung.cache import Manifest, Store
from rung.cache.budget import remove_unnamed, total_bytes, trim, usages
from rung.cache.layer import Layer
from rung.counters import Count

SIZE = 10_000


@pytest.fixture
def layer(tmp_path: Path) -> Layer:
    """Four entries, last used in the order of their names; `a` and `d` share a blob."""
    store = Store(tmp_path / "store")
    for number, name in enumerate("abcd"):
        blobs = (store.put_blob(name.encode() * SIZE), *([store.put_blob(b"a" * SIZE)] if name == "d" else []))
        store.put(Manifest(kind="pieces", key=name, factors={}, data={}, blobs=blobs))
        os.utime(store.layers[0].manifest_path("pieces", name), (1000 + number, 1000 + number))
    return store.layers[0]


def keys(layer: Layer) -> str:
    return "".join(sorted(key for _, key in layer.names()))


def test_usages_are_sorted_by_last_use(layer: Layer) -> None:
    found = usages(layer)
    assert [usage.manifest.key for usage in found] == ["d", "c", "b", "a"]
    assert 2 * SIZE < found[0].bytes < 2 * SIZE + 1000
    assert 4 * SIZE < total_bytes(layer) < 4 * SIZE + 2000


def test_the_least_recently_used_goes_and_shared_blobs_stay(layer: Layer) -> None:
    assert trim(layer, 3 * SIZE + 2000) == [("pieces", "a"), ("pieces", "b")]
    store = Store(layer.root)
    assert store.get_blob(store.get("pieces", "d").blobs[1]) == b"a" * SIZE  # type: ignore[union-attr]


def test_pins_stay(layer: Layer) -> None:
    layer.write(layer.pin_path("pieces", "a"), b"")
    assert [key for _, key in trim(layer, 0)] == ["b", "c", "d"]
    assert keys(layer) == "a"


def test_a_use_counts(layer: Layer) -> None:
    Store(layer.root).get("pieces", "a")
    assert usages(layer)[0].manifest.key == "a"


def test_a_store_keeps_to_its_budget_and_keeps_what_it_just_wrote(layer: Layer) -> None:
    store = Store(layer.root, budget_bytes=SIZE)
    store.put(Manifest(kind="pieces", key="e", factors={}, data={}, blobs=(store.put_blob(b"e" * 2 * SIZE),)))
    assert keys(layer) == "e"
    assert store.counters[Count.EVICTIONS] == 4


def test_blobs_without_a_manifest_go_when_they_are_old(layer: Layer) -> None:
    digest = Store(layer.root).put_blob(b"x" * 500)
    assert remove_unnamed(layer) == 0
    os.utime(layer.blob_path(digest), (0, 0))
    assert remove_unnamed(layer) == 500
    assert keys(layer) == "abcd"
