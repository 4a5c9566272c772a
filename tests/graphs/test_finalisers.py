"""Finalisers and captures."""

from __future__ import annotations

import gc
import weakref

from rung.graphs.backends.finalisers import finalise, finalisers_parked


class Node:
    other: Node


def test_what_is_given_back_during_a_capture_is_freed_after_it() -> None:
    freed: list[str] = []
    with finalisers_parked():
        with finalisers_parked():
            finalise(lambda: freed.append("graph"))
        assert freed == []
    assert freed == ["graph"]
    finalise(lambda: freed.append("later"))
    assert freed == ["graph", "later"]


def test_the_collector_rests_during_a_capture_and_works_after_it() -> None:
    freed: list[str] = []
    with finalisers_parked():
        assert not gc.isenabled()
        node = Node()
        node.other = node
        weakref.finalize(node, freed.append, "node")
        del node
        for _ in range(10_000):
            Node().other = Node()
        assert freed == []
    assert gc.isenabled()
    gc.collect()
    assert freed == ["node"]


def test_a_failed_capture_frees_what_was_parked() -> None:
    freed: list[str] = []
    try:
        with finalisers_parked():
            finalise(lambda: freed.append("graph"))
            raise ValueError
    except ValueError:
        assert freed == ["graph"]
    assert gc.isenabled()
