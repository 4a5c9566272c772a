from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result

from rung.counters import Count, counters
from tests.cli.conftest import refused

TARGET = ("examples.wrap_mlp:build", "--inputs", "examples.wrap_mlp:inputs")


def test_what_was_precompiled_is_required_and_found(rung: Callable[..., Result], model_folder: Path, tmp_path: Path) -> None:
    store = str(tmp_path / "out")
    missed = rung("generate", model_folder, "a", "--require-hit", "--device", "cpu", "--mode", "compiled")
    assert missed.exit_code == 3
    assert "would have to be compiled: the store has no plans" in missed.stderr
    built = json.loads(rung("precompile", model_folder, "--out", store, "--dtype", "float32", "--json").stdout)
    (result,) = built["results"]
    assert (built["store"], result["cache"], result["hit_pieces"]) == (store, "miss", 0)
    again = json.loads(rung("precompile", model_folder, "--out", store, "--dtype", "float32", "--json").stdout)["results"][0]
    assert (again["cache"], again["plan_key"]) == ("hit", result["plan_key"])
    with pytest.MonkeyPatch.context() as patch, counters.expect(**{Count.INDUCTOR_COMPILES: 0, Count.DYNAMO_TRACES: 0}):
        patch.setenv("RUNG_CACHE_DIR", store)
        words = ("generate", model_folder, "a", "--require-hit", "--device", "cpu", "--mode", "compiled", "--max-tokens", 2, "--json")
        done = rung(*words)
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["store"].startswith("loaded, ")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("examples.wrap_mlp:build",), "examples.wrap_mlp:build needs --inputs"),
        (("no.such:build",), "TARGET: 'no.such' cannot be imported"),
        (("examples.wrap_mlp:none",), "TARGET: 'examples.wrap_mlp' has no 'none'"),
        (("tiny", "--inputs", "a:b"), "--inputs goes with a module:attr target, and 'tiny' is a model"),
    ],
)
def test_wrong_targets_are_refused(words: tuple[str, ...], why: str, rung: Callable[..., Result]) -> None:
    assert why in refused(rung("precompile", *words))


def test_a_store_that_is_off_is_refused(rung: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNG_CACHE_MODE", "off")
    for words in (TARGET, (*TARGET, "--out", "store")):
        error = refused(rung("precompile", *words))
        assert "nothing can be kept" in error
        assert "hint: leave RUNG_CACHE_MODE unset\n" in error


@pytest.mark.parametrize("ranges", ["2:8", "x", "0"])
def test_wrong_ranges_are_refused(ranges: str, rung: Callable[..., Result]) -> None:
    assert rung("precompile", "tiny", "--ranges", ranges).exit_code == 2


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch can compile for GPUs")
def test_a_gpu_target_needs_the_cuda_build(rung: Callable[..., Result]) -> None:
    assert "is built without CUDA" in refused(rung("precompile", "tiny", "--target", "h200"))


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is None, reason="needs torch's CUDA build")
@pytest.mark.parametrize("gpu", ["h200", "a100"])
def test_a_gpu_target_is_built_and_loaded_without_the_gpu(rung: Callable[..., Result], tmp_path: Path, gpu: str) -> None:
    words = ("precompile", "tiny", "--target", gpu, "--requests", "4", "--jobs", "2", "--out", tmp_path / "store", "--json")
    first = json.loads(rung(*words).stdout)["results"][0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNG_REQUIRE_HIT", "1")
        second = json.loads(rung(*words).stdout)["results"][0]
    assert (first["cache"], second["cache"]) == ("miss", "hit")
    assert first["unique_pieces"] == second["hit_pieces"] == 3
    assert (first["hit_kernels"], second["hit_kernels"]) == (0, first["kernels"])
    assert first["kernels"] > 40


def test_a_file_that_holds_no_choices_is_refused(rung: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "tuning.json").write_text("{}")
    assert "is no tuning file of format 1" in refused(rung("precompile", *TARGET, "--tuning", tmp_path / "tuning.json"))
