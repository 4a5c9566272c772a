"""What `bench.linear` measures: the products of a decode layer, and the tiles worth a try for each."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rung.models.random import SHAPES
from rung.passes.kernels.launches import Tiles
from rung.passes.kernels.tiles import Dtypes, tiles_for

SHARED_LIMIT = 225 * 1024


@dataclass(frozen=True, slots=True)
class Case:
    """One product of a layer; `n` counts outputs, of which an activation needs two."""

    name: str
    n: int
    k: int
    norm: bool = False
    activation: str = ""
    residual: bool = False
    fp8: bool = False

    @property
    def weight_bytes(self) -> int:
        return self.weight_rows * self.k * (1 if self.fp8 else 2)

    @property
    def weight_rows(self) -> int:
        return self.n * (2 if self.activation else 1)

    @property
    def splittable(self) -> bool:
        return self.name in ("o bare", "down bare")

    @property
    def sets(self) -> int:
        return max(3, min(256, 200_000_000 // self.weight_bytes))

    def variants(self, rows: int) -> list[Case]:
        """One row has norm and residual in its product, more have them in a kernel of their own behind it."""
        bare = Case(self.name + " bare", self.n, self.k, activation=self.activation, fp8=self.fp8)
        return [self] if rows == 1 or not (self.norm or self.residual) else [bare]


def cases(target: str, fp8: bool = False) -> list[Case]:
    shape = SHAPES[target]
    hidden, inner = shape.hidden_size, shape.intermediate_size
    found = [
        Case("qkv", shape.query_size + 2 * shape.kv_size, hidden, norm=True, fp8=fp8),
        Case("o", hidden, shape.query_size, residual=True, fp8=fp8),
        Case("gate_up", inner, hidden, norm=True, activation="silu", fp8=fp8),
        Case("down", hidden, inner, residual=True, fp8=fp8),
    ]
    return found if fp8 else [*found, Case("head", shape.vocab_size, hidden)]  # a head stays as it is


def candidates(case: Case, rows: int, near: bool = False) -> Iterator[Tiles]:
    """Tiles worth a try, each with several amounts of prefetching; `near`: near those that won, for up to 16 rows."""
    if near and rows <= 16:
        yield from _near_vectors(case) if rows == 1 else _near_tiles(case, rows)
        return
    for tiles in _vectors(case) if rows == 1 else _tiles(case, rows):
        for prefetch in (-1, 0, 256, 1024, 4096):
            if prefetch <= case.k // tiles.splits:
                yield replace(tiles, prefetch=prefetch)


def _vectors(case: Case) -> Iterator[Tiles]:
    for block_n, block_k, warps in itertools.product((1, 2, 4, 8, 16), (256, 512, 1024, 2048, 4096), (2, 4, 8)):
        per_thread = block_n * block_k // (32 * warps)
        if 16 <= per_thread <= (128 if case.fp8 else 64) // (2 if case.activation else 1) and block_k < 2 * case.k:
            for stages in (1,) if block_k >= case.k else (1, 3):
                yield Tiles(block_m=1, block_n=block_n, block_k=block_k, num_warps=warps, num_stages=stages)


def _near_vectors(case: Case) -> Iterator[Tiles]:
    small, doubled = case.k < 4096, 2 if case.activation else 1
    shapes = ((1024, 8), (1024, 4), (1024, 2), (512, 4), (512, 2), (256, 4)) if small else ((2048, 8), (1024, 4), (512, 4), (256, 4))
    for block_n, (block_k, warps) in itertools.product((1, 2, 4, 8, 16), shapes):
        each = doubled * block_n * block_k // (32 * warps)  # weights of a step in a thread; 8 are one load
        tiles = Tiles(block_m=1, block_n=block_n, block_k=block_k, num_warps=warps, num_stages=1)
        if 8 <= each <= 64 and block_k < 2 * case.k and block_n * block_k >= 32 * warps * 8 and (small or each >= 16):
            tiles = replace(tiles, block_k=2 * block_k) if case.fp8 else tiles
            yield replace(tiles, prefetch=256)
            yield replace(tiles, prefetch=512 if case.k < 1024 else 1024)  # of small weights all
            if not small:
                yield replace(tiles, prefetch=256, num_stages=3)


def _near_tiles(case: Case, rows: int) -> Iterator[Tiles]:
    small, doubled = case.k < 4096, 2 if case.activation else 1
    depths, fetched = ((64, 128), (256, 512)) if small else ((64, 128, 256), (0, 256))
    block_ms = (16,) if rows > 8 or case.fp8 else (8, 16)
    for block_n, block_k, stages, prefetch in itertools.product((16, 32, 64), depths, (3, 4, 6), fetched):
        for splits, block_m in itertools.product((2, 4) if case.splittable else (1,), block_ms):
            staged = (block_m + doubled * block_n) * block_k * (1 if case.fp8 else 2) * stages
            programs = -(-case.n // block_n) * splits
            if staged > SHARED_LIMIT or -(-case.k // (block_k * splits)) < 2 or programs < 60:
                continue
            if (small and block_n == 64) or (
                not small and (block_n == 16 or min(programs / 132, SHARED_LIMIT // staged) * staged < 40 * 1024)
            ):
                continue
            for swap in (True,) if block_n == 64 or block_m == 8 else (False, True) if small else (False,):
                warps = 4 if block_n == 64 else block_n // 16
                shape = {"block_m": block_m, "block_n": block_n, "block_k": block_k, "splits": splits, "swap": swap}
                yield Tiles(**shape, num_warps=warps, num_stages=stages, prefetch=prefetch)


def _tiles(case: Case, rows: int) -> Iterator[Tiles]:
    small = case.k < 4096 and case.n < 4096
    block_ms = [16] if rows <= 16 else [32] if rows <= 32 else [64] if rows <= 64 else [64, 128]
    if small and rows > 16:
        block_ms = [16, 32, 64]
    splits = (1, 2, 3, 4, 8) if case.splittable else (1,)
    for block_m, block_n, block_k in itertools.product(block_ms, (16, 32, 64, 128), (64, 128, 256)):
        for warps, stages, shares in itertools.product((1, 2, 4, 8), (2, 3, 4, 6), splits):
            for swap in (False, True) if block_n >= 64 and warps == 4 and block_m <= 64 else (False,):
                tiles = Tiles(
                    block_m=block_m, block_n=block_n, block_k=block_k, num_warps=warps, num_stages=stages, splits=shares, swap=swap
                )
                if _is_sensible(case, rows, tiles, small):
                    yield tiles


def _is_sensible(case: Case, rows: int, tiles: Tiles, small: bool) -> bool:
    """Fits, and has enough bytes on their way to fill the memory's pipe (Little's law), or enough programs where all is in the L2 cache."""
    doubled = 2 if case.activation else 1
    staged = (tiles.block_m + doubled * tiles.block_n) * tiles.block_k * (1 if case.fp8 else 2) * tiles.num_stages
    programs = -(-case.n // tiles.block_n) * -(-rows // tiles.block_m) * tiles.splits
    area, steps = tiles.block_m * tiles.block_n, -(-case.k // (tiles.block_k * tiles.splits))
    if staged > SHARED_LIMIT or area * doubled > 4096 * tiles.num_warps or steps < min(tiles.num_stages, 2):
        return False
    if tiles.num_warps > max(1, area // 256) or (tiles.num_warps == 8 and area < 8192) or (tiles.block_m >= 64 and tiles.num_warps < 4):
        return False
    if tiles.block_m >= 64 and tiles.block_k > (256 if case.fp8 else 128):
        return False
    if small:
        return 30 <= programs <= 700 and tiles.block_n <= 64 and tiles.num_stages in (3, 4) and staged >= 16 * 1024
    resident = min(programs / 132, SHARED_LIMIT // staged)
    in_flight = resident * staged * (tiles.num_stages - 1) / tiles.num_stages
    return in_flight >= 30 * 1024 and programs >= 90 and (tiles.splits == 1 or programs <= 600)


def image_of(case: Case, rows: int, tiles: Tiles) -> tuple[Any, ...]:
    """Equal for launches of one kernel image."""
    even = case.n % tiles.block_n == 0, case.k % (tiles.block_k * tiles.splits) == 0
    return case.norm, case.activation, case.residual, case.fp8, even, tiles


def in_use(case: Case, rows: int) -> list[Tiles]:
    tiles = tiles_for(rows, case.n, case.k, activation=case.activation, splittable=case.splittable, fp8=Dtypes(case.fp8, case.fp8))
    return [] if tiles is None else [tiles]


def drawn(case: Case, rows: int, limit: int, near: bool = False) -> list[Tiles]:
    """At most `limit` of the candidates, by chance, and the same ones for cases that share kernels."""
    return sorted(candidates(case, rows, near), key=lambda tiles: zlib.crc32(repr(image_of(case, rows, tiles)).encode()))[:limit]
