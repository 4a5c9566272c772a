"""The decoder: sizes, chunks, tracing, random weights, the rotary table."""

from __future__ import annotations

import math

import pytest
import torch

from rung.attention import rotate
from rung.context import set_forward_context
from rung.errors import UnknownModelError
from rung.models import SHAPES, random_model
from rung.models.rope import FactorScaling, Llama3Scaling, RotaryEmbedding, inverse_frequencies
from tests.models.harness import bind_dense, context, logits

IDS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_every_size_gives_one_row_a_token(count: int) -> None:
    module = random_model("tiny")
    bind_dense(module, 8)
    with torch.inference_mode(), set_forward_context(context(module, 0, count)):
        hidden = module(torch.zeros(count, dtype=torch.int32), torch.arange(count))
    assert hidden.shape == (count, 64)
    assert module.compute_logits(hidden).shape == (count, 256)


def test_chunks_give_what_one_pass_gives() -> None:
    module = random_model("tiny")
    torch.testing.assert_close(logits(module, IDS, chunks=[4, 1, 5]), logits(module, IDS), rtol=0, atol=1e-5)


def test_one_trace_serves_all_sizes() -> None:
    module = random_model("tiny")
    bind_dense(module, 8)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(module, backend=keep, fullgraph=True)
    for count in (3, 0, 1, 8):
        ids, positions = torch.zeros(count, dtype=torch.int64), torch.arange(count)
        for tensor in (ids, positions):
            torch._dynamo.decorators.mark_unbacked(tensor, 0, shape_id="tokens")
        with torch.inference_mode(), set_forward_context(context(module, 0, count)):
            assert compiled(ids, positions).shape == (count, 64)
    assert len(graphs) == 1
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert targets.count("rung.attention") + targets.count("rung.attention.default") == SHAPES["tiny"].num_layers


def test_equal_seeds_give_equal_weights() -> None:
    first, second = random_model("tiny", seed=7).state_dict(), random_model("tiny", seed=7).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_other_seeds_give_other_weights() -> None:
    assert not torch.equal(random_model("tiny", seed=7).embed_tokens.weight, random_model("tiny", seed=8).embed_tokens.weight)


def test_random_weights_have_the_stated_spread() -> None:
    module = random_model("tiny")
    assert module.layers[0].mlp.gate_up_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(module.norm.weight, torch.ones(64))


def test_parameters_need_no_gradient_and_have_the_dtype() -> None:
    module = random_model("tiny", dtype=torch.bfloat16)
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert {tensor.dtype for tensor in (*module.parameters(), *module.buffers())} == {torch.bfloat16}


@pytest.mark.parametrize(("name", "millions"), [("llama-8b", 8030), ("smollm2-135m", 134)])
def test_named_shapes_have_the_known_parameter_count(name: str, millions: int) -> None:
    from rung.models.llama import LlamaForCausalLM

    with torch.device("meta"):
        module = LlamaForCausalLM(SHAPES[name], torch.bfloat16)
    assert sum(parameter.numel() for parameter in module.parameters()) // 10**6 == millions


def test_unknown_shape_lists_the_known_ones() -> None:
    with pytest.raises(UnknownModelError, match="llama-9b") as caught:
        random_model("llama-9b")
    assert "llama-8b" in caught.value.hint


def test_rotation_keeps_length_and_depends_on_distance_alone() -> None:
    rotary = RotaryEmbedding(16, 64, 10000.0, None, torch.float32)
    rotary.fill()
    query, key = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(0))

    def score(at: int, to: int) -> float:
        return float((rotate(query, *rotary(torch.tensor([at]))) * rotate(key, *rotary(torch.tensor([to])))).sum())

    assert score(9, 4) == pytest.approx(score(35, 30), abs=1e-4)
    assert rotate(query, *rotary(torch.tensor([50]))).norm().item() == pytest.approx(query.norm().item(), rel=1e-5)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    plain, scaled = inverse_frequencies(128, 5e5, None), inverse_frequencies(128, 5e5, scaling)
    short, long = 2 * math.pi / plain < 8192 / 4, 2 * math.pi / plain > 8192
    assert torch.equal(scaled[short], plain[short])
    torch.testing.assert_close(scaled[long], plain[long] / 8)
    assert bool(((scaled < plain) & (scaled > plain / 8))[~short & ~long].all())


def test_factors_divide_each_frequency() -> None:
    plain, scaled = inverse_frequencies(4, 100.0, None), inverse_frequencies(4, 100.0, FactorScaling(factors=(1.0, 4.0)))
    assert (plain / scaled).tolist() == [1.0, 4.0]
