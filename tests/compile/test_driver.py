"""Cold and warm: what a second process finds, and what a damaged, stale or unwritable store costs."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rung
from rung.cache import Store
from rung.counters import Count
from rung.errors import CacheError
from tests.compile.cases import Block, Net, Stack, assert_same, run_python

ROWS = {"x": {0: "rows"}}


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def wrapped(module: torch.nn.Module | None = None, **options: Any) -> Any:
    return rung.wrap(Net() if module is None else module, dynamic=ROWS, **options)


def run_once(module: Any, eager: torch.nn.Module) -> Any:
    x = torch.randn(3, 8)
    assert_same(module(x), eager(x))
    return module.rung


@pytest.fixture
def eager() -> Net:
    return Net()


@pytest.fixture
def store(eager: Net, rung_cache_dir: Path) -> Path:
    """A store that holds the plan and the blob of `eager`."""
    run_once(wrapped(copy.deepcopy(eager)), eager)
    return rung_cache_dir


def test_warm_start_compiles_nothing(store: Path, eager: Net) -> None:
    handle = run_once(wrapped(copy.deepcopy(eager)), eager)
    counts = handle.counters.snapshot()
    assert counts[Count.PLAN_HITS] == 1
    assert counts[Count.ARTIFACT_LOADS] == 1
    assert not {Count.DYNAMO_TRACES, Count.INDUCTOR_COMPILES, Count.ARTIFACT_WRITES} & set(counts)


def test_equal_blocks_compile_once_each() -> None:
    module = Stack([Block() for _ in range(8)])
    handle = run_once(wrapped(copy.deepcopy(module), split_ops=("rungtest::write",)), module)
    report = handle.report()[0]
    assert (report["pieces"], report["unique_pieces"]) == (9, 3)
    assert handle.counters[Count.INDUCTOR_COMPILES] == 3


def test_pieces_of_another_plan_are_used_again() -> None:
    options = {"split_ops": ("rungtest::write",)}
    first, second = Stack([Block() for _ in range(4)]), Stack([Block() for _ in range(6)])
    run_once(wrapped(copy.deepcopy(first), **options), first)
    handle = run_once(wrapped(copy.deepcopy(second), **options), second)
    assert handle.counters[Count.DYNAMO_TRACES] == 1
    assert handle.counters[Count.INDUCTOR_COMPILES] == 0


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped byte": lambda path: path.write_bytes(path.read_bytes()[:-9] + bytes([path.read_bytes()[-9] ^ 1]) + path.read_bytes()[-8:]),
    "another file": lambda path: path.write_bytes(b"something else"),
    "deleted": lambda path: path.unlink(),
}


def blobs_of(store: Path) -> list[Path]:
    """Of the only piece: the artifact, Inductor's form, the text, machine code."""
    ((_, manifest),) = Store(store).manifests("pieces")
    return [store / "blobs" / digest for digest in manifest.blobs]


@pytest.mark.parametrize("what", ["artifact", "machine code"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_blob_is_built_again_with_a_warning(damage: str, what: str, store: Path, eager: Net) -> None:
    artifact, *_, machine_code = blobs_of(store)
    blob = {"artifact": artifact, "machine code": machine_code}[what]
    DAMAGES[damage](blob)
    module = wrapped(copy.deepcopy(eager))
    with pytest.warns(RuntimeWarning, match=f"blob {blob.name[:12]}"):
        run_once(module, eager)
    assert module.rung.counters[Count.INDUCTOR_COMPILES] == 1
    assert run_once(wrapped(copy.deepcopy(eager)), eager).counters[Count.DYNAMO_TRACES] == 0


def test_what_a_warm_start_does_not_read_may_be_damaged(store: Path, eager: Net) -> None:
    _, stock, text, *_ = blobs_of(store)
    stock.write_bytes(b"")
    text.unlink()
    assert run_once(wrapped(copy.deepcopy(eager)), eager).counters[Count.INDUCTOR_COMPILES] == 0


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"plan": {}}'])
def test_damaged_plan_is_built_again(text: str, store: Path, eager: Net) -> None:
    plan = next((store / "plans").iterdir())
    plan.write_text(text)
    module = wrapped(copy.deepcopy(eager))
    with pytest.warns(RuntimeWarning, match=r"a stored plan could not be used and is built again: manifest plans/\w+ is damaged"):
        handle = run_once(module, eager)
    assert handle.counters[Count.DYNAMO_TRACES] == 1
    assert run_once(wrapped(copy.deepcopy(eager)), eager).counters[Count.DYNAMO_TRACES] == 0


def test_damaged_piece_manifest_is_built_again(store: Path, eager: Net) -> None:
    shutil.rmtree(store / "plans")
    next((store / "pieces").iterdir()).write_text("{}")
    module = wrapped(copy.deepcopy(eager))
    with pytest.warns(RuntimeWarning, match=r"manifest pieces/\w+ is damaged"):
        run_once(module, eager)
    assert module.rung.counters[Count.INDUCTOR_COMPILES] == 1


def test_store_that_cannot_be_written_warns_and_the_run_is_right(monkeypatch: pytest.MonkeyPatch, eager: Net) -> None:
    def refuse(*_: object) -> None:
        raise CacheError("the artifact store at /full cannot be written: No space left on device", hint="free space")

    monkeypatch.setattr(Store, "_write", refuse)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        handle = run_once(wrapped(copy.deepcopy(eager)), eager)
    assert handle.counters[Count.ARTIFACT_WRITES] == 0


def test_seconds_of_each_phase_are_reported(eager: Net) -> None:
    report = run_once(wrapped(copy.deepcopy(eager)), eager).report()[0]
    imports = {"import Dynamo", "import Inductor"}
    loading = {"read plan", "read and verify", "load pieces", "bind"}
    assert set(report["seconds"]) == imports | {"keys", "trace", "split", "compile", "save", "compare once", *loading}
    assert report["source"] == "compiled"


# --- other processes -----------------------------------------------------------------------------------------------------------------

_MODULE = """
import torch, rung
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
    def forward(self, x):
        return helper(self.linear(x)) * {factor}
def helper(x):
    return torch.relu(x)
def main():
    torch.manual_seed(0)
    module = rung.wrap(Net(), dynamic={{"x": {{0: "rows"}}}})
    with torch.no_grad():
        y = module(torch.ones(3, 8))
    counts = module.rung.counters
    print(y.sum().item(), counts["dynamo_traces"], counts["inductor_compiles"], module.rung.report()[0]["plan_key"])
    print(module.rung.report()[0]["reason"])
"""


def run_module(folder: Path, factor: int, **env: str) -> tuple[list[str], str]:
    folder.mkdir(exist_ok=True)
    (folder / "user_module.py").write_text(_MODULE.format(factor=factor))
    lines = run_python("import user_module; user_module.main()", env={**os.environ, **env}, cwd=folder).splitlines()
    return lines[0].split(), lines[1] if len(lines) > 1 else ""


@pytest.mark.slow
def test_second_process_and_a_moved_store(tmp_path: Path, rung_cache_dir: Path) -> None:
    (value, traces, _, key), _ = run_module(tmp_path / "a", 2, PYTHONHASHSEED="1", HOME=str(tmp_path))
    assert traces == "1"
    assert not [path for path in rung_cache_dir.rglob("*") if path.is_file() and str(tmp_path).encode() in path.read_bytes()]
    moved = tmp_path / "moved"
    shutil.move(rung_cache_dir, moved)
    warm, _ = run_module(tmp_path / "b", 2, RUNG_CACHE_DIR=str(moved), PYTHONHASHSEED="2", HOME="/nowhere", RANK="3")
    assert warm == [value, "0", "0", key]


@pytest.mark.slow
def test_edited_source_is_a_miss_with_a_reason(tmp_path: Path) -> None:
    (value, *_), _ = run_module(tmp_path / "a", 2)
    (other, traces, *_), reason = run_module(tmp_path / "a", 3)
    assert traces == "1"
    assert float(other) == pytest.approx(1.5 * float(value))
    assert reason == "the source of Net.forward changed or cannot be found"
