"""From the guards that Dynamo noted to the closed set."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from rung import torch_compat
from rung.compile.guards.base import Guard, GuardSet, Kind
from rung.compile.guards.describe import belongs_to_torch, describe
from rung.compile.guards.reads import more_guards
from rung.compile.guards.roots import ARGUMENT, GLOBALS, Roots, key_of, path_of
from rung.compile.hooks import FORWARD, OTHERS, how_called
from rung.compile.paths import NthKey, Path, follow, nth_key
from rung.compile.sources import user_code

_KINDS = {
    "CONSTANT_MATCH": Kind.VALUE,
    "EQUALS_MATCH": Kind.VALUE,
    "BOOL_MATCH": Kind.VALUE,
    "NONE_MATCH": Kind.VALUE,
    "ID_MATCH": Kind.OBJECT,
    "FUNCTION_MATCH": Kind.OBJECT,
    "CLOSURE_MATCH": Kind.OBJECT,
    "BUILTIN_MATCH": Kind.OBJECT,
    "CLASS_MATCH": Kind.OBJECT,
    "MODULE_MATCH": Kind.OBJECT,
    "TYPE_MATCH": Kind.TYPE,
    "NOT_NONE_MATCH": Kind.TYPE,
    "SEQUENCE_LENGTH": Kind.LENGTH,
    "DICT_KEYS_MATCH": Kind.KEYS,
    "MAPPING_KEYS_CHECK": Kind.KEYS,
    "DICT_CONTAINS": Kind.CONTAINS,
    "DICT_NOT_CONTAINS": Kind.CONTAINS,
    "SET_CONTAINS": Kind.CONTAINS,
    "SET_NOT_CONTAINS": Kind.CONTAINS,
    "HASATTR": Kind.ATTRIBUTE,
    "NOT_PRESENT_IN_GENERIC_DICT": Kind.OVERRIDE,
    "EMPTY_NN_MODULE_HOOKS_DICT": Kind.HOOKS,
    "TENSOR_MATCH": Kind.TENSOR,
    "DUPLICATE_INPUT": Kind.TIED,
}
# Kept by others: sizes by the audit, modes by the entry and the keys.
_ELSEWHERE = frozenset(
    {
        "SHAPE_ENV",
        "GRAD_MODE",
        "GLOBAL_STATE",
        "DEFAULT_DEVICE",
        "DETERMINISTIC_ALGORITHMS",
        "TORCH_FUNCTION_STATE",
        "AUTOGRAD_SAVED_TENSORS_HOOKS",
    }
)


def collect_guards(noted: Iterable[torch_compat.DynamoGuard], roots: Roots, codes: Collection[types.CodeType] = ()) -> GuardSet:
    """The guards of a trace that was made with what `roots` hold now, through the functions of `codes`. Left out: arguments, which the
    entry checks, what belongs to torch or Python (their versions are in every key), and the hooks of the owner itself, which run around its
    compiled method."""
    guards: dict[str, Guard] = {}
    unknown: dict[str, None] = {}
    for one in noted:
        path = path_of(one.source, roots)
        if one.kind in _ELSEWHERE or path is ARGUMENT:
            continue
        key = nth_key(one.source)
        table = path if key is None else path_of(key.source, roots)
        if table is not None and (hooks := _hooks(one.kind, table, roots)) is not None:
            guards |= {repr(guard): guard for guard in hooks}
            continue
        if key is not None:  # the order of keys has a kind of its own
            entry = _entry(key, roots)
            if entry is None:
                unknown[f"{one.kind} {one.source}"] = None
            else:
                guards[repr(entry)] = entry
            continue
        kind = _KINDS.get(one.kind)
        if path is None and _is_setting_of_torch(one.source, roots):
            continue
        if kind is None or path is None:
            if path is None or not _is_fixed(path, roots):
                unknown[f"{one.kind} {one.source}"] = None
            continue
        if _is_fixed(path, roots):
            continue
        guard = _guard(kind, one, path, roots)
        if isinstance(guard, str):
            unknown[guard] = None
        elif guard is not None:
            guards[repr(guard)] = guard
            if kind is Kind.OBJECT:
                guards |= {repr(extra): extra for extra in _defaults(path, roots)}
    found = list(guards.values())
    guards |= {repr(guard): guard for guard in more_guards(found, user_code(codes), roots)}
    return GuardSet(tuple(guards.values()), tuple(unknown))


def _hooks(kind: str, table: Path, roots: Roots) -> list[Guard] | None:
    """What is to be checked of a table of hooks, whatever was noted of it; None where `table` is none."""
    names = [key for _, key in table.accesses]
    if not names or names[-1] not in (*FORWARD, *OTHERS):
        return [] if any(name in OTHERS for name in names) else None
    if len(names) == 1:  # of the owner
        return [] if _KINDS.get(kind) is Kind.HOOKS else None
    if names[-1] in OTHERS:
        return []
    return [Guard(Kind.HOOKS, table, how_called(Path(table.local, table.accesses[:-1]).resolve(roots), names[-1]))]


def _entry(key: NthKey, roots: Roots) -> Guard | None:
    path, name = path_of(key.source, roots), key_of(key, roots)
    return None if path is None or path is ARGUMENT or name is None else Guard(Kind.CONTAINS, path, [name, True])


def _guard(kind: Kind, one: torch_compat.DynamoGuard, path: Path, roots: Roots) -> Guard | str | None:
    """A guard, None where nothing is to be checked, or why it cannot be described."""
    if kind in (Kind.ATTRIBUTE, Kind.OVERRIDE, Kind.CONTAINS):
        return _membership(kind, one, path, roots)
    found = path.resolve(roots)
    if kind is Kind.TIED:
        other = path_of(one.arguments.get("other", ""), roots)
        if other is ARGUMENT or other is None:
            return None if other is ARGUMENT else f"{one.kind} {one.source}"
        return Guard(kind, path, other.to_json())
    if kind is Kind.LENGTH:
        return Guard(kind, path, len(found))
    if kind is Kind.KEYS:
        return _described(kind, path, [describe(key) for key in found], one)
    if kind is Kind.TENSOR or isinstance(found, torch.Tensor):
        return Guard(Kind.TENSOR, path, describe(found))
    if kind is Kind.TYPE:
        return Guard(kind, path, describe(type(found)))
    return _described(kind, path, describe(found), one)


def _defaults(path: Path, roots: Roots) -> Iterator[Guard]:
    """The defaults of a function; torch 2.11 does not note them."""
    defaults = getattr(path.resolve(roots), "__defaults__", None)
    described = describe(defaults) if isinstance(defaults, tuple) else None
    if described is not None:
        yield Guard(Kind.VALUE, Path(path.local, (*path.accesses, ("attr", "__defaults__"))), described)


def _described(kind: Kind, path: Path, value: Any, one: torch_compat.DynamoGuard) -> Guard | str:
    missing = value is None or (isinstance(value, list) and None in value)
    return f"{one.kind} {one.source}" if missing else Guard(kind, path, value)


def _membership(kind: Kind, one: torch_compat.DynamoGuard, path: Path, roots: Roots) -> Guard | str | None:
    if kind is Kind.CONTAINS:
        key = one.arguments.get("key")
        if not isinstance(key, str | int):
            return f"{one.kind} {one.source}"
        return Guard(kind, path, [key, key in path.resolve(roots)])
    name = one.arguments.get("attr")
    if name is None:  # torch 2.11 names the attribute in the source
        path, name = Path(path.local, path.accesses[:-1]), path.accesses[-1][1]
    found = path.resolve(roots)
    if kind is Kind.OVERRIDE:
        return Guard(kind, path, [name, False]) if name not in getattr(found, "__dict__", {}) else None
    return Guard(kind, path, [name, hasattr(found, name)])


def _is_setting_of_torch(source: str, roots: Roots) -> bool:
    """Whether a call, such as `config.user_override.get()` of torch 2.14, is one of an object inside of torch."""
    path = path_of(source.partition("(")[0].rpartition(".")[0], roots)
    return path is not None and path is not ARGUMENT and _is_fixed(path, roots)


def _is_fixed(path: Path, roots: Roots) -> bool:
    """Whether a path leads through torch or Python themselves."""
    if path.local == GLOBALS and str(path.accesses[0][1]).startswith("__builtins_dict__"):
        return True
    try:
        value = roots[path.local]
    except (KeyError, ImportError):
        return False
    for access in path.accesses:
        if belongs_to_torch(value):
            return True
        try:
            value = follow(value, access)
        except (KeyError, AttributeError, IndexError, TypeError):
            return False
    return belongs_to_torch(value) and not isinstance(value, torch.nn.Module)
