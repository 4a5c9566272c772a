"""What becomes of the quantisations of an FP8 layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode

from rung import torch_compat
from rung.models.fp8 import Scheme, quantize_fp8
from rung.models.llama import LlamaMLP, RMSNorm
from rung.models.random import SHAPES
from rung.passes.cleanup import Duplicates
from rung.passes.fused_ops import FUSED_OPS
from rung.passes.fusion import FlatRows, Projections, Siblings, act_mul, act_quant, add_norm, norm_quant, qk_norm_rope, rms_norm
from rung.passes.ir import IR_OPS, IROp, fp8_linear, fp8_quant_per_token, fp8_quant_static
from rung.passes.lowering import lower
from tests.passes.graphs import misses, run, same, traced, traced_module
from tests.passes.test_fusions import SIZES, layers


class Block(nn.Module):
    """What lies between two attentions."""

    def __init__(self, size: int = 64, scheme: Scheme = "per_token", input_scales: dict[str, float] | None = None) -> None:
        super().__init__()
        self.o_proj = nn.Linear(size, size, bias=False)
        self.norm = RMSNorm(size, 1e-5)
        self.mlp = LlamaMLP(SHAPES["tiny"])
        if size != 64:
            self.mlp.gate_up_proj, self.mlp.down_proj = nn.Linear(size, 2 * size), nn.Linear(size, size)
        self.next_norm = RMSNorm(size, 1e-5)
        self.qkv_proj = nn.Linear(size, 2 * size)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)
        quantize_fp8(self, scheme, input_scales=input_scales)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual = self.o_proj(x) + residual
        residual = self.mlp(self.norm(residual)) + residual
        return self.qkv_proj(self.next_norm(residual)), residual


def piece(block: nn.Module, size: int = 64) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    names = [name for name, _ in block.named_parameters()]
    weights = list(block.parameters())

    def call(x: torch.Tensor, residual: torch.Tensor, *given: torch.Tensor) -> Any:
        return torch.func.functional_call(block, dict(zip(names, given, strict=True)), (x, residual))

    mode = FakeTensorMode()
    return torch_compat.trace_body(call, [mode.from_tensor(t) for t in (torch.empty(3, size), torch.empty(3, size), *weights)]), weights


def equal(module: fx.GraphModule, block: nn.Module, weights: list[torch.Tensor], size: int = 64) -> None:
    module.recompile()
    x, residual = torch.randn(3, size), torch.randn(3, size)
    for found, wanted in zip(module(x, residual, *weights), block(x, residual), strict=True):
        torch.testing.assert_close(found, wanted)


CASES: list[tuple[Scheme, int, dict[str, float] | None, str]] = [
    ("per_token", 64, None, ""),
    ("per_tensor", 64, dict.fromkeys(("o_proj", "mlp.gate_up_proj", "mlp.down_proj", "qkv_proj"), 0.02), "_static"),
    ("group128", 128, None, "_group"),
]


@pytest.mark.parametrize(("scheme", "size", "scales", "suffix"), CASES, ids=[case[0] for case in CASES])
def test_a_layer_has_norm_quant_twice_and_act_quant_once(scheme: Scheme, size: int, scales: dict[str, float] | None, suffix: str) -> None:
    block = Block(size, scheme, scales)
    module, weights = piece(block, size)
    found = run(module, norm_quant(), act_quant())
    assert {name: count for name, count in found.items() if count} == {f"norm_quant{suffix}": 2, f"silu_and_mul_quant{suffix}": 1}
    equal(module, block, weights, size)
    lower(module.graph, (*IR_OPS, *FUSED_OPS))
    equal(module, block, weights, size)


@pytest.mark.parametrize("architecture", ["Llama", "Qwen3", "Phi3"])
def test_a_layer_of_transformers_has_norm_quant_twice_and_act_quant_once(architecture: str) -> None:
    module = layers(architecture, torch.bfloat16, **({"pad_token_id": 0} if architecture == "Phi3" else {}))
    quantize_fp8(module)
    inputs = [torch.randn(1, 6, size).bfloat16() for size in (SIZES["hidden_size"], SIZES["head_dim"], SIZES["head_dim"])]
    with torch.no_grad():
        graph = traced_module(module, *inputs)
        found = run(graph, rms_norm(), act_mul(), qk_norm_rope(), FlatRows(), Duplicates(), norm_quant(), act_quant(), add_norm())
        activation = "silu_and_mul_quant" if architecture == "Phi3" else "silu_mul_quant"
        assert (found["norm_quant"], found[activation], found["add_norm"]) == (2, 1, 1)  # the last norm is not quantised
        assert found["duplicates"] == {"Llama": 3, "Qwen3": 3, "Phi3": 0}[architecture]  # of queries, keys, values; of gate and up
        assert found["qk_norm_rope"] == (architecture == "Qwen3")
        torch.testing.assert_close(graph(*inputs, *module.parameters()), module(*inputs), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("architecture", ["Llama", "Qwen3"])
def test_a_layer_of_transformers_with_static_scales_has_norm_quant_twice_and_act_quant_once(architecture: str) -> None:
    """Calibration gives queries, keys and values the same scale, and gate and up."""
    module = layers(architecture, torch.bfloat16)
    names = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    quantize_fp8(module, "per_tensor", input_scales=dict.fromkeys(names, 0.02))
    inputs = [torch.randn(1, 6, size).bfloat16() for size in (SIZES["hidden_size"], SIZES["head_dim"], SIZES["head_dim"])]
    with torch.no_grad():
        graph = traced_module(module, *inputs)
        found = run(graph, rms_norm(), act_mul(), qk_norm_rope(), FlatRows(), Duplicates(), norm_quant(), act_quant(), add_norm())
        assert (found["norm_quant_static"], found["silu_mul_quant_static"], found["duplicates"]) == (2, 1, 3)
        torch.testing.assert_close(graph(*inputs, *module.parameters()), module(*inputs), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("scheme", ["per_token", "per_tensor"])
@pytest.mark.parametrize("architecture", ["Llama", "Qwen3"])
def test_e4m3_products_of_a_transformers_layer_meet_their_siblings(architecture: str, scheme: Scheme) -> None:
    module = layers(architecture, torch.bfloat16)
    names = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    quantize_fp8(module, scheme, input_scales=dict.fromkeys(names, 0.02) if scheme == "per_tensor" else None)
    inputs = [torch.randn(1, 6, size).bfloat16() for size in (SIZES["hidden_size"], SIZES["head_dim"], SIZES["head_dim"])]
    with torch.no_grad():
        graph = traced_module(module, *inputs)
        joined = Siblings(lambda op, args: None), Projections(lambda op, args: None)
        found = run(graph, rms_norm(), act_mul(), qk_norm_rope(), FlatRows(), Duplicates(), *joined, norm_quant(), act_quant(), add_norm())
        # attention's output, the sum, the norm, the quantisation; behind the MLP the norm is not quantised
        assert (found["fp8_linear_three"], found["fp8_linear_gated"], found["fp8_linear_norm"]) == (1, 1, 1)
        assert found["norm_quant" if scheme == "per_token" else "norm_quant_static"] == 1
        assert found["add_norm"] == 1
        torch.testing.assert_close(graph(*inputs, *module.parameters()), module(*inputs), atol=2e-2, rtol=2e-2)
        lower(graph.graph, (*IR_OPS, *FUSED_OPS))  # no provider here: back to the bodies
        graph.recompile()
        torch.testing.assert_close(graph(*inputs, *module.parameters()), module(*inputs), atol=2e-2, rtol=2e-2)


def test_what_a_norm_or_activation_quantises_for_products_is_left_to_them() -> None:
    """Joined with each product it would be quantised once for each of them."""
    module = layers("Llama", torch.bfloat16)
    quantize_fp8(module)
    inputs = [torch.randn(1, 6, size).bfloat16() for size in (SIZES["hidden_size"], SIZES["head_dim"], SIZES["head_dim"])]
    with torch.no_grad():
        graph = traced_module(module, *inputs)
        joined = Projections(lambda op, args: None)
        found = run(graph, rms_norm(), act_mul(), FlatRows(), joined, Duplicates(), norm_quant(), act_quant())
        assert (found["norm_quant"], found["silu_mul_quant"], found.get("fp8_quant_linear", 0)) == (2, 1, 0)


@pytest.mark.parametrize(("scheme", "size", "scales", "suffix"), CASES, ids=[case[0] for case in CASES])
def test_all_between_two_attentions_is_one_op(scheme: Scheme, size: int, scales: dict[str, float] | None, suffix: str) -> None:
    block = Block(size, scheme, scales)
    module, weights = piece(block, size)
    report = Projections(lambda op, args: None).run(module.graph)
    assert {name: count for name, count in report.items() if count} == {"fp8_block": 1}
    equal(module, block, weights, size)
    assert lower(module.graph) == {"fp8_block": 1}  # no provider on this device: back to the body
    equal(module, block, weights, size)


def test_rows_that_attention_writes_as_e4m3_are_joined_too() -> None:
    block = Block(64, "per_tensor", dict.fromkeys(("o_proj", "mlp.gate_up_proj", "mlp.down_proj", "qkv_proj"), 0.02))
    names = [name for name, _ in block.named_parameters()]
    weights = list(block.parameters())
    o = block.o_proj

    def call(x: torch.Tensor, residual: torch.Tensor, *given: torch.Tensor) -> Any:
        named = dict(zip(names, given, strict=True))
        attended = fp8_linear(x, named["o_proj.input_scale"], named["o_proj.weight"], named["o_proj.weight_scale"], None, residual.dtype)
        residual = attended + residual
        return torch.func.functional_call(Behind(block), {f"block.{name}": value for name, value in named.items()}, (residual,))

    mode = FakeTensorMode()
    x, residual = fp8_quant_static(torch.randn(3, 64), o.input_scale), torch.randn(3, 64)
    module = torch_compat.trace_body(call, [mode.from_tensor(t) for t in (x, residual, *weights)])
    report = Projections(lambda op, args: None).run(module.graph)
    assert {name: count for name, count in report.items() if count} == {"fp8_block": 1}
    module.recompile()
    for found, wanted in zip(module(x, residual, *weights), call(x, residual, *weights), strict=True):
        torch.testing.assert_close(found, wanted)


class Behind(nn.Module):
    """What stands behind the first sum of a block."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual = self.block.mlp(self.block.norm(residual)) + residual
        return self.block.qkv_proj(self.block.next_norm(residual)), residual


def join(why_not: Callable[[IROp, tuple[Any, ...]], str | None], block: nn.Module) -> dict[str, int]:
    return Projections(why_not).run(piece(block)[0].graph)


def test_a_plain_product_beside_quantised_ones_is_not_joined_with_them() -> None:
    block = Block()
    block.o_proj = nn.Linear(64, 64, bias=False).requires_grad_(False)
    report = join(lambda op, args: None, block)
    assert report["fp8_linear_norm_linear"] == report["fp8_norm_linear"] == 1
    assert report["near miss: the products before and behind a norm are quantised differently"] == 1


def test_an_activation_that_is_used_elsewhere_keeps_the_block_apart() -> None:
    class Seen(Block):
        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Any:
            residual = self.o_proj(x) + residual
            middle = torch.ops.rung.silu_and_mul(self.mlp.gate_up_proj(self.norm(residual)))
            residual = self.mlp.down_proj(middle) + residual
            return self.qkv_proj(self.next_norm(residual)), residual, middle

    report = join(lambda op, args: None, Seen())
    assert report["fp8_linear_norm_linear"] == 2
    assert "fp8_block" not in report


def test_a_product_with_nothing_around_keeps_its_quantisation() -> None:
    report = Projections(lambda op, args: None).run(
        piece_of(lambda x, w, s: fp8_linear(*fp8_quant_per_token(x), w, s, None, x.dtype)).graph
    )
    assert report["fp8_quant_linear"] == 1


def test_a_quantisation_for_two_products_is_left_alone() -> None:
    def two(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> Any:
        values, scale = fp8_quant_per_token(x)
        return fp8_linear(values, scale, w, s, None, x.dtype), fp8_linear(values, scale, w, s, None, x.dtype)

    assert not any(Projections(lambda op, args: None).run(piece_of(two).graph).values())


def piece_of(function: Callable[..., Any]) -> fx.GraphModule:
    weight, scale = fp8_quant_per_token(torch.randn(32, 16))
    return traced(function, x=torch.randn(3, 16), w=weight, s=scale.squeeze(1))


def test_a_norm_that_is_read_elsewhere_is_a_near_miss() -> None:
    def layer(x: torch.Tensor, w: torch.Tensor) -> Any:
        normed = torch.ops.rung.rms_norm(x, w, 1e-5)
        return *fp8_quant_per_token(normed), normed

    module = traced(layer, x=torch.randn(3, 16), w=torch.rand(16))
    assert any("rms_norm" in miss.reason for miss in misses(module, norm_quant()))


def test_an_activation_of_two_tensors_is_found_as_transformers_writes_it() -> None:
    def gated(x: torch.Tensor, y: torch.Tensor) -> Any:
        return fp8_quant_per_token(torch.nn.functional.silu(x) * y)

    tensors = {"x": torch.randn(3, 16), "y": torch.randn(3, 16)}
    module = traced(gated, **tensors)
    assert run(module, act_mul(), act_quant())["silu_mul_quant"] == 1
    same(module, gated, tensors)


# --- T78 and T80 ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [4, 8, 16])
def test_the_size_of_groups_is_kept(group: int) -> None:
    def layer(x: torch.Tensor, w: torch.Tensor) -> Any:
        return torch.ops.rung.fp8_quant_group(torch.ops.rung.rms_norm(x, w, 1e-3), group)

    tensors = {"x": torch.randn(3, 16), "w": torch.rand(16)}
    module = traced(layer, **tensors)
    assert run(module, norm_quant())["norm_quant_group"] == 1
    (node,) = module.graph.find_nodes(op="call_function", target=torch.ops.rung.rms_norm_quant_group.default)
    assert node.args[2:] == (1e-3, group)
    same(module, layer, tensors)


@pytest.mark.parametrize("scale", [torch.tensor([0.5]), torch.tensor([0.25])])
def test_the_scale_of_static_quantisation_is_kept(scale: torch.Tensor) -> None:
    def layer(x: torch.Tensor, scale: torch.Tensor) -> Any:
        return fp8_quant_static(torch.ops.rung.silu_and_mul(x), scale)

    tensors = {"x": torch.randn(3, 16), "scale": scale}
    module = traced(layer, **tensors)
    assert run(module, act_quant())["silu_and_mul_quant_static"] == 1
    same(module, layer, tensors)


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("w_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_norm_and_quantisation_in_any_dtypes_are_right_or_left_alone(x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    def layer(x: torch.Tensor, w: torch.Tensor) -> Any:
        return fp8_quant_per_token(torch.ops.rung.rms_norm(x, w, 1e-5))

    tensors = {"x": torch.randn(3, 16).to(x_dtype), "w": torch.rand(16).to(w_dtype)}
    module = traced(layer, **tensors)
    assert run(module, norm_quant())["norm_quant"] == int(x_dtype == w_dtype)
    for found, wanted in zip(module(*tensors.values()), layer(*tensors.values()), strict=True):
        assert torch.equal(found.float(), wanted.float())


def test_a_quantisation_across_a_write_is_left_alone() -> None:
    def layer(x: torch.Tensor, w: torch.Tensor, other: torch.Tensor) -> Any:
        normed = torch.ops.rung.rms_norm(x, w, 1e-5)
        other.add_(1)
        return fp8_quant_per_token(normed)

    module = traced(layer, x=torch.randn(3, 16), w=torch.rand(16), other=torch.randn(3))
    assert any("writes in place" in miss.reason for miss in misses(module, norm_quant()))


def test_products_keep_their_attributes() -> None:
    """A bias, an epsilon, an activation, the scales of squares: each reaches the joined op."""
    block = Block(128, "group128")
    module, _ = piece(block, 128)
    Projections(lambda op, args: None).run(module.graph)
    (node,) = module.graph.find_nodes(op="call_function", target=torch.ops.rung.fp8_block.default)
    assert [arg for arg in node.args if not isinstance(arg, fx.Node)] == [None, None, 1e-5, None, "silu", None, 1e-5, None, "", 128]
