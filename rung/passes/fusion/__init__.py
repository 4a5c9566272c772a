from rung.passes.fusion.projections import Projections
from rung.passes.fusion.residual_add import ResidualAdd

__all__ = ["Projections", "ResidualAdd"]
