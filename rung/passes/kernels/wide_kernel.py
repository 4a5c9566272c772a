"""Products of 17 to 512 rows in CUDA C++ for compute capability 9.0: out = act(x @ gate.T) * (x @ up.T), or x @ weight.T, bf16 or e4m3.

Why not Triton: its tiles are powers of two. Twice 112 outputs a tile fill 97 % of two rounds of 132 multiprocessors for the 14336 outputs
of the 8B shape, where twice 128 fill 85 %; and two blocks of a cluster, one for each half of the rows, take each weight from memory once
(multicast). A block is two warpgroups, 64 rows each, that multiply (wgmma) what a ninth warp has the copy engine bring into a ring of
stages. Blocks walk over tiles, so that the first stages of a tile are on their way during the end of the one before.

Where tiles are too few for all multiprocessors, parts of k are tiles of their own, and the kernel behind sums what they leave.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rung.launch.cuda_source import CudaKernel
from rung.passes.kernels.ring_source import ring_bytes, ring_source

ROWS = 128  # of a block

_TEXT = r"""
constexpr int X_BYTES = 128 * 128, W_BYTES = 2 * N * 128, STAGE = X_BYTES + W_BYTES;  // of x a tile of fewer rows fills the beginning
constexpr int WIDTH = PLAIN ? 2 * N : N;  // outputs of a tile

__device__ void zero(u32 address) { asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory"); }
__device__ float rounded(float x) { return __uint_as_float(bf16x2(0.0f, x) & 0xFFFF0000u); }
__device__ float gated(float gate, float up) {
  gate = rounded(gate), up = rounded(up);
#if PLAIN
  return gate;
#elif GELU
  const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
  return gate * (1.0f - __fdividef(1.0f, 1.0f + __expf(2.0f * inner))) * up;
#else
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
#endif
}

// x [rows, k]; weight [2 * n, k], the gates first, or PLAIN [n, k]; out [rows, n]; scales of e4m3: x_scale a row, x_stride apart,
// weight_scale a row of the weights. A tile has two sets of N rows of them: gates and what they gate, or PLAIN neighbours.
// n is a multiple of 8; steps: of 128 bytes along k. With PARTS > 1, PLAIN and not E4M3, out is float [PARTS, rows, n], the sums of each
// part of k. Grid: clusters of BLOCKS blocks, any number.
extern "C" __global__ void __launch_bounds__(288, 1) wide_product_kernel(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map, u16* out, const float* x_scale,
    const float* weight_scale, int rows, int n, int steps, int x_stride, int out_stride) {
  extern __shared__ u8 raw[];
  const u32 ring = (shared_address(raw) + 1023) & ~1023u, full = ring + STAGES * STAGE, empty = full + 8 * STAGES;
  float* scales = (float*)(raw + (empty + 8 * STAGES - shared_address(raw)));  // [2][2 * N]: of this tile and of the one before
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x % BLOCKS;
  const int row_tiles = (rows + 128 * BLOCKS - 1) / (128 * BLOCKS), columns = (n + WIDTH - 1) / WIDTH, second = PLAIN ? N : n;
  const int tiles = row_tiles * columns * PARTS, box = (rows + row_tiles * BLOCKS - 1) / (row_tiles * BLOCKS);  // rows of a block's tile
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) init(full + 8 * s, 1), init(empty + 8 * s, 2 * BLOCKS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (BLOCKS > 1) cluster_wait(); else __syncthreads();

  int stage = 0, phase = 0;
  if (warp == 8) {
    if (lane == 0) {
      bool waited = false;  // for the kernel before, which may still write x; weights are older
      for (int tile = blockIdx.x / BLOCKS; tile < tiles; tile += gridDim.x / BLOCKS) {
        const int row = (tile % row_tiles * BLOCKS + block) * box, column = tile / row_tiles % columns * WIDTH;
        const int part = tile / row_tiles / columns, first = steps * part / PARTS, end = steps * (part + 1) / PARTS;
        for (int step = first; step < end; step++) {
          wait(empty + 8 * stage, phase ^ 1);
          const u32 barrier = full + 8 * stage, x = ring + stage * STAGE, w = x + X_BYTES;
          expect(barrier, box * 128 + W_BYTES);
          if (BLOCKS > 1) {  // each brings one set for both
            load_for_both(w + block * N * 128, &weight_map, barrier, step * K, column + block * second);
          } else {
            load(w, &weight_map, barrier, step * K, column);
            load(w + N * 128, &weight_map, barrier, step * K, column + second);
          }
          if (waited) {
            load(x, &x_map, barrier, step * K, row);
          } else if (step == end - 1 || step == first + STAGES - 1) {
            asm volatile("griddepcontrol.wait;" ::: "memory");
            waited = true;
            for (int s = 0; s <= step - first; s++) load(ring + s * STAGE, &x_map, full + 8 * s, (first + s) * K, row);
          }
          if (++stage == STAGES) stage = 0, phase ^= 1;
        }
      }
      if (!waited) asm volatile("griddepcontrol.wait;" ::: "memory");
    }
  } else {
    const int group = warp / 4, quad = lane % 4;
    int odd = 0;
    if (box < 128) {  // The instruction takes 128 rows all the same: zeros cost the least power.
      const int count = (128 - box) * 8;  // of 16 bytes
      for (int i = threadIdx.x; i < STAGES * count; i += 256) zero(ring + i / count * STAGE + box * 128 + i % count * 16);
      asm volatile("fence.proxy.async.shared::cta;\nbar.sync 1, 256;" ::: "memory");
    }
    if (E4M3) asm volatile("griddepcontrol.wait;" ::: "memory");  // x_scale is the predecessor's too
    for (int tile = blockIdx.x / BLOCKS; tile < tiles; tile += gridDim.x / BLOCKS, odd ^= 1) {
      const int first_row = (tile % row_tiles * BLOCKS + block) * box, end_row = min(rows, first_row + box);
      const int row = first_row + group * 64 + warp % 4 * 16 + lane / 4;
      const int column = tile / row_tiles % columns * WIDTH, part = tile / row_tiles / columns;
      const int count = steps * (part + 1) / PARTS - steps * part / PARTS;
      float row_scale[2] = {1.0f, 1.0f};
      const float* mine = scales + odd * 2 * N;
      if (E4M3) {
        for (int i = threadIdx.x; i < 2 * N; i += 256) {
          const int set = i / N, at = column + i % N;
          scales[odd * 2 * N + i] = at + (PLAIN ? set * N : 0) < n ? weight_scale[at + set * second] : 0.0f;
        }
        for (int h = 0; h < 2; h++) row_scale[h] = row + 8 * h < end_row ? x_scale[(u64)(row + 8 * h) * x_stride] : 0.0f;
        asm volatile("bar.sync 1, 256;" ::: "memory");
      }
      float sums[N];  // of the first set, then of the second: in one instruction, which reads x once for both
      int before = -1;
      for (int step = 0; step < count; step++) {
        wait(full + 8 * stage, phase);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        const u64 x = matrix(ring + stage * STAGE + group * 64 * 128), w = matrix(ring + stage * STAGE + X_BYTES);
#pragma unroll
        for (int i = 0; i < 4; i++) {  // 32 bytes of each row at a time
          multiply(sums, x + 2 * i, w + 2 * i, step | i);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (before >= 0) {
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
          if (threadIdx.x % 128 < BLOCKS) arrive(empty + 8 * before, threadIdx.x % 128);
        }
        before = stage;
        if (++stage == STAGES) stage = 0, phase ^= 1;
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (threadIdx.x % 128 < BLOCKS) arrive(empty + 8 * before, threadIdx.x % 128);
#if PARTS > 1
#pragma unroll
      for (int o = 0; o < 2 * N; o += 8) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int at = column + o + 2 * quad, to = row + 8 * h;
          float* const sum = (float*)out + ((u64)part * rows + to) * n + at;
          if (at < n && to < end_row) *(float2*)sum = float2{sums[o / 2 + 2 * h], sums[o / 2 + 2 * h + 1]};
        }
      }
#else
      // A thread has two neighbouring outputs of every eight. Four threads exchange theirs, so that each stores eight.
#pragma unroll
      for (int set = 0; set <= PLAIN; set++) {
#pragma unroll
        for (int first = 0; first < N / 8; first += 4) {
          const int count = N / 8 - first < 4 ? N / 8 - first : 4;
#pragma unroll
          for (int h = 0; h < 2; h++) {
            u32 a[4] = {0, 0, 0, 0};
#pragma unroll
            for (int t = 0; t < 4; t++) {
              if (t < count) {
                const int at = 4 * (first + t) + 2 * h, o = 8 * (first + t) + 2 * quad;
                float u[2] = {sums[N / 2 + at], sums[N / 2 + at + 1]}, g[2] = {set ? u[0] : sums[at], set ? u[1] : sums[at + 1]};
                if (E4M3) for (int i = 0; i < 2; i++) g[i] *= row_scale[h] * mine[set * N + o + i], u[i] *= row_scale[h] * mine[N + o + i];
                a[t] = bf16x2(gated(g[0], u[0]), gated(g[1], u[1]));
              }
            }
            const bool odd_lane = quad & 1, high = quad & 2;
            const u32 p = __shfl_xor_sync(~0u, odd_lane ? a[0] : a[1], 1), q = __shfl_xor_sync(~0u, odd_lane ? a[2] : a[3], 1);
            if (odd_lane) a[0] = p, a[2] = q; else a[1] = p, a[3] = q;
            const u32 r = __shfl_xor_sync(~0u, high ? a[0] : a[2], 2), s = __shfl_xor_sync(~0u, high ? a[1] : a[3], 2);
            if (high) a[0] = r, a[1] = s; else a[2] = r, a[3] = s;
            const int at = column + set * N + 8 * (first + quad), to = row + 8 * h;
            if (quad < count && at < n && to < end_row) *(uint4*)(out + (u64)to * out_stride + at) = uint4{a[0], a[1], a[2], a[3]};
          }
        }
      }
#endif
    }
  }
  if (BLOCKS > 1) cluster_wait();  // a neighbour may still send into this block
}
"""


def _source(constants: Mapping[str, Any]) -> str:
    outputs, activation = constants["BLOCK_N"], constants["ACTIVATION"]
    sizes = {"N": outputs, "BLOCKS": constants["BLOCKS"], "PARTS": constants["PARTS"], "GELU": int(activation == "gelu")}
    return ring_source(_TEXT, constants, 2 * outputs, PLAIN=int(not activation), **sizes)


def _shared_bytes(constants: Mapping[str, Any]) -> int:
    """The ring, and the scales of two tiles."""
    outputs = int(constants["BLOCK_N"])
    return ring_bytes(constants, ROWS + 2 * outputs) + 4 * 4 * outputs


wide_product_kernel = CudaKernel(
    name="wide_product_kernel",
    arguments=("x_map", "weight_map", "out", "x_scale", "weight_scale", "rows", "n", "steps", "x_stride", "out_stride"),
    constants=("BLOCK_N", "BLOCKS", "PARTS", "STAGES", "E4M3", "ACTIVATION"),
    source=_source,
    shared_bytes=_shared_bytes,
)
