"""What the kernel of decode attention is written with: sizes that follow from its constants, and device functions around PTX instructions.

Source of the instructions and of their registers' order: NVIDIA's PTX ISA, "Warp-level matrix instructions" and "cp.async".
"""

from __future__ import annotations

# The matrix product is m16n8k16: its rows are keys, its columns the query heads of a KV head.
TILE = 16  # keys
MAX_GROUP = 8

TEXT = r"""
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

constexpr int ROW = HEAD_SIZE * (E4M3 ? 1 : 2), CHUNKS = ROW / 16, SLOT = 16 * ROW;  // bytes of a key, its 16 bytes, bytes of a tile
constexpr int STEPS = HEAD_SIZE / 16, SUMS = HEAD_SIZE + 4;
constexpr int WORKERS = WARPS * BLOCKS, THREADS = 32 * WARPS;
constexpr int OWN = HEAD_SIZE / 32, OWN_BYTES = OWN * ROW / HEAD_SIZE;  // numbers of a key that a lane rotates, their bytes in the cache
constexpr float LOG2E = 1.4426950408889634f;
#define HALF (FP16 || E4M3)  // what is multiplied: float16 or bfloat16

__device__ u32 shared_address(const void* p) {
  u32 a;
  asm("{.reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t;}" : "=r"(a) : "l"(p));
  return a;
}
// Zeros where `bytes` is 0, and nothing is read.
__device__ void bring(u32 to, const u8* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ void await() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
// Where the 16 bytes `chunk` of row `row` lie: eight rows at the same place of theirs use all banks once.
__device__ u32 place(int row, int chunk) { return row * ROW + (chunk ^ (CHUNKS >= 8 ? row & 7 : row >> 1 & 3)) * 16; }
__device__ void matrices(u32 (&a)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
}
__device__ void turned_matrices(u32 (&a)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
}
__device__ u32 turned(u32 a) {
  u32 r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a));
  return r;
}
__device__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if HALF
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ u32 f16x2(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ u32 bf16x2(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ u32 packed(float low, float high) { return HALF ? f16x2(low, high) : bf16x2(low, high); }
__device__ u32 outputs(float low, float high) { return FP16 ? f16x2(low, high) : bf16x2(low, high); }  // in the queries' dtype
__device__ float low(u32 pair) {
  float r;
  if (FP16) asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(r) : "r"(pair));
  else r = __uint_as_float(pair << 16);
  return r;
}
__device__ float high(u32 pair) {
  float r;
  if (FP16) asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(r) : "r"(pair));
  else r = __uint_as_float(pair & 0xFFFF0000u);
  return r;
}
// The two e4m3 numbers in the lower, and in the upper, half of a register.
__device__ u32 widened_low(u32 x) {
  u32 r;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, l;}" : "=r"(r) : "r"(x));
  return r;
}
__device__ u32 widened_high(u32 x) {
  u32 r;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, h;}" : "=r"(r) : "r"(x));
  return r;
}
__device__ u32 e4m3x2(float low, float high) {
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}
__device__ void numbers(float (&x)[OWN], const u16* from) {
#pragma unroll
  for (int i = 0; i < OWN; i += 2) {
    const u32 pair = *(const u32*)(from + i);
    x[i] = low(pair), x[i + 1] = high(pair);
  }
}
// Two neighbours of a row of cosines or sines.
__device__ float2 two(const void* row, int at) {
  if (WIDE) return *(const float2*)((const float*)row + at);
  const u32 pair = *(const u32*)((const u16*)row + at);
  return float2{low(pair), high(pair)};
}
// What a cache keeps of a lane's numbers.
__device__ void keep(u32 (&kept)[2], const float (&x)[OWN], float factor) {
  kept[1] = 0;
  if (E4M3) {
    float c[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) c[i] = fminf(fmaxf(x[i] * factor, -448.0f), 448.0f);
    kept[0] = e4m3x2(c[0], c[1]);
    if (OWN == 4) kept[0] |= e4m3x2(c[OWN - 2], c[OWN - 1]) << 16;
  } else {
    kept[0] = outputs(x[0], x[1]);
    if (OWN == 4) kept[1] = outputs(x[OWN - 2], x[OWN - 1]);
  }
}
__device__ void put(u8* to, const u32 (&kept)[2]) {
  if (OWN_BYTES == 8) *(uint2*)to = uint2{kept[0], kept[1]};
  else if (OWN_BYTES == 4) *(u32*)to = kept[0];
  else *(u16*)to = kept[0];
}
__device__ float exp2_of(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ u32 remote(u32 address, int block) {
  u32 r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(block));
  return r;
}
__device__ float from_cluster(u32 address) {
  float r;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(r) : "r"(address) : "memory");
  return r;
}
__device__ float4 four_from_cluster(u32 address) {
  float4 r;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w) : "r"(address) : "memory");
  return r;
}
__device__ void cluster_wait() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ void add_four(float (&sums)[8], int at, float4 x, float weight) {
  sums[at] += weight * x.x, sums[at + 1] += weight * x.y, sums[at + 2] += weight * x.z, sums[at + 3] += weight * x.w;
}
"""
