"""The passes that a configuration asks for, in the order in which they run."""

from __future__ import annotations

from rung.config import CompileConfig
from rung.errors import PassError
from rung.passes.cleanup import DeadCode, Duplicates, NoopElimination
from rung.passes.extension import load_pass, load_provider
from rung.passes.fusion import (
    FlatRows,
    Projections,
    ResidualAdd,
    Siblings,
    act_mul,
    act_quant,
    add_norm,
    norm_quant,
    qk_norm_rope,
    rms_norm,
)
from rung.passes.invariant import BatchInvariant
from rung.passes.manager import GraphPass, PassManager

# Passes over the whole graph, which `rung.compile.whole` makes: what they join lies on both sides of a split op.
WHOLE_PASSES = ("rope_kv_write", "attention_quant")
# Passes that run only where `with_passes` names them: fusions that were measured and did not win. The one place for it.
OFF_BY_DEFAULT: frozenset[str] = frozenset()


def is_on(name: str, config: CompileConfig) -> bool:
    """Whether a pass runs."""
    return name not in config.without_passes and (name not in OFF_BY_DEFAULT or name in config.with_passes)


def _recognising() -> list[GraphPass]:
    return [NoopElimination(), rms_norm(), act_mul()]


def _joining(config: CompileConfig) -> list[GraphPass]:
    products: list[GraphPass] = [BatchInvariant()] if config.batch_invariant else [Siblings(), Projections()]
    return [qk_norm_rope(), FlatRows(), Duplicates(), *products, norm_quant(), act_quant(), add_norm()]


def _late() -> list[GraphPass]:
    return [ResidualAdd(), DeadCode()]


def pass_manager(config: CompileConfig) -> PassManager:
    """Norms and activations are recognised first, since later patterns are written with them; then come the configuration's own passes,
    and the other fusions, those that take more together first. Residual additions are looked at behind lowering, where the sums stand
    that fused ops were lowered to. Raises `PassError`."""
    own = [load_pass(given) for given in config.passes]
    passes, late = [*_recognising(), *own, *_joining(config)], _late()
    names = [*WHOLE_PASSES, *(item.name for item in (*passes, *late))]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise PassError(f"two passes are called {twice!r}", hint="give each pass a name of its own; reports and `expect` go by it")
    for field, given in (("without_passes", config.without_passes), ("with_passes", config.with_passes)):
        unknown = next((name for name in given if name not in names), None)
        if unknown is not None:
            raise PassError(f"{field} names {unknown!r}, which is no pass", hint=f"there are {', '.join(names)}")
    providers = [load_provider(given) for given in config.providers]
    return PassManager(
        [item for item in passes if is_on(item.name, config)],
        [item for item in late if is_on(item.name, config)],
        providers=providers,
    )


def pass_names() -> tuple[str, ...]:
    """rung's own passes, for `without_passes` to name."""
    return (*WHOLE_PASSES, *(item.name for item in (*_recognising(), *_joining(CompileConfig()), *_late())))
