"""Norm and rotation of queries and keys become one op, as transformers' Qwen3 and Gemma-3 layers have them.

The norms must be IR ops already (pass `rms_norm`). transformers rotates [batch, heads, tokens, head_size]; the op takes and gives
[batch, tokens, heads, head_size], as an attention layer does, and the transposition stays behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rung.passes.fused_ops import QK_NORM_ROPE
from rung.passes.ir import rms_norm
from rung.passes.pattern import Draw, Match, Pattern, each_dtype, same_size
from rung.passes.pattern_pass import PatternPass


def _turn(x: torch.Tensor, half: int) -> torch.Tensor:
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _search(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    epsilon: float,
    half: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    cosines, sines = cos.unsqueeze(1), sin.unsqueeze(1)
    queries = rms_norm(query, query_weight, epsilon).transpose(1, 2)
    keys = rms_norm(key, key_weight, epsilon).transpose(1, 2)
    return queries * cosines + _turn(queries, half) * sines, keys * cosines + _turn(keys, half) * sines


def _replacement(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    epsilon: float,
    half: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    queries, keys = QK_NORM_ROPE.overload(query, key, query_weight, key_weight, cos, sin, epsilon)
    return queries.transpose(1, 2), keys.transpose(1, 2)


def _example(draw: Draw) -> Mapping[str, Any]:
    half = draw.size(5)
    return {
        "query": draw.tensor("query", 2, 3, 4, 2 * half),
        "key": draw.tensor("key", 2, 3, 2, 2 * half),
        "query_weight": draw.tensor("query_weight", 2 * half),
        "key_weight": draw.tensor("key_weight", 2 * half),
        "cos": draw.tensor("cos", 2, 3, 2 * half),
        "sin": draw.tensor("sin", 2, 3, 2 * half),
        "epsilon": draw.float(1e-6, 1e-3),
        "half": half,
    }


def _precondition(match: Match) -> str | None:
    size = match["query"].shape[-1]
    if not same_size(2 * match.constants["half"], size):
        return f"heads of size {size} are cut at {match.constants['half']}, which is not the middle"
    for name in ("key", "query_weight", "key_weight", "cos", "sin"):
        if not same_size(match[name].shape[-1], size):
            return f"{name} ends in {match[name].shape[-1]}, the query in {size}"
    dims = tuple(match[name].dim() for name in ("query", "key", "cos", "sin"))
    return None if dims == (4, 4, 3, 3) else f"query, key, cos and sin have {dims} dimensions, not (4, 4, 3, 3)"


QK_NORM_ROPE_PATTERN = Pattern(
    name="qk_norm_rope",
    search=_search,
    replacement=_replacement,
    precondition=_precondition,
    example=_example,
    variants=each_dtype("query", "key", "query_weight", "key_weight", "cos", "sin"),
    shared=("unsqueeze",),
)


def qk_norm_rope() -> PatternPass:
    return PatternPass("qk_norm_rope", (QK_NORM_ROPE_PATTERN,))
