"""Inductor's wrapper, rewritten so that it runs without Inductor: what is left of its module is `call`, over a closed set of names."""

from __future__ import annotations

import ast
from collections.abc import Collection
from typing import Any

import torch

from rung import torch_compat
from rung.compile.stock_reasons import NotPortableError, StockReason

_DROPPED = ("get_args", "benchmark_compiled_module")
_MADE = ("triton", "cpp_pybinding")  # what `async_compile` made is in the store as machine code
ORDINAL, GUARD = "ordinal", "device_guard"  # names of `torch_compat.wrapper_names` that stand for what the wrapper spells out


def portable_source(text: str, machine_code: Collection[str], *, on_cuda: bool) -> str:
    """A module that defines `call(list) -> tuple`, from the text of Inductor's. `machine_code` names its kernels.

    The ordinal of the device becomes a name, so that the code serves every device of its kind. Raises `NotPortableError`."""
    try:
        module = ast.parse(text)
    except SyntaxError as error:
        raise NotPortableError(StockReason.WRAPPER, f"it does not parse: {error}") from error
    names = set(torch_compat.wrapper_names(None)) | set(machine_code) | set(torch_compat.wrapper_builtins())
    if on_cuda:
        names |= {ORDINAL, GUARD, "empty_strided_cuda", "get_raw_stream"}
    rewrite = _Rewrite()
    body = [rewrite.visit(node) for node in module.body if _stays(node, machine_code)]
    kept = ast.fix_missing_locations(ast.Module([node for node in body if node is not None], []))
    _check_names(kept, names)
    if not any(_defines(node, "call") for node in kept.body):
        raise NotPortableError(StockReason.WRAPPER, "it has no function call")
    return ast.unparse(kept) + "\n"


def _stays(node: ast.stmt, machine_code: Collection[str]) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name not in _DROPPED
    if isinstance(node, ast.ClassDef):
        return True
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        name, made = node.targets[0].id, _made_by(node.value)
        if made is None:
            return name in ("call", "runner", "recursively_apply_fns")
        if made not in _MADE or name not in machine_code:
            raise NotPortableError(StockReason.KERNEL, f"{name} is made by async_compile.{made}")
    return False  # imports, aliases of torch's functions, the compiler's pool, and what runs as a script


def _made_by(value: ast.expr) -> str | None:
    """ "triton" for `async_compile.triton(...)`."""
    called = value.func if isinstance(value, ast.Call) else None
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "async_compile":
        return called.attr
    return None


def _defines(node: ast.stmt, name: str) -> bool:
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    return isinstance(node, ast.FunctionDef) and node.name == name


class _Rewrite(ast.NodeTransformer):
    """The ordinal becomes a name, and the second of two ways to set the device goes."""

    def __init__(self) -> None:
        self._seen: int | None = None  # of the device on which the piece was compiled

    def visit_Expr(self, node: ast.Expr) -> Any:
        if isinstance(node.value, ast.Constant) or _is_call(node.value, "torch.cuda.set_device"):
            return None  # a text, or what the guard around it has done
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        if _is_call(node, "torch.cuda._DeviceGuard"):
            node.func, node.args = _name(GUARD), [self._ordinal(node.args[0])]
        elif _is_call(node, "get_raw_stream"):
            node.args = [self._ordinal(node.args[0])]
        elif _is_call(node, "device") or _is_call(node, "torch.device"):
            for keyword in node.keywords:
                if keyword.arg == "index":
                    keyword.value = self._ordinal(keyword.value)
        return node

    def _ordinal(self, value: ast.expr) -> ast.expr:
        found = value.value if isinstance(value, ast.Constant) else None
        if not isinstance(found, int) or found != (found if self._seen is None else self._seen):
            also = "" if self._seen is None else f" beside {self._seen}"
            raise NotPortableError(StockReason.DEVICES, f"it names device {ast.unparse(value)}{also}")
        self._seen = found
        return _name(ORDINAL)


def _name(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _is_call(node: ast.expr, dotted: str) -> bool:
    return isinstance(node, ast.Call) and _dotted(node.func) == dotted


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def _check_names(module: ast.Module, names: Collection[str]) -> None:
    """Raise `NotPortableError` for a name that neither the module defines nor the runtime has, and for what of torch is not plain."""
    defined: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal):
            raise NotPortableError(StockReason.NAME, ast.unparse(node))
    for node in ast.walk(module):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in defined and node.id not in names:
            raise NotPortableError(StockReason.NAME, node.id)
        if isinstance(node, ast.Attribute) and not _allowed(_dotted(node)):
            raise NotPortableError(StockReason.NAME, _dotted(node))


def _allowed(dotted: str) -> bool:
    """Whether an attribute may be read: anything of values, an op, a dtype or layout of torch, a matrix product that the runtime has."""
    root, _, rest = dotted.partition(".")
    if root == "torch":
        plain = isinstance(getattr(torch, rest, None), torch.dtype | torch.layout | torch.memory_format)
        return plain or rest == "ops" or rest.startswith("ops.")
    if root == "extern_kernels":
        return hasattr(torch_compat.wrapper_names(None)["extern_kernels"], rest)
    return not any(part.startswith("__") for part in dotted.split("."))
