"""The passes over a whole graph that a configuration asks for, and what they did."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx, nn

from rung.attention import Attention, attention_layers
from rung.compile.guards import Roots
from rung.compile.whole.attention_quant import AttentionQuant, quantised_layers
from rung.compile.whole.base import WholeGraph, WholePass
from rung.compile.whole.report import WholeReport
from rung.compile.whole.rope_kv_write import RopeKVWrite
from rung.config import CompileConfig
from rung.passes.defaults import is_on
from rung.passes.report import PassOutcome


def _passes(config: CompileConfig) -> tuple[WholePass, ...]:
    passes: tuple[WholePass, ...] = (RopeKVWrite(), AttentionQuant())
    return tuple(item for item in passes if is_on(item.name, config))


def whole_factors(config: CompileConfig) -> dict[str, str]:
    """What of these passes belongs into the key of a plan."""
    return {item.name: item.uuid() for item in _passes(config)}


def run_whole(graph: fx.Graph, layers: Mapping[str, Attention], config: CompileConfig) -> WholeReport:
    """Rewrite `graph` in place. Raises `PatternError` for a pass that computes something else than what it replaces."""
    passes = _passes(config)
    if not passes or not layers:
        return WholeReport()
    whole, found, misses = WholeGraph(graph, layers), {}, []
    outputs = quantised_layers(whole) if any(isinstance(item, AttentionQuant) for item in passes) else {}
    for item in passes:
        item.check()
        outcome: PassOutcome = item.run(whole)
        found[item.name] = dict(outcome.matches)
        misses += [one.as_json() for one in outcome.near_misses]
    graph.lint()
    return WholeReport(found | ({"near_misses": misses} if misses else {}), outputs)


def layers_of(roots: Roots) -> dict[str, Attention]:
    """The attention layers of the module that a traced method belongs to."""
    owner = roots[roots.owner_name] if roots.owner_name else None
    return attention_layers(owner) if isinstance(owner, nn.Module) else {}
