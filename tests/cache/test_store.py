"""Blobs, manifests, damage, layers, ownership, a full disk."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rung.cache import Manifest, Store
from rung.cache.disk import PART, Disk, remove_leftovers
from rung.counters import Count
from rung.errors import ArtifactError, CacheError, UntrustedStoreError


def manifest(key: str = "key", **fields: Any) -> Manifest:
    return Manifest(**({"kind": "pieces", "key": key, "factors": {"b": 1, "a": [2, None]}, "data": {"x": 1}, "created": 1.5} | fields))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != "log.jsonl")


def root(store: Store) -> Path:
    return store.layers[0].root


def entry(store: Store, data: bytes = b"data", key: str = "key") -> str:
    digest = store.put_blob(data)
    store.put(manifest(key, blobs=(digest,)))
    return digest


def test_blob_round_trip(store: Store) -> None:
    digest = store.put_blob(b"data")
    assert store.get_blob(digest) == b"data"
    assert files(root(store)) == [f"blobs/{digest}"]


def test_manifest_round_trip_keeps_the_order_of_factors(store: Store) -> None:
    wanted = manifest(blobs=("0" * 64,), seconds={"compile": 1.25}, title="Net")
    store.put(wanted)
    assert store.get("pieces", "key") == wanted
    assert list(store.get("pieces", "key").factors) == ["b", "a"]  # type: ignore[union-attr]


def test_absent_manifest_is_none(store: Store) -> None:
    assert store.get("pieces", "key") is None


def test_every_flipped_byte_of_a_manifest_is_noticed() -> None:
    good = manifest(blobs=("0" * 64,)).to_bytes()
    for index in range(len(good)):
        bad = good[:index] + bytes([good[index] ^ 1]) + good[index + 1 :]
        with pytest.raises(ArtifactError):
            Manifest.from_bytes(bad, "pieces", "key")


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b'{"a": 1}'])
def test_damaged_manifest_is_set_aside_and_counted(text: bytes, store: Store) -> None:
    store.put(manifest())
    (root(store) / "pieces" / "key.json").write_bytes(text)
    with pytest.raises(ArtifactError, match="hint: "):
        store.get("pieces", "key")
    assert files(root(store)) == ["quarantine/pieces.key.json"]
    assert store.counters[Count.QUARANTINED] == 1
    assert store.get("pieces", "key") is None


def test_the_manifest_of_another_key_is_refused(store: Store) -> None:
    store.put(manifest("other"))
    os.rename(root(store) / "pieces" / "other.json", root(store) / "pieces" / "key.json")
    with pytest.raises(ArtifactError, match="holds pieces/other"):
        store.get("pieces", "key")


@pytest.mark.parametrize("position", range(0, 4000, 307))
def test_a_flipped_byte_of_a_blob_is_noticed_and_the_blob_can_be_written_again(position: int, store: Store) -> None:
    data = bytes(range(250)) * 16
    digest = store.put_blob(data)
    (root(store) / "blobs" / digest).write_bytes(data[:position] + bytes([data[position] ^ 64]) + data[position + 1 :])
    with pytest.raises(ArtifactError, match="damaged"):
        store.get_blob(digest)
    assert files(root(store)) == [f"quarantine/blobs.{digest}"]
    assert store.get_blob(store.put_blob(data)) == data


@pytest.mark.parametrize("damage", [b"", b"dat", b"datab"])
def test_a_blob_of_another_size_is_damaged(damage: bytes, store: Store) -> None:
    digest = store.put_blob(b"data")
    (root(store) / "blobs" / digest).write_bytes(damage)
    with pytest.raises(ArtifactError, match="damaged"):
        store.get_blob(digest)


@pytest.mark.parametrize("how", ["read", "not read"])
@pytest.mark.parametrize("held", [[], ["file"]], ids=["empty", "full"])
def test_a_folder_in_the_place_of_a_file_is_set_aside(how: str, held: list[str], store: Store) -> None:
    for _ in range(2):
        digest = entry(store)
        for path in (root(store) / "blobs" / digest, root(store) / "pieces" / "key.json"):
            path.unlink()
            path.mkdir()
            for name in held:
                (path / name).touch()
        if how == "read":
            with pytest.raises(ArtifactError):
                store.get_blob(digest)
            with pytest.raises(ArtifactError):
                store.get("pieces", "key")
    digest = entry(store)
    assert store.get_blob(digest) == b"data"
    assert store.get("pieces", "key") is not None
    (root(store) / "blobs" / digest).write_bytes(b"dara")
    with pytest.raises(ArtifactError, match="damaged"):
        store.get_blob(digest)
    assert not (root(store) / "blobs" / digest).exists()


def test_absent_blob_is_an_error_with_a_hint(store: Store) -> None:
    with pytest.raises(ArtifactError, match=r"(?s)cannot be read.*hint: "):
        store.get_blob("0" * 64)


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", "a" * 200])
def test_names_cannot_leave_the_store(name: str, store: Store) -> None:
    with pytest.raises(ArtifactError, match="no name of an entry"):
        store.get("pieces", name)
    with pytest.raises(ArtifactError, match="no digest"):
        store.get_blob(name)


# --- writing ---------------------------------------------------------------------------------------------------------------------------


class FullDisk(Disk):
    """Refuses the `number`-th step of a save; a write puts part of its bytes down first."""

    def __init__(self, number: int, code: int = errno.ENOSPC, *, times: int = 10**9) -> None:
        self.left, self.code, self.times, self.refused = number, code, times, ""

    def _step(self, name: str, partly: Callable[[], object] = lambda: None) -> None:
        self.left -= 1
        if self.left < 0 and self.times > 0:
            self.times -= 1
            self.refused = self.refused or name
            partly()
            raise OSError(self.code, os.strerror(self.code))

    def make_folder(self, folder: Path) -> None:
        self._step("make_folder")
        super().make_folder(folder)

    def create(self, folder: Path) -> tuple[int, str]:
        self._step("create")
        return super().create(folder)

    def write(self, descriptor: int, data: bytes) -> None:
        for part in (0, len(data) // 2, len(data) - 1):
            self._step(f"write {part}", lambda part=part: os.write(descriptor, data[:part]))  # type: ignore[misc]
        super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        self._step("sync")
        super().sync(descriptor)

    def rename(self, name: str, path: Path) -> None:
        self._step("rename")
        super().rename(name, path)

    def sync_folder(self, folder: Path) -> None:
        self._step("sync_folder")
        super().sync_folder(folder)


STEPS = ["make_folder", "create", "write 0", "write 2", "write 3", "sync", "rename", "sync_folder"]


@pytest.mark.parametrize("number", range(2 * len(STEPS)))
def test_a_disk_that_is_full_at_any_step_leaves_no_half_entry(number: int, tmp_path: Path) -> None:
    disk = FullDisk(number)
    with pytest.raises(CacheError, match=r"(?s)No space left on device.*hint: "):
        entry(Store(tmp_path / "store", disk=disk))
    assert disk.refused.partition(" ")[0] == STEPS[number % len(STEPS)].partition(" ")[0]
    assert not [name for name in files(tmp_path / "store") if PART in name]
    store = Store(tmp_path / "store")
    found = store.get("pieces", "key")
    assert found is None or store.get_blob(found.blobs[0]) == b"data"
    assert store.get_blob(entry(store)) == b"data"


@pytest.mark.parametrize("code", [errno.EBUSY, errno.ESTALE])
def test_passing_errors_of_shared_folders_are_tried_again(code: int, tmp_path: Path) -> None:
    store = Store(tmp_path / "store", disk=FullDisk(6, code, times=2))
    assert store.get_blob(store.put_blob(b"data")) == b"data"
    assert len(files(tmp_path / "store")) == 1


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    (tmp_path / f"{PART}dead").write_bytes(b"half")
    descriptor, living = Disk().create(tmp_path)
    assert remove_leftovers(tmp_path, older_than_seconds=0) == 1
    assert files(tmp_path) == [Path(living).name]
    os.close(descriptor)


def test_concurrent_writers_leave_one_blob(store: Store) -> None:
    failures: list[BaseException] = []

    def write() -> None:
        try:
            for _ in range(5):
                store.get_blob(store.put_blob(b"data" * 10000))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(files(root(store))) == 1


# --- layers ----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def base(tmp_path: Path) -> Path:
    entry(Store(tmp_path / "base"))
    return tmp_path / "base"


def test_a_base_is_read_and_never_written(base: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in base.rglob("*")}
    store = Store(tmp_path / "store", bases=[base])
    assert store.get_blob(store.get("pieces", "key").blobs[0]) == b"data"  # type: ignore[union-attr]
    store.put_blob(b"data")
    store.put(manifest("mine"))
    assert {path: path.stat().st_mtime_ns for path in base.rglob("*")} == before
    assert files(tmp_path / "store") == ["pieces/mine.json"]


def test_damage_in_a_base_is_mended_above_it(base: Path, tmp_path: Path) -> None:
    (blob,) = (base / "blobs").iterdir()
    blob.write_bytes(b"dara")
    store = Store(tmp_path / "store", bases=[base])
    with pytest.raises(ArtifactError, match="damaged"):
        store.get_blob(blob.name)
    store.put_blob(b"data")
    assert store.get_blob(blob.name) == b"data"
    assert blob.read_bytes() == b"dara"


def test_a_read_only_store_changes_nothing(base: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in base.rglob("*")}
    store = Store(base, read_only=True)
    assert store.get("pieces", "key") is not None
    with store.lock("pieces", "key") as again:
        assert not again
    store.put_blob(b"new")
    store.put(manifest("new"))
    store.log("hit", "pieces", "key")
    assert {path: path.stat().st_mtime_ns for path in base.rglob("*")} == before


def test_a_store_that_is_off_touches_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a file was touched")

    for name in ("open", "stat", "mkdir", "replace", "unlink"):
        monkeypatch.setattr(os, name, refuse)
    store = Store(None)
    digest = store.put_blob(b"data")
    store.put(manifest())
    with store.lock("pieces", "key"):
        assert store.get("pieces", "key") is None
    store.log("hit", "pieces", "key")
    with pytest.raises(ArtifactError):
        store.get_blob(digest)


# --- trust -----------------------------------------------------------------------------------------------------------------------------


def test_folders_belong_to_the_user_alone(store: Store) -> None:
    store.put_blob(b"data")
    assert (root(store) / "blobs").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("where", [".", "blobs", "pieces", "pieces/key.json", ".."])
def test_what_everybody_may_write_is_refused(where: str, store: Store) -> None:
    digest = entry(store)
    path = root(store) / where
    path.chmod(path.stat().st_mode | 0o002)
    fresh = Store(root(store))
    with pytest.raises(UntrustedStoreError, match=r"(?s)may be written by everybody.*hint: .*RUNG_CACHE_TRUST"):
        (fresh.get("pieces", "key"), fresh.get_blob(digest))
    trusting = Store(root(store), any_owner=True)
    assert trusting.get("pieces", "key") is not None
    path.chmod(0o700)


def test_what_another_user_owns_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = entry(store)
    me = os.geteuid()
    os_stat = os.fstat

    def foreign(descriptor: int) -> os.stat_result:
        found = list(os_stat(descriptor))
        found[4] = me + 1
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", foreign)
    with pytest.raises(UntrustedStoreError, match=f"belongs to user {me + 1}"):
        Store(root(store)).get_blob(digest)


def test_links_and_pipes_are_no_blobs(store: Store, tmp_path: Path) -> None:
    digest = store.put_blob(b"data")
    blob = root(store) / "blobs" / digest
    (tmp_path / "elsewhere").write_bytes(b"data")
    for make in (lambda: blob.symlink_to(tmp_path / "elsewhere"), lambda: os.mkfifo(blob)):
        blob.unlink()
        make()
        with pytest.raises(ArtifactError, match="cannot be read"):
            store.get_blob(digest)
        store.put_blob(b"data")


# --- misses ----------------------------------------------------------------------------------------------------------------------------


def test_a_miss_names_the_factors_that_differ_from_the_nearest_entry(store: Store) -> None:
    store.put(manifest("far", factors={"torch": "1", "python": "2", "module": {"eps": 3}}, title="Net"))
    store.put(manifest("near", factors={"torch": "1", "python": "3", "module": {"eps": 3, "dim": 8}}, title="Net"))
    why = store.explain_miss("pieces", {"torch": "1", "python": "3", "module": {"eps": 4, "dim": 8}}, title="Net")
    assert why == "module.eps: 3 -> 4"
    assert store.explain_miss("pieces", {}, title="Other") == "the store has no pieces of Other"
