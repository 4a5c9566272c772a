"""The whole way in seconds: the attention op as the splitter sees it, and the counters that tests read."""

from __future__ import annotations

import torch

import rung
from rung.attention import layer
from rung.counters import Count, Counters


def test_attention_ops_say_what_they_write() -> None:
    attention = torch.ops.rung.attention.default
    assert [argument.name for argument in attention._schema.arguments if argument.is_write] == ["out"]
    assert {op.replace("::", ".") for op in layer.SPLIT_OPS} == {"rung.kv_cache_write", "rung.attention"}


def test_counts_reach_the_sum() -> None:
    before = rung.counters[Count.REPLAYS]
    counters = Counters()
    counters.add(Count.REPLAYS)
    assert rung.counters[Count.REPLAYS] == before + 1
