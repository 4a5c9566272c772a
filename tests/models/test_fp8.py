from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from rung.context import set_forward_context
from rung.counters import Count, Counters
from rung.errors import CompileError, ConfigError
from rung.models import FP8Linear, LlamaForCausalLM, load_model, quantize_fp8, random_model
from rung.models.fp8 import Scheme, quantise_weight
from rung.passes.ir.fp8_linear import dequantised
from rung.runner import RunnerConfig, SamplingParams, build_engine
from rung.runner.build import compile_model
from tests.models.harness import bind_dense, context

SCHEMES: tuple[Scheme, ...] = ("per_token", "per_tensor", "group128")
LINEARS = 4  # a layer


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weight_is_near_in_each_of_its_parts(scheme: Scheme) -> None:
    weight = torch.randn(256, 384) * 0.02
    weight[7, 9] = 0.5
    values, scale = quantise_weight(weight, scheme)
    assert values.dtype == torch.float8_e4m3fn
    assert scale.shape == ((2, 3) if scheme == "group128" else (256,))
    error = (dequantised(values, scale) - weight).abs()
    assert bool((error <= weight.abs() / 16 + weight.abs().max() * 2**-9 / 448).all())  # half a step, also below the normal numbers
    assert float(dequantised(values, scale)[7, 9]) == pytest.approx(0.5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_layer_is_near_the_one_it_replaces(scheme: Scheme) -> None:
    linear, x = nn.Linear(256, 128), torch.randn(5, 256)
    with torch.no_grad():
        quantised = FP8Linear.from_linear(linear, scheme)
        assert (quantised(x) - linear(x)).norm() < 0.05 * linear(x).norm()
        assert quantised(x.bfloat16()).dtype == torch.bfloat16


def test_a_given_scale_of_activations_clamps() -> None:
    linear = nn.Linear(16, 16, bias=False)
    nn.init.eye_(linear.weight)
    layer = FP8Linear.from_linear(linear, "per_tensor", input_scale=0.01)
    x = torch.zeros(1, 16)
    x[0, 0], x[0, 1] = 100.0, 1.0
    torch.testing.assert_close(layer(x)[0, :2], torch.tensor([4.48, 1.0]), rtol=0.0625, atol=0)


def test_every_linear_layer_but_the_skipped_is_replaced_and_memory_is_a_quarter_of_fp32() -> None:
    model = random_model("tiny")
    before = sum(p.nbytes for p in model.layers.parameters())
    made = quantize_fp8(model, skip=("lm_head", "layers.1.mlp.down_proj"))
    assert len(made) == 3 * LINEARS - 1
    assert isinstance(model.layers[1].mlp.down_proj, nn.Linear)
    assert sum(p.nbytes for p in model.layers.parameters()) < 0.35 * before
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_state_and_pickle_keep_the_layers() -> None:
    model = random_model("tiny")
    quantize_fp8(model, input_scales={"layers.0.mlp.down_proj": 0.1})
    again = pickle.loads(pickle.dumps(model))
    other = random_model("tiny", seed=1)
    quantize_fp8(other, input_scales={"layers.0.mlp.down_proj": 0.3})
    other.load_state_dict(model.state_dict())
    assert model.state_dict()["layers.0.mlp.down_proj.weight"].dtype == torch.float8_e4m3fn
    for copy in (again, other):
        assert torch.equal(logits(copy), logits(model))


def test_layers_of_one_module_share_a_scale_until_they_are_given_different_ones() -> None:
    model, linears = Siblings(), ("q", "k", "v")
    quantize_fp8(model, "per_tensor", input_scales={"q": 0.5, "k": 0.5, "v": 0.25})
    assert model.q.input_scale is model.k.input_scale
    assert model.v.input_scale is not model.q.input_scale
    state = model.state_dict()
    model.load_state_dict(state)
    assert model.q.input_scale is model.k.input_scale  # nothing different came
    model.load_state_dict(state | {"k.input_scale": torch.tensor([0.125])})
    assert [float(model.get_submodule(name).input_scale) for name in linears] == [0.5, 0.125, 0.25]  # type: ignore[arg-type]


@pytest.mark.parametrize("assign", [False, True])
def test_layers_that_are_given_equal_scales_share_them_again(assign: bool) -> None:
    model = pickle.loads(pickle.dumps(Siblings()))
    quantize_fp8(model, "per_tensor", input_scales={"q": 0.5, "k": 0.5, "v": 0.25})
    model = pickle.loads(pickle.dumps(model))  # what happens at a load outlives that
    came = {f"{name}.input_scale": torch.tensor([0.125]) for name in ("q", "k", "v")}
    model.load_state_dict(model.state_dict() | came, assign=assign)
    assert model.q.input_scale is model.k.input_scale
    assert model.q.input_scale is model.v.input_scale
    assert float(model.v.input_scale) == 0.125
    model.load_state_dict(model.state_dict() | {"k.input_scale": torch.tensor([0.25])}, assign=assign)
    assert model.q.input_scale is model.v.input_scale
    assert [float(layer.input_scale) for layer in (model.q, model.k)] == [0.125, 0.25]


class Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 16) for _ in range(3))


def logits(model: LlamaForCausalLM) -> torch.Tensor:
    ids = torch.arange(5, 25)
    bind_dense(model, len(ids))
    with torch.no_grad(), set_forward_context(context(model, 0, len(ids))):
        return model.compute_logits(model(ids, torch.arange(len(ids))))


def test_a_head_of_its_own_can_be_quantised_too() -> None:
    model = random_model("tiny")
    model.lm_head = nn.Linear(64, 256, bias=False).requires_grad_(False)  # type: ignore[assignment]
    before = logits(model)
    assert "lm_head" in quantize_fp8(model, skip=())
    assert (logits(model) - before).norm() < 0.2 * before.norm()


@pytest.mark.parametrize(
    ("sizes", "arguments", "message", "hint"),
    [
        ((24, 32), {}, "in_features must be a multiple of 16 for 'per_token', got 24", "skip"),
        ((32, 40), {}, "out_features must be a multiple of 16", "skip"),
        ((64, 128), {"scheme": "group128"}, "in_features must be a multiple of 128 for 'group128', got 64", "per_token"),
        ((32, 32), {"scheme": "int4"}, "scheme must be one of", "per_token"),
        ((32, 32), {"input_scales": {"1": 0.1}}, "input_scales names '1'", "layers are 0"),
        ((32, 32), {"input_scales": {"0": 0.0}}, "must be positive", "448"),
        ((128, 128), {"scheme": "group128", "input_scales": {"0": 0.1}}, "takes no input_scales", "per_token"),
        ((32, 32), {"skip": ("0",)}, "no linear layer", "load a model first"),
    ],
)
def test_what_cannot_be_quantised_is_refused_before_anything_changes(
    sizes: tuple[int, int], arguments: dict[str, object], message: str, hint: str
) -> None:
    model = nn.Sequential(nn.Linear(*sizes))
    with pytest.raises(ConfigError, match=message) as caught:
        quantize_fp8(model, **arguments)  # type: ignore[arg-type]
    assert hint in str(caught.value)
    assert isinstance(model[0], nn.Linear)


def test_a_second_quantisation_finds_nothing() -> None:
    model = random_model("tiny")
    quantize_fp8(model)
    with pytest.raises(ConfigError, match="no linear layer"):
        quantize_fp8(model)


@pytest.mark.slow
def test_compiled_steps_with_an_fp8_cache_say_what_eager_ones_say() -> None:
    model = random_model("tiny")
    quantize_fp8(model)
    texts = []
    for eager in (True, False):
        config = RunnerConfig(max_num_requests=2, max_num_tokens=32, max_model_len=64, num_blocks=12, kv_cache_dtype="fp8", eager=eager)
        engine, runner, start = build_engine(model, config)
        assert next(iter(runner.kv_caches.values())).key.dtype == torch.float8_e4m3fn
        found = engine.generate([[5, 6, 7, 8], [9, 10]], SamplingParams(max_tokens=6, ignore_eos=True))
        texts.append([completion.token_ids for completion in found])
        engine.executor.shutdown()
    assert texts[0] == texts[1]
    assert start.compile is not None
    assert runner.counters[Count.DYNAMO_TRACES] + runner.counters[Count.PLAN_HITS] == 1


@pytest.mark.slow
def test_smollm2_stays_itself(smollm2_path: Path) -> None:
    """Weights of 135M parameters are the hard case; figures in docs/performance.md."""
    whole, quantised = load_model(smollm2_path), load_model(smollm2_path)
    quantize_fp8(quantised.module)
    ids = whole.tokenizer.apply_chat([{"role": "user", "content": "What is the capital of France?"}])
    config = RunnerConfig(max_num_requests=1, max_num_tokens=64, max_model_len=64, num_blocks=6, eager=True, kv_cache_dtype="fp8")
    engine, _, _ = build_engine(quantised.module, config, tokenizer=quantised.tokenizer)
    (completion,) = engine.generate([ids], SamplingParams(max_tokens=12))
    engine.executor.shutdown()
    assert "Paris" in (completion.text or "")


@pytest.mark.slow
def test_attention_of_a_compiled_model_writes_e4m3() -> None:
    model = random_model("tiny")
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    quantize_fp8(model, "per_tensor", input_scales=dict.fromkeys(names, 0.05))
    texts = []
    for graphs in ("none", "full_and_piecewise"):
        config = RunnerConfig(max_num_requests=2, max_num_tokens=32, max_model_len=64, num_blocks=12, graphs=graphs)  # type: ignore[arg-type]
        engine, runner, start = build_engine(model, config)
        found = engine.generate([[5, 6, 7, 8], [9, 10]], SamplingParams(max_tokens=6, ignore_eos=True))
        texts.append([completion.token_ids for completion in found])
        engine.executor.shutdown()
        assert start.compile is not None
        assert start.compile.whole_passes["attention_quant"] == {"attention_quant": len(runner.layers)}
    eager, _, _ = build_engine(model, RunnerConfig(max_num_requests=2, max_num_tokens=32, max_model_len=64, num_blocks=12, eager=True))
    found = eager.generate([[5, 6, 7, 8], [9, 10]], SamplingParams(max_tokens=6, ignore_eos=True))
    assert texts == [[completion.token_ids for completion in found]] * 2


@pytest.mark.slow
def test_a_lost_match_over_the_whole_graph_fails_the_compile_with_the_reason() -> None:
    model = random_model("tiny")
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    quantize_fp8(model, "per_tensor", input_scales=dict.fromkeys(names, 0.05))  # no backend is chosen
    with pytest.raises(CompileError, match=r"attention_quant was expected to match 3 times and matched 0 times.*no attention backend"):
        compile_model(model, torch.device("cpu"), 32, Counters(), expect={"attention_quant": 3, "rope_kv_write": 3})
