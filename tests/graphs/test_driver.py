"""Counting nodes, on a driver that is a table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rung.graphs.backends import driver
from rung.graphs.backends.base import NodeCounts

GRAPHS = {"whole": [0, 0, 1, 2, 4, 3], "child": [0, 2], "empty": []}  # types of nodes; 4 is the child


def fake(graph: str = "whole", **answers: Any) -> SimpleNamespace:
    def nodes(handle: str, count: int = 0) -> tuple[Any, ...]:
        found = GRAPHS[handle]
        return 0, [(handle, index) for index in range(count)], len(found)

    calls = {
        "CUstream": lambda address: ("stream", address),
        "cuStreamGetCaptureInfo": lambda stream: (0, 1, 7, graph, [], 0),
        "cuGraphGetNodes": nodes,
        "cuGraphNodeGetType": lambda node: (0, GRAPHS[node[0]][node[1]]),
        "cuGraphChildGraphNodeGetGraph": lambda node: (0, "child"),
    }
    return SimpleNamespace(**{**calls, **answers})


def count(monkeypatch: pytest.MonkeyPatch, module: SimpleNamespace | None) -> NodeCounts | None:
    monkeypatch.setattr(driver, "_driver", lambda: module)
    return driver.count_captured_nodes(5)


def test_nodes_of_child_graphs_count_and_the_child_itself_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count(monkeypatch, fake()) == NodeCounts(kernels=3, copies=1, fills=2, others=1)


def test_a_graph_without_nodes_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count(monkeypatch, fake("empty")) == NodeCounts()


def test_the_query_with_edge_data_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    third = fake(cuStreamGetCaptureInfo_v3=lambda stream: (0, 1, 7, "child", [], [], 0), cuStreamGetCaptureInfo=lambda stream: (911,))
    assert count(monkeypatch, third) == NodeCounts(kernels=1, fills=1)


@pytest.mark.parametrize("call", ["cuStreamGetCaptureInfo", "cuGraphGetNodes", "cuGraphNodeGetType", "cuGraphChildGraphNodeGetGraph"])
def test_a_refusal_of_the_driver_is_no_count(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert count(monkeypatch, fake(**{call: lambda *_: (1, None, None, None, None, None)})) is None


def test_without_cuda_bindings_there_is_a_reason_and_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count(monkeypatch, None) is None
    assert "cuda-bindings is not installed" in str(driver.why_no_driver())
    driver.upload_graph(1, 2)  # nothing to do it with
