"""Modules, toy split ops and helpers that the tests of compile share.

`uncompiled` runs a traced and split function with its pieces as plain FX graphs, so that hundreds of graphs cost no C++ compile.
"""

from __future__ import annotations

import dataclasses
import enum
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from rung.compile.arguments import dynamic_dims, leaves
from rung.compile.build import SplitGraph, build_steps
from rung.compile.compiled import CompiledFunction
from rung.compile.plan import CompilePlan, TensorSpec
from rung.compile.rows import output_dims, prove_rows
from rung.compile.signature import own_signature, self_name
from rung.compile.trace import TracedGraph, trace

ROOT = FilePath(__file__).parents[2]
TOY_OPS = ("rungtest::double", "rungtest::pair", "rungtest::write", "rungtest::write_both", "rungtest::first_rows", "rungtest::host_scale")
HOST_FACTOR = {"factor": 2.0}  # what `host_scale` reads on the host

_library = torch.library.Library("rungtest", "FRAGMENT")


def _define(schema: str, body: Callable[..., Any], fake: Callable[..., Any] | None = None, tags: tuple[torch.Tag, ...] = ()) -> None:
    name = schema.partition("(")[0]
    if hasattr(torch.ops.rungtest, name):
        return
    _library.define(schema, tags=tags)
    _library.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"rungtest::{name}", fake or body, lib=_library)


_define("double(Tensor x) -> Tensor", lambda x: x * 2)
_define("pair(Tensor x) -> (Tensor, Tensor)", lambda x: (x + 1, x - 1))
_define(
    "write(Tensor x, Tensor(a!) out, float scale=1.0) -> ()", lambda x, out, scale=1.0: (out.copy_(x * scale), None)[1], lambda *_: None
)
_define(
    "write_both(Tensor x, Tensor(a!) left, Tensor(b!) right) -> ()",
    lambda x, left, right: (left.copy_(x), right.add_(x), None)[2],
    lambda *_: None,
)
_define("first_rows(Tensor x, SymInt rows) -> Tensor", lambda x, rows: x[:rows].clone(), lambda x, rows: x.new_empty(rows, x.shape[1]))
_define("lies_size(Tensor x) -> Tensor", lambda x: x[:, :-1].clone(), lambda x: torch.empty_like(x))
_define("lies_rows(Tensor x) -> (Tensor, Tensor)", lambda x: (x + 1, x[1:].clone()), lambda x: (torch.empty_like(x), torch.empty_like(x)))
_define("lies_dtype(Tensor x) -> Tensor", lambda x: x.double(), lambda x: torch.empty_like(x))
_define("lies_stride(Tensor x) -> Tensor", lambda x: x.t().clone(memory_format=torch.contiguous_format).t(), lambda x: x.new_empty(x.shape))
_define("host_scale(Tensor x) -> Tensor", lambda x: x * HOST_FACTOR["factor"], tags=(torch.Tag.cudagraph_unsafe,))


def double(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.rungtest.double(x)
    return result


def split(
    function: Callable[..., Any], *args: Any, dynamic: Mapping[str, Mapping[int, str]] | None = None
) -> tuple[TracedGraph, SplitGraph]:
    """Trace `function` for `args` and cut it at the toy ops."""
    locals_ = bound(function, args)
    traced = trace(function, locals_, {"x": {0: "rows"}} if dynamic is None else dynamic)
    return traced, build_steps(traced, TOY_OPS)


def bound(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    arguments = own_signature(function).bind(*args, **(kwargs or {}))
    arguments.apply_defaults()
    return dict(arguments.arguments)


def uncompiled(
    function: Callable[..., Any],
    *args: Any,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    pad: Sequence[str] = (),
    split_ops: Collection[str] = TOY_OPS,
    **kwargs: Any,
) -> tuple[CompiledFunction, SplitGraph]:
    """The plan of `function` bound to pieces that run as FX graphs; call it with tensors in the order of `input_names`."""
    locals_ = bound(function, args, kwargs)
    found = leaves(locals_)
    traced = trace(function, locals_, dynamic_dims(function, found, {"x": {0: "rows"}} if dynamic is None else dynamic))
    rows = prove_rows(traced.graph_module, traced.symbols, traced.bounds, pad)
    names = output_dims(traced.graph_module, traced.symbols)
    graph = build_steps(traced, split_ops)
    owner = getattr(function, "__self__", None)
    tensors = [(path, value) for path, value in found if isinstance(value, torch.Tensor)]
    plan = CompilePlan(
        entry="",
        inputs=traced.inputs,
        tensors=tuple((path, TensorSpec(str(value.dtype), "cpu", tuple(value.shape))) for path, value in tensors),
        bounds=traced.bounds,
        pieces=tuple((piece.key, "") for piece in graph.pieces),
        steps=graph.steps,
        outputs=graph.outputs,
        template=traced.template,
        sources=traced.sources,
        fakes=graph.fakes,
        rows=rows,
        output_dims=names,
    )
    plan = CompilePlan.from_json(plan.to_json())
    runs = [_interpreted(piece.graph_module) for piece in graph.pieces]
    return CompiledFunction(plan, runs, {} if owner is None else {self_name(function): owner}), graph


def _interpreted(module: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    def run(inputs: list[Any]) -> Sequence[Any]:
        values = list(inputs)
        inputs.clear()
        result: Sequence[Any] = module(*values)
        return result

    return run


def run_python(code: str, *, env: Mapping[str, str], cwd: FilePath) -> str:
    """Run `code` in a new interpreter whose path has the project and `cwd`; returns what it printed."""
    result = subprocess.run(
        [sys.executable, "-c", code], env={**env, "PYTHONPATH": f"{ROOT}:{cwd}"}, cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


class Net(nn.Module):
    """The ordinary small module: linear, activation, norm."""

    def __init__(self, hidden: int = 16, *, bias: bool = True, activation: str = "relu", epsilon: float = 1e-5) -> None:
        super().__init__()
        self.linear = nn.Linear(8, hidden, bias=bias)
        self.norm = nn.LayerNorm(hidden, eps=epsilon)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.linear(x))
        return torch.relu(y) if self.activation == "relu" else torch.tanh(y)


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.net(x) + 1
        return result


class Block(nn.Module):
    """A layer with one split op inside, a buffer and an epsilon."""

    def __init__(self, hidden: int = 8, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden, eps=epsilon)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.rungtest.write(self.norm(x), out)
        return x + self.linear(out)


class Stack(nn.Module):
    """Equal blocks, one after another."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    extra: torch.Tensor | None = None


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Like(OrderedDict[str, Any]):
    """As the outputs of transformers: a mapping whose entries are attributes too."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


class Level(enum.IntEnum):
    HIGH = 2


class Name(enum.StrEnum):
    LEFT = "left"


class Colour(enum.Enum):
    RED = (255, 0, 0)


class Structures(nn.Module):
    """Returns the structure called `kind`, every value computed from x."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        y = x + 1
        return {
            "tensor": lambda: y,
            "tuple of one": lambda: (y,),
            "tuple with None": lambda: (y, None, x * 2),
            "list": lambda: [y, y],
            "dict": lambda: {"a": y, "b": x * 2},
            "nested": lambda: {"a": (y, [x * 2, {"deep": y}]), 3: None},
            "dataclass": lambda: Output(y),
            "namedtuple": lambda: Pair(y, x * 2),
            "ordered dict": lambda: OrderedDict(b=y, a=x * 2),
            "defaultdict": lambda: defaultdict(list, a=[y]),
            "defaultdict without a default": lambda: defaultdict(None, a=y),
            "mapping with attributes": lambda: Like(logits=y, rest=(x * 2,)),
            "empty containers": lambda: (y, (), [], {}),
            "size": lambda: (y, x.shape[0]),
            "size arithmetic": lambda: (y, x.shape[0] * 2 + 1),
            "constants": lambda: (y, 3, 2.5, "text", True, float("nan")),
            "returned input": lambda: (x, y),
            "members": lambda: (y, Level.HIGH, Name.LEFT, Colour.RED),
            "counter": lambda: (y, Counter({"a": 1})),
        }[self.kind]()


STRUCTURES = (
    "tensor",
    "tuple of one",
    "tuple with None",
    "list",
    "dict",
    "nested",
    "dataclass",
    "namedtuple",
    "ordered dict",
    "defaultdict",
    "defaultdict without a default",
    "mapping with attributes",
    "empty containers",
    "size",
    "size arithmetic",
    "constants",
    "returned input",
    "members",
    "counter",
)


def assert_same(actual: Any, expected: Any) -> None:
    """Equal type, structure and values; tensors to 1e-5."""
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    elif isinstance(expected, tuple | list):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, Mapping):
        assert list(actual) == list(expected)
        for key in expected:
            assert_same(actual[key], expected[key])
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_same(getattr(actual, field.name), getattr(expected, field.name))
    else:
        assert actual == expected or (actual != actual and expected != expected)
