"""Passes over the whole graph, before it is split: what they join lies on both sides of a split op."""

from rung.compile.whole.attention_quant import AttentionQuant
from rung.compile.whole.base import WholeGraph, WholePass
from rung.compile.whole.report import WholeReport
from rung.compile.whole.rope_kv_write import RopeKVWrite
from rung.compile.whole.run import layers_of, run_whole, whole_factors

__all__ = ["AttentionQuant", "RopeKVWrite", "WholeGraph", "WholePass", "WholeReport", "layers_of", "run_whole", "whole_factors"]
