"""Rotation of queries and keys, the norms before it where there are any, and the cache write become one op.

As transformers writes them: `x * cos + rotate_half(x) * sin` over [1, heads, tokens, head_size], with cos and sin whose halves are equal,
and the norm of the Llama family over each head (Qwen3).
"""

from __future__ import annotations

import inspect
import operator
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rung.attention import Attention, KVCache
from rung.attention.backends.torch_reference import TorchReference
from rung.attention.base import AttentionSpec
from rung.compile.whole.base import WholeGraph, arguments, calls, fake, miss, op_name, refresh
from rung.compile.whole.self_check import context, rotated_as_transformers
from rung.context import set_forward_context
from rung.errors import PatternError
from rung.passes.identity import digest
from rung.passes.report import NearMiss, PassOutcome

_PARTS = 4  # rotations of query and key, write, attention


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: fx.Node
    epsilon: float


@dataclass(frozen=True, slots=True)
class _Rotated:
    """A rotation: of what [1, heads, tokens, head_size], by what [1, tokens, head_size], behind which norm."""

    source: fx.Node
    cos: fx.Node
    sin: fx.Node
    half: int
    norm: _Norm | None


class RopeKVWrite:
    """Preconditions: query and key are rotated by the same cos and sin, in their own dtype, whose halves are equal, at the middle of a
    head; both are normed alike or neither is; the write is read by its attention alone, and what it wrote is what that attention is
    given."""

    name = "rope_kv_write"

    def uuid(self) -> str:
        return digest(self.name, inspect.getsource(sys.modules[__name__]))

    def check(self) -> None:
        """Both ways on random rows, with norms and without. Raises `PatternError`."""
        spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=8, scale=0.35)
        generator = torch.Generator().manual_seed(1)
        query, key, value = (torch.randn(5, heads, 8, generator=generator) for heads in (4, 2, 2))
        angles = torch.randn(5, 4, generator=generator)
        for weights in ((None, None), (torch.rand(8, generator=generator), torch.rand(8, generator=generator))):
            results = []
            for fused in (False, True):
                layer = Attention(self.name, spec)
                cache = KVCache(torch.zeros(2, 16, 2, 8), torch.zeros(2, 16, 2, 8))
                layer.bind(TorchReference(spec), cache)
                out, rotated = torch.empty_like(query), torch.empty_like(query)
                with set_forward_context(context(layer)), torch.no_grad():
                    if fused:
                        cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
                        torch.ops.rung.rotate_and_write(query, key, value, rotated, cos, sin, self.name, *weights, 1e-6)
                    else:
                        rotated, keys = rotated_as_transformers(query, key, angles, weights, 1e-6)
                        torch.ops.rung.kv_cache_write(keys, value, self.name)
                    torch.ops.rung.attention(rotated, key, value, out, self.name)
                results.append((out, cache.key, cache.value))
            if not all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(*results, strict=True)):
                raise PatternError("rotate_and_write differs from rotation and write", hint="mend AttentionBackend.rotate_and_write")

    def run(self, whole: WholeGraph) -> PassOutcome:
        matched, misses, fused = 0, [], 0
        for node in list(whole.graph.nodes):
            if op_name(node) == "rung::attention" and (write := arguments(node)["written"]) is not None:
                if op_name(write) == "rung::rotate_and_write":
                    fused += 1
                    continue
                found = self._one(whole.graph, node, write)
                matched += found is None
                misses += [] if found is None else [found]
        return PassOutcome({self.name: matched} | ({"already fused": fused} if fused else {}), tuple(misses))

    def _one(self, graph: fx.Graph, attention: fx.Node, write: fx.Node) -> NearMiss | None:
        """Replace, or say why not."""
        given = arguments(attention)
        if op_name(write) != "rung::kv_cache_write" or not given["fresh"]:
            return miss(self.name, attention, 1, _PARTS, "it reads no fresh keys")
        query, key = _rotation(given["query"]), _rotation(given["key"])
        if isinstance(query, str) or isinstance(key, str):
            parts = 2 + sum(isinstance(side, _Rotated) for side in (query, key))
            return miss(self.name, attention, parts, _PARTS, next(side for side in (query, key) if isinstance(side, str)))
        reason = _why_not(query, key, write, given)
        if reason is not None:
            return miss(self.name, attention, _PARTS, _PARTS, reason)
        _replace(graph, attention, write, query, key)
        return None


def _why_not(query: _Rotated, key: _Rotated, write: fx.Node, given: dict[str, Any]) -> str | None:
    if (query.cos, query.sin, query.half) != (key.cos, key.sin, key.half):
        return "query and key are rotated differently"
    if (query.norm is None) != (key.norm is None) or (query.norm and key.norm and query.norm.epsilon != key.norm.epsilon):
        return "query and key are normed differently"
    if fake(query.source).shape[-1] != 2 * query.half:
        return f"heads of {fake(query.source).shape[-1]} are cut at {query.half}, which is not the middle"
    if (reason := _why_not_layout(query, key, given)) is not None:
        return reason
    if (write.args[0], write.args[1], write.args[2]) != (given["key"], given["value"], given["layer"]):
        return "what is written is not what the attention is given"
    if len(write.users) != 1:
        return "the write has another reader"
    if any(not _has_equal_halves(angle) for angle in (query.cos, query.sin)):
        return "the halves of cos and sin are not known to be equal"
    return None


def _why_not_layout(query: _Rotated, key: _Rotated, given: dict[str, Any]) -> str | None:
    for name, side in (("query", query), ("key", key)):
        dtypes = {fake(node).dtype for node in (side.source, side.cos, side.sin, given[name])}
        if len(dtypes) > 1:
            return f"the rotation of the {name} mixes dtypes: {', '.join(sorted(map(str, dtypes)))}"
        if fake(side.source).dim() != 4 or fake(side.source).shape[0] != 1:
            return f"the {name} has shape {tuple(fake(side.source).shape)}, not [1, heads, tokens, head_size]"
    if any(fake(angle).dim() != 3 or fake(angle).shape[0] != 1 for angle in (query.cos, query.sin)):
        return "cos and sin are not [1, tokens, head_size]"
    return None


def _replace(graph: fx.Graph, attention: fx.Node, write: fx.Node, query: _Rotated, key: _Rotated) -> None:
    given = arguments(attention)
    old = given["query"]
    place = min((user for user in old.users), key=list(graph.nodes).index)
    norms = query.norm, key.norm
    with graph.inserting_before(place):
        rows = [_method(graph, old, "transpose", _method(graph, old, "squeeze", side.source, 0), 0, 1) for side in (query, key)]
        angles = []
        for angle in (query.cos, query.sin):
            row = _method(graph, old, "squeeze", angle, 0)
            first_half: Any = (Ellipsis, slice(None, query.half))
            cut = _made(graph.call_function(operator.getitem, (row, first_half)), old)
            angles.append(_method(graph, old, "unsqueeze", cut, 1))
        size = _made(graph.call_method("size", (rows[0],)), old)
        rotated = _method(graph, old, "new_empty", rows[0], size)
    with graph.inserting_before(write):
        weights = [None if norm is None else norm.weight for norm in norms]
        epsilon = 0.0 if norms[0] is None else norms[0].epsilon
        fused = graph.call_function(
            torch.ops.rung.rotate_and_write.default, (*rows, given["value"], rotated, *angles, given["layer"], *weights, epsilon)
        )
        fused.meta = dict(write.meta)
    given |= {"query": rotated, "key": rows[1], "written": fused, "fresh": False}
    attention.args, attention.kwargs = tuple(given.values()), {}
    for user in list(old.users):  # sizes, and buffers of its shape: the rotation is not to be computed for them
        if calls(user, "size", "new_empty", "empty_like"):
            user.replace_input_with(old, rows[0])
            refresh(user)
    graph.erase_node(write)


def _method(graph: fx.Graph, like: fx.Node, name: str, *args: Any) -> fx.Node:
    return _made(graph.call_method(name, args), like)


def _made(node: fx.Node, like: fx.Node) -> fx.Node:
    """A new node with its value, named as `like` in traces."""
    node.meta = {key: like.meta[key] for key in ("stack_trace", "nn_module_stack") if key in like.meta}
    refresh(node)
    return node


def _rotation(rows: Any) -> _Rotated | str:
    """What the rows [tokens, heads, head_size] are a rotation of, or why they are none."""
    if not (calls(rows, "transpose") and rows.args[1:] == (0, 1) and calls(rows.args[0], "squeeze")):
        return "the rows are no transposed heads"
    total = rows.args[0].args[0]
    if not calls(total, "add"):
        return "the rows are no sum of two products"
    plain, turned = total.args
    if not calls(plain, "mul") or not calls(turned, "mul"):
        return "the rows are no sum of two products"
    (source, cos), (half_turned, sin) = plain.args, turned.args
    half = _half_turn(half_turned, source)
    if half is None or not all(calls(angle, "unsqueeze") and angle.args[1] == 1 for angle in (cos, sin)):
        return "the second product is not that of the turned halves"
    norm, below = _norm_below(source)
    return _Rotated(below, cos.args[0], sin.args[0], half, norm)


def _half_turn(node: Any, source: Any) -> int | None:
    """Where `source` is cut, if the node is cat((-source[cut:], source[:cut]))."""
    if not calls(node, "cat") or node.kwargs.get("dim", node.args[-1]) != -1 or len(node.args[0]) != 2:
        return None
    negative, first = node.args[0]
    if not calls(negative, "neg") or not calls(negative.args[0], "getitem") or not calls(first, "getitem"):
        return None
    second = negative.args[0]
    if first.args[0] is not source or second.args[0] is not source:
        return None
    (_, head), (_, tail) = first.args[1], second.args[1]
    cut = head.stop
    return cut if isinstance(cut, int) and (head, tail) == (slice(None, cut, None), slice(cut, None, None)) else None


def _norm_below(source: fx.Node) -> tuple[_Norm | None, fx.Node]:
    """The norm over each head that the rotated heads [1, heads, tokens, head_size] are behind, and the heads before it, laid out alike."""
    if not calls(source, "transpose") or source.args[1:] != (1, 2):
        return None, source
    found = _norm(source.args[0])
    if found is None:
        return None, source
    norm, x = found
    graph = source.graph
    with graph.inserting_before(source):
        return norm, _made(graph.call_method("transpose", (x, 1, 2)), source)


def _norm(node: Any) -> tuple[_Norm, fx.Node] | None:
    """weight * (wide * rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(dtype), with wide = x.to(float32)."""
    if not calls(node, "mul") or not calls(node.args[1], "to") or not calls(node.args[1].args[0], "mul"):
        return None
    weight, (wide, factor) = node.args[0], node.args[1].args[0].args
    if not calls(wide, "to") or fake(wide).dtype != torch.float32 or not calls(factor, "rsqrt") or not calls(factor.args[0], "add"):
        return None
    mean, epsilon = factor.args[0].args
    if not calls(mean, "mean") or mean.args[1:] != (-1,) or mean.kwargs != {"keepdim": True} or not isinstance(epsilon, float):
        return None
    power = mean.args[0]
    if not calls(power, "pow") or power.args != (wide, 2) or not isinstance(weight, fx.Node) or fake(weight).dim() != 1:
        return None
    x = wide.args[0]
    return (_Norm(weight, epsilon), x) if fake(x).dtype == fake(weight).dtype == fake(node).dtype else None


def _has_equal_halves(angle: fx.Node) -> bool:
    """Whether cos or sin comes of cat((angles, angles)) by operations on single elements."""
    node: Any = angle
    while calls(node, "to", "float", "cos", "sin") or (calls(node, "mul") and isinstance(node.args[1], int | float)):
        node = node.args[0]
    return calls(node, "cat") and len(set(node.args[0])) == 1 and node.kwargs.get("dim", node.args[-1]) == -1
