"""Fusions on unmodified layers of transformers, and what they leave alone (cases T78 and T80)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rung.passes.fusion import act_mul, add_norm, qk_norm_rope, rms_norm
from rung.passes.pattern_pass import PatternPass
from tests.passes.graphs import misses, run, same, targets, traced, traced_module

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
FUSIONS = (rms_norm, qk_norm_rope, add_norm, act_mul)
X, Y, W = torch.randn(3, 8), torch.randn(3, 8), torch.rand(8) + 0.5


class Layers(nn.Module):
    """One decoder layer of transformers and the norm behind it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm = model.layers[0], model.norm

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        found = self.layer(x, position_embeddings=(cos, sin), attention_mask=None)
        return self.norm(found[0] if isinstance(found, tuple) else found)


def layers(architecture: str, dtype: torch.dtype, **changed: Any) -> Layers:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{architecture}Config")(**SIZES, **changed)
    module = Layers(getattr(transformers, {"Gemma3Text": "Gemma3TextModel"}.get(architecture, f"{architecture}Model"))(config))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    return module.to(dtype).eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("architecture", "dtype", "expected"),
    [
        ("Llama", torch.float32, {"rms_norm": 3, "qk_norm_rope": 0, "add_norm": 2, "silu_mul": 1, "gelu_mul": 0}),
        ("Qwen3", torch.bfloat16, {"rms_norm": 5, "qk_norm_rope": 1, "add_norm": 2, "silu_mul": 1, "gelu_mul": 0}),
        ("Gemma3Text", torch.bfloat16, {"rms_norm": 7, "gelu_mul": 1, "silu_mul": 0}),
    ],
    ids=["Llama", "Qwen3", "Gemma3"],
)
def test_matches_on_a_layer_of_transformers(architecture: str, dtype: torch.dtype, expected: dict[str, int]) -> None:
    module = layers(architecture, dtype)
    inputs = [torch.randn(1, 6, size).to(dtype) for size in (SIZES["hidden_size"], SIZES["head_dim"], SIZES["head_dim"])]
    with torch.no_grad():
        graph = traced_module(module, *inputs)
        found = run(graph, *(fusion() for fusion in FUSIONS))
        assert {name: found[name] for name in expected} == expected
        torch.testing.assert_close(graph(*inputs, *module.parameters()), module(*inputs))


# --- T78: dtypes ---------------------------------------------------------------------------------------------------------------------


def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_norm_in_any_dtypes_is_right_or_left_alone(x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    tensors = {"x": X.to(x_dtype), "w": W.to(w_dtype)}
    module = traced(norm, **tensors)
    known = x_dtype != torch.float64 and w_dtype in (x_dtype, torch.float32)
    assert run(module, rms_norm()) == {"rms_norm": int(known)}
    same(module, norm, tensors, rtol=0, atol=0)


def test_an_addition_that_widens_is_left_alone() -> None:
    def layer(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.ops.rung.rms_norm(x + y, w, 1e-5)

    module = traced(layer, x=X.bfloat16(), y=Y, w=W)
    assert [miss.reason for miss in misses(module, add_norm())] == ["torch.float32 expected for x, found torch.bfloat16"]


def test_a_gate_in_another_dtype_is_left_alone() -> None:
    module = traced(lambda x, y: F.silu(x) * y, x=X.bfloat16(), y=Y)
    assert run(module, act_mul()) == dict.fromkeys(("silu_and_mul", "gelu_and_mul", "silu_mul", "gelu_mul"), 0)


# --- T80: attributes -----------------------------------------------------------------------------------------------------------------


def test_a_scaled_addition_is_left_alone() -> None:
    module = traced(lambda x, y, w: torch.ops.rung.rms_norm(torch.add(x, y, alpha=2), w, 1e-5), x=X, y=Y, w=W)
    assert "constant 1 expected, found 2" in misses(module, add_norm())[0].reason


@pytest.mark.parametrize(("parts", "expected"), [(4, {"silu_and_mul": 1, "silu_mul": 0}), (2, {"silu_and_mul": 0, "silu_mul": 1})])
def test_a_gate_and_factor_out_of_one_tensor(parts: int, expected: dict[str, int]) -> None:
    def gated(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.split(parts, dim=-1)[:2]
        return F.silu(gate) * up

    module = traced(gated, x=X)
    found = run(module, act_mul())
    assert {name: found[name] for name in expected} == expected
    same(module, gated, {"x": X})


def test_the_exact_form_of_gelu_is_left_alone() -> None:
    module = traced(lambda x, y: F.gelu(x) * y, x=X, y=Y)
    assert run(module, act_mul()) == dict.fromkeys(("silu_and_mul", "gelu_and_mul", "silu_mul", "gelu_mul"), 0)


def test_a_norm_over_another_dimension_is_left_alone() -> None:
    module = traced(lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-5)), x=X, w=W)
    assert "constant -1 expected, found 0" in misses(module, rms_norm())[0].reason


def test_a_broadcast_residual_is_left_alone() -> None:
    module = traced(lambda x, y, w: torch.ops.rung.rms_norm(x + y, w, 1e-5), x=X, y=Y[:1], w=W)
    assert "x has shape" in misses(module, add_norm())[0].reason


def qk(q_epsilon: float = 1e-6, half: int = 4) -> Any:
    def turn(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((-x[..., half:], x[..., :half]), -1)

    def layer(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q = torch.ops.rung.rms_norm(q, w, q_epsilon).transpose(1, 2)
        k = torch.ops.rung.rms_norm(k, v, 1e-6).transpose(1, 2)
        return q * cos + turn(q) * sin, k * cos + turn(k) * sin

    return layer


QK = {
    "q": torch.randn(1, 3, 4, 8),
    "k": torch.randn(1, 3, 2, 8),
    "w": W,
    "v": W.flip(0),
    "cos": torch.randn(1, 3, 8),
    "sin": torch.randn(1, 3, 8),
}


def test_query_and_key_norms_with_one_epsilon_are_fused() -> None:
    module = traced(qk(), **QK)
    assert run(module, qk_norm_rope()) == {"qk_norm_rope": 1}
    assert "rung.rms_norm.default" not in targets(module)
    same(module, qk(), QK)


@pytest.mark.parametrize(
    ("layer", "message"),
    [(qk(q_epsilon=1e-5), "epsilon is 1e-05 in one place and 1e-06 in another"), (qk(half=2), "heads of size 8 are cut at 2")],
    ids=["epsilon", "half"],
)
def test_query_and_key_with_other_attributes_are_left_alone(layer: Any, message: str) -> None:
    assert any(message in miss.reason for miss in misses(traced(layer, **QK), qk_norm_rope()))


def test_every_fusion_proves_itself() -> None:
    for fusion in FUSIONS:
        made = fusion()
        assert isinstance(made, PatternPass)
        made.check()
