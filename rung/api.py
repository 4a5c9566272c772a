"""The public entry points: `compiled` (decorator), `wrap` (instance or function), the torch.compile backend "rung"."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn

from rung.compile.entry import Entry, is_decorated, undecorated
from rung.compile.fingerprint import RuntimeState
from rung.compile.variant import Variant
from rung.config import CompileConfig
from rung.errors import ConfigError
from rung.handle import Handle

_Wrapped = TypeVar("_Wrapped", bound=Callable[..., Any])


def wrap(target: Any, *, config: CompileConfig | None = None, **options: Any) -> Any:
    """Compile a module instance in place, or return a compiled version of a function, a method, an object with `__call__`, or a partial.

    A module keeps its class, `state_dict` keys and hooks; it gains `module.rung` (a `Handle`). The first call traces. A second method of it
    is wrapped by a second call, and `module.rung` is the handle of the last one; `module.rung.method(name)` reaches each.
    Options are the fields of `rung.config.CompileConfig`, for example `dynamic={"x": {0: "rows"}}`, `graphs="piecewise"`, `pad=("rows",)`.
    """
    config = _config(config, options)
    if isinstance(target, nn.Module):
        original = _method(target, config.method)
        entry = _entry(original, config)
        target.__dict__[config.method] = entry
        target.__dict__["rung"] = Handle(entry)
        return target
    if isinstance(target, Entry):
        raise ConfigError(f"{_name(target)} is wrapped already", hint="wrap the function itself, once")
    if isinstance(target, functools.partial):
        inner = wrap(target.func, config=config)
        result = functools.partial(inner, *target.args, **target.keywords)
        result.rung = inner.rung  # type: ignore[attr-defined]
        return result
    if not isinstance(target, types.FunctionType | types.MethodType | type) and isinstance(
        getattr(target, "__call__", None),  # noqa: B004 - the method itself is wanted
        types.MethodType,
    ):
        target = target.__call__
    if isinstance(target, types.FunctionType | types.MethodType):
        entry = _entry(target, config)
        entry.rung = Handle(entry)  # type: ignore[attr-defined]
        return entry
    raise ConfigError(
        f"cannot wrap {target!r}" if callable(target) else f"cannot wrap a {type(target).__name__}",
        hint="pass a torch.nn.Module instance, or a function or method that is written in Python",
    )


@overload
def compiled(target: _Wrapped) -> _Wrapped: ...
@overload
def compiled(*, config: CompileConfig | None = None, **options: Any) -> Callable[[_Wrapped], _Wrapped]: ...


def compiled(target: Any = None, *, config: CompileConfig | None = None, **options: Any) -> Any:
    """Decorator for an `nn.Module` class or a function: `@rung.compiled(dynamic={"x": {0: "rows"}})`.

    Each instance of a class compiles on its own at its first call. Options as for `wrap`. A class is decorated once for each of its methods
    that is to be compiled; `module.rung` is the handle of the last one, `module.rung.method(name)` reaches each."""
    resolved = _config(config, options)
    if target is None:
        return functools.partial(_decorate, config=resolved)
    return _decorate(target, config=resolved)


class _Entries(RuntimeState, dict[Callable[..., Any], Entry]):
    """The entries of one instance, by the method behind the decorator. Copies and pickles of the instance start without any."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Entries:
        return _Entries()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Entries, ())


def _decorate(target: Any, *, config: CompileConfig) -> Any:
    if not isinstance(target, type):
        return wrap(target, config=config)
    if not issubclass(target, nn.Module):
        raise ConfigError(f"{target.__qualname__} is not an nn.Module class", hint="decorate an nn.Module class or a function")
    original = _method_of_class(target, config.method)

    def entry_of(module: Any) -> Entry:
        entries: _Entries | None = module.__dict__.get("_rung_entries")  # at each call, which makes nothing
        if entries is None:
            entries = module.__dict__.setdefault("_rung_entries", _Entries())
        entry = entries.get(original)
        return entries.setdefault(original, _entry(original.__get__(module), config)) if entry is None else entry

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # inside of another trace: that one compiles it
            return original(self, *args, **kwargs)
        return entry_of(self)(*args, **kwargs)

    method.__rung_original__ = original  # type: ignore[attr-defined]
    method.__rung_entry__ = entry_of  # type: ignore[attr-defined]
    setattr(target, config.method, method)
    # an instance whose other method was wrapped later has a handle of its own
    target.rung = property(lambda module: module.__dict__.get("rung") or Handle(entry_of(module)))  # type: ignore[attr-defined]
    return target


def _method_of_class(cls: type, name: str) -> Any:
    """The function behind a method that is to be decorated."""
    if is_decorated(vars(cls).get(name)):
        raise ConfigError(f"{cls.__qualname__}.{name} is decorated already", hint="decorate a class once for each of its methods")
    method = inspect.getattr_static(cls, name, None)
    if method is None:
        raise ConfigError(f"{cls.__qualname__} has no method {name!r}", hint="name an existing method")
    if not inspect.isfunction(method):
        kind = type(method).__name__
        raise ConfigError(f"{cls.__qualname__}.{name} is a {kind}, not a method of an instance", hint="name a method that has a self")
    return method


def _config(config: CompileConfig | None, options: Mapping[str, Any]) -> CompileConfig:
    if config is not None and options:
        raise ConfigError("pass either config or single options, not both", hint=f"put {min(options)!r} into the CompileConfig")
    if config is not None and not isinstance(config, CompileConfig):
        raise ConfigError(f"config must be a CompileConfig, got {config!r}", hint="give the options by name, or in a CompileConfig")
    try:
        return CompileConfig(**options) if config is None else config
    except TypeError as error:
        known = ", ".join(CompileConfig.__dataclass_fields__)
        raise ConfigError(f"unknown option: {error}", hint=f"options are {known}") from None


def _entry(function: Callable[..., Any], config: CompileConfig) -> Entry:
    return Entry(undecorated(function), config, prepare=_add_graphs if config.graphs != "none" else None)


def _add_graphs(entry: Entry, variant: Variant) -> None:
    from rung.graphs.wrapped import WrappedGraphs

    log = next((other.run.log for other in entry.variants.values() if isinstance(other.run, WrappedGraphs)), None)
    variant.run = WrappedGraphs(
        variant.compiled,
        entry.config,
        entry.counters,
        log,
        owner=entry.owner,
        rebind=lambda: variant.bind_weights(entry.owner),
    )


def _method(module: nn.Module, name: str) -> Callable[..., Any]:
    method = getattr(module, name, None)
    if isinstance(method, Entry) or is_decorated(method):
        hint = "wrap a module once, or deepcopy it first" if isinstance(method, Entry) else "give the options to rung.compiled at its class"
        raise ConfigError(f"{type(module).__qualname__}.{name} is wrapped already", hint=hint)
    if not callable(method) or isinstance(method, nn.Module):
        raise ConfigError(f"{type(module).__qualname__} has no method {name!r}", hint="name an existing method")
    function: Callable[..., Any] = method
    return function


def _name(entry: Entry) -> str:
    return str(getattr(entry.function, "__qualname__", entry.function))


def dynamo_backend(graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The backend behind `torch.compile(model, backend="rung")`: Dynamo keeps its guards, rung splits, compiles and stitches."""
    from rung.compile.backend import compile_graph

    return compile_graph(graph_module)
