"""What products in CUDA C++ for compute capability 9.0 are written with: a ring of stages in shared memory, which the copy engine fills
with rows of x and of the weights, and the instruction that multiplies them.

Source of the instructions and of their descriptors: NVIDIA's PTX ISA, "mbarrier", "cp.async.bulk.tensor" and "wgmma.mma_async".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ROW_BYTES = 128  # of a stage, for each row of x and of the weights

_HELPERS = r"""
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
struct alignas(64) TensorMap { u64 words[16]; };

__device__ u32 shared_address(const void* p) {
  u32 a;
  asm("{.reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t;}" : "=r"(a) : "l"(p));
  return a;
}
__device__ void init(u32 barrier, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count)); }
__device__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Not with .release.cluster: that is a fence of the whole device, and what is handed back here was only read.
__device__ void arrive(u32 barrier, u32 block) {
  asm volatile("{.reg .b32 r; mapa.shared::cluster.u32 r, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [r];}"
               ::"r"(barrier), "r"(block) : "memory");
}
__device__ void wait(u32 barrier, u32 parity) {
  asm volatile("{.reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra DONE; bra AGAIN; DONE:}"
               ::"r"(barrier), "r"(parity) : "memory");
}
#define LOAD "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
__device__ void load(u32 to, const TensorMap* map, u32 barrier, int column, int row) {
  asm volatile(LOAD " [%0], [%1, {%3, %4}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row) : "memory");
}
__device__ void load_for_both(u32 to, const TensorMap* map, u32 barrier, int column, int row) {
  asm volatile(LOAD ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
               ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row), "h"((u16)3) : "memory");
}
// A matrix of rows of 128 bytes, swizzled by 128 bytes: eight rows are 1024 bytes.
__device__ u64 matrix(u32 address) { return (u64)((address & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }
__device__ void cluster_wait() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ u32 bf16x2(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
"""


def ring_source(text: str, constants: Mapping[str, Any], outputs: int, **named: int) -> str:
    """`text` behind what it is written with: STAGES and E4M3 of `constants`, K (elements of a step), the sizes in `named`, the helpers, and
    a `multiply` of 64 rows by `outputs`."""
    e4m3 = constants["E4M3"]
    defined = {"K": ROW_BYTES // (1 if e4m3 else 2), "STAGES": constants["STAGES"], "E4M3": int(e4m3), **named}
    return "".join(f"#define {name} {value}\n" for name, value in defined.items()) + _HELPERS + _multiply(outputs, e4m3) + text


def ring_bytes(constants: Mapping[str, Any], rows: int) -> int:
    """Shared memory of a ring whose stages have so many rows, of x and of the weights: aligned to 1024, with two barriers a stage."""
    return 1024 + int(constants["STAGES"]) * (ROW_BYTES * rows + 16)


def _multiply(outputs: int, e4m3: bool) -> str:
    """d [64, outputs] += x * w, or = where `add` is 0, of 32 bytes of each row."""
    count = outputs // 2  # registers of a thread
    registers = ", ".join(f"%{i}" for i in range(count))
    kinds, k, tail = ("f32.e4m3.e4m3", 32, "1, 1") if e4m3 else ("f32.bf16.bf16", 16, "1, 1, 0, 0")
    instruction = f"wgmma.mma_async.sync.aligned.m64n{outputs}k{k}.{kinds} {{{registers}}}, %{count}, %{count + 1}, p, {tail};"
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        f"__device__ void multiply(float (&d)[{count}], u64 x, u64 w, int add) {{\n"
        f'  asm volatile("{{.reg .pred p; setp.ne.b32 p, %{count + 2}, 0; {instruction}}}" : {operands} : "l"(x), "l"(w), "r"(add));\n}}'
    )
