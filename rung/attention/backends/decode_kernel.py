"""Decode attention in CUDA C++ for compute capability 9.0: one token of each request over pages, shares of the keys joined in the kernel.

A warp takes tiles of 16 keys of one KV head and all query heads of its group. Keys are the rows of the first matrix product and queries its
columns, so that a group of up to eight heads costs instructions of 8 columns, and sums of 128 dimensions lie in 32 registers a thread: a
multiprocessor holds 16 such warps, each with tiles of its own on their way (cp.async), and 2048 of them, 256 requests of 8 KV heads, are
one round. Where requests are few, several warps share a head, and several blocks of a cluster; they join their shares in shared memory,
without a second kernel and without memory between them.

With ROTATED the kernel is given queries, keys and values as the projection made them, and does what `rotate_and_write_kernel` does: every
warp rotates its queries in registers, the one that has the last tile rotates the new key, writes it and its value to the cache, and puts
both into its tile. With SETTLED tiles of earlier steps are on their way before the projection has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rung.attention.backends.decode_instructions import MAX_GROUP, TEXT, TILE
from rung.launch.cuda_source import CudaKernel

_PAD = 4  # floats behind a row of sums, so that rows begin in different banks

_KERNEL = r"""
// One row of the batch and one KV head a cluster; grid: (KV heads, in clusters; rows). query [rows, heads, HEAD_SIZE]; out like it, e4m3
// with out_scale [1] where OUT_SCALED; caches [pages, BLOCK_SIZE, KV heads, HEAD_SIZE]; starts int32 [num_requests + 1]; lengths int32
// [num_requests]; table int32 [num_requests, table_columns]. Strides count elements; those of the caches are multiples of 16 bytes.
// Where ROTATED: key and value [rows, KV heads, HEAD_SIZE]; cosine and sine [rows, ROTATED]; weights [HEAD_SIZE]; slots int64 [rows].
// Where SETTLED, a kernel that was launched normally lies between whoever wrote starts, lengths, table, slots and the keys of earlier
// steps, and this one, so that they are read while the predecessor runs, which makes the rest; else nothing is read before it has ended.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) decode_attention_kernel(
    const u16* query, void* out, u8* key_cache, u8* value_cache, const int* starts, const int* lengths, const int* table,
    const float* out_scale, int num_requests, float scale, float value_scale, float soft_cap, int query_token_stride, int query_head_stride,
    int out_token_stride, int out_head_stride, int block_stride, int slot_stride, int head_stride, int table_stride,
    int table_columns, const u16* key, const u16* value, const void* cosine, const void* sine, const u16* query_weight,
    const u16* key_weight, const long long* slots, float epsilon, float offset, float key_factor, float value_factor, int key_token_stride,
    int key_head_stride, int value_token_stride, int value_head_stride, int cosine_stride, int sine_stride) {
  extern __shared__ __align__(128) u8 raw[];
  constexpr int BYTES = E4M3 ? 1 : 2;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % 4, line = lane / 4;
  const int block = blockIdx.x % BLOCKS, kv_head = blockIdx.x / BLOCKS, row = blockIdx.y, worker = warp * BLOCKS + block;
  const u32 ring = shared_address(raw) + warp * REGION;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (PROGRAMMATIC && !SETTLED) asm volatile("griddepcontrol.wait;" ::: "memory");

  // A steady batch has request i in row i; what is read for that guess is read at once.
  int request = row < num_requests ? row : num_requests - 1, start = starts[request], stop = starts[request + 1], length = lengths[request];
  int page = table[(u64)request * table_stride + min((worker + lane * WORKERS) * 16 / BLOCK_SIZE, table_columns - 1)];
  bool guessed = true, real = row < num_requests;
  if (!real || start != row || stop != row + 1) {
    guessed = false;
    real = row < starts[num_requests];
    int first = 0, last = num_requests - 1;  // the last request that begins at the row or before it
    while (first < last) {
      const int middle = (first + last + 1) / 2;
      if (starts[middle] <= row) first = middle; else last = middle - 1;
    }
    request = first, stop = starts[request + 1], length = lengths[request];
  }
  const int end = real ? length - (stop - row) + 1 : 0;  // keys that the row sees end here
  const int first_tile = WINDOW > 0 ? max(end - WINDOW, 0) / 16 : 0, last_tile = (end + 15) / 16;
  const int tiles = max(last_tile - first_tile - worker + WORKERS - 1, 0) / WORKERS;  // of this warp: first_tile + worker + i * WORKERS
  const int* pages = table + (u64)request * table_stride;
  if (WINDOW > 0 || !guessed) page = lane < tiles ? pages[(first_tile + worker + lane * WORKERS) * 16 / BLOCK_SIZE] : 0;

  const long long slot_of_row = ROTATED ? slots[row] : 0;
  key_cache += (u64)kv_head * head_stride * BYTES, value_cache += (u64)kv_head * head_stride * BYTES;
  const int known = end - (ROTATED && slot_of_row >= 0);  // keys that are in the cache
  u64 from = 0;  // of the tile that is brought
  // Unit 2 * i are the keys of tile i, unit 2 * i + 1 its values.
  auto issue = [&](int tile, bool values, u32 slot) {
    if (tile < tiles) {
      const int key = (first_tile + worker + tile * WORKERS) * 16;
      if (!values) {
        if (tile % 32 == 0 && tile > 0) page = tile + lane < tiles ? pages[(key + lane * WORKERS * 16) / BLOCK_SIZE] : 0;
        const u64 of_page = __shfl_sync(~0u, page, tile % 32);
        from = (of_page * block_stride + (u64)(key % BLOCK_SIZE) * slot_stride) * BYTES;
      }
      const u8* base = (values ? value_cache : key_cache) + from;
#pragma unroll
      for (int i = 0; i < CHUNKS / 2; i++) {
        const int r = (i * 32 + lane) / CHUNKS, c = lane % CHUNKS;
        bring(slot + place(r, c), base + (u64)r * slot_stride * BYTES + 16 * c, key + r < known ? 16 : 0);
      }
    }
    commit();
  };

#pragma unroll
  for (int u = 0; u < SLOTS - 1; u++) issue(u / 2, u % 2, ring + u * SLOT);
  if (PROGRAMMATIC && SETTLED) asm volatile("griddepcontrol.wait;" ::: "memory");

  const u8* cosines = (const u8*)cosine + (u64)row * cosine_stride * (WIDE ? 4 : 2);
  const u8* sines = (const u8*)sine + (u64)row * sine_stride * (WIDE ? 4 : 2);
  // The queries as columns: a thread holds, of query `line`, dimensions that are neighbours in pairs.
  u32 queries[STEPS][2];
  {
    float x[STEPS][2][2], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int at = 16 * i + (E4M3 ? 4 * quad + 2 * h : 2 * quad + 8 * h);
        u32 pair = 0;
        if (line < GROUP) pair = *(const u32*)(query + (u64)row * query_token_stride + (kv_head * GROUP + line) * query_head_stride + at);
        queries[i][h] = pair;
        x[i][h][0] = low(pair), x[i][h][1] = high(pair);
        squares += x[i][h][0] * x[i][h][0] + x[i][h][1] * x[i][h][1];
      }
    }
    if (NORM) {
      squares += __shfl_xor_sync(~0u, squares, 1), squares += __shfl_xor_sync(~0u, squares, 2);
      const float part = rsqrtf(squares / HEAD_SIZE + epsilon);
#pragma unroll
      for (int i = 0; i < STEPS; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const u32 pair = *(const u32*)(query_weight + 16 * i + (E4M3 ? 4 * quad + 2 * h : 2 * quad + 8 * h));
          x[i][h][0] *= part * (low(pair) + offset), x[i][h][1] *= part * (high(pair) + offset);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < ROTATED / 16; i++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int at = 16 * i + (E4M3 ? 4 * quad + 2 * h : 2 * quad + 8 * h);
        const float2 c = two(cosines, at), s = two(sines, at);
        float(&first)[2] = x[i][h], (&second)[2] = x[i + ROTATED / 16][h];
        const float turned_first[2] = {first[0] * c.x - second[0] * s.x, first[1] * c.y - second[1] * s.y};
        second[0] = second[0] * c.x + first[0] * s.x, second[1] = second[1] * c.y + first[1] * s.y;
        first[0] = turned_first[0], first[1] = turned_first[1];
      }
    }
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        if (ROTATED) queries[i][h] = slot_of_row < 0 ? 0u : outputs(x[i][h][0], x[i][h][1]);
        if (E4M3 && !FP16) {
          const float l = low(queries[i][h]), u = high(queries[i][h]);
          queries[i][h] = f16x2(fminf(fmaxf(l, -65504.0f), 65504.0f), fminf(fmaxf(u, -65504.0f), 65504.0f));
        }
      }
    }
  }

  // The new key and value, by the warp that has the last tile.
  const bool last_is_mine = ROTATED && known < end && tiles > 0 && worker == (last_tile - 1 - first_tile) % WORKERS;
  u8* fresh = raw + STAGED + warp * 2 * ROW + lane * OWN_BYTES;
  if (last_is_mine) {
    float x[OWN], y[OWN], w[OWN], squares = 0.0f;
    numbers(x, key + (u64)row * key_token_stride + kv_head * key_head_stride + lane * OWN);
    numbers(y, value + (u64)row * value_token_stride + kv_head * value_head_stride + lane * OWN);
    if (NORM) {
      numbers(w, key_weight + lane * OWN);
#pragma unroll
      for (int i = 0; i < OWN; i++) squares += x[i] * x[i];
#pragma unroll
      for (int i = 1; i < 32; i *= 2) squares += __shfl_xor_sync(~0u, squares, i);
      const float part = rsqrtf(squares / HEAD_SIZE + epsilon);
#pragma unroll
      for (int i = 0; i < OWN; i++) x[i] *= part * (w[i] + offset);
    }
    constexpr int HALVES = ROTATED / OWN;  // lanes that hold a half
    const bool first = lane < HALVES, second = !first && lane < 2 * HALVES;
    const int other = first ? lane + HALVES : second ? lane - HALVES : lane;
#pragma unroll
    for (int i = 0; i < OWN; i += 2) {
      const float l = __shfl_sync(~0u, x[i], other), u = __shfl_sync(~0u, x[i + 1], other);
      if (first || second) {
        const int at = (lane * OWN + i) % (ROTATED ? ROTATED : 1);
        const float2 c = two(cosines, at), s = two(sines, at);
        x[i] = x[i] * c.x + l * (first ? -s.x : s.x), x[i + 1] = x[i + 1] * c.y + u * (first ? -s.y : s.y);
      }
    }
    u32 kept[2];
    const u64 slot = slot_of_row, to = (slot / BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride) * BYTES + lane * OWN_BYTES;
    keep(kept, x, key_factor);
    put(fresh, kept), put(key_cache + to, kept);
    keep(kept, y, value_factor);
    put(fresh + ROW, kept), put(value_cache + to, kept);
  }
  auto patch = [&](u32 slot, bool values) {  // into the row of the new key, which nothing was read for
    u8* to = raw + (slot - shared_address(raw)) + place((end - 1) % 16, lane * OWN_BYTES / 16) + lane * OWN_BYTES % 16;
    const u8* of = fresh + (values ? ROW : 0);
    if (OWN_BYTES == 8) *(uint2*)to = *(const uint2*)of;
    else if (OWN_BYTES == 4) *(u32*)to = *(const u32*)of;
    else *(u16*)to = *(const u16*)of;
    __syncwarp();
  };

  float sums[STEPS][4];
#pragma unroll
  for (int i = 0; i < STEPS; i++) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.0f;
  float highest[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};  // of queries 2 * quad and 2 * quad + 1
  const float factor = SOFT_CAP ? 1.0f : scale * LOG2E;
  u32 slot = ring, free = ring + (SLOTS - 1) * SLOT;
  const u32 ring_end = ring + SLOTS * SLOT;
  for (int tile = 0; tile < tiles; tile++) {
    await<SLOTS - 2>();
    __syncwarp();
    issue(tile + (SLOTS - 1) / 2, (SLOTS - 1) % 2, free);
    free = slot;
    if (ROTATED && last_is_mine && tile == tiles - 1) patch(slot, false);
    float scores[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};  // keys `line` and line + 8, two chains
#pragma unroll
    for (int i = 0; i < STEPS; i += E4M3 ? 2 : 1) {
      u32 a[4];
      matrices(a, slot + place(lane % 16, (E4M3 ? i : 2 * i) + lane / 16));
      if (E4M3) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const u32 first = a[2 * j], second = a[2 * j + 1], *of = queries[i + j];
          multiply(scores[j], widened_low(first), widened_low(second), widened_high(first), widened_high(second), of[0], of[1]);
        }
      } else {
        multiply(scores[i % 2], a[0], a[1], a[2], a[3], queries[i][0], queries[i][1]);
      }
    }
    if ((slot += SLOT) == ring_end) slot = ring;

    const int key = (first_tile + worker + tile * WORKERS) * 16 + line;
    const bool edge = key - line + 16 > end || (WINDOW > 0 && key - line < end - WINDOW);
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[i] = scores[0][i] + scores[1][i];
      if (SOFT_CAP) x[i] = soft_cap * LOG2E * (1.0f - __fdividef(2.0f, exp2_of(x[i] * (scale / soft_cap) * (2.0f * LOG2E)) + 1.0f));
      const int at = key + i / 2 * 8;
      if (edge && (at >= end || (WINDOW > 0 && at < end - WINDOW))) x[i] = -INFINITY;
    }
    float fade[2];
#pragma unroll
    for (int c = 0; c < 2; c++) {
      float most = fmaxf(x[c], x[c + 2]) * factor;
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 4));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 8));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 16));
      const float risen = fmaxf(highest[c], most), reference = risen == -INFINITY ? 0.0f : risen;
      fade[c] = exp2_of(highest[c] - reference);
      highest[c] = risen;
      x[c] = exp2_of(x[c] * factor - reference), x[c + 2] = exp2_of(x[c + 2] * factor - reference);
      total[c] = total[c] * fade[c] + x[c] + x[c + 2];
    }
    const u32 weights[2] = {turned(packed(x[0], x[1])), turned(packed(x[2], x[3]))};
    if (__any_sync(~0u, fade[0] != 1.0f || fade[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < STEPS; i++) sums[i][0] *= fade[0], sums[i][1] *= fade[1], sums[i][2] *= fade[0], sums[i][3] *= fade[1];
    }

    await<SLOTS - 2>();
    __syncwarp();
    issue(tile + SLOTS / 2, SLOTS % 2, free);
    free = slot;
    if (ROTATED && last_is_mine && tile == tiles - 1) patch(slot, true);
#pragma unroll
    for (int i = 0; i < STEPS; i += E4M3 ? 2 : 1) {
      u32 a[4];
      if (E4M3) {  // a register holds dimensions 2 * line and 2 * line + 1 of two keys: bytes are sorted by dimension
        turned_matrices(a, slot + place(lane % 16, i + lane / 16));
#pragma unroll
        for (int j = 0; j < 4; j++) a[j] = __byte_perm(a[j], 0, 0x3120);
        multiply(sums[i], widened_low(a[0]), widened_high(a[0]), widened_low(a[1]), widened_high(a[1]), weights[0], weights[1]);
        multiply(sums[i + 1], widened_low(a[2]), widened_high(a[2]), widened_low(a[3]), widened_high(a[3]), weights[0], weights[1]);
      } else {
        turned_matrices(a, slot + place(lane % 8 + lane / 16 * 8, 2 * i + lane / 8 % 2));
        multiply(sums[i], a[0], a[1], a[2], a[3], weights[0], weights[1]);
      }
    }
    if ((slot += SLOT) == ring_end) slot = ring;
  }

  // Shares of the warps: sums [8][SUMS], highest [8], total [8], in place of the warp's tiles.
#pragma unroll
  for (int c = 0; c < 2; c++) {
    total[c] += __shfl_xor_sync(~0u, total[c], 4);
    total[c] += __shfl_xor_sync(~0u, total[c], 8);
    total[c] += __shfl_xor_sync(~0u, total[c], 16);
  }
  await<0>();
  __syncwarp();
  float* share = (float*)(raw + warp * REGION);
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) share[(2 * quad + j % 2) * SUMS + 16 * i + (E4M3 ? 2 * line + j / 2 : line + j / 2 * 8)] = sums[i][j];
  }
  if (line == 0) {
    for (int c = 0; c < 2; c++) share[8 * SUMS + 2 * quad + c] = highest[c], share[8 * SUMS + 8 + 2 * quad + c] = total[c];
  }
  if (WARPS > 1) __syncthreads(); else __syncwarp();

  const float unit = OUT_SCALED ? out_scale[0] : 1.0f;
  auto finish = [&](int g, int d, const float (&x)[8], float weight) {  // eight outputs of query g from dimension d on
    const float part = weight != 0.0f ? value_scale / weight : 0.0f;  // NaN too: a row that holds one shows it
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = weight != 0.0f ? outputs(x[2 * i] * part, x[2 * i + 1] * part) : 0u;
    const u64 at = (u64)row * out_token_stride + (kv_head * GROUP + g) * out_head_stride + d;
    if (OUT_SCALED) {
      u32 kept[4];
#pragma unroll
      for (int i = 0; i < 4; i++) kept[i] = e4m3x2(low(pairs[i]) / unit, high(pairs[i]) / unit);
      *(uint2*)((u8*)out + at) = uint2{kept[0] | kept[1] << 16, kept[2] | kept[3] << 16};
    } else {
      *(uint4*)((u16*)out + at) = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
    }
  };
  constexpr int PARTS = GROUP * HEAD_SIZE / 8;
  float* joined = (float*)(raw + WARPS * REGION);  // of the block, for its cluster: the same three
  for (int part = threadIdx.x; part < PARTS; part += THREADS) {
    const int g = part / (HEAD_SIZE / 8), d = part % (HEAD_SIZE / 8) * 8;
    float most = -INFINITY, weight = 0.0f, x[8] = {};
    for (int w = 0; w < WARPS; w++) most = fmaxf(most, ((float*)(raw + w * REGION))[8 * SUMS + g]);
    const float reference = most == -INFINITY ? 0.0f : most;
    for (int w = 0; w < WARPS; w++) {
      const float* of = (float*)(raw + w * REGION);
      const float each = WARPS > 1 ? exp2_of(of[8 * SUMS + g] - reference) : 1.0f;
      weight += each * of[8 * SUMS + 8 + g];
      add_four(x, 0, *(float4*)(of + g * SUMS + d), each), add_four(x, 4, *(float4*)(of + g * SUMS + d + 4), each);
    }
    if (BLOCKS == 1) {
      finish(g, d, x, weight);
    } else {
      *(float4*)(joined + g * SUMS + d) = float4{x[0], x[1], x[2], x[3]};
      *(float4*)(joined + g * SUMS + d + 4) = float4{x[4], x[5], x[6], x[7]};
      if (d == 0) joined[8 * SUMS + g] = most, joined[8 * SUMS + 8 + g] = weight;
    }
  }
  if (BLOCKS > 1) {
    __syncwarp();
    cluster_wait();
    const u32 mine = shared_address(joined);
    for (int part = block + BLOCKS * threadIdx.x; part < PARTS; part += BLOCKS * THREADS) {
      const int g = part / (HEAD_SIZE / 8), d = part % (HEAD_SIZE / 8) * 8;
      float most = -INFINITY, weight = 0.0f, x[8] = {}, of_block[BLOCKS];
#pragma unroll
      for (int b = 0; b < BLOCKS; b++) most = fmaxf(most, of_block[b] = from_cluster(remote(mine, b) + 4 * (8 * SUMS + g)));
      const float reference = most == -INFINITY ? 0.0f : most;
#pragma unroll
      for (int b = 0; b < BLOCKS; b++) {
        const u32 of = remote(mine, b);
        const float each = exp2_of(of_block[b] - reference);
        weight += each * from_cluster(of + 4 * (8 * SUMS + 8 + g));
#pragma unroll
        for (int i = 0; i < 8; i += 4) add_four(x, i, four_from_cluster(of + 4 * (g * SUMS + d + i)), each);
      }
      finish(g, d, x, weight);
    }
    __syncwarp();
    cluster_wait();  // a neighbour may still read what this block joined
  }
}
"""


def _sums_bytes(constants: Mapping[str, Any]) -> int:
    """Of a share: sums, and two numbers a query."""
    return 4 * (MAX_GROUP * (int(constants["HEAD_SIZE"]) + _PAD) + 2 * MAX_GROUP)


def _region(constants: Mapping[str, Any]) -> int:
    """Bytes of a warp: its ring of tiles, and later its share."""
    ring = int(constants["SLOTS"]) * TILE * int(constants["HEAD_SIZE"]) * (1 if constants["E4M3"] else 2)
    return -(-max(ring, _sums_bytes(constants)) // 128) * 128


def _staged(constants: Mapping[str, Any]) -> int:
    """Where the new keys and values of the warps lie: behind their regions and what the block joins for its cluster."""
    return int(constants["WARPS"]) * _region(constants) + (_sums_bytes(constants) if constants["BLOCKS"] > 1 else 0)


def _shared_bytes(constants: Mapping[str, Any]) -> int:
    row = int(constants["HEAD_SIZE"]) * (1 if constants["E4M3"] else 2)
    return _staged(constants) + (int(constants["WARPS"]) * 2 * row if constants["ROTATED"] else 0)


def _source(constants: Mapping[str, Any]) -> str:
    resident = max(1, min(16 // int(constants["WARPS"]), 227 * 1024 // (_shared_bytes(constants) + 1024)))
    defined = {name: int(value) for name, value in constants.items()}
    defined |= {"REGION": _region(constants), "STAGED": _staged(constants), "RESIDENT": resident}
    lines = [f"#define {name} {value}\n" for name, value in defined.items()]
    return "".join([*lines, "#define INFINITY __int_as_float(0x7f800000)\n", TEXT, _KERNEL])


decode_attention_kernel = CudaKernel(
    name="decode_attention_kernel",
    arguments=(
        "query", "out", "key_cache", "value_cache", "query_start_loc", "seq_lens", "block_table", "out_scale", "num_requests", "scale",
        "value_scale", "soft_cap", "query_token_stride", "query_head_stride", "out_token_stride", "out_head_stride", "block_stride",
        "slot_stride", "head_stride", "table_stride", "table_columns", "key", "value", "cosine", "sine", "query_weight", "key_weight",
        "slots", "epsilon", "offset", "key_factor", "value_factor", "key_token_stride", "key_head_stride", "value_token_stride",
        "value_head_stride", "cosine_stride", "sine_stride",
    ),
    constants=(
        "GROUP", "HEAD_SIZE", "BLOCK_SIZE", "E4M3", "FP16", "WINDOW", "SOFT_CAP", "OUT_SCALED", "WARPS", "BLOCKS", "SLOTS", "PROGRAMMATIC",
        "SETTLED", "ROTATED", "WIDE", "NORM",
    ),
    source=_source,
    shared_bytes=_shared_bytes,
)  # fmt: skip
