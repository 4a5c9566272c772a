"""Scales of an e4m3 cache and of static activations, from prompts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rung.attention import KVCache, attention_layers
from rung.attention.backends.torch_reference import TorchReference
from rung.context import set_forward_context
from rung.errors import ConfigError
from rung.models import LlamaForCausalLM, calibrate_input_scales, calibrate_kv_scales, quantize_fp8, random_model
from rung.models.hf import FlatModel
from rung.passes.ir.fp8 import E4M3, LARGEST
from rung.runner import RunnerConfig, SamplingParams, build_engine
from tests.models.harness import bind_dense, context

PROMPTS = [[5, 6, 7, 8, 9], [10, 11], list(range(20, 41))]


def caches_of(model: Any, prompt: list[int]) -> dict[str, KVCache]:
    """The keys and values that a prompt leaves in a dense cache of the model's dtype."""
    bind_dense(model, len(prompt))
    with torch.no_grad(), set_forward_context(context(model, 0, len(prompt))):
        model(torch.tensor(prompt), torch.arange(len(prompt)))
    return {name: layer.kv_cache for name, layer in attention_layers(model).items() if layer.kv_cache is not None}


def largest(model: Any) -> dict[str, tuple[float, float]]:
    seen = [caches_of(model, prompt) for prompt in PROMPTS]
    return {
        name: (max(float(one[name].key.abs().max()) for one in seen), max(float(one[name].value.abs().max()) for one in seen))
        for name in seen[0]
    }


def flat() -> FlatModel:
    transformers = pytest.importorskip("transformers")
    from tests.models.test_hf import SMALL

    config = transformers.Qwen3Config(**SMALL, head_dim=16)
    return FlatModel(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().requires_grad_(False))


@pytest.mark.parametrize("make", [lambda: random_model("tiny"), flat], ids=["ours", "transformers"])
def test_scales_are_the_largest_magnitude_over_448(make: Any) -> None:
    model = make()
    wanted = largest(model)
    found = calibrate_kv_scales(model, PROMPTS, margin=2.0)
    for name, layer in attention_layers(model).items():
        assert found[name] == (layer.key_scale, layer.value_scale)
        assert found[name] == pytest.approx(tuple(2.0 * value / LARGEST for value in wanted[name]))


def test_what_was_bound_is_bound_again() -> None:
    model = random_model("tiny")
    bind_dense(model, 8)
    before = [(layer.backend, layer.kv_cache) for layer in attention_layers(model).values()]
    calibrate_kv_scales(model, PROMPTS)
    assert [(layer.backend, layer.kv_cache) for layer in attention_layers(model).values()] == before


def small_values() -> LlamaForCausalLM:
    """Values so small that e4m3 without a scale has few numbers for them."""
    model = random_model("tiny")
    for layer in model.layers:
        attention = layer.attention
        with torch.no_grad():
            attention.qkv_proj.weight[-attention.sizes[2] :] *= 1e-2
            attention.o_proj.weight *= 1e2
    return model


def test_calibrated_caches_lose_less() -> None:
    model = small_values()
    ids = torch.tensor(PROMPTS[2])

    def hidden(fp8: bool) -> torch.Tensor:
        for layer in attention_layers(model).values():
            shape = (1, len(ids), layer.spec.num_kv_heads, layer.spec.head_size)
            dtype = E4M3 if fp8 else torch.float32
            scales = (layer.key_scale, layer.value_scale) if fp8 else (1.0, 1.0)
            layer.bind(TorchReference(layer.spec), KVCache(*(torch.zeros(shape).to(dtype) for _ in range(2)), *scales))
        with torch.no_grad(), set_forward_context(context(model, 0, len(ids))):
            result: torch.Tensor = model(ids, torch.arange(len(ids)))
        return result

    exact = hidden(fp8=False)
    before = float((hidden(fp8=True) - exact).norm() / exact.norm())
    calibrate_kv_scales(model, PROMPTS)
    after = float((hidden(fp8=True) - exact).norm() / exact.norm())
    assert after < 0.05 < before


def test_a_runner_hands_the_scales_to_its_cache() -> None:
    model = random_model("tiny")
    scales = calibrate_kv_scales(model, PROMPTS)
    config = RunnerConfig(max_num_requests=2, max_num_tokens=32, max_model_len=64, num_blocks=12, kv_cache_dtype="fp8", eager=True)
    engine, runner, _ = build_engine(model, config)
    assert {name: (cache.key_scale, cache.value_scale) for name, cache in runner.kv_caches.items()} == scales
    found = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(found[0].token_ids) == 4
    engine.executor.shutdown()


def test_scales_of_activations_are_those_that_quantisation_takes() -> None:
    model = random_model("tiny")
    seen: dict[str, float] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(
                lambda _, args, name=name: seen.update({name: max(seen.get(name, 0.0), float(args[0].abs().max()))})
            )
    scales = calibrate_input_scales(model, PROMPTS)
    assert scales == {name: pytest.approx(value / LARGEST) for name, value in seen.items()}
    layers = quantize_fp8(model, "per_tensor", input_scales=scales)
    assert all(layer.input_scale is not None for layer in layers.values())


@pytest.mark.parametrize("calibrate", [calibrate_kv_scales, calibrate_input_scales])
def test_no_prompts_are_refused(calibrate: Any) -> None:
    with pytest.raises(ConfigError, match="no prompts"):
        calibrate(random_model("tiny"), [])


def test_values_that_are_not_finite_are_refused() -> None:
    model = random_model("tiny")
    with torch.no_grad():
        model.layers[1].attention.qkv_proj.weight[-1] = float("nan")
    with pytest.raises(ConfigError, match=r"layers.1.attention: values reach nan"):
        calibrate_kv_scales(model, PROMPTS)
