"""Random ragged batches over a paged cache, and what attention must give for them, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from rung.attention import AttentionBackend, AttentionMetadata, AttentionSpec, HostMetadata, KVCache

NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class Batch:
    spec: AttentionSpec
    query: torch.Tensor  # [num_tokens, num_heads, head_size]; padded rows NaN
    key: torch.Tensor  # [num_tokens, num_kv_heads, head_size]; padded rows NaN
    value: torch.Tensor
    cache: KVCache  # the history of every request; every other slot NaN
    metadata: AttentionMetadata
    num_actual_tokens: int
    expected: torch.Tensor  # float64 [num_tokens, num_heads, head_size]; padded rows zero

    def without_host(self) -> Batch:
        return replace(self, metadata=replace(self.metadata, host=None))

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        """Write the cache, attend into a NaN output, and give it back as float64 on the CPU."""
        out = torch.full_like(self.query, NAN)
        backend.write_kv(self.key, self.value, self.cache, self.metadata.slot_mapping)
        backend.forward(self.query, self.cache, out, self.metadata)
        return out.double().cpu()

    def check(self, backend: AttentionBackend, tolerance: float) -> None:
        """Relative error over all real rows below `tolerance`, padded rows exactly zero."""
        out = self.run(backend)
        real, padded = out[: self.num_actual_tokens], out[self.num_actual_tokens :]
        expected = self.expected[: self.num_actual_tokens]
        assert bool((padded == 0).all()), "padded rows are not zero"
        if expected.numel():
            error = float((real - expected).norm() / expected.norm().clamp(min=1e-30))
            worst = float((real - expected).abs().max())
            assert error < tolerance, f"relative error {error:.2e}, worst element off by {worst:.2e}"


def make_batch(
    spec: AttentionSpec,
    lengths: list[tuple[int, int]],  # (query length, history) of each request
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    padded_requests: int = 0,
    padded_rows: int = 0,
    slack: int = 0,  # how far the bounds lie above the true maxima
    seed: int = 0,
) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    count, num_requests = len(lengths), len(lengths) + padded_requests
    query_lens = [query for query, _ in lengths]
    seq_lens = [query + history for query, history in lengths]
    actual = sum(query_lens)
    num_tokens = actual + padded_rows
    max_seq_len = max(seq_lens, default=0) + slack
    columns = -(-max_seq_len // block_size) + 1
    needed = [-(-seq // block_size) for seq in seq_lens]
    order = (torch.randperm(sum(needed), generator=generator) + 1).tolist()  # block 0 belongs to nobody
    table = torch.zeros(num_requests, columns, dtype=torch.int32)
    for row, blocks in enumerate(needed):
        table[row, :blocks] = torch.tensor(order[:blocks], dtype=torch.int32)
        del order[:blocks]

    shape = (1 + sum(needed), block_size, spec.num_kv_heads, spec.head_size)
    key_cache, value_cache = torch.full(shape, NAN, dtype=dtype), torch.full(shape, NAN, dtype=dtype)
    rows = (num_tokens, spec.num_kv_heads, spec.head_size)
    query = torch.full((num_tokens, spec.num_heads, spec.head_size), NAN, dtype=dtype)
    key, value = torch.full(rows, NAN, dtype=dtype), torch.full(rows, NAN, dtype=dtype)
    slots = torch.full((num_tokens,), -1, dtype=torch.int64)
    expected = torch.zeros(query.shape, dtype=torch.float64)
    start = 0
    for row, (query_len, history) in enumerate(lengths):
        stop, seq_len = start + query_len, query_len + history
        full = (seq_len, spec.num_kv_heads, spec.head_size)
        keys = torch.randn(full, generator=generator).to(dtype)
        values = torch.randn(full, generator=generator).to(dtype)
        query[start:stop] = torch.randn(query[start:stop].shape, generator=generator).to(dtype)
        position = torch.arange(seq_len)
        place = table[row, position // block_size].long() * block_size + position % block_size
        key_cache.flatten(0, 1)[place[:history]] = keys[:history]
        value_cache.flatten(0, 1)[place[:history]] = values[:history]
        key[start:stop], value[start:stop] = keys[history:], values[history:]
        slots[start:stop] = place[history:]
        expected[start:stop] = _attend(spec, query[start:stop].to(device), keys.to(device), values.to(device)).cpu()
        start = stop

    starts = np.zeros(num_requests + 1, dtype=np.int32)
    starts[1 : count + 1] = np.cumsum(query_lens)
    starts[count + 1 :] = actual
    seqs = np.array(seq_lens + [0] * padded_requests, dtype=np.int32)
    metadata = AttentionMetadata(
        query_start_loc=torch.from_numpy(starts.copy()).to(device),
        seq_lens=torch.from_numpy(seqs.copy()).to(device),
        block_table=table.to(device),
        slot_mapping=slots.to(device),
        num_requests=num_requests,
        num_actual_tokens=actual,
        max_query_len=max([*query_lens, 1]) + slack * (max([*query_lens, 1]) > 1),
        max_seq_len=max_seq_len,
        host=HostMetadata(query_start_loc=starts, seq_lens=seqs),
    )
    return Batch(
        spec=spec,
        query=query.to(device),
        key=key.to(device),
        value=value.to(device),
        cache=KVCache(key_cache.to(device), value_cache.to(device)),
        metadata=metadata,
        num_actual_tokens=actual,
        expected=expected,
    )


def _attend(spec: AttentionSpec, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The last query_len rows of one request: query [query_len, num_heads, head_size], keys [seq_len, num_kv_heads, head_size]."""
    query_len, seq_len = query.shape[0], keys.shape[0]
    group = spec.num_heads // spec.num_kv_heads
    distance = torch.arange(seq_len - query_len, seq_len)[:, None] - torch.arange(seq_len)[None, :]
    hidden = distance < 0
    if spec.sliding_window is not None:
        hidden |= distance >= spec.sliding_window
    result = torch.empty(query.shape, dtype=torch.float64, device=query.device)
    for head in range(spec.num_heads):
        scores = query[:, head].double() @ keys[:, head // group].double().T * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        scores[hidden.to(query.device)] = float("-inf")
        result[:, head] = torch.softmax(scores, 1) @ values[:, head // group].double()
    return result


def make_spec(
    num_heads: int = 4, num_kv_heads: int = 2, head_size: int = 16, window: int | None = None, cap: float | None = None
) -> AttentionSpec:
    return AttentionSpec(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, scale=head_size**-0.5, sliding_window=window, soft_cap=cap
    )


# Name -> (query length, history) of each request.
LENGTHS: dict[str, list[tuple[int, int]]] = {
    "decode": [(1, 0), (1, 15), (1, 16), (1, 70), (1, 33)],
    "prefill": [(1, 0), (17, 0), (40, 0)],
    "chunked": [(16, 16), (7, 30), (33, 5)],
    "mixed": [(1, 40), (1, 3), (29, 0), (1, 17), (16, 19)],
    "zero length requests": [(0, 20), (1, 8), (0, 0), (1, 9), (0, 5), (12, 1), (0, 3)],
    "one token": [(1, 0)],
    "nothing": [(0, 0)],
}

# Five real rows in a cache of 5 blocks of 16, the last slot real, in a batch padded to 8.
T13_SLOTS = [0, 17, 33, 50, 79, -1, -1, -1]


def check_writes_only_its_slots(
    backend: AttentionBackend, slots: list[int], device: str = "cpu", dtype: torch.dtype = torch.float32
) -> None:
    """Write rows to `slots` of an 80-slot cache that lies between guard rows; everything else must stay bit for bit."""
    guard, blocks, block_size, heads, size = 2, 5, 16, 2, 16
    generator = torch.Generator().manual_seed(1)
    shape = (blocks + 2 * guard, block_size, heads, size)
    stores = [torch.randn(shape, generator=generator).to(dtype).to(device) for _ in range(2)]
    for store in stores:
        store[guard, 1] = NAN  # a reserved slot of padding may hold anything
    before = [store.clone() for store in stores]
    cache = KVCache(*(store[guard : guard + blocks] for store in stores))
    new = [torch.randn(len(slots), heads, size, generator=generator).to(dtype).to(device) for _ in range(2)]
    for rows in new:
        rows[torch.tensor(slots) < 0] = NAN
    backend.write_kv(new[0], new[1], cache, torch.tensor(slots, dtype=torch.int64, device=device))
    for store, old, rows in zip(stores, before, new, strict=True):
        wanted = old.clone()
        for row, slot in enumerate(slots):
            if slot >= 0:
                wanted[guard + slot // block_size, slot % block_size] = rows[row]
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(store.view(bits), wanted.view(bits))
