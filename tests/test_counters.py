from __future__ import annotations

import gc
import threading

import pytest

import rung
from rung.counters import Count, Counters


def test_a_count_that_nothing_added_to_reads_0_and_is_not_listed() -> None:
    counters = Counters()
    assert counters[Count.REPLAYS] == 0
    assert list(counters) == []
    assert Count.REPLAYS not in counters


def test_counts_add_up() -> None:
    counters = Counters()
    counters.add(Count.REPLAYS)
    counters.add(Count.REPLAYS, 4)
    assert counters[Count.REPLAYS] == 5
    assert Count.REPLAYS in counters
    assert len(counters) == 1


def test_an_enum_member_and_its_value_name_the_same_count() -> None:
    counters = Counters()
    counters.add(Count.DYNAMO_TRACES)
    assert counters["dynamo_traces"] == 1
    assert counters.snapshot() == {"dynamo_traces": 1}


def test_a_snapshot_does_not_follow_later_counts() -> None:
    counters = Counters()
    before = counters.snapshot()
    counters.add("captures")
    assert before == {}


def test_expect_passes_when_every_named_count_grew_by_the_amount() -> None:
    counters = Counters()
    counters.add("replays", 7)
    with counters.expect(replays=2, captures=0):
        counters.add("replays", 2)
        counters.add("unnamed")


def test_expect_names_what_was_expected_and_what_came() -> None:
    counters = Counters()
    with pytest.raises(AssertionError, match=r"captures expected \+1, came \+3"), counters.expect(captures=1):
        counters.add("captures", 3)


def test_the_error_of_the_block_wins_over_wrong_counts() -> None:
    with pytest.raises(ZeroDivisionError), Counters().expect(captures=1):
        1 / 0  # noqa: B018  (raises on purpose)


def test_two_objects_do_not_share_counts() -> None:
    first, second = Counters(), Counters()
    first.add("captures")
    assert second["captures"] == 0
    assert first != second


def test_the_sum_covers_all_objects_living_and_gone() -> None:
    before = rung.counters["test_sum"]
    living, gone = Counters(), Counters()
    living.add("test_sum", 2)
    gone.add("test_sum", 5)
    del gone
    gc.collect()
    assert rung.counters["test_sum"] - before == 7


def test_the_sum_is_read_only() -> None:
    with pytest.raises(TypeError, match="read-only"):
        rung.counters.add("captures")


def test_threads_lose_no_count() -> None:
    counters = Counters()
    threads = [threading.Thread(target=lambda: [counters.add("replays") for _ in range(2000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters["replays"] == 8000


def test_the_sum_can_be_read_while_another_thread_adds_new_names() -> None:
    counters, errors = Counters(), []
    counters.add("first")

    def read() -> None:
        try:
            for _ in range(300):
                rung.counters.snapshot()
        except RuntimeError as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    number = 0
    while reader.is_alive():
        number += 1
        counters.add(f"name_{number % 3000}")
    assert errors == []


def test_an_object_that_dies_while_the_sum_is_read_is_counted_once() -> None:
    before = rung.counters["test_dying"]
    threshold = gc.get_threshold()
    try:
        gc.set_threshold(1)  # collect at almost every allocation, so also inside the read
        for _ in range(50):
            cycle: list[object] = [Counters()]
            cycle[0].add("test_dying")  # type: ignore[attr-defined]
            cycle.append(cycle)
            del cycle
            rung.counters.snapshot()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert rung.counters["test_dying"] - before == 50
