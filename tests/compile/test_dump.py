from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import rung
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
    assert sorted(text) == sorted(
        ["bytecode.py", "captured_graph.py", "inductor_00.py", "inductor_01.py", "piece_00.py", "piece_01.py", "plan.json", "stitched.py"]
    )
    assert "rungtest.write" in text["captured_graph.py"]
    assert "layer_norm" in text["piece_00.py"]
    assert "def call(" in text["inductor_00.py"]
    assert "call_0" in text["stitched.py"]
    assert [step["name"] for step in json.loads(text["plan.json"])["steps"]] == ["piece_00", "write_00", "piece_01"]
    pytest.importorskip("depyf")
    assert "def " in text["bytecode.py"]


def test_dump_that_fails_warns_and_the_run_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RUNG_DUMP", str(tmp_path / "file"))
    eager = Block()
    module = rung.wrap(Block(), dynamic={"x": {0: "rows"}}, split_ops=("rungtest::write",))
    module.load_state_dict(eager.state_dict())
    x = torch.randn(3, 8)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="RUNG_DUMP could not write"):
        assert_same(module(x), eager(x))
