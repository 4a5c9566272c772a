"""Attention metadata of a step: one object for each KV-cache group, shared by the group's layers."""

from __future__ import annotations

import numpy as np
import torch

from rung.attention import AttentionMetadata, HostMetadata
from rung.graphs import Dispatch
from rung.runner.batch import Batch
from rung.runner.inputs import InputBuffers


def build_metadata(
    batch: Batch,
    dispatch: Dispatch,
    buffers: InputBuffers,
    block_table: torch.Tensor,  # int32 [R, B], in batch order
    slot_mapping: torch.Tensor,  # int64 [num_tokens padded]
    max_model_len: int,
    *,
    decode_graph: bool = False,
) -> AttentionMetadata:
    """FULL: padded sizes and upper bounds that hold for every batch of the graph, nothing for the host. Else: the batch's own sizes.
    `decode_graph`: the graph gives every row to a request, and `DecodeStep.build_inputs` settles what it reads."""
    if dispatch.mode == "full":
        assert dispatch.num_requests is not None
        return AttentionMetadata(
            query_start_loc=buffers.query_start_loc[: dispatch.num_requests + 1],
            seq_lens=buffers.seq_lens[: dispatch.num_requests],
            block_table=block_table[: dispatch.num_requests],
            slot_mapping=slot_mapping,
            num_requests=dispatch.num_requests,
            num_actual_tokens=dispatch.num_tokens,
            max_query_len=dispatch.max_query_len or batch.max_query_len,
            max_seq_len=max_model_len,
            settled=decode_graph,
            may_pad=not decode_graph,
        )
    return AttentionMetadata(
        query_start_loc=buffers.query_start_loc[: batch.num_requests + 1],
        seq_lens=buffers.seq_lens[: batch.num_requests],
        block_table=block_table[: batch.num_requests],
        slot_mapping=slot_mapping,
        num_requests=batch.num_requests,
        num_actual_tokens=batch.num_tokens,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        host=HostMetadata(query_start_loc=batch.query_start_loc, seq_lens=np.asarray(batch.seq_lens, np.int32)),
    )
