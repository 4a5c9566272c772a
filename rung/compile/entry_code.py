"""Generate the checked entry of a variant: the parameters of the wrapped function, every check of a call in one expression."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from rung import torch_compat
from rung.compile.arguments import Container
from rung.compile.generated import Source
from rung.compile.plan import TensorSpec
from rung.compile.signature import own_signature

if TYPE_CHECKING:
    from rung.compile.variant import Variant


def generate_entry(variant: Variant, function: Callable[..., Any], owner: Any) -> Source:
    """A function with the parameters of `function`. It calls `variant.miss` when a check fails, and `variant.stale` when tensors that the
    graph reads are found to be others behind the work, before it hands out any output."""
    signature = own_signature(function)
    source = Source("entry", "")
    source.prefix = "_rung_"  # a parameter may have any other name
    source.head = f"    def entry({_parameters(signature, source)}):"
    plan = variant.compiled.plan
    checks = _checks(variant, source, owner)
    forwarded = ", ".join(_forward(parameter) for parameter in signature.parameters.values())
    inputs = ", ".join(plan.inputs[number].expression() for number in variant.compiled.arguments)
    if variant.overlap.possible:
        checks.append(f"not {source.bind(variant.overlaps_among)}({inputs})")
    source.bind(variant, "_rung_variant")
    source.bind(variant.state, "_rung_state")
    checks.append("_rung_state.unchanged()")
    sweep = "swept" if variant.repeatable else "identities_swept"
    if not variant.sweeps_behind:
        checks.append(f"_rung_state.{sweep}()")
    source.lines += [
        "try:",
        f"    _rung_good = {' and '.join(checks)}",
        "except Exception:",  # a leaf is missing or of another type: the slow road tells which
        "    _rung_good = False",
        "if not _rung_good:",
        f"    return _rung_variant.miss({forwarded})",
    ]
    if variant.sweeps_behind:
        source.lines += [
            f"_rung_result = _rung_variant.run({inputs})",
            "if _rung_state.swept():",
            "    return _rung_result",
            f"return _rung_variant.stale({forwarded})",
        ]
    else:
        source.lines.append(f"return _rung_variant.run({inputs})")
    return source


def _checks(variant: Variant, source: Source, owner: Any) -> list[str]:
    source.bind(torch.Tensor, "_rung_Tensor")
    source.bind(torch.is_grad_enabled, "_rung_grad")
    source.bind(torch.is_autocast_enabled, "_rung_autocast")
    checks: list[str] = []
    first: dict[str, str] = {}
    for path, spec in variant.compiled.plan.tensors:
        checks += _tensor_checks(variant, path.expression(), path.dotted(), spec, source, first)
    for path, value in variant.constants:
        checks += _constant_checks(path.expression(), value, source)
    ask = torch_compat.mode_checks()
    devices = sorted({spec.device for _, spec in variant.compiled.plan.tensors})
    autocast = " or ".join(f"_rung_autocast({device_type!r})" for device_type in devices) or "False"
    checks.append(f"not ({source.bind(ask['autocast'])}() and ({autocast}))")
    dtype, deterministic, modes = variant.modes
    checks.append(f"{source.bind(torch.get_default_dtype)}() is {source.bind(dtype)}")
    checks.append(f"{source.bind(ask['deterministic'])}() is {deterministic}")
    if modes:
        checks.append(f"{source.bind(torch_compat.function_modes)}() == {modes!r}")
    else:
        checks.append(f"not {source.bind(ask['function_modes'])}()")
    checks += [f"not {source.bind(check)}()" for check in torch_compat.transform_checks()]
    checks.append(f"not (_rung_grad() and {source.bind(variant.wants_gradient)}())")
    if owner is not None and hasattr(owner, "training"):
        checks.append(f"{source.bind(owner, '_rung_owner')}.training is {variant.training}")
    return checks


def _tensor_checks(variant: Variant, text: str, name: str, spec: TensorSpec, source: Source, first: dict[str, str]) -> list[str]:
    dtype = source.bind(getattr(torch, spec.dtype.removeprefix("torch.")))
    device = source.bind(variant.devices[name])
    checks = [f"{text}.__class__ is _rung_Tensor", f"{text}.dtype is {dtype}", f"{text}.device == {device}"]
    checks += [f"{text}.is_contiguous()", f"not ({text}.requires_grad and _rung_grad())"]
    shape = f"_rung_shape_{len(source.bound)}"  # read once: each `shape` is a new object
    checks.append(f"len({shape} := {text}.shape) == {len(spec.shape)}")
    for dim, extent in enumerate(spec.shape):
        here = f"{shape}[{dim}]"
        if isinstance(extent, int):
            checks.append(f"{here} == {extent}")
        elif extent in first:
            checks.append(f"{here} == {first[extent]}")
        else:
            first[extent] = here
            bound = variant.compiled.plan.bounds.get(extent)
            checks.append(f"{here} >= 1" if bound is None else f"1 <= {here} <= {bound}")
    return checks


def _constant_checks(text: str, value: Any, source: Source) -> list[str]:
    if value is None or isinstance(value, bool):
        return [f"{text} is {value!r}"]
    if isinstance(value, Container):
        checks = [f"{text}.__class__ is {source.bind(value.type)}"]
        if isinstance(value.keys, tuple):
            return [*checks, f"(*{text},) == {source.bind(value.keys)}"]
        return checks if value.keys is None else [*checks, f"len({text}) == {value.keys}"]
    checks = [f"{text}.__class__ is {source.bind(type(value))}", f"{text} == {source.bind(value)}"]
    if isinstance(value, float) and value == 0:  # 0.0 == -0.0
        checks.append(f"repr({text}) == {repr(value)!r}")
    return checks


def _parameters(signature: inspect.Signature, source: Source) -> str:
    parts: list[str] = []
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    for index, parameter in enumerate(signature.parameters.values()):
        if (
            parameter.kind is parameter.KEYWORD_ONLY
            and parameter.VAR_POSITIONAL not in kinds
            and parameter.KEYWORD_ONLY not in kinds[:index]
        ):
            parts.append("*")
        star = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else f"={source.bind(parameter.default)}"
        parts.append(f"{star}{parameter.name}{default}")
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.POSITIONAL_ONLY not in kinds[index + 1 :]:
            parts.append("/")
    return ", ".join(parts)


def _forward(parameter: inspect.Parameter) -> str:
    if parameter.kind is parameter.VAR_POSITIONAL:
        return f"*{parameter.name}"
    if parameter.kind is parameter.VAR_KEYWORD:
        return f"**{parameter.name}"
    return f"{parameter.name}={parameter.name}" if parameter.kind is parameter.KEYWORD_ONLY else parameter.name
