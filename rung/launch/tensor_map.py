"""Tensor maps: how the copy engine of compute capability 9.0 sees a matrix."""

from __future__ import annotations

import ctypes
import functools

import torch

from rung.errors import LaunchError
from rung.launch.rehearsal import current_rehearsal

BYTES = 128
ALIGNMENT = 16  # bytes, of the matrix and of its rows
_ROW_BYTES = 128  # of a box: one row of the swizzle


def tensor_map(matrix: torch.Tensor, box_rows: int) -> bytes:
    """The map of a [rows, columns] matrix, whose boxes are `box_rows` rows (at most 256) of 128 bytes, swizzled by 128 bytes in shared
    memory; what a box has beyond the matrix is zero. The matrix and its rows are aligned to 16 bytes."""
    if current_rehearsal.get() is not None:
        return bytes(BYTES)  # nothing lies anywhere
    rows, columns = matrix.shape
    return _encode(matrix.data_ptr(), rows, columns, matrix.stride(0), matrix.element_size(), box_rows)


@functools.lru_cache(maxsize=4096)
def _encode(address: int, rows: int, columns: int, stride: int, element: int, box_rows: int) -> bytes:
    from cuda.bindings import driver

    kinds = driver.CUtensorMapDataType
    kind = {1: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8, 2: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT16}[element]
    sizes, number = driver.cuuint64_t, driver.cuuint32_t
    code, found = driver.cuTensorMapEncodeTiled(
        kind,
        2,
        address,
        [sizes(columns), sizes(rows)],
        [sizes(stride * element)],
        [number(_ROW_BYTES // element), number(box_rows)],
        [number(1), number(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if code:
        raise LaunchError(
            f"a tensor map of [{rows}, {columns}] with rows of {stride} elements at {address:#x} failed: {code.name}",
            hint="align the matrix and its rows to 16 bytes",
            code=int(code),
        )
    return ctypes.string_at(int(found.getPtr()), BYTES)
