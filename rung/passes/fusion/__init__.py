from rung.passes.fusion.residual_add import ResidualAdd

__all__ = ["ResidualAdd"]
