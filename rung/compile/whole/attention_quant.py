"""Attention and the static quantisation of its output become one: the backend writes e4m3.

The output and its quantisation lie on both sides of the split, with views between. Scales that are found row by row, or group by group,
stay as they are: a program of an attention kernel sees the heads of one KV head alone.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import fx

from rung.attention import Attention, AttentionSpec, KVCache
from rung.attention.backends.torch_reference import TorchReference
from rung.compile.whole.base import WholeGraph, arguments, behind_views, calls, fake, miss, op_name, refresh
from rung.compile.whole.self_check import context
from rung.context import set_forward_context
from rung.errors import PatternError
from rung.passes.identity import digest
from rung.passes.ir.fp8 import E4M3, fp8_quant_static
from rung.passes.report import PassOutcome

_QUANTISATIONS = ("rung::fp8_quant_static", "rung::fp8_quant_per_token", "rung::fp8_quant_group")
_PARTS = 2  # attention and quantisation


class AttentionQuant:
    """Preconditions: the scale is one for all rows and known before the attention; nobody else reads the output or a view of it; the
    layer's backend can write e4m3 (`Attention.why_not_fp8_output`)."""

    name = "attention_quant"

    def uuid(self) -> str:
        return digest(self.name, inspect.getsource(sys.modules[__name__]))

    def check(self) -> None:
        """Attention into e4m3 against attention and quantisation behind it, on random rows. Raises `PatternError`."""
        spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=8, scale=0.35)
        layer = Attention(self.name, spec)
        generator = torch.Generator().manual_seed(1)
        query, key, value = (torch.randn(5, heads, 8, generator=generator) for heads in (4, 2, 2))
        layer.bind(TorchReference(spec), KVCache(torch.zeros(2, 16, 2, 8), torch.zeros(2, 16, 2, 8)))
        for scale in (torch.tensor([0.01]), torch.tensor([1e-4])):
            with set_forward_context(context(layer)), torch.no_grad():
                whole, found = torch.empty_like(query), torch.empty(query.shape, dtype=E4M3)
                written = torch.ops.rung.kv_cache_write(key, value, self.name)
                torch.ops.rung.attention(query, key, value, whole, self.name, written)
                torch.ops.rung.attention(query, key, value, found, self.name, written, False, scale)
            if not torch.equal(fp8_quant_static(whole, scale).float(), found.float()):
                raise PatternError(
                    "attention into e4m3 differs from attention that is quantised", hint="mend AttentionBackend.forward_quantised"
                )

    def run(self, whole: WholeGraph) -> PassOutcome:
        matched, misses = 0, []
        for node in list(whole.graph.nodes):
            found = _attention_before(node)
            if found is None:
                continue
            reason = self._replace(whole, node, found)
            matched += reason is None
            if reason is not None:
                misses.append(miss(self.name, node, _PARTS, _PARTS, reason))
        return PassOutcome({self.name: matched}, tuple(misses))

    def _replace(self, whole: WholeGraph, node: fx.Node, found: tuple[fx.Node, fx.Node, list[fx.Node]]) -> str | None:
        attention, out, views = found
        reason = _why_not(whole, node, attention, out, views)
        if reason is not None:
            return reason
        given = arguments(attention)
        given["out_scale"] = node.args[1]
        attention.args, attention.kwargs = tuple(given.values()), {}
        out.kwargs = {**out.kwargs, "dtype": E4M3}
        for changed in (out, *views):
            refresh(changed)
        node.replace_all_uses_with(views[-1] if views else out)
        whole.graph.erase_node(node)
        return None


def _attention_before(node: fx.Node) -> tuple[fx.Node, fx.Node, list[fx.Node]] | None:
    """The attention whose output `node` quantises, the buffer of that output, and the views between."""
    if op_name(node) not in _QUANTISATIONS:
        return None
    out, views = behind_views(node.args[0])
    if not calls(out, "new_empty", "empty_like"):
        return None
    attention = next((user for user in out.users if op_name(user) == "rung::attention" and user.args[3] is out), None)
    return None if attention is None else (attention, out, views)


def _why_not(whole: WholeGraph, node: fx.Node, attention: fx.Node, out: fx.Node, views: list[fx.Node]) -> str | None:
    if op_name(node) != _QUANTISATIONS[0]:
        return "its scales are found row by row, and a program of attention sees some heads of a row alone"
    scale: Any = node.args[1]
    if fake(scale).numel() != 1 or not whole.precedes(scale, attention):
        return f"its scale ({scale.name}) is no single number that is known before the attention"
    for source, reader in zip((out, *views), (*views, node), strict=True):
        other = next((user for user in source.users if user is not reader and user is not attention), None)
        if other is not None:
            return f"the output has another reader: {other.name}"
    layer = whole.layers.get(str(arguments(attention)["layer"]))
    return "the module has no such attention layer" if layer is None else layer.why_not_fp8_output


def quantised_layers(whole: WholeGraph) -> dict[str, bool]:
    """By attention layer whose output is quantised by one scale: whether its backend can write e4m3."""
    found = (_attention_before(node) for node in whole.graph.nodes if op_name(node) == _QUANTISATIONS[0])
    names = [str(arguments(parts[0])["layer"]) for parts in found if parts is not None]
    return {name: whole.layers[name].why_not_fp8_output is None for name in names if name in whole.layers}
