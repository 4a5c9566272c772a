"""Wrapped things inside of wrapped things, and what other parts of torch and Python do with them."""

from __future__ import annotations

import copy
import functools
import io
import os
import pickle
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import rung
import rung.api
from rung.counters import Count
from rung.errors import ConfigError
from tests.compile.cases import ROOT, assert_same

ROWS = {"x": {0: "rows"}}


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


@rung.compiled(dynamic=ROWS)
class Inner(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.two, self.three, self.plain = Inner(2.0), Inner(3.0), nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(self.two(x) + self.three(x))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(x) - 1


X = torch.arange(6.0).view(3, 2)
EXPECTED = torch.sigmoid(X * 5)


def test_a_wrapped_module_of_decorated_and_wrapped_ones_is_one_trace() -> None:
    outer = Outer()
    rung.wrap(outer.plain, dynamic={"input": {0: "rows"}})
    rung.wrap(outer, dynamic=ROWS)
    torch.testing.assert_close(outer(X), EXPECTED)
    assert outer.rung.counters[Count.DYNAMO_TRACES] == 1
    assert outer.two.rung.counters[Count.DYNAMO_TRACES] == 0
    assert outer.rung.report()[0]["guards"]["unknown"] == []


def test_decorated_modules_of_an_unwrapped_one_compile_on_their_own() -> None:
    outer = Outer()
    torch.testing.assert_close(outer(X), EXPECTED)
    assert outer.two.rung.counters[Count.DYNAMO_TRACES] == outer.three.rung.counters[Count.DYNAMO_TRACES] == 1


def test_another_method_reaches_decorated_submodules() -> None:
    outer = rung.wrap(Outer(), method="encode", dynamic=ROWS)
    assert torch.equal(outer.encode(X), X * 2 - 1)
    torch.testing.assert_close(outer(X), EXPECTED)


def test_a_bound_method_of_a_decorated_class() -> None:
    method = rung.wrap(Inner(4.0).forward, dynamic=ROWS)
    assert torch.equal(method(X), X * 4)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"])
def test_copies_of_compiled_modules_compile_anew(copied: Any) -> None:
    outer = Outer()
    outer(X)
    again = copied(outer)
    again.two.factor = 7.0
    torch.testing.assert_close(again(X), torch.sigmoid(X * 10))
    torch.testing.assert_close(outer(X), EXPECTED)
    assert again.two.rung.counters[Count.DYNAMO_TRACES] == 1


def test_torch_export_sees_through() -> None:
    exported = torch.export.export(rung.wrap(Outer(), dynamic=ROWS), (X,)).module()
    torch.testing.assert_close(exported(X), EXPECTED)


def test_decorated_submodules_and_breaks_are_loaded_again() -> None:
    """What rung itself puts between a caller and a function has no source to be found again."""
    for source in ("compiled", "loaded"):
        outer = rung.wrap(OuterWithBreak(), dynamic=ROWS)
        assert torch.equal(outer(X), (X * 2).round() + 1)
        assert outer.rung.report()[0]["source"] == source, outer.rung.report()[0]["reason"]


@rung.eager_break(out="x")
def rounded(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy().round())


class OuterWithBreak(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.two = Inner(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rounded(self.two(x)) + 1


# --- what can be wrapped -------------------------------------------------------------------------------------------------------------


class Plain:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    @staticmethod
    def static(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @classmethod
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x * 5


def scaled(x: torch.Tensor, factor: float, *, shift: float = 0.0) -> torch.Tensor:
    return x * factor + shift


def make(factor: float) -> Any:
    @rung.compiled(dynamic=ROWS)
    def multiply(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    return multiply


@pytest.mark.parametrize(
    ("target", "factor"),
    [
        (Plain(2.0), 2),
        (Plain.static, 3),
        (Plain.of_class, 5),
        (functools.partial(scaled, factor=7.0), 7),
        (functools.partial(Plain(11.0)), 11),
        (lambda x: x * 13, 13),
    ],
    ids=["object", "static method", "class method", "partial", "partial of an object", "lambda"],
)
def test_callables(target: Any, factor: int) -> None:
    wrapped = rung.wrap(target, dynamic=ROWS)
    for x in (X, X[:1]):
        assert torch.equal(wrapped(x), x * factor)
    assert wrapped.rung.counters[Count.DYNAMO_TRACES] == 1


def test_a_partial_still_takes_other_arguments() -> None:
    wrapped = rung.wrap(functools.partial(scaled, factor=2.0), dynamic=ROWS)
    assert torch.equal(wrapped(X, shift=1.0), X * 2 + 1)
    assert torch.equal(wrapped(X, factor=3.0), X * 3)


def test_functions_of_one_factory_are_told_apart() -> None:
    made = [make(factor) for factor in (2.0, 3.0, 4.0)]
    for function, factor in zip(made, (2, 3, 4), strict=True):
        assert torch.equal(function(X), X * factor)


@pytest.mark.parametrize("target", [torch.relu, len, "text"])
def test_what_has_no_python_code_is_refused(target: Any) -> None:
    with pytest.raises(ConfigError, match=r"(?s)cannot wrap .*hint: "):
        rung.wrap(target)


@rung.compiled(dynamic=ROWS)
def decorated(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_decorated_function_pickles_by_its_name() -> None:
    assert pickle.loads(pickle.dumps(decorated)) is decorated


class Sub(Inner):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


@pytest.mark.parametrize("twice", [False, True])
def test_a_subclass_of_a_decorated_class(twice: bool) -> None:
    cls = rung.compiled(dynamic=ROWS)(type("Again", (Sub,), {})) if twice else Sub
    module = cls(2.0)
    for x in (X, X[:1]):
        assert torch.equal(module(x), x * 2 + 1)


# --- what others do with a wrapped module --------------------------------------------------------------------------------------------


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def traced_by_make_fx(module: Any, x: torch.Tensor) -> torch.Tensor:
    return make_fx(module)(torch.ones(3, 2))(x)


def traced_by_jit(module: Any, x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        return torch.jit.trace(module, (torch.ones(3, 2),))(x)


def with_other_weights(module: Any, x: torch.Tensor) -> torch.Tensor:
    state = {name: value * 2 for name, value in module.state_dict().items()}
    return torch.func.functional_call(module, state, (x,))


def counted(module: Any, x: torch.Tensor) -> torch.Tensor:
    with FlopCounterMode(display=False) as mode:
        result = module(x)
    assert mode.get_total_flops() == 24
    return result


def exported(module: Any, x: torch.Tensor) -> torch.Tensor:
    rows = {"x": {0: torch.export.Dim("rows", min=2)}}
    return torch.export.export(module, (torch.ones(3, 2),), dynamic_shapes=rows).module()(x)


USES: dict[str, Any] = {
    "make_fx": traced_by_make_fx,
    "jit.trace": traced_by_jit,
    "functional_call": with_other_weights,
    "vmap": lambda module, x: torch.vmap(module)(x[None])[0],
    "flop counter": counted,
    "export": exported,
    "symbolic_trace": lambda module, x: torch.fx.symbolic_trace(module)(x),
    "torch.compile": lambda module, x: torch.compile(module, backend="eager")(x),
}


@pytest.mark.parametrize("called", [False, True], ids=["before a call", "after a call"])
@pytest.mark.parametrize("use", USES)
def test_others_see_the_operations(use: str, called: bool) -> None:
    torch._dynamo.reset()
    module, x = Linear(), X + 1
    eager = copy.deepcopy(module)
    rung.wrap(module, dynamic=ROWS)
    if called:
        module(x)
    torch.testing.assert_close(USES[use](module, x), USES[use](eager, x))
    torch.testing.assert_close(module(x), eager(x))
    watched = use in ("make_fx", "jit.trace", "vmap", "flop counter")
    assert (module.rung.counters["eager.transform"] > 0) is watched


def test_a_module_without_memory_runs_eagerly() -> None:
    module = rung.wrap(Linear().to("meta"), dynamic=ROWS)
    assert module(X.to("meta")).is_meta
    assert module.rung.counters["eager.meta"] == 1


def test_a_saved_module_is_wrapped_when_it_is_loaded() -> None:
    module = rung.wrap(Linear(), dynamic=ROWS)
    expected = module(X)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(again(X), expected)
    assert again.rung.report()[0]["source"] == "loaded"


# --- torch.compile(backend="rung") ---------------------------------------------------------------------------------------------------


BY_NAME = """
import torch, rung
class Net(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1
for how in ("function", "method"):
    torch._dynamo.reset()
    module = Net()
    x = torch.ones(3, 4)
    expected = module(x)
    called = torch.compile(module, backend="rung") if how == "function" else module
    if how == "method":
        module.compile(backend="rung")
    torch.testing.assert_close(called(x), expected)
    print(how, rung.counters["pieces"])
"""


def test_the_backend_by_name(tmp_path: Path) -> None:
    """The entry points of pyproject.toml as an installation would write them: a source tree is enough."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = tmp_path / "rung-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: rung\nVersion: 0\n")
    groups = project["entry-points"].items()
    lines = [line for group, named in groups for line in (f"[{group}]", *(f"{name} = {value}" for name, value in named.items()))]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))}
    done = subprocess.run([sys.executable, "-c", BY_NAME], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["function 1", "method 2"]


def test_the_backend_leaves_gradients_and_autocast_to_the_graph_itself() -> None:
    torch._dynamo.reset()
    module = Linear()
    eager = copy.deepcopy(module)
    before = dict(rung.counters.items())
    compiled = torch.compile(module, backend=rung.api.dynamo_backend)
    with torch.enable_grad():
        for one in (compiled, eager):
            one(X + 1).sum().backward()
    assert module.linear.weight.grad is not None
    torch.testing.assert_close(module.linear.weight.grad, eager.linear.weight.grad)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert compiled(X).dtype is eager(X).dtype is dtype
    torch.testing.assert_close(compiled(X), eager(X))
    counted = {name: rung.counters[f"eager.{name}"] - before.get(f"eager.{name}", 0) for name in ("gradient", "autocast")}
    assert counted == {"gradient": 1, "autocast": 2}


def in_a_dict(x: torch.Tensor) -> Any:
    return {"a": x + 1, "b": (x * 2, [x, None])}


def test_the_backend_gives_back_structures() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(in_a_dict, backend=rung.api.dynamo_backend, dynamic=True)
    for x in (X, X[:2]):
        assert_same(compiled(x), in_a_dict(x))
