"""A piece as a graph of its own, and the key under which equal pieces are compiled once."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rung import torch_compat
from rung.compile.ambient import Reentry, blocks_of
from rung.compile.split import Segment, is_size_arithmetic, mutates, operator_schema, storages, written_storages
from rung.errors import UnsupportedModuleError

_KEPT_META = ("stack_trace", "nn_module_stack")


@dataclass(frozen=True, slots=True)
class Piece:
    """A compilable graph. `key` is equal for pieces that differ only in names, symbols and weights."""

    graph_module: fx.GraphModule  # placeholders carry `example_value`; the output is a tuple
    key: str


def extract_piece(owner: torch.nn.Module, segment: Segment) -> Piece:
    """Copy a segment into a graph of its own, with the size arithmetic it needs."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for index, node in enumerate(segment.inputs):
        copies[node] = graph.placeholder(f"a{index}")
        copies[node].meta = {"example_value": node.meta["example_value"]}

    def copy(node: fx.Node) -> fx.Node:
        if node not in copies:
            for used in node.all_input_nodes:
                if used not in copies and is_size_arithmetic(used):
                    copy(used)
            copies[node] = graph.node_copy(node, lambda used: copies[used])
            copies[node].meta = {name: value for name, value in node.meta.items() if name in (*_KEPT_META, "example_value")}
            if node.stack_trace:  # it ends up in comments of the generated code, which must not depend on where the project lies
                copies[node].meta["stack_trace"] = re.sub(r'File "[^"]*/([^"/]+)"', r'File "\1"', node.stack_trace)
        return copies[node]

    blocks = Reentry(graph)
    for node in segment.nodes:
        blocks.at(blocks_of(node))
        copy(node)
    blocks.at(())
    graph.output(tuple(copies[node] for node in segment.outputs))
    module = fx.GraphModule(owner, graph, class_name="Piece")
    return Piece(module, piece_key(module))


def refuse_aliased_writes(piece: Piece) -> None:
    """Raise `UnsupportedModuleError` when the piece updates an input in place and has another input in the same storage: Inductor takes
    inputs for distinct tensors."""
    placeholders = [node for node in piece.graph_module.graph.nodes if node.op == "placeholder"]
    for node in piece.graph_module.graph.nodes:
        written = written_storages(node) if mutates(node) else set()
        if any(sum(storage in storages(placeholder) for placeholder in placeholders) > 1 for storage in written):
            raise UnsupportedModuleError(
                f"forward updates a tensor in place and reads it through another view behind a split op{torch_compat.node_location(node)}",
                hint="clone the view before the split op, or make the update out of place",
            )


def piece_key(module: fx.GraphModule) -> str:
    """Hash of structure, layouts, aliasing among inputs, constants by value, targets by name and schema, and where the piece talks
    to other ranks their layout. Names and symbols are renamed, so layers that differ only in their weights are equal."""
    canon = _Canon(module)
    lines = [canon.line(node) for node in module.graph.nodes]
    if torch_compat.communicates(module):  # the names of groups say nothing of who is in them
        lines.append(repr(torch_compat.topology()))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class _Canon:
    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.index: dict[fx.Node, int] = {}
        self.symbols: dict[str, str] = {}
        self.storages: dict[int, int] = {}

    def line(self, node: fx.Node) -> str:
        self.index[node] = len(self.index)
        head = f"%{self.index[node]}={node.op}"
        if node.op == "placeholder":
            return f"{head} {self.value(node.meta['example_value'])}"
        if node.op == "get_attr":
            return f"{head} {constant_digest(_attribute(self.module, str(node.target)))}"
        return f"{head} {target_name(node.target)} {self.argument(node.args)} {self.argument(node.kwargs)}"

    def value(self, value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            return f"int {self.size(value)}" if isinstance(value, torch.SymInt) else f"{type(value).__name__} {value!r}"
        shape = ",".join(self.size(extent) for extent in value.shape)
        stride = ",".join(self.size(extent) for extent in value.stride())
        alias = self.storages.setdefault(torch_compat.storage_identity(value), len(self.storages))
        offset = self.size(value.storage_offset())
        return f"{value.dtype} {value.device.type} [{shape}] ({stride}) +{offset} @{alias} {value.requires_grad}"

    def size(self, extent: Any) -> str:
        expression = torch_compat.symbol_of(extent)
        if expression is None:
            return str(extent)
        for symbol in sorted(map(str, expression.free_symbols)):
            self.symbols.setdefault(symbol, f"S{len(self.symbols)}")
        return str(expression.xreplace({s: type(s)(self.symbols[str(s)]) for s in expression.free_symbols}))

    def argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return f"%{self.index[value]}"
        if isinstance(value, tuple | list):
            return f"{type(value).__name__}({','.join(self.argument(item) for item in value)})"
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{key}:{self.argument(item)}" for key, item in sorted(value.items())) + "}"
        if isinstance(value, slice):
            return f"slice({self.argument((value.start, value.stop, value.step))})"
        if isinstance(value, torch.SymInt):
            return self.size(value)
        return f"{type(value).__name__}:{value!r}"


def target_name(target: Any) -> str:
    """A call target by qualified name, with the schema for registered ops."""
    if isinstance(target, str):
        return f".{target}"
    schema = operator_schema(target)
    if schema is not None:
        return str(schema)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', getattr(target, '__name__', str(target)))}"


def constant_digest(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        data = base64.b64encode(bytes(raw.tolist())).decode()
        return hashlib.sha256(f"{value.dtype}{tuple(value.shape)}{data}".encode()).hexdigest()
    return f"{type(value).__name__}:{value!r}"


def _attribute(module: fx.GraphModule, target: str) -> Any:
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value
