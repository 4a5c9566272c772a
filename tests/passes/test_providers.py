"""Providers from outside: where they run, what is refused, and their keys."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import rung
from examples.custom_provider import Normed, make_provider
from rung.config import CompileConfig
from rung.errors import CompileError, PassError
from rung.passes import extension
from rung.passes.defaults import pass_manager
from rung.passes.extension import PROVIDERS, load_provider
from rung.passes.providers import OwnProvider


def changed(**fields: Any) -> OwnProvider:
    return dataclasses.replace(make_provider(), **fields)


def test_a_provider_by_import_path_runs_and_is_reported() -> None:
    module = rung.wrap(
        Normed().requires_grad_(False),
        dynamic={"x": {0: "rows"}},
        providers=("examples.custom_provider:make_provider",),
        expect={"rms_norm.torch": 1},
    )
    x = torch.randn(5, 16)
    torch.testing.assert_close(module(x), F.rms_norm(x.sin(), (16,), module.weight, 1e-5) * 2)
    report = module.rung.report()[0]["passes"][0]
    assert (report["providers"], report["lowering"]) == ({"rms_norm.torch": 1}, {})


def test_what_it_does_not_take_is_left_to_others_and_a_near_miss() -> None:
    module = rung.wrap(Normed(12).requires_grad_(False), dynamic={"x": {0: "rows"}}, providers=(make_provider,))
    module(torch.randn(5, 12))
    report = module.rung.report()[0]["passes"][0]
    assert (report["providers"], report["lowering"]) == ({"rms_norm.torch": 0}, {"rms_norm": 1})
    assert [miss["reason"] for miss in report["near_misses"] if miss["pattern"] == "rms_norm.torch"] == ["rows of 12 are no multiple of 8"]


def test_a_lost_provider_fails_the_compile_with_the_reason() -> None:
    module = rung.wrap(
        Normed(12).requires_grad_(False), dynamic={"x": {0: "rows"}}, providers=(make_provider,), expect={"rms_norm.torch": 1}
    )
    with pytest.raises(CompileError, match=r"rms_norm\.torch was expected to match 1 times and matched 0 times.*no multiple of 8"):
        module(torch.randn(5, 12))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda x, weight, epsilon: F.rms_norm(x, (x.shape[-1],), weight), "differs by"),
        (lambda x, weight, epsilon: F.rms_norm(x, (x.shape[-1],), weight, epsilon).double(), "is torch.float64"),
        (lambda x, weight, epsilon: F.rms_norm(x, (x.shape[-1],), weight, epsilon).T.contiguous().T, "with strides"),
        (lambda x, weight, epsilon: x * float("nan"), "differs by nan"),
    ],
    ids=["epsilon dropped", "dtype", "strides", "nan"],
)
def test_a_provider_that_computes_something_else_is_refused(run: Any, message: str) -> None:
    with pytest.raises(PassError, match=re.escape(message)):
        changed(run=run, example=lambda rows, dtype, device: (torch.randn(rows, 32) * 1e-3, torch.rand(32), 1e-3)).check()


def test_nothing_is_compared_where_no_device_has_its_arguments() -> None:
    changed(run=lambda *args: None, why_not=lambda x, *_: None if x.device.type == "tpu" else "no such device").check()


@pytest.mark.parametrize("fields", [{"op": "rms_morn"}, {"tolerance": {}}], ids=["op", "tolerance"])
def test_a_provider_that_says_too_little_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(PassError):
        changed(**fields)


@pytest.mark.parametrize("given", ["no.such.module:x", "examples.custom_provider:Normed", 3])
def test_what_is_no_provider_is_refused(given: Any) -> None:
    with pytest.raises(PassError):
        load_provider(given)


def test_an_entry_point_is_loaded_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    entry = EntryPoint("mine", "examples.custom_provider:make_provider", PROVIDERS)
    monkeypatch.setattr(extension, "entry_points", lambda group: [entry] if group == PROVIDERS else [])
    assert load_provider("mine").label == "rms_norm.torch"


def scaled(by: float) -> Any:
    return lambda x, weight, epsilon: F.rms_norm(x, (x.shape[-1],), weight, epsilon) * by


def test_source_and_parameters_are_in_the_key() -> None:
    variants = (
        (),
        (make_provider,),
        (changed(tolerance={torch.float32: 1e-5}),),
        (changed(run=scaled(1.0)),),
        (changed(run=scaled(2.0)),),
        (changed(name="other"),),
    )
    assert len({pass_manager(CompileConfig(providers=given)).uuid() for given in variants}) == len(variants)
    assert make_provider().uuid() == make_provider().uuid()
