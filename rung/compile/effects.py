"""Find out whether forward changes attributes of its module; a compiled graph would not repeat that."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from rung.compile.paths import Path
from rung.compile.split import storages, updates_first
from rung.errors import LazyStateError, UnsupportedModuleError

_STATE = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
_GONE = object()


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
        f"{path}.{key}" if path else key: (old.get(key, (None, None))[0], value[0])
        for path, old in before.items()
        for key, value in _state(modules[path]).items()
        if key not in old or not _unchanged(old[key], value)
    }
    for path, old in before.items():
        _restore(modules[path], old)
    if changed:
        first, (old_value, value) = next(iter(changed.items()))
        message = f"{name} assigns the attribute {first!r} while it runs; a compiled graph would do so only once"
        tensors = {*dict(owner.named_buffers(remove_duplicate=False)), *dict(owner.named_parameters(remove_duplicate=False))}
        hint = _instead(first, old_value, value, registered=first in tensors)
        if all(old is None and new is not None for old, new in changed.values()):
            raise LazyStateError(message, hint=hint, names=tuple(changed))
        raise UnsupportedModuleError(message, hint=hint)


def _instead(path: str, old: Any, new: Any, *, registered: bool) -> str:
    """What to write in place of an assignment to the attribute at `path`, which was a buffer or parameter if it is `registered`."""
    name = path.rpartition(".")[2]
    if registered and isinstance(new, torch.Tensor):
        return f"write into the tensor: `self.{name}.copy_(value)` in place of `self.{name} = value`"
    if isinstance(new, torch.Tensor):
        return (
            f"return the tensor, or make a buffer for it in __init__ (`self.register_buffer({name!r}, torch.zeros(...))`) and write into "
            f"that: `self.{name}.copy_(value)`"
        )
    if type(new) in (int, float, bool) and not isinstance(old, torch.Tensor):
        kind = {int: "torch.int64", float: "torch.float32", bool: "torch.bool"}[type(new)]
        return (
            f"count where the module is called, or in a buffer: `self.register_buffer({name!r}, torch.zeros((), dtype={kind}))` in "
            f"__init__, `self.{name}.add_(1)` or `self.{name}.fill_(value)` in forward"
        )
    return f"set {name!r} in __init__ or where the module is called, or return the value"


def keep_updated_state(output: fx.Node, inputs: Sequence[Path], owner: str, locals_: Mapping[str, Any], results: list[Any]) -> None:
    """`self.n += 1` updates a tensor of the module and assigns it to itself. Such an output of a graph is left out (None), and `results`,
    which holds a stand-in for each output, has the tensor itself in its place. `owner` is the module's name among `locals_`."""
    placeholders = [node for node in output.graph.nodes if node.op == "placeholder"]
    state = {node: path for node, path in zip(placeholders, inputs, strict=True) if path.local == owner and path.dim is None}
    flat: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for index, node in enumerate(flat):
        source = node
        while isinstance(source, fx.Node) and updates_first(source):
            source = source.args[0]
        if source is not node and source in state:
            tensor, updated = state[source].resolve(locals_), node.meta["example_value"]
            same = storages(source) == storages(node)  # an operator without an in-place form, such as @=, makes another tensor
            if same and updated.shape == tensor.shape and updated.stride() == tensor.stride():
                flat[index], results[index] = None, tensor
    output.args = (tuple(flat),)


def is_seen(value: Any) -> bool:
    """Whether `net_effects` sees all of an object that may change: no further slots, cells, iterators or containers with attributes."""
    if type(value) in _CONTAINERS:
        return True
    slots = {name for cls in type(value).__mro__ for name in _names(vars(cls).get("__slots__", ()))} - {"__dict__", "__weakref__"}
    return hasattr(value, "__dict__") and not slots and not isinstance(value, _CONTAINERS)


def _names(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


@contextmanager
def net_effects(objects: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Collect the names of those `objects` whose attributes or contents are others after the block than before, and which attribute (of a
    container, an empty text); all are put back. What is set and reset again, as a context variable around a call, leaves nothing to
    repeat."""
    before = {name: _surface(value) for name, value in objects.items()}
    changed: dict[str, str] = {}
    try:
        yield changed
    finally:
        for name, value in objects.items():
            old, new = before[name], _surface(value)
            if _unchanged((None, old), (None, new)):
                continue
            if _contents(value) is None:
                changed[name] = next((key for key in {**new, **old} if key not in old or old[key] is not new.get(key, _GONE)), "")
                _put_back_attributes(value, old)
            else:
                changed[name] = ""
                _put_back((value, old))


def _surface(value: Any) -> Any:
    return _contents(value) if _contents(value) is not None else dict(getattr(value, "__dict__", {}))


def _put_back_attributes(value: Any, old: Mapping[str, Any]) -> None:
    """A class has no dictionary that could be written."""
    is_class = isinstance(value, type)
    for key, now in dict(vars(value)).items():
        if key not in old:
            delattr(value, key) if is_class else value.__dict__.pop(key)
        elif now is not old[key]:
            setattr(value, key, old[key]) if is_class else value.__dict__.update({key: old[key]})
    for key in [key for key in old if key not in vars(value)]:
        setattr(value, key, old[key]) if is_class else value.__dict__.update({key: old[key]})


def _state(module: nn.Module) -> dict[str, Any]:
    """Attribute -> (object, its contents when it is a plain container)."""
    state = {key: value for key, value in module.__dict__.items() if key not in _STATE}
    for table in _STATE:
        state.update(module.__dict__[table])
    return {key: (value, _contents(value)) for key, value in state.items()}


def _contents(value: Any) -> Any:
    return value.copy() if type(value) in _CONTAINERS else None


def _unchanged(old: tuple[Any, Any], new: tuple[Any, Any]) -> bool:
    if old[0] is not new[0] or type(old[1]) is not type(new[1]):
        return False
    before, after = old[1], new[1]
    if isinstance(before, dict):
        return list(before) == list(after) and all(before[key] is after[key] for key in before)
    if isinstance(before, list | deque):
        return len(before) == len(after) and all(one is other for one, other in zip(before, after, strict=True))
    return bool(before == after)


def _put_back(old: tuple[Any, Any]) -> Any:
    value, contents = old
    if contents is not None:
        value.clear()
        value.extend(contents) if isinstance(value, list | deque) else value.update(contents)
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
