"""The reference attention inside of a FULL graph: lengths, slots and block tables are read when the graph is replayed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rung.attention import Attention, AttentionMetadata, AttentionSpec, KVCache
from rung.attention.backends.torch_reference import TorchReference
from rung.context import ForwardContext, set_forward_context
from rung.graphs import Descriptor, GraphMode
from tests.graphs.toys import ToyPlan, brk, data, make_manager, run_padded

SPEC = AttentionSpec(num_heads=2, num_kv_heads=1, head_size=2, scale=0.5)
ROWS = 4
FULL = Descriptor(mode=GraphMode.FULL, num_tokens=ROWS, num_requests=ROWS, uniform_query_len=1)


def attention_layer() -> Attention:
    layer = Attention("attention", SPEC)
    layer.bind(TorchReference(SPEC), KVCache(torch.zeros(8, 2, 1, 2), torch.zeros(8, 2, 1, 2)))
    return layer


def metadata(seq_lens: Sequence[int]) -> AttentionMetadata:
    """One new token a request, padded to ROWS requests; request i owns blocks 2 i and 2 i + 1."""
    count = len(seq_lens)
    table = torch.arange(2 * ROWS, dtype=torch.int32).view(ROWS, 2)
    slots = [4 * i + length - 1 for i, length in enumerate(seq_lens)] + [-1] * (ROWS - count)
    return AttentionMetadata(
        query_start_loc=torch.tensor([min(i, count) for i in range(ROWS + 1)], dtype=torch.int32),
        seq_lens=torch.tensor([*seq_lens, *[0] * (ROWS - count)], dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.tensor(slots),
        num_requests=ROWS,
        num_actual_tokens=ROWS,
        max_query_len=1,
        max_seq_len=4,
    )


@contextmanager
def step(layer: Attention, meta: AttentionMetadata) -> Iterator[None]:
    with set_forward_context(ForwardContext(attention_metadata={layer.name: meta}, attention_layers={layer.name: layer})):
        yield


def test_full_replay_follows_the_metadata_and_leaves_other_slots_alone() -> None:
    layer, oracle = attention_layer(), attention_layer()

    def attend(module: Attention) -> Any:
        return lambda x: (module(x.view(-1, 2, 2), x[:, None, :2], x[:, None, 2:]).flatten(1),)

    manager = make_manager(ToyPlan([(brk("attention_00", attend(layer)), ("x",), ("y",))], ("y",)))
    static = metadata([])
    manager.capture([FULL], lambda descriptor: step(layer, static))
    assert layer.kv_cache is not None
    assert oracle.kv_cache is not None
    for seed, seq_lens in enumerate([[1, 1, 1], [2, 2, 2, 1], [3, 3], [4, 4, 3, 2]]):
        x, now = data(len(seq_lens), seed), metadata(seq_lens)
        for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
            getattr(static, name).copy_(getattr(now, name))
        manager.poison()
        got = run_padded(manager, FULL, x)[0]  # no forward context: nothing of the break's Python runs
        with step(oracle, now):
            want = attend(oracle)(torch.cat([x, torch.zeros(ROWS - len(x), 4)]))[0]
        torch.testing.assert_close(got, want[: len(x)])
        assert torch.equal(layer.kv_cache.key, oracle.kv_cache.key)
        assert torch.equal(layer.kv_cache.value, oracle.kv_cache.value)
