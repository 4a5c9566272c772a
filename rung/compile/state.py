"""Whether a module, and what else its trace read, still is what was traced.

A trace unrolls modules, takes number attributes and globals for constants, and binds tensors. All of it is looked at again before each
call: by identity, in one generated expression, and only names that the traced code mentions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from rung.compile.fingerprint import RuntimeState, fingerprint
from rung.compile.stitch import Source

_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_SMALL = 64  # larger containers are compared by their length alone


class ModuleState:
    """A snapshot of `module`. `names` are the identifiers that the traced code mentions."""

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        self.module = module
        self.names = frozenset(names)
        self.refresh()

    def refresh(self) -> None:
        """Take what is there now for what was traced."""
        self.description = self._describe()
        self.unchanged: Callable[[], bool] = self._expression()

    def same_trace(self) -> bool:
        """Whether a trace would come out as it did: values and layouts are equal, although objects may be others."""
        return self._describe() == self.description

    def wants_gradient(self) -> bool:
        return any(parameter.requires_grad for parameter in self.module.parameters())

    def _describe(self) -> str:
        described, opaque = fingerprint(self.module)
        modules = dict(self.module.named_modules())
        for name, fields in described["modules"].items():
            fields["attributes"] = {key: value for key, value in fields["attributes"].items() if self._read(name, key)}
        for where in opaque:
            owner, _, key = where.rpartition(".")
            if owner in modules and self._read(owner, key):
                described[f"identity of {where}"] = id(getattr(modules[owner], key, None))
        return json.dumps(described, sort_keys=True, default=str)

    def _read(self, module: str, name: str) -> bool:
        if name in _HOOKS:
            return module != ""  # hooks of the module itself run around its compiled method
        return name in self.names or name == "training"

    def _expression(self) -> Callable[[], bool]:
        source = Source("unchanged", "")
        checks = [check for module in self.module.modules() for check in self._checks(module, source)]
        source.lines.append(f"return {' and '.join(checks)}")
        source.lines[:0] = ["try:"]
        source.lines[1] = f"    {source.lines[1]}"
        source.lines += ["except (KeyError, AttributeError):", "    return False"]
        return source.build("state")

    def _checks(self, module: nn.Module, source: Source) -> Iterable[str]:
        own = source.bind(module.__dict__)
        tables = _TABLES if module is self.module else (*_TABLES, *_HOOKS)
        for table in tables:
            yield from _entries(source, source.bind(module.__dict__[table]), module.__dict__[table])
        yield f"{own}['training'] is {module.training}"
        for key, value in module.__dict__.items():
            if key in self.names and key not in (*_TABLES, *_HOOKS) and not isinstance(value, RuntimeState):
                yield f"{own}[{key!r}] is {source.bind(value)}"
                if type(value) in (list, dict):
                    yield from _entries(source, source.bind(value), value)


def _entries(source: Source, name: str, container: Any) -> Iterable[str]:
    yield f"len({name}) == {len(container)}" if container else f"not {name}"
    if len(container) > _SMALL:
        return
    for key, value in container.items() if isinstance(container, dict) else enumerate(container):
        here = f"{name}[{key!r}]" if isinstance(key, str | int) else f"{name}[{source.bind(key)}]"
        yield f"{here} is {source.bind(value)}"
        if isinstance(value, torch.Tensor):
            yield f"{here}.data_ptr() == {value.data_ptr()}"
