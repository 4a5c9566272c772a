"""From a batch to everything that its forward pass reads, enqueued, and to the forward context that says where it lies."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from rung.attention import Attention
from rung.context import ForwardContext
from rung.counters import Counters
from rung.graphs import Dispatch
from rung.launch import RepeatedLaunches
from rung.runner.batch import Batch
from rung.runner.block_table import BlockTable
from rung.runner.inputs import InputBuilder
from rung.runner.kv_groups import KVGroup
from rung.runner.metadata import build_metadata
from rung.runner.steps import PreparedStep

_KEPT = 256  # kinds of step, by padded tokens and requests; each about 2 KB on the host


class StepInputs:
    """Fills the input buffers of `builder`, and gathers block tables and slot mapping, one of each for a group of `groups`. The runner owns
    them all, and what they hold counts until the next step."""

    def __init__(
        self,
        builder: InputBuilder,
        layers: Mapping[str, Attention],
        groups: Sequence[KVGroup],
        tables: Sequence[BlockTable],
        max_model_len: int,
        counters: Counters,
    ) -> None:
        self._builder = builder
        self._layers = layers
        self._groups = groups
        self._tables = tables
        self._max_model_len = max_model_len
        self._launches = RepeatedLaunches(_KEPT, counters)

    def prepare(self, batch: Batch, dispatch: Dispatch, *, decode_graph: bool) -> PreparedStep:
        """Enqueue inputs, block tables and slot mapping. `decode_graph`: for a graph that advances itself."""
        buffers = self._builder.buffers
        rows = dispatch.num_requests or batch.num_requests
        # A full graph that does not advance itself attends for its padded requests too, and takes their lengths for 0.
        if batch.uniform_query_len == 1 and dispatch.num_requests is None and dispatch.num_tokens <= buffers.idx_mapping.shape[0]:
            self._enqueue_decodes(batch, dispatch.num_tokens)
        else:
            self._enqueue(batch, dispatch.num_tokens, rows)
        metadata = {}
        for kv_group, table in zip(self._groups, self._tables, strict=True):
            block_table, slot_mapping = table.batch[:rows], table.slot_mapping[: dispatch.num_tokens]
            group = build_metadata(batch, dispatch, buffers, block_table, slot_mapping, self._max_model_len, decode_graph=decode_graph)
            metadata.update(dict.fromkeys(kv_group.layers, group))
        context = ForwardContext(
            attention_metadata=metadata,
            attention_layers=self._layers,
            mode=dispatch.mode,
            descriptor=dispatch.descriptor,
            num_actual_tokens=batch.num_tokens,
        )
        return PreparedStep(batch=batch, dispatch=dispatch, context=context)

    def _enqueue_decodes(self, batch: Batch, num_rows: int) -> None:
        """As a decode graph has them: every row is a request, with one kernel for each group."""
        self._builder.upload_decodes(batch)
        for table in self._tables:
            table.written(num_rows)
        self._launch(num_rows, enqueue=partial(self._builder.build_decodes, self._tables, num_rows))

    def _enqueue(self, batch: Batch, num_tokens: int, num_requests_padded: int) -> None:
        self._builder.upload(batch)
        rows = tuple(table.rows_to_gather(num_requests_padded) for table in self._tables)
        self._launch(num_tokens, batch.has_prefill, rows, enqueue=partial(self._build, num_tokens, batch.has_prefill, rows))

    def _launch(self, *numbers: Hashable, enqueue: Callable[[], None]) -> None:
        """What follows from the uploaded batch. The kernels work between buffers that stay, so `numbers` decide all of their launches."""
        if self._builder.has_kernels:
            self._launches.run(numbers, enqueue)
        else:
            enqueue()

    def _build(self, num_tokens: int, has_prefill: bool, rows: tuple[int, ...]) -> None:
        buffers = self._builder.buffers
        self._builder.build(num_tokens, has_prefill)
        for table, count in zip(self._tables, rows, strict=True):
            table.gather_rows(buffers.idx_mapping, count)
            table.map_slots(buffers.idx_mapping, buffers.query_start_loc, buffers.positions, num_tokens)

    @contextmanager
    def kept(self, *more: torch.Tensor) -> Iterator[None]:
        """What a step may have prepared in the persistent buffers, and in `more`, is put back at the end."""
        persistent = [
            *more,
            *self._builder.buffers.tensors,
            *(t for table in self._tables for t in (table.batch, table.slot_mapping)),
        ]
        saved = [tensor.clone() for tensor in persistent]
        try:
            yield
        finally:
            for tensor, values in zip(persistent, saved, strict=True):
                tensor.copy_(values)
            self._builder.forget()  # what was uploaded last is not what the buffers hold now
