"""`eager_break`: a function that runs as ordinary Python between compiled pieces and captured graphs."""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rung import torch_compat
from rung.compile.sources import code_digest
from rung.errors import ConfigError

NAMESPACE = "rung_break"


def eager_break(
    function: Callable[..., Any] | None = None, *, out: str | Callable[..., Any] | None = None, mutates: Sequence[str] = ()
) -> Any:
    """Decorator: calls of `function` inside a wrapped module are left out of the graph and run eagerly at every call.

    The function is annotated (tensors, numbers, strings, None, lists of them) and returns a tensor, several, or None. A trace must know its
    outputs without running it: `out` names the argument that the output resembles, or is a function of the same arguments that makes empty
    outputs. Without `out`, a function that returns something is run once on fake tensors during a trace. `mutates` names the arguments that
    it updates in place. Outputs that share memory with an argument are copied. Raises `ConfigError` for a signature that cannot be used."""
    if function is None:
        return functools.partial(eager_break, out=out, mutates=mutates)
    schema = _schema(function, mutates)
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    name = _free_name(function)
    library.define(f"{name}{schema}", tags=(torch.Tag.cudagraph_unsafe,))
    library.impl(name, _without_aliases(function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", _fake(function, out, schema), lib=library)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return overload(*args, **kwargs)

    call.rung_library = library  # type: ignore[attr-defined]  # the op lives as long as the function
    return call


def _schema(function: Callable[..., Any], mutates: Sequence[str]) -> str:
    try:
        schema: str = torch.library.infer_schema(function, mutates_args=list(mutates))
    except (ValueError, TypeError) as error:
        method = next(iter(inspect.signature(function).parameters), "") in ("self", "cls")
        raise ConfigError(
            f"{function.__qualname__} cannot be an eager break: {str(error).splitlines()[0]}",
            hint="a method cannot be one: make it a function that takes the tensors of its module as arguments"
            if method
            else "annotate every parameter and the result with torch.Tensor, int, float, bool, str, None or lists of them",
        ) from None
    return schema


def _free_name(function: Callable[..., Any]) -> str:
    """The function's name with a digest of its place and source, so that an edited function is another op; numbered when taken."""
    digest = hashlib.sha256(f"{function.__module__}:{function.__qualname__}:{code_digest(function.__code__)}".encode()).hexdigest()
    base = f"{re.sub('[^A-Za-z0-9_]', '_', function.__name__)}_{digest[:8]}"
    taken = getattr(torch.ops, NAMESPACE)
    return next(name for n in itertools.count() if not hasattr(taken, name := f"{base}_{n}" if n else base))


def plain_name(op: str) -> str:
    """The name of the function behind an op of `NAMESPACE`."""
    return re.sub(r"_[0-9a-f]{8}(_\d+)?$", "", op)


def _without_aliases(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with contiguous outputs of their own: what an op returns is taken for new memory of the traced layout."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if result is None:
            return None
        outputs = [result] if isinstance(result, torch.Tensor) else list(result)
        used = {torch_compat.storage_identity(value) for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)}
        for index, value in enumerate(outputs):
            shared = torch_compat.storage_identity(value) in used
            outputs[index] = value.clone(memory_format=torch.contiguous_format) if shared else value.contiguous()
            used.add(torch_compat.storage_identity(outputs[index]))
        return outputs[0] if isinstance(result, torch.Tensor) else type(result)(outputs)

    return run


def _fake(function: Callable[..., Any], out: str | Callable[..., Any] | None, schema: str) -> Callable[..., Any]:
    if schema.endswith("-> ()"):
        return lambda *args, **kwargs: None
    if not isinstance(out, str):
        return _contiguous(function if out is None else out)
    signature = inspect.signature(function)
    if out not in signature.parameters:
        raise ConfigError(f"{function.__qualname__} has no argument {out!r}", hint=f"out names one of {list(signature.parameters)}")
    return _contiguous(lambda *args, **kwargs: signature.bind(*args, **kwargs).arguments[out])


def _contiguous(outputs: Callable[..., Any]) -> Callable[..., Any]:
    """New contiguous tensors of the sizes, dtypes and devices of what `outputs` returns."""

    def empty(*args: Any, **kwargs: Any) -> Any:
        made = outputs(*args, **kwargs)
        return made.new_empty(made.shape) if isinstance(made, torch.Tensor) else type(made)(item.new_empty(item.shape) for item in made)

    return empty
