from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from rung.cache import Manifest, Store
from rung.errors import ConfigError
from rung.launch.choices import choice_entry
from tests.cli.conftest import refused

Run = Callable[..., Result]


@pytest.fixture
def store(rung_cache_dir: Path) -> Store:
    store = Store(rung_cache_dir)
    for number, name in enumerate(("aaa", "abb", "ccc")):
        blobs = (store.put_blob(name.encode() * 1000),)
        factors = {"torch": "2", "size": number, "deep": {"eps": number // 2}}
        store.put(Manifest(kind="pieces", key=name, factors=factors, data={}, blobs=blobs, seconds={"compile": 2.0}, title=f"net {name}"))
    store.log("miss", "plans", "key", "torch: 1 -> 2")
    return store


def parsed(result: Result) -> object:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_ls(rung: Run, store: Store) -> None:
    rows = parsed(rung("cache", "ls", "--kind", "pieces", "--json"))
    assert [(row["key"], row["title"], row["seconds"], row["pinned"]) for row in rows] == [  # type: ignore[attr-defined]
        (name, f"net {name}", 2.0, False) for name in ("ccc", "abb", "aaa")
    ]
    assert "net abb" in rung("cache", "ls").stdout


def test_show_names_the_factors_in_order(rung: Run, store: Store) -> None:
    shown = parsed(rung("cache", "show", "c", "--json"))
    assert list(shown["factors"]) == ["torch", "size", "deep"]  # type: ignore[index]
    assert "compile 2.00 s" in rung("cache", "show", "c").stdout


def test_diff_of_two_and_with_the_nearest(rung: Run, store: Store) -> None:
    two = parsed(rung("cache", "diff", "aa", "c", "--json"))
    assert two["factors"] == {"size": [0, 2], "deep.eps": [0, 1]}  # type: ignore[index]
    assert parsed(rung("cache", "diff", "aa", "--json"))["second"] == "abb"  # type: ignore[index]
    assert "deep.eps" in rung("cache", "diff", "aa", "c").stdout


def test_explain_shows_the_latest_misses(rung: Run, store: Store) -> None:
    (line,) = parsed(rung("cache", "explain", "--json"))  # type: ignore[misc]
    assert (line["event"], line["why"]) == ("miss", "torch: 1 -> 2")
    assert "torch: 1 -> 2" in rung("cache", "explain").stdout


def test_verify_ends_with_1_on_damage(rung: Run, store: Store, rung_cache_dir: Path) -> None:
    assert "6 files, 0 damaged" in rung("cache", "verify").stdout
    next((rung_cache_dir / "blobs").iterdir()).write_bytes(b"bad")
    result = rung("cache", "verify", "--json")
    assert result.exit_code == 1
    assert "is damaged" in json.loads(result.stdout)["problems"][0]["reason"]


def test_prune_pin_and_stat(rung: Run, store: Store) -> None:
    assert parsed(rung("cache", "pin", "aaa", "--json"))["entries"] == [["pieces", "aaa"]]  # type: ignore[index]
    assert parsed(rung("cache", "prune", "--bytes", "1", "--dry-run", "--json"))["removed"] == [["pieces", "abb"], ["pieces", "ccc"]]  # type: ignore[index]
    assert parsed(rung("cache", "stat", "--json"))["layers"][0]["entries"] == 3  # type: ignore[index]
    rung("cache", "prune", "--bytes", "1")
    (layer,) = parsed(rung("cache", "stat", "--json"))["layers"]  # type: ignore[index]
    assert (layer["entries"], layer["pinned"], layer["blobs"]) == (1, 1, 1)
    rung("cache", "pin", "aaa", "--remove")
    assert "1 entries removed" in rung("cache", "prune", "--older-than", "0").stdout


def test_export_import_and_clear(rung: Run, store: Store, tmp_path: Path) -> None:
    assert parsed(rung("cache", "export", tmp_path / "b.tar.gz", "--json"))["blobs"] == 3  # type: ignore[index]
    assert parsed(rung("cache", "--store", tmp_path / "other", "import", tmp_path / "b.tar.gz", "--json"))["manifests"] == 3  # type: ignore[index]
    assert rung("cache", "clear").exit_code == 1  # nobody answers
    assert parsed(rung("cache", "clear", "--yes", "--json"))["removed"] == 3  # type: ignore[index]
    assert parsed(rung("cache", "ls", "--json")) == []


@pytest.mark.parametrize("command", [("prune",), ("clear", "--yes"), ("pin", "aaa"), ("import", "file")])
def test_a_read_only_store_is_not_changed(command: tuple[str, ...], rung: Run, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNG_CACHE_MODE", "read-only")
    assert "read-only" in refused(rung("cache", *command))


def test_a_store_that_others_may_write_is_refused(rung: Run, store: Store, rung_cache_dir: Path) -> None:
    rung_cache_dir.chmod(0o777)
    assert "may be written by everybody" in refused(rung("cache", "ls"))
    assert rung("cache", "--trust-store", "ls").exit_code == 0


def test_a_bundle_that_cannot_be_written_is_refused(rung: Run, store: Store, tmp_path: Path) -> None:
    assert "there is no folder" in refused(rung("cache", "export", tmp_path / "no" / "b.tar"))


def test_a_piece_that_only_inductor_can_load_says_why(rung: Run, store: Store) -> None:
    store.put(Manifest(kind="pieces", key="odd", factors={}, data={"stock_only": "name: an_unknown_name"}))
    assert "only Inductor's loader can run it (name: an_unknown_name)" in rung("cache", "show", "odd").stdout
    assert "Inductor's loader" not in rung("cache", "show", "aaa").stdout


def test_measured_choices_become_a_file(rung: Run, store: Store, tmp_path: Path) -> None:
    store.put(choice_entry(["a", "b"], "a GPU", "b", [2.0, 1.0]))
    assert "1 choices written" in rung("cache", "tuning", tmp_path / "tuning.json").stdout
    assert parsed(rung("cache", "tuning", tmp_path / "tuning.json", "--json")) == {"choices": 1}
    found = json.loads((tmp_path / "tuning.json").read_text())
    assert found == {"format": 1, "choices": [{"codes": ["a", "b"], "device": "a GPU", "code": "b", "microseconds": [2.0, 1.0]}]}
    assert "there is no folder" in refused(rung("cache", "tuning", tmp_path / "no" / "tuning.json"))


def test_explain_takes_the_kind_with_the_key(rung: Run, store: Store) -> None:
    assert parsed(rung("cache", "explain", "plans/ke", "--json"))[0]["key"] == "key"  # type: ignore[index]


# --- what is refused -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["5X", "-1"])
@pytest.mark.parametrize("words", [("prune", "--bytes"), ("import", "b.tar", "--max-member")], ids=lambda words: words[0])
def test_what_is_no_size_is_refused_by_the_name_of_the_option(words: tuple[str, ...], size: str, rung: Run, store: Store) -> None:
    assert f"{words[-1]}: {size!r} is no size" in refused(rung("cache", *words, size))


@pytest.mark.parametrize("name", ["RUNG_CACHE_MODE", "RUNG_CACHE_BYTES", "RUNG_CACHE_TRUST"])
def test_a_wrong_variable_is_refused(name: str, rung: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "bogus")
    assert name in refused(rung("cache", "stat"))


@pytest.mark.parametrize("place", [("cache", "--debug", "prune"), ("cache", "prune", "--debug")], ids=" ".join)
def test_debug_shows_the_error_of_an_option(place: tuple[str, ...], rung: Run, store: Store) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        rung(*place, "--bytes", "5X")


@pytest.mark.parametrize("key", ["zzz", "pieces/key"])
def test_a_key_that_the_log_has_not_is_refused(key: str, rung: Run, store: Store) -> None:
    assert f"no miss, damage or eviction of {key!r}" in refused(rung("cache", "explain", key))


COMMANDS = ["ls", "show a", "diff a", "explain", "verify", "prune", "pin a", "stat", "export b.tar", "tuning t.json", "clear --yes"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_store_that_is_not_there_is_refused(command: str, rung: Run, tmp_path: Path) -> None:
    assert "--store: there is no folder" in refused(rung("cache", "--store", tmp_path / "none", *command.split()))
    assert not (tmp_path / "none").exists()


def test_import_makes_the_store(rung: Run, store: Store, tmp_path: Path) -> None:
    rung("cache", "export", tmp_path / "b.tar")
    assert parsed(rung("cache", "--store", tmp_path / "new", "import", tmp_path / "b.tar", "--json"))["manifests"] == 3  # type: ignore[index]
    assert len(parsed(rung("cache", "--store", tmp_path / "new", "ls", "--json"))) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize("words", [(), ("--kind", "kernels")], ids=" ".join)
def test_a_bundle_of_nothing_is_refused(words: tuple[str, ...], rung: Run, tmp_path: Path) -> None:
    assert "nothing to export" in refused(rung("cache", "export", tmp_path / "b.tar", *words))
    assert not (tmp_path / "b.tar").exists()
