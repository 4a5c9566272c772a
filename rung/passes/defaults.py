"""The passes that a configuration asks for, in the order in which they run."""

from __future__ import annotations

from rung.config import CompileConfig
from rung.errors import PassError
from rung.passes.cleanup import DeadCode, NoopElimination
from rung.passes.extension import load_pass
from rung.passes.fusion import Projections, ResidualAdd, act_mul, act_quant, add_norm, norm_quant, qk_norm_rope, rms_norm
from rung.passes.manager import GraphPass, PassManager


def _recognising() -> list[GraphPass]:
    return [NoopElimination(), rms_norm(), act_mul()]


def _joining() -> list[GraphPass]:
    return [qk_norm_rope(), Projections(), norm_quant(), act_quant(), add_norm()]


def _late() -> list[GraphPass]:
    return [ResidualAdd(), DeadCode()]


def pass_manager(config: CompileConfig) -> PassManager:
    """Norms and activations are recognised first, since later patterns are written with them; then come the configuration's own passes,
    and the other fusions, those that take more together first. Residual additions are looked at behind lowering, where the sums stand
    that fused ops were lowered to. Raises `PassError`."""
    own = [load_pass(given) for given in config.passes]
    passes, late = [*_recognising(), *own, *_joining()], _late()
    names = [item.name for item in (*passes, *late)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise PassError(f"two passes are called {twice!r}", hint="give each pass a name of its own; reports and `expect` go by it")
    unknown = next((name for name in config.without_passes if name not in names), None)
    if unknown is not None:
        raise PassError(f"without_passes names {unknown!r}, which is no pass", hint=f"there are {', '.join(names)}")
    skip = set(config.without_passes)
    return PassManager([item for item in passes if item.name not in skip], [item for item in late if item.name not in skip])


def pass_names() -> tuple[str, ...]:
    """The passes that run unless `without_passes` names them."""
    return tuple(item.name for item in (*_recognising(), *_joining(), *_late()))
