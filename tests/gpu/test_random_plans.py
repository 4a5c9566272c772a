"""Random plans through the Triton operations: slots, block tables and inputs equal both oracles bit for bit."""

from __future__ import annotations

import pytest

from tests.runner.test_random_plans import follow

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("decode_in_graph", [False, True])
@pytest.mark.parametrize("seed", range(100, 110))
def test_persistent_batch_equals_its_oracles_on_the_device(seed: int, decode_in_graph: bool) -> None:
    seen = follow(seed, decode_in_graph=decode_in_graph, device="cuda")
    assert (seen["replayed"] > 20, seen["sampled in the graph"] > 5) == (decode_in_graph, decode_in_graph)


@pytest.mark.parametrize("decode_in_graph", [False, True])
@pytest.mark.parametrize("seed", range(110, 115))
def test_decodes_without_a_decode_graph_equal_the_oracles_on_the_device(seed: int, decode_in_graph: bool) -> None:
    seen = follow(seed, decode_in_graph=decode_in_graph, piecewise_decodes=True, device="cuda")
    assert (seen["sampled by its operations"] > 5) == decode_in_graph
