from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result

from rung import torch_compat


def test_names_versions_devices_and_the_store(rung: Callable[..., Result], rung_cache_dir: Path) -> None:
    found = json.loads(rung("doctor", "--json").stdout)
    assert found["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found["missing_torch_apis"] == []
    assert found["devices"][0].startswith("cpu: ")
    assert found["store"] == {"path": str(rung_cache_dir), "usable": True, "files": 0, "bytes": 0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what a machine without a GPU lacks")
def test_says_why_a_backend_is_not_available(rung: Callable[..., Result]) -> None:
    found = json.loads(rung("doctor", "--json").stdout)
    assert found["attention_backends"]["torch_reference"] == "available"
    missing = "CUDA" if found["versions"]["triton"] else "Triton is not installed"  # torch for CPUs alone comes without Triton
    assert missing in found["attention_backends"]["triton_paged"]
    assert (found["graph_backends"]["recorded"], "CUDA" in found["graph_backends"]["cuda"]) == ("available", True)


def test_missing_private_api_is_named_and_fails(rung: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_compat, "missing_apis", lambda: ["torch._gone"])
    result = rung("doctor")
    assert result.exit_code == 1
    assert "MISSING: torch._gone" in result.stdout


def test_says_how_kernels_are_launched(rung: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rung.launch.launch_road", lambda: "triton: for a reason")
    assert json.loads(rung("doctor", "--json").stdout)["kernel_launches"] == "triton: for a reason"
    assert "triton: for a reason" in rung("doctor").stdout


@pytest.mark.parametrize(("reason", "said"), [(None, "compiled by NVRTC"), ("it is not here: a test", "it is not here: a test")])
def test_says_whether_kernels_in_cuda_cpp_can_be_compiled(
    rung: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, reason: str | None, said: str
) -> None:
    monkeypatch.setattr("rung.launch.why_no_nvrtc", lambda: reason)
    assert json.loads(rung("doctor", "--json").stdout)["cuda_cpp"] == said
    assert said in rung("doctor").stdout
