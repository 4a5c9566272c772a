"""Products of up to 256 rows in CUDA C++ for compute capability 9.0 whose k is shared by the blocks of a cluster: out = x @ weight.T.

For weights of some 4096 rows, tiles that keep the matrix units busy are fewer than multiprocessors. Parts of k make up for it, but as
programs of their own they cost a second kernel and float32 parts in memory. Here the blocks of a cluster take parts of k, the warpgroups
of a block halves of each step, with all rows of x and 64 of the weights, and exchange their sums in shared memory.

The weights are the left side of the instruction, 64 of them, and all rows of x its right side: with rows on the left it reads shared memory
more often for the same work. Measured, the bound is what a multiprocessor takes from the L2 cache, 64 bytes a cycle (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rung.launch.cuda_source import CudaKernel
from rung.passes.kernels.ring_source import ring_bytes, ring_source

OUTPUTS = 64  # of a cluster

_TEXT = r"""
constexpr int X_BYTES = ROWS * 128, STAGE = X_BYTES + 64 * 128;
constexpr int EIGHTS = ROWS / 8, HALF = EIGHTS / 2, KEPT = HALF / SPLITS;  // rows of x in eights: all, of a warpgroup, of it in one block
constexpr int PITCH = 144;  // bytes of a row of 64 outputs, so that rows begin in different banks

__device__ void arrive_here(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
// The four sums that a thread has of eight rows of x lie where the thread of its number in other warpgroups and blocks looks for them.
__device__ u32 place(u32 sums, int j) { return sums + (j * 128 + threadIdx.x % 128) * 16; }
__device__ void put(u32 to, const float* x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}
__device__ void get(float (&x)[4], u32 from, int block) {
  asm volatile("{.reg .b32 a; mapa.shared::cluster.u32 a, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [a];}"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(from), "r"(block) : "memory");
}
__device__ void get_here(float (&x)[4], u32 from) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(from) : "memory");
}
__device__ void both_groups() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
__device__ void cluster_sync() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// x [rows, k]; weight [n, k]; out [rows, n], n a multiple of 8; scales of e4m3: x_scale a row, x_stride apart, weight_scale an output;
// steps: of 128 bytes along k. Grid: a cluster for each 64 outputs. A box of x has its rows and no others: the copy engine takes half as
// long again where rows of a box lie outside of the matrix. What stands in their places comes to outputs that nobody stores.
extern "C" __global__ void __launch_bounds__(288, 1) split_product_kernel(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map, u16* out, const float* x_scale,
    const float* weight_scale, int rows, int n, int steps, int x_stride, int out_stride) {
  extern __shared__ u8 raw[];
  const u32 ring = (shared_address(raw) + 1023) & ~1023u, full = ring + STAGES * STAGE, empty = full + 8 * STAGES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x % SPLITS, column = blockIdx.x / SPLITS * 64;
  const int first = steps * block / SPLITS, last = steps * (block + 1) / SPLITS;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) init(full + 8 * s, 1), init(empty + 8 * s, 2);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  __syncthreads();

  const int group = warp / 4;
  float sums[ROWS / 2];  // of 64 outputs and all rows, as the instruction lays them out
  if (warp == 8) {
    if (lane == 0) {
      bool waited = false;  // for the kernel before, which may still write x; weights are older
      int stage = 0, phase = 0;
      for (int step = first; step < last; step++) {
        wait(empty + 8 * stage, phase ^ 1);
        const u32 barrier = full + 8 * stage, x = ring + stage * STAGE;
        expect(barrier, rows * 128 + 64 * 128);
        load(x + X_BYTES, &weight_map, barrier, step * K, column);
        if (waited) {
          load(x, &x_map, barrier, step * K, 0);
        } else if (step == last - 1 || step - first == STAGES - 1) {
          asm volatile("griddepcontrol.wait;" ::: "memory");
          waited = true;
          for (int s = 0; s <= step - first; s++) load(ring + s * STAGE, &x_map, full + 8 * s, (first + s) * K, 0);
        }
        if (++stage == STAGES) stage = 0, phase ^= 1;
      }
      if (!waited) asm volatile("griddepcontrol.wait;" ::: "memory");
    }
  } else {
    if (first == last) {
#pragma unroll
      for (int i = 0; i < ROWS / 2; i++) sums[i] = 0.0f;
    }
    int stage = 0, phase = 0, before = -1;
    for (int step = first; step < last; step++) {
      wait(full + 8 * stage, phase);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      const u64 x = matrix(ring + stage * STAGE), w = matrix(ring + stage * STAGE + X_BYTES);
#pragma unroll
      for (int i = 2 * group; i < 2 * group + 2; i++) multiply(sums, w + 2 * i, x + 2 * i, step > first || i % 2);  // 32 bytes of each row
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      if (before >= 0) {
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (threadIdx.x % 128 == 0) arrive_here(empty + 8 * before);
      }
      before = stage;
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    both_groups();  // the ring is read to its end: sums go in its place
#pragma unroll
    for (int j = 0; j < EIGHTS; j++) if (j / HALF != group) put(place(ring, j), sums + 4 * j);
    both_groups();
#pragma unroll
    for (int j = 0; j < EIGHTS; j++) {
      if (j / HALF != group) continue;
      float other[4];
      get_here(other, place(ring, j));
#pragma unroll
      for (int i = 0; i < 4; i++) sums[4 * j + i] += other[i];
      if (j % HALF / KEPT != block) put(place(ring, j), sums + 4 * j);  // nobody but this thread looked there before
    }
  }
  if (SPLITS > 1) cluster_sync();
  if (warp < 8) {
    const u32 tile = ring + EIGHTS * 128 * 16 + group * KEPT * 8 * PITCH;  // [KEPT * 8 rows, 64 outputs], bf16
    const int output = column + warp % 4 * 16 + lane / 4;  // and the eighth behind it
    float output_scale[2] = {1.0f, 1.0f};
    if (E4M3) {
      asm volatile("griddepcontrol.wait;" ::: "memory");  // x_scale is the predecessor's
      for (int h = 0; h < 2; h++) output_scale[h] = output + 8 * h < n ? weight_scale[output + 8 * h] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < EIGHTS; j += 2) {
      if (j / HALF != group || j % HALF / KEPT != block) continue;
      float others[SPLITS][2][4];  // all on their way before the first is added
#pragma unroll
      for (int other = 1; other < SPLITS; other++) {
#pragma unroll
        for (int h = 0; h < 2; h++) get(others[other][h], place(ring, j + h), (block + other) % SPLITS);
      }
      u32 a[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float low = sums[4 * j + 2 * i], high = sums[4 * j + 2 * i + 1];
#pragma unroll
        for (int other = 1; other < SPLITS; other++) low += others[other][i / 2][i % 2 * 2], high += others[other][i / 2][i % 2 * 2 + 1];
        if (E4M3) {
          const int row = 8 * (j + i / 2) + 2 * (lane % 4);
          low *= row < rows ? output_scale[i % 2] * x_scale[(u64)row * x_stride] : 0.0f;
          high *= row + 1 < rows ? output_scale[i % 2] * x_scale[(u64)(row + 1) * x_stride] : 0.0f;
        }
        a[i] = bf16x2(low, high);
      }
      // Four matrices of eight outputs by eight rows, stored with the outputs of a row side by side.
      const int row = 8 * (j % KEPT + lane / 16) + lane % 8, of = warp % 4 * 16 + lane / 8 % 2 * 8;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                   ::"r"(tile + row * PITCH + 2 * of), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
    }
    asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");
    const int part = lane % 8 * 8, begin = 8 * (group * HALF + block * KEPT);
    for (int row = threadIdx.x % 128 / 8; row < KEPT * 8; row += 16) {
      uint4 eight;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(eight.x), "=r"(eight.y), "=r"(eight.z), "=r"(eight.w) : "r"(tile + row * PITCH + 2 * part) : "memory");
      if (begin + row < rows && column + part < n) *(uint4*)(out + (u64)(begin + row) * out_stride + column + part) = eight;
    }
  }
  if (SPLITS > 1) cluster_sync();  // others may still read here
}
"""


def _source(constants: Mapping[str, Any]) -> str:
    rows = constants["BLOCK_M"]
    return ring_source(_TEXT, constants, rows, ROWS=rows, SPLITS=constants["SPLITS"])


def _shared_bytes(constants: Mapping[str, Any]) -> int:
    """The ring; sums and outputs come in its place."""
    return ring_bytes(constants, int(constants["BLOCK_M"]) + OUTPUTS)


split_product_kernel = CudaKernel(
    name="split_product_kernel",
    arguments=("x_map", "weight_map", "out", "x_scale", "weight_scale", "rows", "n", "steps", "x_stride", "out_stride"),
    constants=("BLOCK_M", "SPLITS", "STAGES", "E4M3"),
    source=_source,
    shared_bytes=_shared_bytes,
)
