"""What torch does not say about CUDA graphs, asked of the driver through cuda-bindings, which is optional."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from rung.graphs.backends.base import NodeCounts

_CHILD = 4  # of CUgraphNodeType, where 0, 1 and 2 are kernels, copies and fills


@cache
def _driver() -> Any | None:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return None


def why_no_driver() -> str | None:
    """Why graphs cannot be inspected here, None when they can."""
    return None if _driver() is not None else "cuda-bindings is not installed, so nodes are not counted"


def count_captured_nodes(stream: int) -> NodeCounts | None:
    """Nodes of the graph that `stream` is capturing into right now. None when nobody can tell; never raises."""
    driver = _driver()
    if driver is None:
        return None
    # Version 3 of CUDA 12 and the only one of CUDA 13 also return edge data, without which programmatic edges make the query fail.
    query = getattr(driver, "cuStreamGetCaptureInfo_v3", driver.cuStreamGetCaptureInfo)
    found = _checked(query(driver.CUstream(stream)))
    return None if found is None else _count(driver, found[2])  # (status, id, graph, ...) in every version


def upload_graph(executable: int, stream: int) -> None:
    """Upload an executable graph. Without cuda-bindings that happens at its first replay."""
    driver = _driver()
    if driver is not None:
        driver.cuGraphUpload(driver.CUgraphExec(executable), driver.CUstream(stream))


def _count(driver: Any, graph: Any) -> NodeCounts | None:
    size = _checked(driver.cuGraphGetNodes(graph))
    if size is None:
        return None
    found = _checked(driver.cuGraphGetNodes(graph, size[-1])) if size[-1] else ((),)
    if found is None:
        return None
    counts = [0, 0, 0, 0]
    inside = NodeCounts()
    for node in found[0]:
        kind = _checked(driver.cuGraphNodeGetType(node))
        if kind is None:
            return None
        number = int(kind[0])
        if number == _CHILD:
            child = _checked(driver.cuGraphChildGraphNodeGetGraph(node))
            below = None if child is None else _count(driver, child[0])
            if below is None:
                return None
            inside += below
        else:
            counts[min(number, 3)] += 1
    return NodeCounts(*counts) + inside


def _checked(answer: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The values behind the status, None when it is not success."""
    return answer[1:] if int(answer[0]) == 0 else None
