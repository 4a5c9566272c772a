"""Which tiles a product gets, or that cuBLAS computes it. Measured on an H200 with `bench/linear.py --sweep` (docs/performance.md).

Two regimes: matrices above `_SMALL_BYTES` are bound by the bytes of the weights, and want enough of them on their way; smaller ones by
latency, and want short loops and many programs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import itemgetter

import torch

from rung.passes.kernels.launches import Tiles
from rung.passes.kernels.wide import why_not_wide

_SMALL_BYTES = 8 * 2**20
_MANY_COLUMNS = 32768  # a head over the vocabulary
# Small matrices beyond this k, as keys and values of an 8B have them, lose above this number of rows, where there are no parts to share k:
# 32 programs, each with all of k to go through, are a quarter of the device.
_LONG_K, _LONG_K_ROWS = 3072, 16
_SHORT_K = 1024  # small matrices up to this k have the tiles of `_SHORT`

# What a product is ("plain"; "split": its parts may be summed by the kernel behind it; "gated": with an activation), the largest number of
# rows, tiles or None for cuBLAS. In order; above the last cuBLAS.
_Table = tuple[tuple[str, int, Tiles | None], ...]


def _wide(blocks: int, block_k: int, block_n: int = 112, num_stages: int = 5, parts: int = 1) -> Tiles:
    return Tiles(
        block_m=128, block_n=block_n, block_k=block_k, num_warps=9, num_stages=num_stages, splits=parts, prefetch=0, wide=blocks
    )  # fmt: skip


def _sharing(blocks: int, block_k: int, rows: int, num_stages: int) -> Tiles:
    return Tiles(block_m=rows, block_n=64, block_k=block_k, num_warps=9, num_stages=num_stages, prefetch=0, wide=blocks, shares_k=True)


_SMALL: _Table = (
    ("plain", 1, Tiles(block_m=1, block_n=2, block_k=1024, num_warps=4, num_stages=1, prefetch=1024)),
    ("gated", 1, Tiles(block_m=1, block_n=2, block_k=1024, num_warps=4, num_stages=1, prefetch=256)),
    ("plain", 8, Tiles(block_m=16, block_n=16, block_k=256, num_warps=1, num_stages=3, prefetch=256)),
    ("split", 8, Tiles(block_m=8, block_n=16, block_k=64, num_warps=1, num_stages=6, prefetch=256, splits=4, swap=True)),
    ("gated", 8, Tiles(block_m=8, block_n=16, block_k=64, num_warps=1, num_stages=6, prefetch=256, swap=True)),
    ("plain", 16, Tiles(block_m=16, block_n=16, block_k=256, num_warps=1, num_stages=3, prefetch=256)),
    ("split", 16, Tiles(block_m=16, block_n=32, block_k=128, num_warps=2, num_stages=4, prefetch=256, splits=4)),
    ("gated", 16, Tiles(block_m=16, block_n=16, block_k=64, num_warps=1, num_stages=6, prefetch=256, swap=True)),
    ("plain", 256, Tiles(block_m=32, block_n=64, block_k=256, num_warps=4, num_stages=3, prefetch=256, swap=True)),
    ("split", 64, Tiles(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4, prefetch=0, splits=4, swap=True)),
    ("split", 192, Tiles(block_m=32, block_n=64, block_k=256, num_warps=4, num_stages=4, prefetch=256, splits=2, swap=True)),
    ("split", 256, Tiles(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=4, prefetch=0, splits=3)),
    ("gated", 64, Tiles(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4, prefetch=256, swap=True)),
    ("gated", 256, Tiles(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=4, prefetch=256, swap=True)),
)
_SHORTER = {
    ("plain", 1): Tiles(block_m=1, block_n=4, block_k=1024, num_warps=8, num_stages=1, prefetch=256),
    ("plain", 8): Tiles(block_m=8, block_n=16, block_k=128, num_warps=1, num_stages=6, prefetch=256, swap=True),
    ("plain", 16): Tiles(block_m=16, block_n=16, block_k=64, num_warps=1, num_stages=6, prefetch=256),
    ("split", 8): Tiles(block_m=16, block_n=16, block_k=64, num_warps=1, num_stages=3, prefetch=256, splits=4, swap=True),
    ("split", 16): Tiles(block_m=16, block_n=16, block_k=64, num_warps=1, num_stages=3, prefetch=256, splits=4),
    ("split", 192): Tiles(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4, prefetch=256, splits=2, swap=True),
    ("split", 256): Tiles(block_m=32, block_n=64, block_k=256, num_warps=4, num_stages=4, prefetch=0, swap=True),
}
_SHORT: _Table = tuple((kind, most, _SHORTER.get((kind, most), tiles)) for kind, most, tiles in _SMALL)
_LARGE: _Table = (
    ("plain", 1, Tiles(block_m=1, block_n=4, block_k=1024, num_warps=4, num_stages=1, prefetch=256)),
    ("gated", 1, Tiles(block_m=1, block_n=4, block_k=1024, num_warps=4, num_stages=3, prefetch=256)),
    ("plain", 16, Tiles(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=6, prefetch=256, swap=True)),
    ("split", 16, Tiles(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=6, prefetch=256, splits=2, swap=True)),
    ("gated", 16, Tiles(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4, prefetch=256, swap=True)),
    ("plain", 32, Tiles(block_m=32, block_n=64, block_k=128, num_warps=4, num_stages=6, prefetch=256, swap=True)),
    ("split", 32, Tiles(block_m=32, block_n=64, block_k=128, num_warps=4, num_stages=4, prefetch=0, splits=4, swap=True)),
    ("gated", 32, Tiles(block_m=32, block_n=64, block_k=128, num_warps=4, num_stages=4, prefetch=0)),
    ("plain", 64, Tiles(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=6, prefetch=256, swap=True)),
    ("split", 64, Tiles(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=6, prefetch=0, splits=4)),
    ("gated", 64, _wide(1, 64)),
    ("gated", 64, Tiles(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=4, prefetch=256)),  # without the kernels in CUDA C++
    ("gated", 128, _wide(1, 64)),
    ("gated", 208, None),  # cuBLAS has tiles of 192 rows
    ("gated", 256, _wide(2, 64)),  # the weights once for both blocks: less power, which bounds the clock there
)
_HEAD: _Table = (
    ("plain", 1, Tiles(block_m=1, block_n=4, block_k=2048, num_warps=8, num_stages=1, prefetch=-1)),
    ("plain", 16, Tiles(block_m=16, block_n=32, block_k=128, num_warps=2, num_stages=6, prefetch=-1)),
    ("plain", 64, Tiles(block_m=64, block_n=128, block_k=128, num_warps=8, num_stages=4, prefetch=256)),
)
# e4m3 by e4m3, but for one row, which stays in bf16.
_LARGE_FP8: _Table = (
    ("plain", 1, Tiles(block_m=1, block_n=8, block_k=1024, num_warps=4, num_stages=3, prefetch=1024)),
    ("gated", 1, Tiles(block_m=1, block_n=16, block_k=256, num_warps=4, num_stages=3, prefetch=0)),
    ("plain", 16, Tiles(block_m=16, block_n=64, block_k=256, num_warps=4, num_stages=6, prefetch=256, swap=True)),
    ("split", 16, Tiles(block_m=16, block_n=64, block_k=256, num_warps=4, num_stages=6, prefetch=1024, splits=2, swap=True)),
    ("gated", 16, Tiles(block_m=16, block_n=64, block_k=256, num_warps=4, num_stages=4, prefetch=1024)),
    ("plain", 64, Tiles(block_m=64, block_n=64, block_k=256, num_warps=4, num_stages=6, prefetch=256, swap=True)),
    ("plain", 128, None),
    ("plain", 256, _wide(2, 128, 48, 8)),
    ("split", 64, Tiles(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=4, prefetch=0, splits=4)),
    ("split", 256, Tiles(block_m=64, block_n=128, block_k=128, num_warps=8, num_stages=6, prefetch=0)),
    ("gated", 64, _wide(1, 128)),
    ("gated", 64, Tiles(block_m=64, block_n=128, block_k=128, num_warps=4, num_stages=4, prefetch=256)),
    ("gated", 128, _wide(1, 128)),
    ("gated", 256, _wide(2, 128)),
    ("gated", 512, _wide(1, 128)),
)
# For products whose clusters, with 64 outputs each, come to one round of 132 multiprocessors: the number of outputs, the smallest k, and an
# entry that goes before those of the tables above for as many rows; "any" is "plain" or "split".
_PAIRS, _SINGLES = range(3584, 4225), range(5632, 8449)  # of blocks
_SHARING: tuple[tuple[range, int, str, int, Tiles | None], ...] = (
    (_PAIRS, 4096, "any", 32, _sharing(2, 64, 64, 9)),  # from 17 rows on
    (_PAIRS, 4096, "any", 64, _sharing(2, 64, 64, 9)),
    (_PAIRS, 8192, "split", 128, _wide(1, 64, 32, 9, parts=2)),
    (_PAIRS, 4096, "any", 128, None),
    (_PAIRS, 4096, "any", 192, _sharing(2, 64, 192, 7)),
    (_PAIRS, 4096, "split", 256, _wide(2, 64, 64, 6, parts=2)),
)
_SHARING_FP8: tuple[tuple[range, int, str, int, Tiles | None], ...] = (
    (_PAIRS, 4096, "any", 64, _sharing(2, 128, 64, 9)),  # from 17 rows on
    (_PAIRS, 4096, "any", 128, _sharing(2, 128, 128, 9)),
    (_PAIRS, 8192, "any", 192, _sharing(2, 128, 192, 7)),
    (_PAIRS, 4096, "any", 192, _wide(2, 128, 32, 8)),
    (_PAIRS, 8192, "any", 256, _sharing(2, 128, 256, 5)),
    (_SINGLES, 4096, "plain", 128, _wide(1, 128, 48, 8)),
)


@dataclass(frozen=True, slots=True)
class Dtypes:
    """What a product multiplies, beside bf16 by bf16."""

    weights: bool = False  # e4m3
    rows: bool = False  # e4m3, where there are more than one
    squares: bool = False  # a scale for each square of weights


BF16 = Dtypes()


def tiles_for(
    rows: int,
    n: int,
    k: int,
    *,
    activation: str = "",
    splittable: bool = False,
    programmatic: bool = True,
    fp8: Dtypes = BF16,
    wide: bool = True,
) -> Tiles | None:
    """The tiles for a product [rows, k] x [n, k] (n outputs, of which an activation needs two each), or None: cuBLAS.

    `splittable` allows parts to be left for the kernel behind it to sum; `programmatic` allows programmatic launches, `wide` the kernels
    in CUDA C++: ask without where `why_not_wide` refuses what was found with."""
    for most, tiles in _allowed(n, k, activation, splittable and rows > 1, fp8, wide):
        if rows <= most:
            return tiles if programmatic or tiles is None else replace(tiles, prefetch=-1)
    return None


def row_cases(maximum: int) -> tuple[int, ...]:
    """Numbers of rows up to `maximum` that, for a product of any size, together take all the kernels that any number up to it can take;
    where cuBLAS computes it too, behind which an activation is a kernel of its own."""
    entries = [entry[-2:] for table in (_SMALL, _LARGE, _HEAD, _LARGE_FP8, _SHARING, _SHARING_FP8) for entry in table]
    ends = {most for most, tiles in entries if tiles is not None}
    if maximum <= max(ends):
        ends |= {most for most, tiles in entries if tiles is None}  # beyond, `maximum` itself is computed by cuBLAS
    return tuple(sorted({end for end in ends if end < maximum} | {maximum}))


def most_rows(n: int, k: int, *, activation: str = "", splittable: bool = False, fp8: Dtypes = BF16, wide: bool = True) -> int:
    """The largest number of rows that has tiles; `wide`: those of the kernels in CUDA C++ too."""
    return max(most for most, tiles in _allowed(n, k, activation, splittable, fp8, wide) if tiles is not None)


def say_rows(weight: torch.Tensor, bias: torch.Tensor | None, *, activation: str = "", splittable: bool = False, fp8: Dtypes = BF16) -> str:
    """How many rows our kernels take for a weight, as "to 128 and 209 to 256 rows"."""
    n, k = weight.shape
    wide = why_not_wide(weight, weight, bias) is None
    spans: list[tuple[int, int]] = []
    after = 0
    for most, tiles in _allowed(n // (2 if activation else 1), k, activation, splittable, fp8, wide):
        if tiles is not None and most > after:
            spans = [*spans[:-1], (spans[-1][0], most)] if spans and spans[-1][1] == after else [*spans, (after + 1, most)]
        after = most
    said = " and ".join(f"to {last}" if first == 1 else f"{first} to {last}" for first, last in spans)
    return f"{said} rows{why_fewer_rows(weight, bias, activation=activation, splittable=splittable, fp8=fp8)}"


def why_fewer_rows(
    weight: torch.Tensor, bias: torch.Tensor | None, *, activation: str = "", splittable: bool = False, fp8: Dtypes = BF16
) -> str:
    """Where a kernel in CUDA C++ would take more rows, why it does not; else nothing."""
    reason = why_not_wide(weight, weight, bias)
    n, k = weight.shape
    most, few = (
        most_rows(n // (2 if activation else 1), k, activation=activation, splittable=splittable, fp8=fp8, wide=wide)
        for wide in (True, False)
    )
    return f", not to {most}: {reason}" if reason is not None and most > few else ""


def _for_fp8(tiles: Tiles) -> Tiles:
    """Not measured: the same bytes on their way as the tiles for bf16 have, where the matrix units do not bound the length of k. Weights
    are converted in registers, where only the left side can stay."""
    prefetch = 2 * tiles.prefetch if tiles.prefetch > 0 else tiles.prefetch
    block_k = 2 * tiles.block_k if tiles.block_m == 1 else min(tiles.block_k, 128)
    return replace(tiles, prefetch=prefetch, block_k=block_k, swap=tiles.swap or (tiles.block_m > 1 and tiles.block_n >= 64))


def _within_squares(tiles: Tiles) -> Tiles:
    """A step over k takes at most one square of scales."""
    return tiles if tiles.block_m == 1 else replace(tiles, block_k=min(tiles.block_k, 128))


def _narrow(table: _Table) -> Iterator[tuple[str, int, Tiles]]:
    """Without the kernels in CUDA C++, which convert no weights and know no scales of squares, and tiles of 8 rows, measured in bf16."""
    return ((kind, most, tiles) for kind, most, tiles in table if tiles is not None and not tiles.wide and tiles.block_m != 8)


def _allowed(n: int, k: int, activation: str, splittable: bool, fp8: Dtypes, wide: bool) -> tuple[tuple[int, Tiles | None], ...]:
    fitting = _fitting(n, k, activation, splittable, fp8)
    return fitting if wide else tuple(entry for entry in fitting if entry[1] is None or not entry[1].wide)


@functools.lru_cache(maxsize=1024)  # asked at each call outside of a graph
def _fitting(n: int, k: int, activation: str, splittable: bool, fp8: Dtypes) -> tuple[tuple[int, Tiles | None], ...]:
    """Numbers of rows, each with the tiles that more rows than the one before get up to it."""
    nbytes = (1 if fp8.weights else 2) * n * k * (2 if activation else 1)
    small = nbytes <= _SMALL_BYTES
    table = (_SHORT if k <= _SHORT_K else _SMALL) if small else _HEAD if n >= _MANY_COLUMNS and not activation else _LARGE
    if fp8.weights:
        large = table is _LARGE and fp8.rows
        table = _LARGE_FP8 if large else tuple((kind, most, _for_fp8(tiles)) for kind, most, tiles in _narrow(table))
    if fp8.squares:
        table = tuple((kind, most, _within_squares(tiles)) for kind, most, tiles in _narrow(table))
    kinds = ("gated",) if activation else ("split", "plain") if splittable else ("plain",)
    if not fp8.weights and small and k > _LONG_K and kinds[0] == "plain":
        table = tuple(entry for entry in table if entry[1] <= _LONG_K_ROWS)
    found = next(found for kind in kinds if (found := [(most, tiles) for name, most, tiles in table if name == kind]))
    sharing = () if activation else _SHARING if table is _LARGE else _SHARING_FP8 if table is _LARGE_FP8 else ()
    before = [
        (most, tiles) for outputs, least_k, name, most, tiles in sharing if n in outputs and k >= least_k and name in ("any", kinds[0])
    ]
    return tuple(sorted([*before, *found], key=itemgetter(0)))
