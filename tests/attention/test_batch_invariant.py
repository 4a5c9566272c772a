"""Attention whose rows have the same bits in every batch: as a decode, as a part of a prompt, beside others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rung.attention import AttentionBackend, AttentionMetadata
from rung.attention.backends.flash_attn import FlashAttention2, FlashAttention3
from rung.attention.backends.flash_triton import FlashTriton
from rung.attention.backends.launch_plan import invariant_launch
from rung.attention.backends.torch_reference import TorchReference
from rung.attention.backends.triton_paged import TritonPaged, why_no_triton
from rung.attention.base import HostMetadata
from rung.attention.select import select_backend
from tests.attention.cases import Batch, make_batch, make_spec

CPU = torch.device("cpu")
INTERPRETED = pytest.mark.skipif(why_no_triton(CPU) is not None, reason="needs Triton's interpreter")
LENGTHS = [(1, 70), (29, 0), (1, 3), (40, 31)]


def part(batch: Batch, request: int, rows: slice, host: bool) -> tuple[torch.Tensor, AttentionMetadata]:
    """Some rows of one request as a batch of its own."""
    starts = batch.metadata.query_start_loc.tolist()
    length = int(batch.metadata.seq_lens[request]) - (starts[request + 1] - starts[request] - rows.stop)
    count = rows.stop - rows.start
    query_start_loc, seq_lens = np.array([0, count], np.int32), np.array([length], np.int32)
    metadata = replace(
        batch.metadata,
        query_start_loc=torch.from_numpy(query_start_loc).to(batch.query.device),
        seq_lens=torch.from_numpy(seq_lens).to(batch.query.device),
        block_table=batch.metadata.block_table[request : request + 1],
        slot_mapping=batch.metadata.slot_mapping[starts[request] + rows.start : starts[request] + rows.stop],
        num_requests=1,
        num_actual_tokens=count,
        max_query_len=count,
        max_seq_len=length,
        host=HostMetadata(query_start_loc=query_start_loc, seq_lens=seq_lens) if host else None,
    )
    return batch.query[starts[request] + rows.start : starts[request] + rows.stop], metadata


@pytest.mark.parametrize("backend", [TorchReference, pytest.param(TritonPaged, marks=INTERPRETED)], ids=["torch", "triton"])
@pytest.mark.parametrize("options", [{}, {"window": 20}, {"cap": 20.0}], ids=["full", "window", "cap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_has_the_same_bits_in_every_batch(backend: type[AttentionBackend], options: dict[str, Any], dtype: torch.dtype) -> None:
    batch = make_batch(make_spec(**options), LENGTHS, dtype=dtype, padded_rows=2)
    made = backend(batch.spec, batch_invariant=True)
    made.write_kv(batch.key, batch.value, batch.cache, batch.metadata.slot_mapping)
    together = torch.empty_like(batch.query)
    made.forward_given_keys(batch.query, batch.key, batch.value, batch.cache, together, batch.metadata)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 5e-3, "rtol": 5e-3}
    torch.testing.assert_close(together[: batch.num_actual_tokens].double(), batch.expected[: batch.num_actual_tokens], **tolerance)
    starts = batch.metadata.query_start_loc.tolist()
    for request, rows in ((0, slice(0, 1)), (1, slice(0, 29)), (1, slice(5, 9)), (1, slice(28, 29)), (3, slice(0, 7)), (3, slice(39, 40))):
        query, metadata = part(batch, request, rows, host=rows.start == 0)
        found = torch.empty_like(query)
        made.forward(query, batch.cache, found, metadata)
        assert torch.equal(found, together[starts[request] + rows.start : starts[request] + rows.stop])


@pytest.mark.parametrize("backend", [FlashAttention3, FlashAttention2, FlashTriton], ids=lambda backend: backend.name)
def test_who_cannot_is_passed_over(backend: type[AttentionBackend]) -> None:
    assert backend.why_not_batch_invariant() == "how it sums depends on the batch"
    assert select_backend(make_spec(), torch.float32, CPU, 16, batch_invariant=True)[0] is TorchReference


@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (8, 1, 256), (128, 1, 64)])
def test_one_launch_serves_every_batch(heads: tuple[int, int, int], element_size: int) -> None:
    found = invariant_launch(make_spec(*heads), element_size)
    assert found.splits == 1
    assert found.block_m >= found.block_q * (heads[0] // heads[1])
    assert found.block_q >= 1
