"""Collections around a compile."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from rung.compile.garbage import without_collections

MANY = 3 * gc.get_threshold()[0]  # objects that would be collected several times


class Cycle:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generation of each collection, as they come."""
    found: list[int] = []

    def began(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    gc.collect()
    gc.callbacks.append(began)
    yield found
    gc.callbacks.remove(began)


def test_none_runs_inside_and_none_looks_at_what_was_made_there(collections: list[int]) -> None:
    with without_collections():
        made = [Cycle() for _ in range(MANY)]
        assert not gc.isenabled()
    assert gc.isenabled()
    assert collections == []
    assert gc.get_count()[0] < MANY  # of young objects
    old = {id(one) for one in gc.get_objects(generation=2)}
    assert all(id(one) in old for one in made)


def test_a_full_collection_frees_it() -> None:
    with without_collections():
        one = Cycle()
        gone = weakref.ref(one)
        del one
    assert gone() is not None
    gc.collect()
    assert gone() is None


def test_what_compile_after_compile_leaves_is_collected() -> None:
    """Nobody collects, and what a compile makes never comes to a young collection."""
    gone: list[weakref.ref[Cycle]] = []
    for _ in range(60):
        with without_collections():
            one = Cycle()
            gone.append(weakref.ref(one))
            del one
        assert sum(ref() is not None for ref in gone) <= 12


def test_what_was_off_stays_off() -> None:
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_frozen_objects_stay_frozen() -> None:
    """In a process of its own: what it freezes is everything."""
    code = (
        "import gc\nfrom rung.compile.garbage import without_collections\ngc.freeze()\nbefore = gc.get_freeze_count()\n"
        "with without_collections():\n    pass\nassert gc.isenabled()\nassert gc.get_freeze_count() == before > 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
