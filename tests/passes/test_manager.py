from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import rung
from rung.passes import PassManager, lowering
from rung.passes.ir import RMS_NORM, rms_norm
from tests.compile.cases import assert_same


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(rms_norm(x + 1, self.weight, 1e-5)) + rms_norm(x, self.weight, 0.5)


class CountNodes:
    """A pass that changes nothing."""

    name = "count_nodes"

    def __init__(self, version: str = "1") -> None:
        self.version = version

    def uuid(self) -> str:
        return self.version

    def run(self, graph: fx.Graph) -> dict[str, int]:
        return {"nodes": len(graph.nodes)}


def reference(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, epsilon)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_op_equals_torch(rows: int) -> None:
    x, weight = torch.randn(rows, 8), torch.rand(8)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), reference(x, weight, 1e-5))


def test_op_keeps_the_dtype_of_its_argument() -> None:
    x = torch.randn(3, 8).bfloat16()
    assert rms_norm(x, torch.ones(8).bfloat16(), 1e-5).dtype == torch.bfloat16


def test_op_stays_whole_in_the_trace_and_is_lowered_in_the_piece() -> None:
    eager = Normed()
    module = rung.wrap(Normed(), dynamic={"x": {0: "rows"}})
    module.load_state_dict(eager.state_dict())
    x = torch.randn(3, 8)
    with torch.no_grad():
        assert_same(module(x), eager(x))
    (report,) = module.rung.report()[0]["passes"]  # also where Inductor has the piece in a cache of its own, and calls no pass
    assert (report["residual_add"], report["lowering"]) == ({"mm + residual": 0}, {"rms_norm": 2})
    (source,) = next(iter(module.rung._entry.variants.values())).compiled.piece_sources
    assert "torch.ops.rung.rms_norm" not in source
    assert "rsqrt" in source or "sqrt" in source


def test_report_is_kept_with_the_artifact() -> None:
    for _ in range(2):
        torch.manual_seed(0)
        module = rung.wrap(Normed(), dynamic={"x": {0: "rows"}})
        with torch.no_grad():
            module(torch.randn(3, 8))
        passes = module.rung.report()[0]["passes"]
        module.rung.release()
        with torch.no_grad():
            module(torch.randn(3, 8))
        assert module.rung.report()[0]["source"] == "loaded"
        assert module.rung.report()[0]["passes"] == passes != []


def test_uuid_is_stable() -> None:
    assert PassManager().uuid() == PassManager().uuid()


@pytest.mark.parametrize("other", [PassManager([CountNodes()]).uuid(), PassManager((), [CountNodes()]).uuid(), PassManager().uuid("tag")])
def test_uuid_covers_passes_and_tag(other: str) -> None:
    assert PassManager().uuid() != other


def test_uuid_covers_the_version_of_a_pass() -> None:
    assert PassManager([CountNodes("1")]).uuid() != PassManager([CountNodes("2")]).uuid()


@pytest.mark.parametrize("changed", ["lowering", "rms_norm"])
def test_uuid_covers_the_source(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import inspect

    before = PassManager().uuid()
    original = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda item: original(item) + ("#" if changed in getattr(item, "__name__", "") else ""))
    assert PassManager().uuid() != before


def test_passes_run_in_order_and_report() -> None:
    manager = PassManager([CountNodes()])
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    manager.run(graph)
    assert manager.report == {"count_nodes": {"nodes": 2}, "lowering": {}}


def test_lowering_gives_the_body_of_the_op() -> None:
    from torch._subclasses import FakeTensorMode

    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    node = graph.call_function(RMS_NORM.overload, (x, weight, 0.25))
    graph.output(node)
    with FakeTensorMode():
        x.meta["val"], weight.meta["val"] = torch.empty(3, 8), torch.empty(8)
    assert lowering.lower(graph) == {"rms_norm": 1}
    values = torch.randn(3, 8), torch.rand(8)
    torch.testing.assert_close(fx.GraphModule({}, graph)(*values), reference(*values, 0.25))
