"""IR ops, passes over pieces, and their lowering."""

from rung.passes.manager import GraphPass, PassManager

__all__ = ["GraphPass", "PassManager"]
