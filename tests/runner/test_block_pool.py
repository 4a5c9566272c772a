from __future__ import annotations

import pytest

from rung.errors import InternalError
from rung.runner.block_pool import BlockPool


def test_the_null_block_is_never_given_out() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    assert blocks == [1, 2, 3, 4]
    assert pool.allocate(1) is None
    pool.free(blocks)
    with pytest.raises(InternalError, match="block 2 is freed but nobody owns it"):
        pool.free([2])
    with pytest.raises(InternalError, match="block 0 is freed"):
        pool.free([0])


def test_a_kept_block_is_found_until_it_is_given_out_again() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    pool.keep(1, b"one")
    pool.free([1, 2])
    assert pool.find(b"one") == 1
    assert pool.allocate(1) == [2]
    assert pool.find(b"one") == 1
    assert pool.allocate(1) == [1]
    assert (pool.find(b"one"), pool.num_kept) == (None, 0)


def test_the_least_recently_freed_goes_first_and_the_end_of_a_request_before_its_beginning() -> None:
    pool = BlockPool(7)
    pool.allocate(6)
    for block in (1, 2, 3, 4):
        pool.keep(block, bytes([block]))
    pool.free([3, 4])
    pool.free([1, 2])
    pool.free([5, 6])
    assert [pool.allocate(1) for _ in range(6)] == [[5], [6], [4], [3], [2], [1]]


def test_a_shared_block_is_free_when_its_last_owner_has_gone() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    pool.keep(1, b"one")
    pool.share(1)
    pool.free([1])
    assert pool.num_free == 1
    pool.free([1])
    assert pool.num_free == 2
    pool.share(1)
    assert pool.num_free == 1
    assert pool.allocate(2) is None


def test_the_first_block_of_a_key_stays() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    pool.keep(1, b"one")
    pool.keep(2, b"one")
    pool.free([1, 2])
    assert pool.allocate(1) == [2]
    assert pool.find(b"one") == 1


def test_forgotten_blocks_are_not_found() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    pool.keep(1, b"one")
    pool.forget_all()
    pool.free([1])
    assert pool.find(b"one") is None
