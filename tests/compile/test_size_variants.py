"""Code of their own for sizes and ranges: which runs, what the store keeps, and what a thread does meanwhile."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rung
from rung.cache import open_store
from rung.cache.inspect import verify_store
from rung.compile.piece_compiler import PieceCompiler
from rung.compile.sizes import SizeRange, SizeTable
from rung.counters import Count
from rung.errors import CacheMissError, CompileError, ConfigError
from tests.compile.cases import Block, Net, Stack, assert_same

ROWS = {"x": {0: "rows"}}
ENDS = textwrap.dedent(  # the script is done before the first variant is compiled
    """
    import threading, time, torch, rung
    from rung.compile.piece_compiler import PieceCompiler
    from tests.compile.cases import Net

    compile_piece = PieceCompiler._compile

    def late(self, *arguments, **named):
        while threading.current_thread() is not threading.main_thread() and threading.main_thread().is_alive():
            time.sleep(0.01)
        return compile_piece(self, *arguments, **named)

    PieceCompiler._compile = late
    module = Net()
    rung.wrap(module, dynamic={"x": {0: "rows"}}, variants=(1, 2, (4, 9)), background_variants=True)
    with torch.no_grad():
        module(torch.randn(3, 8))
    """
)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def eager() -> Net:
    return Net()


def wrapped(module: torch.nn.Module, **options: Any) -> Any:
    return rung.wrap(copy.deepcopy(module), dynamic=ROWS, **options)


def calls(module: Any) -> dict[str, int]:
    return {one["sizes"]: one["calls"] for one in module.rung.report()[0]["variants"]}


def states(module: Any) -> dict[str, str]:
    return {one["sizes"]: one["state"] for one in module.rung.report()[0]["variants"]}


def test_the_narrowest_range_is_found() -> None:
    ranges = [SizeRange(4, 64), SizeRange(8, 8), SizeRange(16, 32), SizeRange(1, 1)]
    table = SizeTable(ranges)
    for size in range(1, 100):
        fitting = [one for one in ranges if one.low <= size <= one.high]
        assert table.find(size) == min(fitting, key=lambda one: one.high - one.low, default=None), size


def test_each_size_runs_its_own_code(eager: Net) -> None:
    module = wrapped(eager, variants=(1, 4, (8, 16)))
    for rows in (1, 2, 4, 8, 11, 16, 17, 4):
        x = torch.randn(rows, 8)
        assert_same(module(x), eager(x))
    assert calls(module) == {"1": 1, "4": 2, "8-16": 3}
    assert states(module) == dict.fromkeys(("1", "4", "8-16"), "compiled")
    assert "sizes 8-16: compiled, 3 calls" in module.rung.explain()
    counts = module.rung.counters
    assert (counts[Count.SIZE_VARIANTS], counts[Count.DYNAMO_TRACES], counts[Count.INDUCTOR_COMPILES]) == (3, 1, 4)


def test_code_for_a_size_has_no_size_in_its_arguments(eager: Net) -> None:
    module = wrapped(eager, variants=(4,))
    module(torch.randn(2, 8))
    compiled = next(iter(module.rung._entry.variants.values())).compiled
    (general,) = compiled.piece_sources
    (fixed,) = compiled._by_size.functions[SizeRange(4, 4)].piece_sources
    assert "(4, 8)" in fixed
    assert "(4, 8)" not in general


def test_a_second_process_loads_them(eager: Net) -> None:
    wrapped(eager, variants=(4, (8, 16)))(torch.randn(4, 8))
    module = wrapped(eager, variants=(4, (8, 16)))
    x = torch.randn(4, 8)
    assert_same(module(x), eager(x))
    assert states(module) == {"4": "loaded", "8-16": "loaded"}
    assert calls(module) == {"4": 1, "8-16": 0}
    assert not {Count.DYNAMO_TRACES, Count.INDUCTOR_COMPILES, Count.SIZE_VARIANTS} & set(module.rung.counters.snapshot())


def test_what_a_stored_plan_lacks_is_traced_again(eager: Net) -> None:
    wrapped(eager)(torch.randn(4, 8))
    module = wrapped(eager, variants=(4,))
    x = torch.randn(4, 8)
    assert_same(module(x), eager(x))
    assert (states(module), calls(module)) == ({"4": "compiled"}, {"4": 1})
    counts = module.rung.counters
    assert (counts[Count.PLAN_HITS], counts[Count.DYNAMO_TRACES], counts[Count.INDUCTOR_COMPILES]) == (1, 1, 1)


def test_a_required_hit_asks_for_variants_too(eager: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped(eager)(torch.randn(4, 8))
    monkeypatch.setenv("RUNG_REQUIRE_HIT", "1")
    with pytest.raises(CacheMissError, match="code for sizes 4 of"):
        wrapped(eager, variants=(4,))(torch.randn(4, 8))


def test_replaced_weights_reach_variants(eager: Net) -> None:
    module = wrapped(eager, variants=(4,))
    x = torch.randn(4, 8)
    module(x)
    other = Net()
    module.load_state_dict(other.state_dict(), assign=True)
    assert_same(module(x), other(x))
    assert calls(module)["4"] >= 2


def test_pieces_between_breaks_have_variants() -> None:
    eager = Stack([Block() for _ in range(3)])
    module = wrapped(eager, variants=(3,), split_ops=("rungtest::write",))
    for rows in (3, 5):
        x = torch.randn(rows, 8)
        assert_same(module(x), eager(x))
    assert calls(module) == {"3": 1}


def test_graphs_capture_the_variant_of_a_size(eager: Net) -> None:
    module = wrapped(eager, variants=(4,), graphs="full", maximum=8)
    for _ in range(3):
        x = torch.randn(4, 8)
        assert_same(module(x), eager(x))
    assert calls(module)["4"] >= 1
    assert module.rung.counters[Count.REPLAYS] >= 1


# --- in the background ---------------------------------------------------------------------------------------------------------------


def test_the_general_code_serves_until_a_variant_is_there(eager: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    go, compile_piece = threading.Event(), PieceCompiler._compile

    def held(self: PieceCompiler, *arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert go.wait(60)
        return compile_piece(self, *arguments)

    monkeypatch.setattr(PieceCompiler, "_compile", held)
    module = wrapped(eager, variants=(4, 6), background_variants=True)
    x = torch.randn(4, 8)
    assert_same(module(x), eager(x))
    assert not module.rung.wait_for_variants(0.0)
    assert_same(module(x), eager(x))
    assert calls(module) == {"4": 0, "6": 0}
    go.set()
    assert module.rung.wait_for_variants(120.0)
    assert_same(module(x), eager(x))
    assert (states(module), calls(module)) == ({"4": "compiled", "6": "compiled"}, {"4": 1, "6": 0})
    assert module.rung.counters[Count.SIZE_VARIANTS] == 2


def test_a_process_that_ends_waits_for_the_variant_at_hand() -> None:
    process = subprocess.run([sys.executable, "-c", ENDS], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    said = [
        line for line in process.stderr.splitlines() if not re.match(r"[IW]\d{4} .* torch/", line)
    ]  # its logs, as of a GPU that is not there
    assert (process.returncode, process.stdout, said) == (0, "", [])
    store = open_store()
    assert all(problem is None for problem in verify_store(store))
    assert len(list(store.manifests("pieces"))) == 2  # for all sizes, and for the size 1; the others were not begun


def test_a_variant_that_fails_is_counted_and_its_error_kept(eager: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_piece = PieceCompiler._compile

    def failing(self: PieceCompiler, piece: Any, traced: Any, passes: Any, index: int, sizes: Any = None) -> Any:
        if sizes == SizeRange(4, 4):
            raise CompileError("no code for 4", hint="none")
        return compile_piece(self, piece, traced, passes, index, sizes)

    monkeypatch.setattr(PieceCompiler, "_compile", failing)
    module = wrapped(eager, variants=(4, 6), background_variants=True)
    x = torch.randn(4, 8)
    assert_same(module(x), eager(x))
    with pytest.raises(CompileError, match="no code for 4"):
        module.rung.wait_for_variants()
    assert states(module) == {"4": "failed", "6": "compiled"}
    assert module.rung.report()[0]["variants"][0]["error"].startswith("no code for 4")
    assert module.rung.counters[Count.VARIANT_FAILURES] == 1
    assert_same(module(x), eager(x))
    with pytest.raises(CompileError, match="no code for 4"):
        wrapped(eager, variants=(4,))(x)  # in the foreground it is the call's


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"variants": (0,)}, "sizes are at least 1"),
        ({"variants": ((8, 4),)}, "ranges are"),
        ({"variants": (9,), "maximum": 8}, "at most 8"),
        ({"background_variants": True}, "no effect without variants"),
        ({"variants": (4,), "background_variants": True, "graphs": "full"}, "graphs keep the code"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        rung.config.CompileConfig(**options)


class Two(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum(0) + y.sum(0)


def test_two_dimensions_are_refused() -> None:
    module = rung.wrap(Two(), dynamic={"x": {0: "a"}, "y": {0: "b"}}, variants=(4,))
    with pytest.raises(ConfigError, match="has 2: a, b"):
        module(torch.randn(4, 8), torch.randn(3, 8))
