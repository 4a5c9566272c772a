"""Imports point one way: cli -> api -> runner, models -> graphs -> compile -> passes, attention -> launch, cache -> the ground.

Inside one layer topics may use each other as long as no circle arises. Imports inside functions and under TYPE_CHECKING count like any
other; the lazy names of `rung/__init__` are text and do not.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import rung

ROOT = Path(__file__).parents[1]
CHAIN = [
    {"context", "config", "errors", "counters", "versions", "torch_compat"},
    {"launch", "cache"},
    {"passes", "attention"},
    {"compile"},
    {"graphs"},
    {"runner", "models"},
    {"api", "handle"},
    {"cli"},
]
LAYER = {topic: number for number, topics in enumerate(CHAIN) for topic in topics}
COMPILERS = ("triton", "torch._inductor", "torch._dynamo")


@dataclass(frozen=True)
class Use:
    """A dotted name that a file imports, or reaches through an imported module."""

    name: str
    line: int
    imported: bool  # by an import statement or `import_module("...")`, not by an attribute


def _uses(source: str, module: str, is_package: bool) -> Iterator[Use]:
    tree = ast.parse(source)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Use(alias.name, node.lineno, True)
                aliases[alias.asname or alias.name.partition(".")[0]] = alias.name if alias.asname else alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, base] if base else parts)
            for alias in node.names:
                yield Use(f"{base}.{alias.name}", node.lineno, True)
                aliases[alias.asname or alias.name] = f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield Use(argument.value, node.lineno, True)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            head, _, rest = ast.unparse(node).partition(".")
            if head in aliases and all(part.isidentifier() for part in rest.split(".")):
                yield Use(f"{aliases[head]}.{rest}", node.lineno, False)


def _topic(name: str) -> str | None:
    """The topic of rung that a dotted name belongs to; None when it is not rung's or is `rung` itself."""
    package, _, rest = name.partition(".")
    if package != "rung" or not rest:
        return None
    first = rest.partition(".")[0]
    if first in LAYER:
        return first
    return _topic(rung._PUBLIC[first]) if first in rung._PUBLIC else None


def _is_private_torch(name: str) -> bool:
    parts = name.split(".")
    if parts[0] != "torch" or parts[1:2] == ["ops"]:  # below torch.ops are the names of operator libraries
        return False
    private = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return private or parts[1:3] == ["fx", "experimental"]


@cache
def _files() -> dict[str, tuple[Path, tuple[Use, ...]]]:
    files = {}
    for path in sorted((ROOT / "rung").rglob("*.py")):
        is_package = path.name == "__init__.py"
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts[:-1] if is_package else parts)
        files[module] = (path.relative_to(ROOT), tuple(_uses(path.read_text(encoding="utf-8"), module, is_package)))
    return files


def _topic_uses() -> Iterator[tuple[str, str, str]]:
    """(topic, used topic, place) for every import of rung inside rung."""
    for module, (path, uses) in _files().items():
        topic = _topic(module)
        for use in uses:
            used = _topic(use.name)
            if topic and used and used != topic and use.imported:
                yield topic, used, f"{path}:{use.line} imports {use.name}"


def test_every_topic_has_its_place_in_the_chain() -> None:
    topics = {module.split(".")[1] for module in _files() if module != "rung"}
    assert topics - LAYER.keys() == set()


def test_no_layer_imports_a_higher_one() -> None:
    assert [place for topic, used, place in _topic_uses() if LAYER[used] > LAYER[topic]] == []


def test_topics_form_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    for topic, used, _ in _topic_uses():
        graph.setdefault(topic, set()).add(used)
    TopologicalSorter(graph).prepare()


def test_private_torch_names_stand_in_torch_compat_alone() -> None:
    found = {
        f"{path}:{use.line} {use.name}"
        for module, (path, uses) in _files().items()
        if _topic(module) != "torch_compat"
        for use in uses
        if _is_private_torch(use.name)
    }
    assert found == set()


def test_the_package_itself_imports_only_counters_and_versions() -> None:
    assert {_topic(use.name) for use in _files()["rung"][1]} - {None} == {"counters", "versions"}


def _modules_after(code: str) -> set[str]:
    """The modules that a new interpreter has loaded after running `code`."""
    script = f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def _compilers(modules: set[str]) -> list[str]:
    return sorted(m for m in modules if any(m == c or m.startswith(c + ".") for c in COMPILERS))


def test_importing_rung_loads_nothing_but_counters_and_versions() -> None:
    loaded = _modules_after("import rung")
    assert sorted(m for m in loaded if m.partition(".")[0] == "rung") == ["rung", "rung.counters", "rung.versions"]
    assert loaded.isdisjoint({"torch", "numpy", "triton"})


def test_launch_loads_no_compiler() -> None:
    modules = [m for m in _files() if m == "rung.launch" or m.startswith("rung.launch.")]
    assert _compilers(_modules_after("import torch\n" + "\n".join(f"import {m}" for m in modules))) == []


def test_launch_names_no_compiler() -> None:
    """Imports inside functions would not show at import time."""
    found = [
        f"{path}:{use.line} {use.name}"
        for module, (path, uses) in _files().items()
        if _topic(module) == "launch"
        for use in uses
        if _compilers({use.name})
    ]
    assert found == []


# --- the test's own eyes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import rung.graphs.program", "rung.graphs.program"),
        ("from rung.graphs import program", "rung.graphs.program"),
        ("from ..graphs import program", "rung.graphs.program"),
        ("from . import layer", "rung.attention.layer"),
        ("def f():\n    from rung import graphs", "rung.graphs"),
        ("importlib.import_module('rung.graphs')", "rung.graphs"),
        ("import torch\ntorch._dynamo.reset()", "torch._dynamo.reset"),
        ("from torch import fx\nfx.experimental.proxy_tensor", "torch.fx.experimental.proxy_tensor"),
        ("import torch.nn as tnn\ntnn.modules", "torch.nn.modules"),
    ],
)
def test_a_use_is_seen(source: str, name: str) -> None:
    assert name in {use.name for use in _uses(source, "rung.attention.select", is_package=False)}


def test_relative_imports_of_a_package_start_at_the_package() -> None:
    assert [use.name for use in _uses("from .base import X", "rung.attention", is_package=True)] == ["rung.attention.base.X"]


def test_public_names_count_as_the_topic_they_come_from() -> None:
    assert _topic("rung.wrap") == "api"
    assert _topic("rung.__version__") is None


@pytest.mark.parametrize(
    ("name", "private"),
    [
        ("torch._dynamo", True),
        ("torch.utils._pytree.tree_map", True),
        ("torch.fx.experimental.proxy_tensor", True),
        ("torch.fx.Graph", False),
        ("torch.__version__", False),
        ("torch.ops._c10d_functional.all_reduce", False),
        ("numpy._core", False),
    ],
)
def test_private_torch_names_are_told_apart(name: str, private: bool) -> None:
    assert _is_private_torch(name) is private
