"""One access on the way to a guarded value: where it is stored, so that reading it again is one dictionary lookup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from rung.compile.generated import Source
from rung.compile.paths import Access

_TABLES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True)
class Edge:
    """`child` was read from `container` by an attribute or an item."""

    container: Any
    kind: str  # "attr" or "item"
    key: Any
    child: Any
    stable: bool  # reading it again gives the same object

    def expression(self, source: Source) -> str:
        held = source.bind(self.container)
        if self.kind == "attr":
            return f"{held}.{self.key}"
        return f"{held}[{self.key!r}]" if isinstance(self.key, str | int) else f"{held}[{source.bind(self.key)}]"


def edge_of(container: Any, access: Access) -> Edge:
    """Follow an access from `container`. What lies in the object's own dictionary, or in a table of a module, is read there."""
    kind, key = access
    if kind == "attr":
        child = getattr(container, key)
        for table in _homes(container):
            if key in table and table[key] is child:
                return Edge(table, "item", key, child, stable=True)
        return Edge(container, kind, key, child, stable=getattr(container, key) is child)
    if kind == "nth":
        key = list(container)[key]
        return Edge(container, "item", key, container[key], stable=True)
    child = container[key]
    return Edge(container, kind, key, child, stable=container[key] is child)


def _homes(container: Any) -> list[dict[str, Any]]:
    own = getattr(container, "__dict__", None)
    homes = [own] if isinstance(own, dict) else []
    if isinstance(container, nn.Module):
        homes += [container.__dict__[name] for name in _TABLES]
    return homes
