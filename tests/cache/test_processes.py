"""Several processes and one store: races, locks of the dead, kills in the middle of a save."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cache import scripts


def names(root: Path) -> set[str]:
    return {str(path.relative_to(root).parts[0]) for path in root.rglob("*") if path.is_file()}


def test_eight_processes_build_one_key_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    (codes,) = scripts.run(scripts.RACE, tmp_path / "store", str(log), "kept")
    assert json.loads(codes) == [0] * 8
    assert log.read_text() == "built\n"
    assert names(tmp_path / "store") == {"blobs", "pieces"}


def test_a_folder_that_somebody_removes_costs_builds_and_no_failure(tmp_path: Path) -> None:
    (codes,) = scripts.run(scripts.RACE, tmp_path / "store", str(tmp_path / "log"), "removed")
    assert json.loads(codes) == [0] * 9


def test_the_lock_of_a_dead_process_is_free_and_waiting_ends(tmp_path: Path) -> None:
    lines = scripts.run(scripts.HOLDER, tmp_path / "store")
    assert lines == ["held", "gave up True", "healed True"]


def test_fifty_kills_lose_nothing_and_the_next_run_heals(tmp_path: Path) -> None:
    ((line),) = scripts.run(scripts.KILL, tmp_path / "store")
    killed, half, files = map(int, line.split())
    assert killed >= 20, "most children should die in the middle"
    assert half >= 10
    assert files == 52 * 4
    assert names(tmp_path / "store") == {"blobs", "pieces"}
