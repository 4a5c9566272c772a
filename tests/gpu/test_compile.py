"""Compiled modules on a device: values, sizes, warm start."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import rung
from rung.counters import Count
from rung.passes.ir import rms_norm
from tests.compile.cases import Block, Net, Stack

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def both(module: torch.nn.Module, dtype: torch.dtype) -> tuple[Any, torch.nn.Module]:
    module = module.to("cuda", dtype)
    return rung.wrap(copy.deepcopy(module), dynamic={"x": {0: "rows"}}, split_ops=("rungtest::write",)), module


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", [(1, 2, 5, 64), (64, 1, 0, 2)])
def test_every_size_in_any_order_with_one_trace(order: tuple[int, ...], dtype: torch.dtype) -> None:
    module, eager = both(Net(), dtype)
    for rows in order:
        x = torch.randn(rows, 8, device="cuda", dtype=dtype)
        tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(module(x), eager(x), rtol=tolerance, atol=tolerance)
    assert module.rung.counters[Count.DYNAMO_TRACES] == 1


def test_blocks_around_a_split_op() -> None:
    module, eager = both(Stack([Block() for _ in range(4)]), torch.float32)
    for rows in (3, 1, 17):
        x = torch.randn(rows, 8, device="cuda")
        torch.testing.assert_close(module(x), eager(x), rtol=1e-4, atol=1e-4)
    assert module.rung.report()[0]["unique_pieces"] == 3


def test_loaded_again_without_a_trace() -> None:
    module, eager = both(Net(), torch.float32)
    x = torch.randn(3, 8, device="cuda")
    module(x)
    again = rung.wrap(copy.deepcopy(eager), dynamic={"x": {0: "rows"}}, split_ops=("rungtest::write",))
    torch.testing.assert_close(again(x), eager(x), rtol=1e-5, atol=1e-5)
    assert again.rung.counters[Count.DYNAMO_TRACES] == again.rung.counters[Count.INDUCTOR_COMPILES] == 0


@pytest.mark.parametrize("options", [{}, {"background_variants": True}, {"graphs": "full", "maximum": 64}], ids=["now", "behind", "graphs"])
def test_sizes_with_code_of_their_own(options: dict[str, Any]) -> None:
    eager = Net().to("cuda")
    module = rung.wrap(copy.deepcopy(eager), dynamic={"x": {0: "rows"}}, variants=(1, 8, (16, 64)), **options)
    for rows in (3, 1, 8, 16, 33, 64, 8):
        x = torch.randn(rows, 8, device="cuda")
        torch.testing.assert_close(module(x), eager(x), rtol=1e-5, atol=1e-5)
        assert module.rung.wait_for_variants()
    found = {one["sizes"]: one for one in module.rung.report()[0]["variants"]}
    assert {one["state"] for one in found.values()} == {"compiled"}
    assert all(one["calls"] > 0 for one in found.values())


def test_no_trace_serves_another_device() -> None:
    module, eager = both(Net(), torch.float32)
    x = torch.randn(3, 8)
    module(x.cuda())
    module.cpu()
    module.rung.release()
    torch.testing.assert_close(module(x), eager.cpu()(x), rtol=1e-5, atol=1e-5)
    assert module.rung.counters[Count.DYNAMO_TRACES] == 2


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(64) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x * 2, self.weight, 1e-5) + 1


def test_norm_is_one_kernel_with_its_neighbours() -> None:
    module, eager = both(Normed(), torch.bfloat16)
    x = torch.randn(5, 64, device="cuda", dtype=torch.bfloat16)
    torch.testing.assert_close(module(x), eager(x), rtol=2e-2, atol=2e-2)
    (source,) = next(iter(module.rung._entry.variants.values())).compiled.piece_sources
    assert source.count(".run(") == 1
    assert "torch.ops.rung.rms_norm" not in source


def test_stream_of_the_caller() -> None:
    module, eager = both(Net(), torch.float32)
    x = torch.randn(3, 8, device="cuda")
    expected = eager(x)
    module(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        actual = module(x)
    stream.synchronize()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


class Pitch(torch.nn.Module):
    """Positions that are columns of a wider buffer, a width that Inductor would pad, a value used before and behind the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(1048)
        self.table = torch.nn.Parameter(torch.randn(64, 1048))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x + self.table[positions].sum(0))  # [rows, 1048]
        out = torch.empty_like(hidden)
        torch.ops.rungtest.write(hidden * 2, out)
        return hidden + self.norm(out)


@pytest.mark.parametrize("maximum", [None, 40])
def test_strides_of_what_crosses_a_cut(maximum: int | None) -> None:
    eager = Pitch().to("cuda").eval().requires_grad_(False)
    dynamic = {"x": {0: "rows"}, "positions": {1: "rows"}}
    module = rung.wrap(copy.deepcopy(eager), dynamic=dynamic, maximum=maximum, split_ops=("rungtest::write",))
    buffer = torch.randint(0, 64, (3, 41), device="cuda")
    for rows in (40, 17, 1):
        x = torch.randn(rows, 1048, device="cuda")
        torch.testing.assert_close(module(x, buffer[:, :rows]), eager(x, buffer[:, :rows]), rtol=1e-4, atol=1e-4)
    assert module.rung.counters[Count.DYNAMO_TRACES] == 1


def test_autocast_is_left_to_eager_mode_outside_and_compiled_inside() -> None:
    """T39: the ambient autocast runs eagerly with a reason; a block inside of forward is compiled, with its dtype in the key."""
    module, eager = both(Net(), torch.float32)
    x = torch.randn(3, 8, device="cuda")
    module(x)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cuda", dtype):
            assert module(x).dtype is eager(x).dtype
            torch.testing.assert_close(module(x), eager(x))
    assert module.rung.counters["eager.autocast"] == 4
    assert module(x).dtype is torch.float32

    def gram(x: torch.Tensor, half: bool) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16 if half else torch.bfloat16):
            return x @ x.t()

    for _ in range(2):
        wrapped = rung.wrap(gram, dynamic={})
        for half in (True, False):
            assert wrapped(x, half).dtype is gram(x, half).dtype
            torch.testing.assert_close(wrapped(x, half), gram(x, half), rtol=2e-2, atol=2e-2)


MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


class Lazy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(4.0, device=x.device)
        return x * self.table


@pytest.mark.parametrize("serve", MODES)
@pytest.mark.parametrize("warm", MODES)
def test_state_of_the_first_call_in_every_mode(warm: str, serve: str) -> None:
    """T41, with graphs: their static buffers are ordinary tensors in whichever mode they were made."""
    module = rung.wrap(Lazy().cuda(), dynamic={"x": {0: "rows"}}, graphs="full")
    for mode in (warm, serve):
        with MODES[mode]():
            for rows in (3, 2, 3):
                x = torch.full((rows, 4), float(rows), device="cuda")
                torch.testing.assert_close(module(x), x * torch.arange(4.0, device="cuda"))
    assert not module.table.is_inference()
    assert module.rung.counters[Count.DYNAMO_TRACES] == 1
