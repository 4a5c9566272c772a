"""Each private torch API that rung stands on, probed alone, so that a new torch says what it moved."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from torch import fx

from rung import torch_compat
from rung.torch_compat import FreshSymbols, capture, probes


@pytest.mark.parametrize("name", torch_compat.PROBES)
def test_api_exists(name: str) -> None:
    assert probes._exists(name)


def test_missing_api_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "PROBES", ("torch.nn.Linear", "torch._gone.Thing"))
    assert torch_compat.missing_apis() == ["torch._gone.Thing"]


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


def captured(x: torch.Tensor, factor: float = 2.0) -> torch_compat.Capture:
    stand_in = torch.zeros(41, x.shape[1])
    torch_compat.mark_unbacked(stand_in, 0, shape_id="rows")
    return torch_compat.capture_graph(scaled, (stand_in, factor), {})


def test_capture_names_its_inputs() -> None:
    assert "L['x']" in captured(torch.zeros(3, 4)).sources


def test_numbers_are_constants_whatever_was_traced_before() -> None:
    counts = [len(captured(torch.zeros(3, 4), factor).sources) for factor in (2.0, 3.0, 4.0)]
    assert counts[0] == counts[1] == counts[2]


def test_replay_runs_the_bytecode_around_a_stand_in() -> None:
    marker = torch.ones(1)
    replay = captured(torch.zeros(3, 4)).replay(lambda *_: [marker])
    assert replay(torch.zeros(3, 4), 2.0) is marker


def test_a_trace_keeps_no_weak_reference_to_a_weight() -> None:
    module = torch.nn.Linear(4, 4)
    kept = torch_compat.capture_graph(module.forward, (torch.zeros(3, 4),), {})
    assert len(kept.sources) == 3
    del kept
    gc.collect()
    assert weakref.getweakrefs(module.weight) == []


def test_function_without_tensor_ops() -> None:
    with pytest.raises(torch_compat.NoTensorOpsError):
        torch_compat.capture_graph(lambda x: 3, (torch.zeros(2),), {})


def warn_of_both() -> list[str]:
    with capture._side_effects() as found:
        warnings.warn("certain side effects happened in the model.forward. Here: [L['self'], G['x']]", UserWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)
    return found


def test_side_effects_are_collected_and_other_warnings_given_again() -> None:
    with pytest.warns(UserWarning, match="something else") as caught:
        found = warn_of_both()
    assert found == ["L['self']", "G['x']"]
    assert len(caught) == 1


def test_a_folder_called_like_us_is_user_code() -> None:
    assert torch_compat.is_user_file("/home/somebody/rung/torch/train.py")
    assert not torch_compat.is_user_file(torch.nn.__file__)
    assert not torch_compat.is_user_file(torch_compat.__file__)


def test_location_of_a_node_in_a_folder_called_like_us() -> None:
    node = fx.Graph().placeholder("x")
    node.stack_trace = (
        f'File "/home/somebody/rung/train.py", line 7, in forward\n    y = x + 1\nFile "{torch.nn.__file__}", line 1, in f\n    z'
    )
    assert torch_compat.node_location(node) == " at /home/somebody/rung/train.py:7 (y = x + 1)"


def test_fresh_symbols_are_shared_by_name() -> None:
    fresh = FreshSymbols()
    assert fresh.symbol("rows") is fresh.symbol("rows")
    assert fresh.symbol("rows") is not fresh.symbol("tokens")


def test_fresh_tensor_keeps_layout() -> None:
    like = torch.empty_strided((3, 4), (1, 3), dtype=torch.float64)
    fake = FreshSymbols().tensor(like)
    assert (tuple(fake.shape), fake.stride(), fake.dtype) == ((3, 4), (1, 3), torch.float64)


def test_artifact_round_trip_and_its_inner_callable() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.sin, (x,)),))
    fresh = FreshSymbols()
    rows = fresh.symbol("rows")
    with fresh.mode:
        fake = torch.empty(rows, 4)
    module = fx.GraphModule({}, graph)
    with torch_compat.quiet_compiler():
        fresh.propagate(module, [fake])
        blob = torch_compat.serialize_artifact(torch_compat.compile_piece(module, fresh, [fake], {}))
        artifact = torch_compat.deserialize_artifact(blob)
    call = torch_compat.raw_callable(artifact)
    assert call is not None
    assert "def call(" in torch_compat.artifact_source(artifact)
    for count in (0, 1, 5):
        value = torch.randn(count, 4)
        torch.testing.assert_close(call([value])[0], torch.sin(value))


def test_toolchain_factors_name_torch() -> None:
    assert torch_compat.toolchain_factors()["torch"] == torch.__version__


def test_device_factors_have_no_ordinal() -> None:
    assert torch_compat.device_factors(torch.device("cpu", 0)) == {"device": "cpu"}


def test_storage_identity_is_shared_by_views() -> None:
    x = torch.zeros(4, 4)
    assert torch_compat.storage_identity(x) == torch_compat.storage_identity(x[1:].t())
    assert torch_compat.storage_identity(x) != torch_compat.storage_identity(x.clone())


@pytest.mark.parametrize("rows", [1, 4, 33])
def test_scaled_mm_pads_rows_whose_scales_belong_to_groups(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(x: torch.Tensor, weight: torch.Tensor, *, scale_a: torch.Tensor, scale_b: torch.Tensor, **_: object) -> torch.Tensor:
        assert x.shape[0] % 4 == 0
        assert scale_a.shape == (x.shape[0], 2)
        assert scale_a.stride(0) == 1
        rows_of = x.float() * scale_a.repeat_interleave(128, 1)
        return rows_of @ (weight.float() * scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1))

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    x, weight = (torch.randn(shape).to(torch.float8_e4m3fn) for shape in ((rows, 256), (128, 256)))
    scale, weight_scale = torch.rand(rows, 2).t().contiguous().t(), torch.rand(1, 2)
    found = torch_compat.scaled_mm(x, scale, weight, weight_scale, None, torch.float32)
    wanted = (x.float() * scale.repeat_interleave(128, 1)) @ (weight.float() * weight_scale.repeat_interleave(128, 1)).t()
    torch.testing.assert_close(found, wanted)


def test_products_of_three_dimensional_rows_are_propagated() -> None:
    """As unmodified models have them; torch 2.11 asked for the number of elements of a symbolic tensor on a device."""
    fresh = torch_compat.FreshSymbols(hinted=True)

    class Product(torch.nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, weight)

    graph, rows = torch.fx.symbolic_trace(Product()), fresh.symbol("s0")
    with fresh.mode:
        inputs = torch.empty(1, rows, 16, device="cuda"), torch.empty(8, 16, device="cuda")
    fresh.propagate(graph, inputs)
    found = next(node.meta["example_value"] for node in graph.graph.nodes if node.op == "call_function")
    assert (found.dim(), found.shape[2]) == (3, 8)
