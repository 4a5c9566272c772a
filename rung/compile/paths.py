"""Where a graph input comes from: a path such as `L['self']._modules['head']._parameters['weight']` or `L['x'].size()[0]`.

Paths are parsed, never evaluated, and stored as JSON.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rung.errors import UnsupportedModuleError

Access = tuple[str, Any]  # ("attr", name) | ("item", key)


@dataclass(frozen=True, slots=True)
class Path:
    """Accesses that start at a local of the traced function; `dim` is set when the value is a size of the tensor found there."""

    local: str
    accesses: tuple[Access, ...] = ()
    dim: int | None = None

    def resolve(self, locals_: Mapping[str, Any]) -> Any:
        value = locals_[self.local]
        for kind, key in self.accesses:
            value = getattr(value, key) if kind == "attr" else value[key]
        return value if self.dim is None else value.shape[self.dim]

    def expression(self) -> str:
        """Python source that reads the value, given the locals under their own names."""
        text = self.local + "".join(f".{key}" if kind == "attr" else f"[{key!r}]" for kind, key in self.accesses)
        return text if self.dim is None else f"{text}.shape[{self.dim}]"

    def dotted(self) -> str:
        """A short name for messages and reports: module paths as in `state_dict`, arguments by name."""
        names = [str(key) for kind, key in self.accesses if key not in ("_modules", "_parameters", "_buffers")]
        text = ".".join([self.local, *names])
        return text if self.dim is None else f"{text}.shape[{self.dim}]"

    def to_json(self) -> list[Any]:
        return [self.local, [list(access) for access in self.accesses], self.dim]

    @staticmethod
    def from_json(data: list[Any]) -> Path:
        return Path(data[0], tuple((kind, key) for kind, key in data[1]), data[2])


def parse_path(source: str) -> Path:
    """Parse Dynamo's source expression. Raises `UnsupportedModuleError` for anything that is not reached from an argument."""
    accesses: list[Access] = []
    dim: int | None = None
    try:
        node: ast.expr = ast.parse(source, mode="eval").body
    except SyntaxError:
        raise _unsupported(source) from None
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call):
        call = node.value
        if not (isinstance(call.func, ast.Attribute) and call.func.attr == "size" and not call.args):
            raise _unsupported(source)
        dim = int(_constant(node.slice, source))
        node = call.func.value
    while not (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)):
        if isinstance(node, ast.Attribute):
            accesses.append(("attr", node.attr))
        elif isinstance(node, ast.Subscript):
            accesses.append(("item", _constant(node.slice, source)))
        else:
            raise _unsupported(source)
        node = node.value
    if node.value.id != "L":
        raise _unsupported(source)
    return Path(str(_constant(node.slice, source)), tuple(reversed(accesses)), dim)


def _constant(node: ast.expr, source: str) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise _unsupported(source) from None


def _unsupported(source: str) -> UnsupportedModuleError:
    return UnsupportedModuleError(
        f"the graph reads {source!r}, which is neither an argument nor an attribute of the module",
        hint="pass the tensor as an argument or register it as a buffer of the module",
    )
