"""What is looked at behind the work: tensors, submodules, their classes, replaced methods. A part at every call, generated as code."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rung.compile.generated import Source
from rung.compile.guards.edges import Edge

OFTEN = 128  # units of a part of the first kind: 64 tensors or submodules, about 3 us
SELDOM = 48  # of the second
_ADDRESS, _LAYOUT, _TABLE, _CLASS, _OVERRIDE, _HOOKS = 2, 5, 2, 1, 1, 4  # units of one check
_HOOK_TABLES = 32  # that one check looks at

Check = tuple[int, Callable[[Source], str]]  # units, and the text of the check


class LateChecks:
    """Checks in parts of equal cost, of two kinds that take turns on their own: what people replace (tensors, submodules, methods), and
    what hardly anybody does (sizes and strides of a tensor that stays where it is, the class of a module, hooks that were put in by hand).
    The first and last tensor are looked at every time, since each conversion of a module moves them."""

    def __init__(
        self, tensors: Sequence[Edge], modules: Sequence[nn.Module], overrides: Sequence[tuple[dict[str, Any], str]], hooks: Sequence[Any]
    ) -> None:
        often = [_address_check(edge) for edge in tensors]
        often += [_table_check(module) for module in modules if module._modules]
        often += [_override_check(own, name) for own, name in overrides]
        seldom = [_layout_check(edge.child) for edge in tensors if edge.child is not None]
        seldom += [_class_check(module) for module in modules]
        seldom += [_hooks_check(hooks[start : start + _HOOK_TABLES]) for start in range(0, len(hooks), _HOOK_TABLES)]
        parts = _parts(often, OFTEN)
        ends = [_address_check(edge) for edge in (tensors[0], tensors[-1])] if len(parts) > 1 and tensors else []
        self._parts = [[_built([*ends, *part]) for part in parts or [[]]], [_built(part) for part in _parts(seldom, SELDOM) or [[]]]]
        self._often, self._seldom = (itertools.cycle(parts) for parts in self._parts)

    def next(self) -> bool:
        """Whether what the next part of each kind looks at is what it was."""
        return next(self._often)() and next(self._seldom)()

    def identities(self) -> bool:
        """The same for all parts of the first kind and the next of the second."""
        return all(part() for part in self._parts[0]) and next(self._seldom)()

    def all(self) -> bool:
        """Whether everything is."""
        return all(part() for parts in self._parts for part in parts)


def _layout_check(tensor: torch.Tensor) -> Check:
    shape, stride = tensor.shape, tensor.stride()

    def text(source: Source) -> str:
        held = source.bind(tensor)
        return f"{held}.shape == {source.bind(shape)} and {held}.stride() == {source.bind(stride)}"

    return _LAYOUT, text


def _address_check(edge: Edge) -> Check:
    def text(source: Source) -> str:
        same = f"{edge.expression(source)} is {source.bind(edge.child)}"
        if not isinstance(edge.child, torch.Tensor):
            return same
        return f"{same} and {source.bind(edge.child.data_ptr)}() == {edge.child.data_ptr()}"

    return _ADDRESS, text


def _table_check(module: nn.Module) -> Check:
    table = module._modules  # dicts compare their values by identity first, in C
    return _TABLE, lambda source: f"{source.bind(table)} == {source.bind(dict(table))}"


def _class_check(module: nn.Module) -> Check:
    return _CLASS, lambda source: f"{source.bind(module)}.__class__ is {source.bind(type(module))}"


def _override_check(own: dict[str, Any], name: str) -> Check:
    return _OVERRIDE, lambda source: f"{name!r} not in {source.bind(own)}"


def _hooks_check(tables: Sequence[Any]) -> Check:
    return _HOOKS, lambda source: f"not {source.bind(any)}({source.bind(tables)})"


def _parts(checks: Sequence[Check], budget: int) -> list[list[Check]]:
    parts: list[list[Check]] = []
    left = 0
    for check in checks:
        if check[0] > left:
            parts.append([])
            left = budget
        parts[-1].append(check)
        left -= check[0]
    return parts


def _built(checks: Sequence[Check]) -> Callable[[], bool]:
    source = Source("late", "")
    texts = [text(source) for _, text in checks] or ["True"]
    source.lines += [
        "try:",
        f"    return {' and '.join(texts)}",
        "except Exception:",  # something is gone, or of another type
        "    return False",
    ]
    return source.build("late guards")
