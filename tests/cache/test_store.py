from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from rung.cache import Store, difference, key_of
from rung.errors import ArtifactError, CacheError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def files(store: Store) -> list[str]:
    return sorted(str(path.relative_to(store.root)) for path in store.root.rglob("*") if path.is_file())


def test_blob_round_trip(store: Store) -> None:
    digest = store.put_blob(b"data")
    assert store.get_blob(digest) == b"data"
    assert files(store) == [f"blobs/{digest}"]


def test_manifest_round_trip(store: Store) -> None:
    store.put_manifest("plans", "key", {"a": [1, None]})
    assert store.get_manifest("plans", "key") == {"a": [1, None]}


def test_absent_manifest_is_none(store: Store) -> None:
    assert store.get_manifest("plans", "key") is None


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff"])
def test_manifest_that_is_no_object_is_an_error_with_a_hint(text: bytes, store: Store) -> None:
    store.put_manifest("plans", "key", {})
    (store.root / "plans" / "key.json").write_bytes(text)
    with pytest.raises(ArtifactError, match="hint: "):
        store.get_manifest("plans", "key")


@pytest.mark.parametrize("damage", [b"", b"dat", b"datb"])
def test_damaged_blob_is_set_aside_and_can_be_written_again(damage: bytes, store: Store) -> None:
    digest = store.put_blob(b"data")
    (store.root / "blobs" / digest).write_bytes(damage)
    with pytest.raises(ArtifactError, match="damaged"):
        store.get_blob(digest)
    assert files(store) == [f"blobs/{digest}.bad"]
    assert store.put_blob(b"data") == digest
    assert store.get_blob(digest) == b"data"


def test_absent_blob_is_an_error_with_a_hint(store: Store) -> None:
    with pytest.raises(ArtifactError, match=r"(?s)cannot be read.*hint: "):
        store.get_blob("0" * 64)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_full_disk_is_an_error_and_leaves_nothing(call: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(CacheError, match=r"(?s)No space left on device.*hint: "):
        store.put_blob(b"data")
    assert files(store) == []


def test_concurrent_writers_leave_one_blob(store: Store) -> None:
    failures: list[BaseException] = []

    def write() -> None:
        try:
            for _ in range(20):
                store.get_blob(store.put_blob(b"data" * 10000))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(files(store)) == 1


def test_folders_belong_to_the_user_alone(store: Store) -> None:
    store.put_blob(b"data")
    assert (store.root / "blobs").stat().st_mode & 0o077 == 0


def test_key_does_not_depend_on_the_order() -> None:
    assert key_of({"a": 1, "b": [2]}) == key_of({"b": [2], "a": 1})


@pytest.mark.parametrize("other", [{"a": 2}, {"a": "1"}, {"a": 1, "b": None}, {}])
def test_every_factor_counts(other: dict[str, Any]) -> None:
    assert key_of({"a": 1}) != key_of(other)


def test_difference_names_the_factors() -> None:
    assert difference({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 5, "d": 4}) == {"b": (2, 5), "c": (3, None), "d": (None, 4)}
