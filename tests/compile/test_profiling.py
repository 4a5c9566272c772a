"""Names in torch.profiler, and lines of log under TORCH_LOGS."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import rung
from rung import torch_compat
from rung.compile.driver import _log
from tests.compile.cases import Block


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setenv("RUNG_CACHE_DIR", str(tmp_path_factory.mktemp("store")))
        module = rung.wrap(Block().requires_grad_(False), dynamic={"x": {0: "rows"}}, split_ops=("rungtest::write",))
        module(torch.randn(3, 8))
    return module


def test_pieces_and_breaks_appear_by_name(module: torch.nn.Module) -> None:
    x = torch.randn(3, 8)
    expected = module(x)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as run:
        assert torch.equal(module(x), expected)
    names = [event.name for event in run.events() if event.name.startswith("rung ")]
    assert names == ["rung Block.forward", "rung piece piece_00", "rung break write_00", "rung piece piece_01"]


def test_without_a_profiler_no_range_is_opened(module: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.profiler, "record_function", None)
    assert not torch_compat.profiling()
    module(torch.randn(3, 8))


def test_torch_logs_takes_rung_as_a_module(capfd: pytest.CaptureFixture[str]) -> None:
    torch._logging.set_logs(modules={"rung": logging.DEBUG})
    try:
        assert _log.isEnabledFor(logging.DEBUG)
        _log.info("said by %s", "rung")
    finally:
        torch._logging.set_logs()
        logging.getLogger("rung").setLevel(logging.NOTSET)
    assert "said by rung" in capfd.readouterr().err
