"""What may differ because of rounding."""

from __future__ import annotations

import torch
from torch import fx

from rung.compile.rounding import ShakenRun, agree, explained, tolerance_of


def test_what_is_rounded_to_e4m3_may_differ_by_its_steps() -> None:
    want = torch.randn(64)
    assert not agree(want, want * 1.05, 0.0)
    assert agree(want, want * 1.05, 0.1)
    assert not agree(want, want * 1.2, 0.1)


def test_the_coarsest_dtype_inside_tells_the_tolerance() -> None:
    graph = fx.symbolic_trace(lambda x: (x.bfloat16() * 2).float()).graph
    for node in graph.nodes:
        node.meta["example_value"] = torch.zeros((), dtype=torch.bfloat16 if "mul" in node.name else torch.float32)
    assert tolerance_of(graph) == 2e-2
    for node in graph.nodes:
        node.meta["example_value"] = (torch.zeros(3), 1)
    assert tolerance_of(graph) == 1e-4


def test_infinities_are_compared_by_place_and_not_in_the_norm() -> None:
    want = torch.tensor([1.0, float("-inf"), float("nan")])
    assert agree(want, torch.tensor([1.0, float("-inf"), 0.0]), 1e-4)
    assert not agree(want, torch.tensor([2.0, float("-inf"), 0.0]), 1e-4)
    assert not agree(want, torch.tensor([1.0, 0.0, 0.0]), 1e-4)


def test_complex_numbers_are_rounded_too() -> None:
    want = torch.randn(8, dtype=torch.complex64)
    assert agree(want, want * (1 + 1e-6j), 1e-4)
    assert agree(want, want.conj().resolve_conj().conj(), 1e-4)
    assert not agree(want, want * 1.01, 1e-4)


def test_integers_stay_where_nothing_moves() -> None:
    want = torch.arange(32)
    off = want.clone()
    off[3] += 1
    assert not agree(want, off, 1.0)
    assert not explained(want, off, [])
    assert not explained(want + 2**60, off + 2**60, [want + 2**60])  # the same number in float64
    assert not explained(want, off, [want])
    assert explained(want, off, [off])
    off[4] += 1
    assert not explained(want, off, [torch.where(torch.arange(32) == 3, want + 9, want)])


def test_a_shaken_run_writes_into_nothing_that_it_is_given() -> None:
    def piece(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1) * 1
        rows[1:].add_(1)  # a view of what is returned
        return rows * weight.view(-1)

    x, weight = torch.randn(8), torch.nn.Parameter(torch.randn(8))
    kept = x.clone(), weight.clone()
    with torch.no_grad():
        want = piece(x, weight)
        first, second = (ShakenRun(fx.symbolic_trace(piece), seed).run(x, weight) for seed in (0, 1))
    assert torch.equal(x, kept[0])
    assert torch.equal(weight, kept[1])
    torch.testing.assert_close(first, want, rtol=1e-3, atol=1e-3)
    assert not torch.equal(first, want)
    assert not torch.equal(first, second)
