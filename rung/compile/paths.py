"""Where a graph input comes from: a path such as `L['self']._modules['head']._parameters['weight']` or `L['x'].size()[0]`.

Paths are parsed, never evaluated, and stored as JSON.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rung.compile import hooks
from rung.errors import UnsupportedModuleError

Access = tuple[str, Any]  # ("attr", name) | ("item", key) | ("nth", index): a value of a table of hooks, whose keys are only counted up


@dataclass(frozen=True, slots=True)
class NthKey:
    """Stands in an access for a key of the mapping behind `source`, until that is looked up."""

    source: str
    index: int


@dataclass(frozen=True, slots=True)
class Path:
    """Accesses that start at a local of the traced function; `dim` is set when the value is a size of the tensor found there."""

    local: str
    accesses: tuple[Access, ...] = ()
    dim: int | None = None

    def resolve(self, locals_: Mapping[str, Any]) -> Any:
        value = locals_[self.local]
        for access in self.accesses:
            value = follow(value, access)
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
        return [self.local, [[kind, _key_to_json(key)] for kind, key in self.accesses], self.dim]

    @staticmethod
    def from_json(data: list[Any]) -> Path:
        return Path(data[0], tuple((kind, _key_from_json(key)) for kind, key in data[1]), data[2])


def follow(value: Any, access: Access) -> Any:
    """One access of a path."""
    kind, key = access
    if kind == "nth":
        return list(value.values())[key]
    return getattr(value, key) if kind == "attr" else value[key]


def _key_to_json(key: Any) -> Any:
    """Keys of mappings may be tuples or bytes, which JSON has no form for."""
    if isinstance(key, tuple):
        return {"tuple": [_key_to_json(item) for item in key]}
    return {"bytes": key.hex()} if isinstance(key, bytes) else key


def _key_from_json(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    return bytes.fromhex(data["bytes"]) if "bytes" in data else tuple(_key_from_json(item) for item in data["tuple"])


def parse_path(source: str) -> Path:
    """Parse Dynamo's source expression of a graph input. Raises `UnsupportedModuleError` for what is not reached from an argument."""
    text, size, rest = source.rpartition(".size()[")
    try:
        parsed = parse_accesses(text if size else source)
        dim = int(rest.removesuffix("]")) if size else None
    except (SyntaxError, ValueError):
        raise _unsupported(source) from None
    if parsed is None or parsed[0] != "L" or any(isinstance(key, NthKey) for _, key in parsed[2]):
        raise _unsupported(source)
    return Path(parsed[1], parsed[2], dim)


def parse_accesses(source: str) -> tuple[str, str, tuple[Access, ...]] | None:
    """Scope ("L" locals, "G" globals), first name and accesses of an expression of attributes and items; None for any other expression.
    Raises `SyntaxError` or `ValueError` for text that is no expression."""
    accesses: list[Access] = []
    node: ast.expr = ast.parse(source, mode="eval").body
    while not (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)):
        if isinstance(node, ast.Attribute):
            accesses.append(("attr", node.attr))
        elif isinstance(node, ast.Subscript):
            accesses.append(_entry(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1 and node.func.id in ("type", "dict"):
            if node.func.id == "type":  # `dict(type(x).__dict__)["name"]` is how Dynamo reads a class attribute
                accesses.append(("attr", "__class__"))
            node = node.args[0]
            continue
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "dict.__getitem__" and len(node.args) == 2:
            accesses.append(("item", _nth_key(node.args[1]) or ast.literal_eval(node.args[1])))
            node = node.args[0]
            continue
        else:
            return None
        node = node.value
    return node.value.id, str(ast.literal_eval(node.slice)), tuple(reversed(accesses))


def _entry(node: ast.Subscript) -> Access:
    """An item by its key, or by its place in the order of the keys."""
    key = _nth_key(node.slice)
    if key is None:
        return "item", ast.literal_eval(node.slice)
    holder = node.value
    is_table = isinstance(holder, ast.Attribute) and holder.attr in hooks.FORWARD
    return ("nth", key.index) if is_table else ("item", key)


def nth_key(source: str) -> NthKey | None:
    """`NthKey` for the text of one, None for any other expression."""
    if "dict.keys(" not in source:
        return None
    try:
        return _nth_key(ast.parse(source, mode="eval").body)
    except SyntaxError:
        return None


def _nth_key(node: ast.expr) -> NthKey | None:
    """`list(dict.keys(MAPPING))[INDEX]` is how Dynamo names a key of a mapping that is no plain dict."""
    if not (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call) and isinstance(node.slice, ast.Constant)):
        return None
    inner = node.value.args[0] if ast.unparse(node.value.func) == "list" and len(node.value.args) == 1 else None
    if isinstance(inner, ast.Call) and ast.unparse(inner.func) == "dict.keys" and len(inner.args) == 1:
        return NthKey(ast.unparse(inner.args[0]), int(str(node.slice.value)))
    return None


def _unsupported(source: str) -> UnsupportedModuleError:
    return UnsupportedModuleError(
        f"the graph reads {source!r}, which is neither an argument nor an attribute of the module",
        hint="pass the tensor as an argument or register it as a buffer of the module",
    )
