"""A warm process on a GPU: no compiler is imported, the numbers are the same bit by bit, machine code is loaded before the first call."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import rung
from rung.cache import Store, open_store
from rung.compile.artifact import Artifact, PieceLoader
from rung.counters import Count
from rung.launch import FirstConfig
from tests.compile.test_warm_start import elsewhere, start
from tests.compile.warm_child import Net

pytestmark = pytest.mark.gpu


def test_a_warm_process_imports_no_compiler(tmp_path: Path) -> None:
    cold = start("cuda")
    assert "torch._inductor" in cold["imported"]  # the check below can fail
    warm = start("cuda", **elsewhere(tmp_path))
    assert warm["imported"] == []
    assert warm["outputs"] == cold["outputs"]  # bit by bit
    assert warm["error"] < 1e-4
    assert warm["counters"][Count.PROGRAM_LOADS] == warm["counters"][Count.ARTIFACT_LOADS] == 1
    assert not {Count.INDUCTOR_COMPILES, Count.DYNAMO_TRACES, Count.PLAN_MISSES, Count.KERNEL_TUNINGS} & warm["counters"].keys()


def test_a_warm_engine_imports_no_compiler(tmp_path: Path) -> None:
    cold = start("cuda", "engine")
    warm = start("cuda", "engine", **elsewhere(tmp_path))
    assert (warm["imported"], warm["outputs"]) == ([], cold["outputs"])
    assert warm["counters"][Count.PROGRAM_LOADS] == warm["counters"][Count.ARTIFACT_LOADS] == 3
    assert Count.KERNEL_TUNINGS not in warm["counters"]


def artifacts(store: Store) -> list[Artifact]:
    return [Artifact.from_bytes(store.get_blob(manifest.blobs[0])) for _, manifest in store.manifests("pieces")]


@torch.no_grad()
def wrapped(module: torch.nn.Module, *arguments: torch.Tensor) -> Any:
    handle: Any = rung.wrap(copy.deepcopy(module), dynamic={"x": {0: "rows"}})
    handle(*arguments)
    return handle


def test_both_loaders_agree_bit_by_bit() -> None:
    module = Net().cuda().bfloat16()
    x = torch.randn(33, 64, device="cuda", dtype=torch.bfloat16)
    wrapped(module, x)
    store = open_store()
    (artifact,) = artifacts(store)
    assert artifact.program is not None, (artifact.reason, artifact.detail)
    entry: Any = wrapped(module, x)
    compiled = next(iter(entry.rung._entry.variants.values())).compiled
    seen: list[Any] = []

    def record(step: Any, arguments: list[Any]) -> Any:
        seen.append((list(arguments), step.call(arguments)))
        return seen[-1][1]

    with torch.no_grad():
        compiled.run_steps([x], record)
    stock_only = Artifact(stock=artifact.stock, text=artifact.text)
    for given, expected in seen:
        call, _ = PieceLoader(x.device, store.get_blob).bind(stock_only, FirstConfig())
        assert all(torch.equal(got, want) for got, want in zip(call(list(given)), expected, strict=True))


def test_a_captured_piece_replays_what_it_computed() -> None:
    module = Net().cuda()
    x = torch.randn(8, 64, device="cuda")
    entry: Any = wrapped(module, x)
    entry(x)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = entry(x)
    x.copy_(torch.randn(8, 64))
    graph.replay()
    with torch.no_grad():
        torch.testing.assert_close(out, entry(x), rtol=0, atol=0)
    assert entry.rung.counters[Count.PROGRAM_LOADS] == entry.rung.counters[Count.ARTIFACT_LOADS] > 0


def test_another_device_runs_the_same_artifact() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    module = Net()
    x = torch.randn(5, 64)
    first = wrapped(module.cuda(0), x.cuda(0))
    with rung.counters.expect(**{Count.INDUCTOR_COMPILES: 0}):
        second = wrapped(module.cuda(1), x.cuda(1))
    with torch.no_grad():
        assert torch.equal(first(x.cuda(0)).cpu(), second(x.cuda(1)).cpu())


def test_inputs_at_odd_addresses_are_right() -> None:
    module = Net().cuda()
    entry = wrapped(module, torch.randn(5, 64, device="cuda"))
    assert entry.rung.counters[Count.PROGRAM_LOADS] == 1
    x = torch.randn(5 * 64 + 1, device="cuda")[1:].view(5, 64)
    assert x.data_ptr() % 16
    with torch.no_grad():
        torch.testing.assert_close(entry(x), module(x), rtol=1e-4, atol=1e-4)


# torch's own product says so in a thread without a context, and gives it one
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning")
def test_a_thread_that_never_touched_the_device_may_call() -> None:
    module = Net().cuda()
    x = torch.randn(5, 64, device="cuda")
    entry = wrapped(module, x)
    found: list[torch.Tensor] = []

    def call() -> None:
        with torch.no_grad():
            found.append(entry(x))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    with torch.no_grad():
        assert torch.equal(found[0], entry(x))
