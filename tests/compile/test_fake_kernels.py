"""Fake kernels that say something else than the op does: found by name at the first run, or while a piece is compared."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rung
from rung.cache import open_store, use_store
from rung.compile import paths, selfcheck
from rung.compile.fake_kernels import CheckedInterpreter
from rung.compile.plan import TensorSpec
from rung.errors import CacheMissError, FakeKernelError, InternalError
from tests.compile.cases import TOY_OPS, double, run_python, uncompiled

LIES = {
    "lies_size": r"output 0 of rungtest::lies_size is torch.float32 \[3, 4\], but its fake kernel said torch.float32 \[3, 5\]",
    "lies_rows": r"output 1 of rungtest::lies_rows is torch.float32 \[2, 5\], but its fake kernel said torch.float32 \[3, 5\]",
    "lies_dtype": r"output 0 of rungtest::lies_dtype is torch.float64 \[3, 5\], but its fake kernel said torch.float32 \[3, 5\]",
    "lies_stride": r"output 0 of rungtest::lies_stride is strides \[1, 3\], but its fake kernel said a contiguous tensor",
}
X = torch.ones(3, 5)
MENDED = textwrap.dedent(
    """
    import torch, rung

    def real(x: torch.Tensor) -> torch.Tensor:
        return x.double()

    torch.library.custom_op("rungtest::mended", real, mutates_args=()).register_fake(lambda x: torch.empty_like(x, dtype=torch.SAID))

    def function(x):
        return torch.ops.rungtest.mended(x * 2) + 1

    try:
        print(rung.wrap(function, dynamic={"x": {0: "rows"}})(torch.ones(3, 5)).dtype)
    except rung.errors.RungError as error:
        print(type(error).__name__)
    """
)


def around(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    op = getattr(torch.ops.rungtest, name)

    def function(x: torch.Tensor) -> torch.Tensor:
        made: Any = op(x * 2)
        return (made[1] if isinstance(made, tuple) else made) + 1

    return function


@pytest.mark.parametrize("name", LIES)
def test_a_split_op_is_found_at_the_first_run(name: str) -> None:
    compiled, _ = uncompiled(around(name), X, split_ops=(f"rungtest::{name}",))
    compiled.plan = replace(compiled.plan, tensors=((paths.Path("x"), TensorSpec("torch.float32", "cpu", ("rows", 5))),))
    for _ in range(2):  # and at the next, as long as it lies
        with pytest.raises(FakeKernelError, match=LIES[name]):
            compiled(X)


@pytest.mark.parametrize("name", ["lies_size", "lies_dtype"])
def test_an_op_inside_of_a_piece_is_found_when_it_is_compared(name: str) -> None:
    _, graph = uncompiled(around(name), X, split_ops=())
    (piece,) = graph.pieces
    with pytest.raises(FakeKernelError, match=f"output 0 of rungtest::{name}"):
        CheckedInterpreter(piece.graph_module).run(X)


def test_honest_ops_are_looked_at_once() -> None:
    compiled, _ = uncompiled(lambda x: double(x) + 1, X, split_ops=TOY_OPS)
    (fake,) = compiled.plan.fakes.values()
    assert (fake.op, fake.shape, fake.contiguous) == ("rungtest::double", ("rows", 5), True)
    assert compiled._unchecked
    assert torch.equal(compiled(X), X * 2 + 1)
    assert not compiled._unchecked


class Lying(nn.Module):
    """An op inside of the only piece; what it returns is told by an attribute."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: Any = getattr(torch.ops.rungtest, self.name)(x * 2)
        return (made[1] if isinstance(made, tuple) else made) + 1


def call(name: str, **options: Any) -> Any:
    module = Lying(name)
    rung.wrap(module, dynamic={"x": {0: "rows"}}, **options)
    return module(X)


@pytest.mark.parametrize("name", LIES)
def test_a_piece_that_failed_its_comparison_is_never_used(name: str) -> None:
    module = Lying(name)
    rung.wrap(module, dynamic={"x": {0: "rows"}})
    for _ in range(3):
        with pytest.raises(FakeKernelError, match=rf"output \d of rungtest::{name} is "):
            module(X)
    with pytest.raises(FakeKernelError, match=f"rungtest::{name}"):  # another wrap of the class, on the same store
        call(name)
    assert not list(open_store().manifests())


def test_another_process_finds_nothing_that_failed(rung_cache_dir: Path) -> None:
    name = "lies_rows"
    with pytest.raises(FakeKernelError):
        call(name)
    code = f"from tests.compile.test_fake_kernels import call\ntry:\n    call({name!r})\nexcept Exception as error:\n    print(error)"
    assert f"of rungtest::{name} is" in run_python(code, env=os.environ, cwd=rung_cache_dir.parent)


def test_code_for_a_size_that_failed_its_comparison_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such code is found by its key alone, without a plan."""
    options: dict[str, Any] = {"variants": (4,)}
    honest = selfcheck.check_piece

    def check(*arguments: Any) -> None:
        if arguments[-1][0] == 4:
            raise InternalError("it differs", hint="none")
        honest(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(selfcheck, "check_piece", check)
        for _ in range(2):
            with pytest.raises(InternalError, match="it differs"):
                call("double", **options)
    with use_store(require_hit=True), pytest.raises(CacheMissError, match="code for sizes 4"):
        call("double", **options)
    call("double", **options)
    with use_store(require_hit=True):
        assert torch.equal(call("double", **options), X * 4 + 1)


def test_code_for_a_size_that_was_not_compared_yet_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may have been killed by the comparison."""
    options: dict[str, Any] = {"variants": (4,)}

    def interrupted(*arguments: Any) -> None:
        if arguments[-1][0] == 4:
            raise KeyboardInterrupt

    checked: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(selfcheck, "check_piece", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call("double", **options)
        patch.setattr(selfcheck, "check_piece", lambda *arguments: checked.append(arguments[-1][0]))
        call("double", **options)
        call("double", **options)
    assert checked == [4]


def test_a_mended_fake_kernel_is_compiled_for(rung_cache_dir: Path) -> None:
    """The key of a piece has the schema of an op, and not what its fake kernel says."""
    for said, expected in (("float32", "FakeKernelError"), ("float64", "torch.float64")):
        code = MENDED.replace("SAID", said)
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(rung_cache_dir.parent / said)}
        assert run_python(code, env=env, cwd=rung_cache_dir.parent) == expected
