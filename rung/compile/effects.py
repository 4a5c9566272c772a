"""Find out whether forward changes attributes of its module; a compiled graph would not repeat that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from rung.errors import LazyStateError, UnsupportedModuleError

_STATE = ("_parameters", "_buffers", "_modules")


@contextmanager
def refuse_side_effects(owner: object | None, name: str) -> Iterator[None]:
    """Raise `UnsupportedModuleError` naming the attribute when the block rebinds one of the module, `LazyStateError` when all that it sets
    were absent or None; the old state is put back."""
    if not isinstance(owner, nn.Module):
        yield
        return
    before = {path: _state(module) for path, module in owner.named_modules()}
    modules = dict(owner.named_modules())
    yield
    changed = {
        f"{path}.{key}" if path else key: old.get(key, (None, None))[0] is None and value[0] is not None
        for path, old in before.items()
        for key, value in _state(modules[path]).items()
        if key not in old or not _unchanged(old[key], value)
    }
    for path, old in before.items():
        _restore(modules[path], old)
    if changed:
        message = f"{name} assigns the attribute {next(iter(changed))!r} while it runs; a compiled graph would do so only once"
        hint = "update a registered buffer in place (buffer.copy_(...)), or return the value"
        if all(changed.values()):
            raise LazyStateError(message, hint=hint, names=tuple(changed))
        raise UnsupportedModuleError(message, hint=hint)


@contextmanager
def net_effects(objects: Mapping[str, Any]) -> Iterator[list[str]]:
    """Collect the names of those `objects` whose attributes or contents are others after the block than before; all are put back. What is
    set and reset again, as a context variable around a call, leaves nothing to repeat."""
    before = {name: _surface(value) for name, value in objects.items()}
    changed: list[str] = []
    try:
        yield changed
    finally:
        for name, value in objects.items():
            if not _unchanged((None, before[name]), (None, _surface(value))):
                changed.append(name)
                _put_back((value.__dict__ if _contents(value) is None else value, before[name]))


def _surface(value: Any) -> Any:
    return _contents(value) if _contents(value) is not None else dict(getattr(value, "__dict__", {}))


def _state(module: nn.Module) -> dict[str, Any]:
    """Attribute -> (object, its contents when it is a plain container)."""
    state = {key: value for key, value in module.__dict__.items() if key not in _STATE}
    for table in _STATE:
        state.update(module.__dict__[table])
    return {key: (value, _contents(value)) for key, value in state.items()}


def _contents(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict, set) else None


def _unchanged(old: tuple[Any, Any], new: tuple[Any, Any]) -> bool:
    if old[0] is not new[0] or type(old[1]) is not type(new[1]):
        return False
    before, after = old[1], new[1]
    if isinstance(before, dict):
        return list(before) == list(after) and all(before[key] is after[key] for key in before)
    if isinstance(before, list):
        return len(before) == len(after) and all(one is other for one, other in zip(before, after, strict=True))
    return bool(before == after)


def _put_back(old: tuple[Any, Any]) -> Any:
    value, contents = old
    if contents is not None:
        value.clear()
        value.extend(contents) if isinstance(value, list) else value.update(contents)
    return value


def _restore(module: nn.Module, old: dict[str, Any]) -> None:
    for table in _STATE:
        entries = module.__dict__[table]
        for key in list(entries):
            if key not in old:
                del entries[key]
            else:
                entries[key] = _put_back(old[key])
    for key in [key for key in module.__dict__ if key not in _STATE]:
        if key not in old:
            del module.__dict__[key]
        else:
            module.__dict__[key] = _put_back(old[key])
