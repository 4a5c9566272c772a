from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rung.cache import Manifest, Store
from rung.cache.bundle import export_bundle, import_bundle
from rung.cache.inspect import find_entry, verify_store
from rung.errors import BundleError, ConfigError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    for name in ("one", "two"):
        store.put(Manifest(kind="pieces", key=name, factors={"name": name}, data={}, blobs=(store.put_blob(name.encode() * 100),)))
    return store


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["bundle.tar", "bundle.tar.gz", "bundle.tar.xz"])
def test_a_bundle_is_the_store_again(name: str, store: Store, tmp_path: Path) -> None:
    summary = export_bundle(store, tmp_path / name)
    assert (summary.manifests, summary.blobs) == (2, 2)
    assert import_bundle(Store(tmp_path / "other"), tmp_path / name) == summary
    assert files(tmp_path / "other") == files(tmp_path / "store")


def test_equal_stores_give_equal_bundles(store: Store, tmp_path: Path) -> None:
    for name in ("a.tar", "b.tar"):
        export_bundle(store, tmp_path / name)
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()


def test_chosen_entries_bring_their_blobs_alone(store: Store, tmp_path: Path) -> None:
    export_bundle(store, tmp_path / "one.tar", [find_entry(store, "on")[1]])
    import_bundle(Store(tmp_path / "other"), tmp_path / "one.tar")
    assert len(files(tmp_path / "other")) == 2


def add(tar: tarfile.TarFile, name: str, data: bytes = b"x", kind: bytes = tarfile.REGTYPE, link: str = "") -> None:
    member = tarfile.TarInfo(name)
    member.size, member.type, member.linkname = len(data) if kind == tarfile.REGTYPE else 0, kind, link
    tar.addfile(member, io.BytesIO(data))


ATTACKS: dict[str, tuple[Callable[[tarfile.TarFile], None], str]] = {
    "traversal": (lambda tar: add(tar, "../evil"), "no name of a blob"),
    "absolute": (lambda tar: add(tar, "/etc/evil"), "no name of a blob"),
    "traversal in a kind": (lambda tar: add(tar, "pieces/../../evil.json"), "no name of a blob"),
    "hidden": (lambda tar: add(tar, "locks/.evil.json"), "no name of a blob"),
    "symlink": (lambda tar: add(tar, "blobs/" + "0" * 64, kind=tarfile.SYMTYPE, link="/etc/passwd"), "no plain file"),
    "hard link": (lambda tar: add(tar, "blobs/" + "0" * 64, kind=tarfile.LNKTYPE, link="../evil"), "no plain file"),
    "device": (lambda tar: add(tar, "blobs/" + "0" * 64, kind=tarfile.CHRTYPE), "no plain file"),
    "fifo": (lambda tar: add(tar, "blobs/" + "0" * 64, kind=tarfile.FIFOTYPE), "no plain file"),
    "folder": (lambda tar: add(tar, "blobs", kind=tarfile.DIRTYPE), "no plain file"),
    "wrong hash": (lambda tar: add(tar, "blobs/" + "0" * 64), "damaged"),
    "no manifest": (lambda tar: add(tar, "pieces/key.json", b"{}"), "damaged"),
    "missing blob": (
        lambda tar: add(tar, "pieces/key.json", Manifest(kind="pieces", key="key", factors={}, data={}, blobs=("0" * 64,)).to_bytes()),
        "names a blob that is not in the bundle",
    ),
    "large": (lambda tar: add(tar, "blobs/" + "0" * 64, b"x" * 2000), "above the limit"),
    "many": (lambda tar: [add(tar, f"blobs/{n:064}", b"x" * 900) for n in range(5)] and None, "above the limit|damaged"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_no_bundle_holds_is_refused_and_nothing_is_taken(attack: str, store: Store, tmp_path: Path) -> None:
    export_bundle(store, tmp_path / "bundle.tar")
    with tarfile.open(tmp_path / "bundle.tar", "a") as tar:
        ATTACKS[attack][0](tar)
    with pytest.raises(BundleError, match=ATTACKS[attack][1]):
        import_bundle(Store(tmp_path / "other"), tmp_path / "bundle.tar", max_member_bytes=1500, max_total_bytes=3000)
    assert not (tmp_path / "other").exists()
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("data", [b"", b"no tar", b"\x1f\x8b\x08half"])
def test_other_files_are_refused(data: bytes, store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(BundleError, match="hint: "):
        import_bundle(store, tmp_path / "file")


def test_a_tar_without_an_index_is_refused(store: Store, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "file", "w") as tar:
        add(tar, "blobs/" + "0" * 64)
    with pytest.raises(BundleError, match="no bundle of format 1"):
        import_bundle(store, tmp_path / "file")


def test_a_damaged_store_is_not_exported(store: Store, tmp_path: Path) -> None:
    next((tmp_path / "store" / "blobs").iterdir()).write_bytes(b"bad")
    with pytest.raises(Exception, match="damaged"):
        export_bundle(store, tmp_path / "bundle.tar")
    assert not list(tmp_path.glob("*bundle*"))


def test_verify_finds_what_is_damaged_or_gone(store: Store, tmp_path: Path) -> None:
    assert list(verify_store(store)) == [None] * 4
    two = find_entry(store, "two")[1]
    blob, other = sorted((tmp_path / "store" / "blobs").iterdir())
    blob.write_bytes(b"bad")
    other.unlink()
    (tmp_path / "store" / "pieces" / "one.json").write_bytes(b"{}")
    reasons = sorted(problem.reason for problem in verify_store(store) if problem is not None)
    assert len(reasons) == 2 + (other.name in two.blobs)  # a blob that only the damaged manifest named is missed by nobody
    assert any("manifest pieces/one is damaged" in reason for reason in reasons)


@pytest.mark.parametrize("text", ["", "x", "pieces/", "plans/one"])
def test_a_key_that_names_nothing_is_refused(text: str, store: Store) -> None:
    with pytest.raises(ConfigError, match="is no beginning of a key"):
        find_entry(store, text)


def test_an_ambiguous_key_is_refused(store: Store) -> None:
    store.put(Manifest(kind="plans", key="one", factors={}, data={}))
    with pytest.raises(ConfigError, match=r"begins 2 keys: p\w+/one, p\w+/one"):
        find_entry(store, "o")
    assert find_entry(store, "plans/o")[1].kind == "plans"
