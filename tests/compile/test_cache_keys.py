"""Every declared factor, changed alone, misses and is named; what was not declared hits; an edited function misses."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rung
from rung import torch_compat
from rung.cache import Factor, Factors, Store, use_store
from rung.compile import driver
from rung.counters import Count
from rung.errors import CacheMissError


def activation(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


class Net(nn.Module):
    def __init__(self, *, bias: bool = True, eps: float = 1e-5) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=bias)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return activation(self.linear(x)) + self.eps


NAMES = [
    *("piece_format", "passes", "inductor", "python", "default_dtype", "torch", "torch_sources", "cuda", "inductor_changed"),
    *(
        "inductor_variables",
        "cpu",
        "device",
        "extra",
        "format",
        "entry",
        "module",
        "dynamic",
        "maximum",
        "breaks",
        "split_ops",
        "pad",
        "row_wise_ops",
    ),
    *("whole_passes", "expect", "tensors", "constants"),
]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that holds `Net`."""
    root = tmp_path_factory.mktemp("keys") / "store"
    with use_store(root=root):
        call(Net())
    return root


def call(module: nn.Module, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    """The report of one call."""
    with torch.no_grad():
        wrapped = rung.wrap(copy.deepcopy(module), dynamic={"x": {0: "rows"}}, **options)
        wrapped(torch.ones(3, 8, dtype=dtype))
    report: dict[str, Any] = wrapped.rung.report()[0]
    return report


def must_hit(root: Path, module: nn.Module, **options: Any) -> dict[str, Any]:
    with use_store(root=root, require_hit=True):
        return call(module, **options)


def perturb(monkeypatch: pytest.MonkeyPatch, change: Callable[[Factor], Factor]) -> None:
    original = driver.plan_factors

    def changed(*args: Any) -> tuple[Factors, list[str]]:
        factors, opaque = original(*args)
        return Factors(change(factor) for factor in factors), opaque

    monkeypatch.setattr(driver, "plan_factors", changed)


def test_the_list_of_factors_is_the_declared_one(filled: Path) -> None:
    ((_, manifest),) = Store(filled).manifests("plans")
    assert list(manifest.factors) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_factor_changed_alone_misses_and_is_named(name: str, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    perturb(monkeypatch, lambda factor: Factor(name, ["other"], factor.changes_code) if factor.name == name else factor)
    wanted = "the store has no plans of" if name == "entry" else rf"{name}: .* -> \[\"other\"\]"
    with pytest.raises(CacheMissError, match=wanted):
        must_hit(filled, Net())


def test_code_factors_are_those_of_the_piece(filled: Path) -> None:
    ((_, piece),) = Store(filled).manifests("pieces")
    assert list(piece.factors) == ["piece", "bounds", *NAMES[: NAMES.index("format")]]


def test_the_unchanged_module_hits_and_says_what_that_saved(filled: Path) -> None:
    report = must_hit(filled, Net())
    assert report["cache"] == "hit"
    assert report["saved_seconds"] > 0.01


def test_a_key_is_the_same_after_a_run(filled: Path) -> None:
    module = Net()
    assert call(module)["plan_key"] == must_hit(filled, module)["plan_key"]


@pytest.mark.parametrize("name", ["PATH", "RANK", "LOCAL_RANK", "MASTER_PORT", "HOSTNAME", "USER", "HOME", "CUDA_VISIBLE_DEVICES"])
def test_variables_that_nobody_declared_hit(name: str, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "7")
    assert must_hit(filled, Net())["cache"] == "hit"


@pytest.mark.parametrize(
    ("module", "options", "named"),
    [
        (Net(bias=False), {}, r"module\.modules\.linear"),
        (Net(eps=1e-6), {}, r"module\.modules\.\.attributes\.eps: float:1e-05 -> float:1e-06"),
        (Net(), {"maximum": 64}, "maximum: nothing -> 64"),
        (Net(), {"factors": {"my_op": 2}}, "extra.my_op: nothing -> 2"),
        (Net(), {"inductor": {"max_fusion_size": 8}}, "inductor.max_fusion_size: nothing -> 8"),
        (Net().double(), {}, "module.modules.linear.tensors"),
    ],
)
def test_another_module_or_option_misses_and_is_named(module: nn.Module, options: dict[str, Any], named: str, filled: Path) -> None:
    with pytest.raises(CacheMissError, match=named):
        must_hit(filled, module, dtype=next(module.parameters()).dtype, **options)


def test_an_edited_function_misses(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edited = types.FunctionType(compile("def activation(x):\n    return x\n", "edited", "exec").co_consts[0], globals())
    monkeypatch.setitem(globals(), "activation", edited)
    with pytest.raises(CacheMissError, match="the source of activation changed"):
        must_hit(filled, Net())


@pytest.mark.parametrize("version", ["torch", "python"])
def test_another_version_is_named_with_old_and_new(version: str, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if version == "torch":
        monkeypatch.setattr(torch_compat.keys.torch, "__version__", "9.9")  # type: ignore[attr-defined]
    else:
        monkeypatch.setattr("platform.python_version_tuple", lambda: ("9", "9", "0"))
    with pytest.raises(CacheMissError, match=rf"{version}: \S+ -> 9\.9"):
        must_hit(filled, Net())


def test_a_partial_hit_names_the_pieces(filled: Path) -> None:
    class Other(Net):
        pass

    with use_store(root=filled):
        report = call(Other())
    assert (report["cache"], report["hit_pieces"]) == ("partial", 1)


def test_a_store_that_is_off_compiles_and_writes_nothing(rung_cache_dir: Path) -> None:
    with use_store(mode="off"):
        assert call(Net())["cache"] == "miss"
    assert not rung_cache_dir.exists()


def test_plans_of_two_sources_lie_under_one_key(rung_cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call(Net())
    with monkeypatch.context() as patch:
        edited = types.FunctionType(compile("def activation(x):\n    return x\n", "edited", "exec").co_consts[0], globals())
        patch.setitem(globals(), "activation", edited)
        assert call(Net())["cache"] == "miss"
    assert must_hit(rung_cache_dir, Net())["cache"] == "hit"
    assert len(list((rung_cache_dir / "plans").iterdir())) == 1


def test_counts(filled: Path) -> None:
    with use_store(root=filled), rung.counters.expect(**{Count.PLAN_HITS: 1, Count.PLAN_MISSES: 0, Count.PIECE_HITS: 0}):
        call(Net())
