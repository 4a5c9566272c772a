"""IR ops, one file each. `IR_OPS` is the closed table that lowering reads."""

from rung.passes.ir.activation import GELU_AND_MUL, SILU_AND_MUL, gelu_and_mul, silu_and_mul
from rung.passes.ir.fp8 import (
    FP8_QUANT_GROUP,
    FP8_QUANT_PER_TOKEN,
    FP8_QUANT_STATIC,
    fp8_quant_group,
    fp8_quant_per_token,
    fp8_quant_static,
)
from rung.passes.ir.fp8_linear import (
    FP8_BLOCK,
    FP8_LINEAR,
    FP8_LINEAR_NORM,
    FP8_LINEAR_NORM_LINEAR,
    FP8_NORM_LINEAR,
    FP8_QUANT_LINEAR,
    fp8_linear,
)
from rung.passes.ir.fp8_siblings import FP8_LINEAR_GATED, FP8_LINEAR_THREE
from rung.passes.ir.linear import LINEAR, LINEAR_NORM, LINEAR_NORM_LINEAR, NORM_LINEAR, linear, norm_linear
from rung.passes.ir.op import IROp, Provider, define_ir_op
from rung.passes.ir.rms_norm import RMS_NORM, rms_norm
from rung.passes.ir.siblings import LINEAR_GATED, LINEAR_THREE

IR_OPS: tuple[IROp, ...] = (
    *(RMS_NORM, SILU_AND_MUL, GELU_AND_MUL, LINEAR, NORM_LINEAR, LINEAR_NORM, LINEAR_NORM_LINEAR),
    *(LINEAR_GATED, LINEAR_THREE, FP8_LINEAR_GATED, FP8_LINEAR_THREE),
    *(FP8_QUANT_STATIC, FP8_QUANT_PER_TOKEN, FP8_QUANT_GROUP),
    *(FP8_LINEAR, FP8_QUANT_LINEAR, FP8_NORM_LINEAR, FP8_LINEAR_NORM, FP8_LINEAR_NORM_LINEAR, FP8_BLOCK),
)

__all__ = [
    "FP8_BLOCK",
    "FP8_LINEAR",
    "FP8_LINEAR_GATED",
    "FP8_LINEAR_NORM",
    "FP8_LINEAR_NORM_LINEAR",
    "FP8_LINEAR_THREE",
    "FP8_NORM_LINEAR",
    "FP8_QUANT_GROUP",
    "FP8_QUANT_LINEAR",
    "FP8_QUANT_PER_TOKEN",
    "FP8_QUANT_STATIC",
    "fp8_linear",
    "fp8_quant_group",
    "fp8_quant_per_token",
    "fp8_quant_static",
    "GELU_AND_MUL",
    "IR_OPS",
    "LINEAR",
    "LINEAR_GATED",
    "LINEAR_NORM",
    "LINEAR_NORM_LINEAR",
    "LINEAR_THREE",
    "NORM_LINEAR",
    "RMS_NORM",
    "SILU_AND_MUL",
    "IROp",
    "Provider",
    "define_ir_op",
    "gelu_and_mul",
    "linear",
    "norm_linear",
    "rms_norm",
    "silu_and_mul",
]
