"""Passes from outside, their keys, and matches that a configuration counts on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

import rung
from examples.custom_pass import Scaled, make_pass
from rung.config import CompileConfig
from rung.errors import CompileError, ConfigError, PassError
from rung.passes import extension
from rung.passes.defaults import pass_manager, pass_names
from rung.passes.expectations import check_expectations
from rung.passes.extension import load_pass


class Counts:
    """Has no uuid of its own."""

    name = "counts"

    def __init__(self, limit: Any = 3) -> None:
        self.limit = limit

    def run(self, graph: fx.Graph) -> dict[str, int]:
        return {"nodes": min(self.limit, len(graph.nodes))}


@pytest.fixture(scope="module")
def module() -> Any:
    return rung.wrap(Scaled(), dynamic={"x": {0: "rows"}}, passes=("examples.custom_pass:make_pass",), expect={"scale": 1})


def test_a_pass_by_import_path_runs_and_is_reported(module: Any) -> None:
    x = torch.randn(5, 8)
    torch.testing.assert_close(module(x), Scaled()(x))
    assert module.rung.report()[0]["passes"][0]["join_scales"] == {"scale": 1}


def test_a_lost_match_fails_the_compile() -> None:
    module = rung.wrap(Scaled(), dynamic={"x": {0: "rows"}}, passes=(make_pass,), expect={"join_scales": 2})
    with pytest.raises(CompileError, match="join_scales was expected to match 2 times and matched 1 times"):
        module(torch.randn(5, 8))


def test_a_lost_match_lists_near_misses() -> None:
    miss = {"pattern": "add_norm", "anchor": "n", "matched": 1, "total": 2, "reason": "constant 1 expected, found 2", "where": ""}
    report = {"add_norm": {"add_norm": 1, "near miss: another user": 7}, "near_misses": [miss]}
    check_expectations({"add_norm": 4}, [(report, 4)])
    with pytest.raises(CompileError, match=r"5 times and matched 4 times\. Near misses: .*constant 1 expected, found 2"):
        check_expectations({"add_norm": 5}, [(report, 4)])


def test_a_fused_op_that_is_lowered_counts_once() -> None:
    report = {"act_mul": {"silu_mul": 1, "gelu_mul": 0}, "lowering": {"silu_mul": 1, "rms_norm": 2}}
    check_expectations({"silu_mul": 1, "act_mul": 1, "rms_norm": 2}, [(report, 1)])
    with pytest.raises(CompileError, match="silu_mul was expected to match 2 times and matched 1 times"):
        check_expectations({"silu_mul": 2}, [(report, 1)])


def test_an_expectation_of_an_unknown_pass_is_named() -> None:
    with pytest.raises(CompileError, match="No pass and no pattern has this name; there are add_norm"):
        check_expectations({"addnorm": 1}, [({"add_norm": {"add_norm": 1}}, 1)])


def test_an_expectation_must_be_a_number() -> None:
    with pytest.raises(ConfigError, match="expect must give numbers"):
        CompileConfig(expect={"add_norm": "all"})


@pytest.mark.parametrize("given", [Counts, Counts(), "tests.passes.test_extension:Counts", lambda: Counts()])
def test_a_pass_may_be_an_object_a_maker_or_a_path(given: Any) -> None:
    assert load_pass(given).name == "counts"


def test_an_entry_point_is_loaded_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    entry = EntryPoint("counts", "tests.passes.test_extension:Counts", extension.GROUP)
    monkeypatch.setattr(extension, "entry_points", lambda group: [entry] if group == extension.GROUP else [])
    assert load_pass("counts").name == "counts"
    with pytest.raises(PassError, match=r"'other' is no entry point of rung\.passes"):
        load_pass("other")


@pytest.mark.parametrize("given", ["no.such.module:x", "rung.passes:Nothing", "examples.custom_pass:Scaled", 3])
def test_what_is_no_pass_is_refused(given: Any) -> None:
    with pytest.raises(PassError):
        load_pass(given)


def test_the_key_of_a_pass_without_uuid_covers_its_attributes() -> None:
    assert load_pass(Counts(3)).uuid() == load_pass(Counts(3)).uuid() != load_pass(Counts(4)).uuid()


def test_an_attribute_that_no_key_can_hold_is_refused() -> None:
    with pytest.raises(PassError, match="differs between processes"):
        load_pass(Counts(object()))


def test_passes_of_the_configuration_are_in_the_key() -> None:
    keys = {pass_manager(CompileConfig(passes=passes)).uuid() for passes in ((), (Counts(3),), (Counts(4),), (make_pass,))}
    assert len(keys) == 4


def test_a_pass_can_be_left_out() -> None:
    names = [item.name for item in pass_manager(CompileConfig(without_passes=("add_norm",))).passes]
    assert "add_norm" in pass_names()
    assert "add_norm" not in names


@pytest.mark.parametrize("options", [{"without_passes": ("addnorm",)}, {"passes": (Counts, Counts)}])
def test_names_that_do_not_fit_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PassError):
        pass_manager(CompileConfig(**options))
