"""IR ops, one file each. `IR_OPS` is the closed table that lowering reads."""

from rung.passes.ir.op import IROp, define_ir_op
from rung.passes.ir.rms_norm import RMS_NORM, rms_norm

IR_OPS: tuple[IROp, ...] = (RMS_NORM,)

__all__ = ["IR_OPS", "RMS_NORM", "IROp", "define_ir_op", "rms_norm"]
