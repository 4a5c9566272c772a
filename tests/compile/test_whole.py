"""Passes over the whole graph, on unmodified decoder layers of transformers whose attention is ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from rung.attention import SPLIT_OPS, AttentionBackend, attention_layers
from rung.attention.backends.flash_attn import FlashAttention3
from rung.attention.backends.torch_reference import TorchReference
from rung.compile.build import build_steps
from rung.compile.trace import TracedGraph, trace
from rung.compile.whole import AttentionQuant, RopeKVWrite, WholeReport, run_whole
from rung.config import CompileConfig
from rung.context import set_forward_context
from rung.errors import PatternError
from rung.models import quantize_fp8, random_model
from rung.models.hf import FlatModel
from rung.passes.ir import fp8_quant_static
from rung.passes.ir.fp8 import E4M3
from tests.compile.cases import bound
from tests.models.harness import bind_dense, context
from tests.models.test_hf import SMALL

LENGTH = 11
DIMS = {"input_ids": {0: "tokens"}, "positions": {0: "tokens"}}


def flat(architecture: str, scheme: str = "", static: bool = True, **changed: Any) -> FlatModel:
    """An unmodified model of transformers with one decoder layer; `scheme` makes its linear layers e4m3."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(**{**SMALL, "num_hidden_layers": 1, **changed})
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    if scheme:
        linears = [name for name, module in theirs.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
        quantize_fp8(theirs, scheme, input_scales=dict.fromkeys(linears, 0.02) if static else None)  # type: ignore[arg-type]
    model = FlatModel(theirs)
    bind_dense(model, LENGTH)
    return model


def choose(model: nn.Module, backend: type[AttentionBackend]) -> None:
    for layer in attention_layers(model).values():
        layer.choose(backend, torch.device("cpu"))


def traced(model: FlatModel) -> TracedGraph:
    ids = torch.zeros(4, dtype=torch.int64)
    return trace(model.forward, bound(model.forward, (ids, torch.arange(4))), DIMS)


def rewrite(model: FlatModel, **options: Any) -> tuple[WholeReport, Callable[..., Any]]:
    """What the passes report, and the graph behind them as a function of token ids and positions."""
    found = traced(model)
    report = run_whole(found.graph_module.graph, attention_layers(model), CompileConfig(**options))
    found.graph_module.recompile()
    weights: Mapping[str, Any] = {"self": model}
    values = [path.resolve(weights) if path.local == "self" else None for path in found.inputs]

    def call(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        given = {"input_ids": ids, "positions": positions}
        inputs = [
            value if value is not None else given[path.local].shape[path.dim] if path.dim is not None else given[path.local]
            for path, value in zip(found.inputs, values, strict=True)
        ]
        result: torch.Tensor = found.graph_module(*inputs)[0]
        return result

    return report, call


def outputs(model: FlatModel, run: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Hidden states of one request, in two steps."""
    ids = torch.randint(3, 64, (LENGTH,), generator=torch.Generator().manual_seed(1))
    found = []
    for start, count in ((0, 7), (7, 4)):
        with torch.no_grad(), set_forward_context(context(model, start, count)):
            found.append(run(ids[start : start + count], torch.arange(start, start + count)).view(count, -1))
    return torch.cat(found)


# --- rotation and write ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("architecture", "norms"), [("Llama", False), ("Qwen3", True), ("Qwen2", False)], ids=["Llama", "Qwen3", "Qwen2"])
def test_rotation_and_write_are_one_in_a_layer(architecture: str, norms: bool) -> None:
    model = flat(architecture, **({"head_dim": 16} if norms else {}))
    wanted = outputs(model, model)
    report, call = rewrite(model, expect={})
    assert report.passes == {"rope_kv_write": {"rope_kv_write": 1}, "attention_quant": {"attention_quant": 0}}
    torch.testing.assert_close(outputs(model, call), wanted)
    found = traced(model)
    run_whole(found.graph_module.graph, attention_layers(model), CompileConfig())
    steps = build_steps(found, SPLIT_OPS).steps
    assert [call.target for step in steps for call in step.calls] == ["rung::rotate_and_write", "rung::attention"]
    (write,) = (call for step in steps for call in step.calls if "write" in call.target)
    assert (write.args[7] != {"constant": None}) is norms  # the norm over each head went with it


def test_what_is_written_so_is_reported_as_fused() -> None:
    model = random_model("tiny")
    bind_dense(model, LENGTH)
    found = traced(model)  # type: ignore[arg-type]
    report = run_whole(found.graph_module.graph, attention_layers(model), CompileConfig())
    assert report.passes["rope_kv_write"] == {"rope_kv_write": 0, "already fused": 3}


def test_a_rotation_of_another_form_is_a_near_miss() -> None:
    report, _ = rewrite(flat("Phi", num_key_value_heads=4, partial_rotary_factor=0.5))
    assert report.passes["rope_kv_write"] == {"rope_kv_write": 0}
    assert [miss["reason"] for miss in report.passes["near_misses"]] == ["the rows are no sum of two products"]


def test_halves_of_cos_that_differ_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = flat("Llama")
    rotary = model.base.rotary_emb
    forward = type(rotary).forward

    def skewed(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = forward(self, x, position_ids)
        return cos + torch.linspace(0, 1, cos.shape[-1]), sin

    monkeypatch.setattr(type(rotary), "forward", skewed)
    report, _ = rewrite(model)
    assert [miss["reason"] for miss in report.passes["near_misses"]] == ["the halves of cos and sin are not known to be equal"]


@pytest.mark.parametrize("case", ["dtypes", "epsilon", "half"])
def test_dtypes_and_attributes_that_do_not_fit_are_left_alone(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases T78 and T80: cos and sin in a wider dtype, norms with different constants, heads that are cut elsewhere."""
    from transformers.models.qwen3 import modeling_qwen3

    model = flat("Qwen3", head_dim=16)
    if case == "dtypes":
        model = model.bfloat16()
        bind_dense(model, LENGTH)
        forward = type(model.base.rotary_emb).forward
        monkeypatch.setattr(type(model.base.rotary_emb), "forward", lambda self, x, position_ids: forward(self, x.float(), position_ids))
    elif case == "epsilon":
        model.base.layers[0].self_attn.k_norm.variance_epsilon = 1e-3
    else:
        monkeypatch.setattr(modeling_qwen3, "rotate_half", lambda x: torch.cat((-x[..., 4:], x[..., :4]), dim=-1))
    wanted = {
        "dtypes": "the rotation of the query mixes dtypes: torch.bfloat16, torch.float32",
        "epsilon": "query and key are normed differently",
        "half": "heads of 16 are cut at 4, which is not the middle",
    }[case]
    report, call = rewrite(model)
    assert report.passes["rope_kv_write"] == {"rope_kv_write": 0}
    assert [miss["reason"] for miss in report.passes["near_misses"]] == [wanted]
    if case != "dtypes":  # the dense cache has one dtype
        torch.testing.assert_close(outputs(model, call), outputs(model, model))


# --- attention and quantisation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["Llama", "Qwen3"])
def test_attention_writes_e4m3_in_an_fp8_layer(architecture: str) -> None:
    model = flat(architecture, "per_tensor", head_dim=16)
    wanted = outputs(model, model)
    choose(model, TorchReference)
    report, call = rewrite(model, without_passes=("rope_kv_write",))
    assert report.passes == {"attention_quant": {"attention_quant": 1}}
    assert report.fp8_outputs == {"layers.0.attention": True}
    assert torch.equal(outputs(model, call), wanted)


def test_the_buffer_that_attention_writes_is_e4m3() -> None:
    model = flat("Llama", "per_tensor")
    choose(model, TorchReference)
    found = traced(model)
    run_whole(found.graph_module.graph, attention_layers(model), CompileConfig())
    graph = found.graph_module.graph
    (node,) = (node for node in graph.nodes if "rung.attention" in str(node.target))
    assert node.args[3].meta["example_value"].dtype == E4M3
    assert sum("fp8_quant_static" in str(node.target) for node in graph.nodes) == 6  # q, k, v, gate, up, down


@pytest.mark.parametrize(
    ("scheme", "static", "backend", "reason"),
    [
        ("per_tensor", True, FlashAttention3, "FlashAttention writes its output in the model's dtype only"),
        ("per_tensor", True, None, "it writes its output in the model's dtype only"),
        ("per_token", False, TorchReference, "its scales are found row by row, and a program of attention sees some heads of a row alone"),
    ],
    ids=["backend", "unknown backend", "scales by row"],
)
def test_what_cannot_be_joined_is_a_near_miss(scheme: str, static: bool, backend: Any, reason: str) -> None:
    model = flat("Llama", scheme, static)
    if backend is not None:
        choose(model, backend)
    report, call = rewrite(model)
    assert report.passes["attention_quant"] == {"attention_quant": 0}
    assert [miss["reason"] for miss in report.passes["near_misses"]] == [reason]
    torch.testing.assert_close(outputs(model, call), outputs(model, model))


class Peeks(nn.Module):
    """Reads the output of attention twice."""

    def __init__(self, o_proj: nn.Module) -> None:
        super().__init__()
        self.o_proj = o_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.o_proj(x) + x.sum()
        return result


def test_an_output_that_is_read_elsewhere_is_left_alone() -> None:
    model = flat("Llama", "per_tensor")
    choose(model, TorchReference)
    attention = model.base.layers[0].self_attn
    attention.o_proj = Peeks(attention.o_proj)
    report, _ = rewrite(model)
    assert report.passes["near_misses"][0]["reason"].startswith("the output has another reader: ")


def test_a_plan_holds_while_backends_can_do_the_same() -> None:
    model = flat("Llama", "per_tensor")
    choose(model, TorchReference)
    report, _ = rewrite(model)
    layers = attention_layers(model)
    assert WholeReport.from_json(report.to_json()).violation(layers) == ""
    choose(model, FlashAttention3)
    assert report.violation(layers) == "the backend of 'layers.0.attention' could write e4m3"


# --- proofs and switches ---------------------------------------------------------------------------------------------------------------


def test_the_passes_prove_themselves() -> None:
    AttentionQuant().check()
    RopeKVWrite().check()


def test_a_backend_that_quantises_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any, query: torch.Tensor, cache: Any, out: torch.Tensor, scale: torch.Tensor, metadata: Any, given: Any = None) -> None:
        whole = torch.empty_like(query)
        self.forward(query, cache, whole, metadata)
        out.copy_(fp8_quant_static(whole, 2 * scale))

    monkeypatch.setattr(TorchReference, "forward_quantised", wrong)
    with pytest.raises(PatternError, match="differs from attention that is quantised"):
        AttentionQuant().check()


def test_a_rotation_that_drops_the_norm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    rotate = AttentionBackend.rotate_and_write

    def plain(self: Any, query: Any, key: Any, value: Any, rotation: Any, *more: Any) -> None:
        rotate(self, query, key, value, replace(rotation, query_weight=None), *more)

    monkeypatch.setattr(TorchReference, "rotate_and_write", plain)
    with pytest.raises(PatternError, match="differs from rotation and write"):
        RopeKVWrite().check()


def test_a_pass_can_be_left_out() -> None:
    report, _ = rewrite(flat("Llama"), without_passes=("rope_kv_write", "attention_quant"))
    assert report.passes == {}
