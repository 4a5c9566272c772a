"""Paged attention in plain torch: the road of the CPU and the oracle of the other backends.

With host lengths, runs of one-token requests are computed together and longer requests one by one. Without them (a FULL graph), every
row gathers the keys of its own request up to `max_seq_len`: all shapes come from the metadata, all lengths stay on the device.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from rung.attention.backends.kv_write import write_kv_torch
from rung.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec, CaptureSupport, HostMetadata, KVCache

_GATHERED_ELEMENTS = 1 << 24  # keys gathered at once, in elements: 64 MiB of float32


class TorchReference(AttentionBackend):
    """Runs everywhere. Scores and sums are float32 at least."""

    name: ClassVar[str] = "torch_reference"
    capture_support: ClassVar[CaptureSupport] = CaptureSupport.ALWAYS

    @classmethod
    def why_not(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        if not dtype.is_floating_point:
            return f"{dtype} is no floating point type"
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} heads cannot be grouped over {spec.num_kv_heads} KV heads"
        return None

    @classmethod
    def why_not_fp8_cache(cls, device: torch.device) -> str | None:
        return None

    @classmethod
    def why_not_fp8_output(cls, device: torch.device) -> str | None:
        return None

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
        write_kv_torch(key, value, cache, slot_mapping)

    @classmethod
    def why_not_batch_invariant(cls) -> str | None:
        return None

    def forward(self, query: torch.Tensor, cache: KVCache, out: torch.Tensor, metadata: AttentionMetadata) -> None:
        if metadata.host is None or self.batch_invariant:
            self._forward_on_device(query, cache, out, metadata)
        else:
            self._forward_by_request(query, cache, out, metadata, metadata.host)

    def _forward_on_device(self, query: torch.Tensor, cache: KVCache, out: torch.Tensor, metadata: AttentionMetadata) -> None:
        starts, seq_lens = metadata.query_start_loc, metadata.seq_lens
        rows = torch.arange(query.shape[0], device=query.device, dtype=starts.dtype)
        request = torch.searchsorted(starts[1:], rows, right=True)  # num_requests for padded rows
        padded = request == metadata.num_requests
        request = request.clamp(max=metadata.num_requests - 1)
        position = seq_lens[request] - starts[request + 1] + rows
        position = torch.where(padded, -1, position)
        if not self.batch_invariant:
            self._attend_rows(query, cache, out, metadata.block_table, request, position, metadata.max_seq_len)
            return
        longest = metadata.block_table.shape[1] * cache.block_size  # not of this batch: products over other lengths have other bits
        for row in range(query.shape[0]):
            here = slice(row, row + 1)
            one = query[here].clone()  # where in memory a row lies may decide how a library sums
            self._attend_rows(one, cache, out[here], metadata.block_table, request[here], position[here], longest)

    def _forward_by_request(
        self, query: torch.Tensor, cache: KVCache, out: torch.Tensor, metadata: AttentionMetadata, host: HostMetadata
    ) -> None:
        starts, seq_lens = host.query_start_loc.tolist(), host.seq_lens.tolist()
        count = len(seq_lens)
        first = 0
        while first < count:
            start, stop = starts[first], starts[first + 1]
            last = first + 1
            if stop - start == 1:
                while last < count and starts[last + 1] - starts[last] == 1:
                    last += 1
                request = torch.arange(first, last, device=query.device)
                rows = slice(start, starts[last])
                position = metadata.seq_lens[first:last] - 1
                self._attend_rows(query[rows], cache, out[rows], metadata.block_table, request, position, max(seq_lens[first:last]))
            elif stop > start:
                self._attend_request(query[start:stop], cache, out[start:stop], metadata.block_table[first], seq_lens[first])
            first = last
        out[starts[-1] :].zero_()

    def _attend_rows(
        self,
        query: torch.Tensor,  # [rows, num_heads, head_size]
        cache: KVCache,
        out: torch.Tensor,
        block_table: torch.Tensor,
        request: torch.Tensor,  # int64 [rows], row of the block table
        position: torch.Tensor,  # [rows], position of each row in its request; negative: the row becomes zero
        max_seq_len: int,
    ) -> None:
        blocks = min(-(-max_seq_len // cache.block_size), block_table.shape[1])
        length = blocks * cache.block_size
        if length == 0:
            out.zero_()
            return
        step = max(1, _GATHERED_ELEMENTS // (length * self.spec.num_kv_heads * self.spec.head_size))
        for start in range(0, query.shape[0], step):
            rows = slice(start, start + step)
            table = block_table[request[rows], :blocks]  # [step, blocks]
            keys, values = (gathered.flatten(1, 2) for gathered in _read(cache, table))
            self._attend_gathered(query[rows], keys, values, position[rows], out[rows])

    def _attend_gathered(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: torch.Tensor, out: torch.Tensor
    ) -> None:
        """`keys` and `values` are [rows, length, num_kv_heads, head_size]: each row brings its own."""
        compute = torch.promote_types(query.dtype, torch.float32)
        visible = self._visible(position, keys.shape[1])  # [rows, length]
        # A slot that was never written may hold NaN, and 0 * NaN is NaN: such values are replaced, not only weighted with zero.
        values = torch.where(visible[:, :, None, None], values, 0).to(compute)
        grouped = query.unflatten(1, (self.spec.num_kv_heads, -1)).to(compute)  # [rows, num_kv_heads, group, head_size]
        scores = self._capped(grouped @ keys.to(compute).permute(0, 2, 3, 1) * self.spec.scale)
        weights = torch.where(visible[:, None, None, :], scores, float("-inf")).softmax(-1)
        result = weights @ values.transpose(1, 2)  # [rows, num_kv_heads, group, head_size]
        out.copy_(torch.where((position >= 0)[:, None, None], result.flatten(1, 2), 0))

    def _attend_request(self, query: torch.Tensor, cache: KVCache, out: torch.Tensor, table: torch.Tensor, seq_len: int) -> None:
        """All rows of one request: `query` is [query_len, num_heads, head_size], `table` its row of the block table."""
        query_len = query.shape[0]
        if seq_len < query_len:  # rows without a position: they attend to nothing
            out[: query_len - seq_len].zero_()
            query, out, query_len = query[query_len - seq_len :], out[query_len - seq_len :], seq_len
        if seq_len == 0:
            return
        table = table[: -(-seq_len // cache.block_size)]
        # [num_kv_heads, seq_len, head_size]
        keys, values = (gathered.flatten(0, 1)[:seq_len].transpose(0, 1).to(query.dtype) for gathered in _read(cache, table))
        position = torch.arange(seq_len - query_len, seq_len, device=query.device)
        visible = self._visible(position, seq_len)
        if self.spec.soft_cap is None:
            queries = query.transpose(0, 1)[None]
            whole = query_len == seq_len and self.spec.sliding_window is None
            mask = None if whole else visible
            result = scaled_dot_product_attention(
                queries, keys[None], values[None], attn_mask=mask, is_causal=whole, scale=self.spec.scale, enable_gqa=True
            )
            out.copy_(result[0].transpose(0, 1))
            return
        compute = torch.promote_types(query.dtype, torch.float32)
        grouped = (
            query.unflatten(1, (self.spec.num_kv_heads, -1)).permute(1, 2, 0, 3).to(compute)
        )  # [num_kv_heads, group, query_len, head_size]
        scores = self._capped(grouped @ keys[:, None].transpose(-1, -2).to(compute) * self.spec.scale)
        weights = torch.where(visible, scores, float("-inf")).softmax(-1)
        out.copy_((weights @ values[:, None].to(compute)).permute(2, 0, 1, 3).flatten(1, 2))

    def _visible(self, position: torch.Tensor, length: int) -> torch.Tensor:
        """Which of `length` keys each row attends to: its own and those before it, as far as the window reaches. [rows, length]"""
        distance = position[:, None] - torch.arange(length, device=position.device)
        visible = distance >= 0
        return visible if self.spec.sliding_window is None else visible & (distance < self.spec.sliding_window)

    def _capped(self, scores: torch.Tensor) -> torch.Tensor:
        cap = self.spec.soft_cap
        return scores if cap is None else cap * torch.tanh(scores / cap)


def _read(cache: KVCache, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of some blocks [..., block_size, num_kv_heads, head_size]; those of an e4m3 cache as float32."""
    keys, values = cache.key[table], cache.value[table]
    return (keys.float() * cache.key_scale, values.float() * cache.value_scale) if cache.is_fp8 else (keys, values)
