"""Fusions, one file each."""

from rung.passes.fusion.act_mul import act_mul
from rung.passes.fusion.act_quant import act_quant
from rung.passes.fusion.add_norm import add_norm
from rung.passes.fusion.flat_rows import FlatRows
from rung.passes.fusion.norm_quant import norm_quant
from rung.passes.fusion.projections import Projections
from rung.passes.fusion.qk_norm_rope import qk_norm_rope
from rung.passes.fusion.residual_add import ResidualAdd
from rung.passes.fusion.rms_norm import rms_norm
from rung.passes.fusion.siblings import Siblings

__all__ = [
    "FlatRows",
    "Projections",
    "ResidualAdd",
    "Siblings",
    "act_mul",
    "act_quant",
    "add_norm",
    "norm_quant",
    "qk_norm_rope",
    "rms_norm",
]
