from __future__ import annotations

import pytest
import torch

from rung.passes.kernels import tiles as tables
from rung.passes.kernels.fp8_launches import _summed_size
from rung.passes.kernels.fp8_product import Weight, product_tiles
from rung.passes.kernels.launches import row_warps
from rung.passes.kernels.tiles import BF16, Dtypes, most_rows, row_cases, say_rows, tiles_for

SHAPES = [(6144, 4096, ""), (4096, 4096, ""), (14336, 4096, "silu"), (4096, 14336, ""), (128256, 4096, "")]
SHAPES += [(1024, 4096, "")]
DTYPES = [BF16, Dtypes(weights=True), Dtypes(True, True), Dtypes(True, True, True)]
SHAPES += [(960, 576, ""), (576, 576, ""), (1536, 576, "silu"), (576, 1536, ""), (49152, 576, ""), (53248, 16384, "silu"), (7, 33, "gelu")]


@pytest.mark.parametrize(("n", "k", "activation"), SHAPES)
@pytest.mark.parametrize("splittable", [False, True])
@pytest.mark.parametrize("fp8", DTYPES, ids=str)
def test_every_number_of_rows_has_an_answer(n: int, k: int, activation: str, splittable: bool, fp8: Dtypes) -> None:
    most = most_rows(n, k, activation=activation, splittable=splittable, fp8=fp8)
    for rows in range(1, 600):
        tiles = tiles_for(rows, n, k, activation=activation, splittable=splittable, fp8=fp8)
        assert tiles is None or rows <= most
        if tiles is None:
            assert rows > 64 or rows > most  # between two kernels of ours cuBLAS may be better
            continue
        assert tiles.block_m == 1 or not fp8.squares or tiles.block_k <= 128
        assert (tiles.block_m == 1) == (rows == 1)  # the kernel for one row is the one that norms
        assert rows <= tiles.block_m or not tiles.shares_k
        assert tiles.splits == 1 or (splittable and rows > 1 and not activation)
        nbytes = 1 if fp8.rows and tiles.block_m > 1 else 2
        staged = (tiles.block_m + tiles.block_n * (2 if activation else 1)) * tiles.block_k * nbytes * tiles.num_stages
        assert rows == 1 or staged <= 227 * 1024  # shared memory of a block on 9.0


def test_without_programmatic_launches_nothing_is_fetched_ahead() -> None:
    tiles = tiles_for(8, 4096, 4096, programmatic=False)
    assert tiles is not None
    assert tiles.prefetch == -1


@pytest.mark.parametrize("maximum", [1, 20, 209, 256, 2048])
@pytest.mark.parametrize("splittable", [False, True])
@pytest.mark.parametrize("fp8", DTYPES, ids=str)
def test_few_numbers_of_rows_take_every_kernel(maximum: int, splittable: bool, fp8: Dtypes) -> None:
    cases = row_cases(maximum)
    assert max(cases) == maximum
    assert len(cases) <= 10
    for n, k, activation in SHAPES:
        named = {"activation": activation, "splittable": splittable, "fp8": fp8}
        taken = {tiles_for(rows, n, k, **named) for rows in cases}
        assert {tiles_for(rows, n, k, **named) for rows in range(1, maximum + 1)} == taken  # None, which is cuBLAS, among them


def test_a_long_product_of_few_outputs_is_left_to_cublas_unless_its_k_is_shared() -> None:
    """Keys or values of an 8B at 64 rows: 32 programs would go through 4096 numbers each."""
    assert most_rows(1024, 4096) == 16
    assert tiles_for(64, 1024, 4096) is None
    shared = tiles_for(64, 1024, 4096, splittable=True)
    assert shared is not None
    assert shared.splits == 4
    assert most_rows(1024, 3072) == 256  # measured: no loss


def test_few_rows_of_small_weights_have_tiles_of_eight_rows_in_bf16() -> None:
    for n, k, activation in ((960, 576, ""), (1536, 576, "silu")):
        for rows, block_m in ((1, 1), (2, 8), (8, 8), (9, 16)):
            found = tiles_for(rows, n, k, activation=activation)
            assert found is not None
            assert found.block_m == block_m
        found = tiles_for(8, n, k, activation=activation, fp8=Dtypes(True, True))
        assert found is not None
        assert found.block_m == 16
    down = tiles_for(8, 576, 1536, splittable=True)
    assert down is not None
    assert (down.block_m, down.splits) == (8, 4)


@pytest.mark.parametrize("splittable", [False, True])
def test_k_is_shared_by_clusters_where_they_come_to_one_round(splittable: bool) -> None:
    def rows_of(n: int, k: int, fp8: Dtypes) -> list[int]:
        ends = (16, 17, 64, 65, 128, 129, 192, 193, 256, 257)
        found = [(rows, tiles_for(rows, n, k, splittable=splittable, fp8=fp8)) for rows in ends]
        return [rows for rows, tiles in found if tiles is not None and tiles.shares_k]

    e4m3 = Dtypes(True, True)
    for n, k in ((4096, 4096), (4096, 14336), (3584, 18944)):
        assert rows_of(n, k, BF16) == [17, 64, 129, 192]
        assert rows_of(n, k, e4m3) == [17, 64, 65, 128, *([129, 192, 193, 256] if k > 4096 else [])]
    for n, k, fp8 in ((6144, 4096, BF16), (6144, 4096, e4m3), (4096, 1024, BF16), (2048, 8192, e4m3), (5120, 5120, e4m3)):
        assert rows_of(n, k, fp8) == []
    for fp8 in (Dtypes(weights=True), Dtypes(True, True, squares=True)):
        assert rows_of(4096, 4096, fp8) == []
    assert not any(tiles.shares_k for rows in (128, 129) if (tiles := tiles_for(rows, 4096, 4096, activation="silu")) is not None)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("splittable", [False, True])
@pytest.mark.parametrize("fp8", DTYPES, ids=str)
def test_what_is_said_of_rows_is_what_they_take(wide: bool, splittable: bool, fp8: Dtypes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "why_not_wide", lambda *tensors: None if wide else "a test")
    for n, k, activation in SHAPES:
        named = {"activation": activation, "splittable": splittable, "fp8": fp8}
        found = {rows for rows in range(2, 600) if tiles_for(rows, n, k, wide=wide, **named) is not None}
        said = say_rows(torch.empty(n * (2 if activation else 1), k, device="meta"), None, **named).partition(" rows")[0]
        spans = [span.removeprefix("to ").split(" to ") for span in said.split(" and ")]
        assert {rows for span in spans for rows in range(2 if len(span) == 1 else int(span[0]), int(span[-1]) + 1)} == found


def test_where_the_wide_kernels_are_refused_tiles_of_triton_go_on() -> None:
    for rows in (64, 65, 128, 129, 256):
        assert (with_them := tiles_for(rows, 4096, 14336, splittable=True, fp8=Dtypes(True, True))) is not None
        assert (without := tiles_for(rows, 4096, 14336, splittable=True, fp8=Dtypes(True, True), wide=False)) is not None
        assert (with_them.wide > 0, without.wide) == (True, 0)
    weight = torch.empty(4096, 14336, dtype=torch.float8_e4m3fn, device="meta")
    given = Weight(weight, torch.empty(4096, device="meta"), None, torch.empty(4096, dtype=torch.bfloat16, device="meta"))
    found = product_tiles(128, given, "", splittable=True)
    assert found is not None
    assert not found.wide
    assert product_tiles(128, given, "") is None  # cuBLAS


@pytest.mark.parametrize(
    ("rows", "n", "parts", "warps", "quantised"),
    [(8, 4096, 2, 8, 16), (64, 4096, 1, 8, 8), (96, 4096, 1, 8, 8), (97, 4096, 1, 32, 32), (65, 4096, 2, 32, 32), (256, 4096, 1, 32, 32),
     (257, 4096, 1, 8, 8), (256, 2048, 2, 4, 4), (8192, 16384, 1, 8, 16)],
)  # fmt: skip
def test_norms_have_many_warps_where_rows_are_many_and_not_too_many(rows: int, n: int, parts: int, warps: int, quantised: int) -> None:
    assert row_warps(rows, n, parts) == warps
    assert _summed_size(rows, n, parts)["num_warps"] == quantised
