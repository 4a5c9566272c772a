from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import rung
from rung.compile.dump import Dump
from rung.compile.generated import Source
from tests.compile.cases import Block, assert_same


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # depyf 0.20 leaves its version file open
def test_dump_has_a_file_for_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNG_DUMP", str(tmp_path / "dump"))
    module = rung.wrap(Block(), dynamic={"x": {0: "rows"}}, split_ops=("rungtest::write",))
    with torch.no_grad():
        module(torch.randn(3, 8))
    (folder,) = (tmp_path / "dump").iterdir()
    text = {path.name: path.read_text() for path in folder.iterdir()}
    assert folder.name.startswith("Block.forward-")
    stages = ["bytecode.py", "captured_graph.py", "entry.py", "guards.py", "guards.txt", "plan.json", "stitched.py"]
    pieces = [name for piece in ("00", "01") for name in (f"inductor_{piece}.py", f"piece_{piece}.py", f"piece_{piece}.pass_00_before.txt")]
    assert {*stages, *pieces} <= set(text)
    assert ".is_contiguous()" in text["entry.py"]
    assert "linear" in text["guards.txt"]
    assert "rungtest.write" in text["captured_graph.py"]
    assert "layer_norm" in text["piece_00.py"]
    assert "def call(" in text["inductor_00.py"]
    assert "call_0" in text["stitched.py"]
    assert [step["name"] for step in json.loads(text["plan.json"])["steps"]] == ["piece_00", "write_00", "piece_01"]
    pytest.importorskip("depyf")
    assert "def " in text["bytecode.py"] or "RETURN_VALUE" in text["bytecode.py"]


def test_every_trace_has_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNG_DUMP", str(tmp_path))
    first = Dump.of("package:Net.forward", "0123456789")
    first.entry(Source("entry", ""), Source("guards", ""))
    assert first.folder == tmp_path / "Net.forward-01234567"
    assert Dump.of("package:Net.forward", "0123456789").folder == tmp_path / "Net.forward-01234567.2"


def test_a_pass_that_changed_a_piece_has_a_file(tmp_path: Path) -> None:
    observe = Dump(tmp_path).graph_passes(3)
    graph = torch.fx.Graph()
    value = graph.placeholder("x")
    assert observe is not None
    observe(0, "before", graph)
    graph.output(value)
    observe(1, "norms", graph)
    observe(2, "cleanup", graph)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["piece_03.pass_00_before.txt", "piece_03.pass_01_norms.txt"]


def forbidden(self: Path) -> bool:
    if self.parent.name == "dump":
        raise PermissionError("not allowed")
    return os.path.exists(self)


def raising(*_: object) -> None:
    raise RuntimeError("the disk is full")


@pytest.mark.parametrize("how", ["unwritable", "forbidden", "raising"])
def test_dump_that_fails_warns_and_the_run_is_right(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RUNG_DUMP", str(tmp_path / "file" if how == "unwritable" else tmp_path / "dump"))
    if how == "raising":
        monkeypatch.setattr(Dump, "_text", staticmethod(raising))
    if how == "forbidden":
        monkeypatch.setattr(Path, "exists", forbidden)
    eager = Block()
    module = rung.wrap(Block(), dynamic={"x": {0: "rows"}}, split_ops=("rungtest::write",))
    module.load_state_dict(eager.state_dict())
    x = torch.randn(3, 8)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="RUNG_DUMP could not write"):
        assert_same(module(x), eager(x))
