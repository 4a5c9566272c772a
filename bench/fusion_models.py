"""The models of `bench.fusions`, with values on a device or without, and the step that they are run on."""

from __future__ import annotations

import torch
from torch import nn

from bench.plain_decoder import PlainDecoder
from rung import torch_compat
from rung.attention import AttentionMetadata, KVCache, attention_layers
from rung.attention.backends.triton_paged import TritonPaged
from rung.context import ForwardContext
from rung.models import FP8Linear, calibrate_input_scales, quantize_fp8, random_model
from rung.models.build import empty_model
from rung.models.config import LlamaConfig
from rung.runner.build import example_inputs

SHAPES = {
    "8b": LlamaConfig(
        vocab_size=4096, hidden_size=4096, intermediate_size=14336, num_layers=4, num_heads=32, num_kv_heads=8, head_size=128,
        max_position_embeddings=2048, rms_norm_eps=1e-6, tie_word_embeddings=True,
    ),
    "qwen3-0.6b": LlamaConfig(
        vocab_size=4096, hidden_size=1024, intermediate_size=3072, num_layers=6, num_heads=16, num_kv_heads=8, head_size=128,
        max_position_embeddings=2048, rms_norm_eps=1e-6, tie_word_embeddings=True, qk_norm=True,
    ),
}  # fmt: skip
FORMS = ("plain", "plain fp8", "ours", "ours fp8")
BLOCK, CONTEXT, DECODES = 16, 128, 64
_READ_THE_SAME = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})


def model_of(form: str, shape: LlamaConfig, device: torch.device) -> nn.Module:
    """With random values on `device`, in bf16 or e4m3 with static activations; equal for equal arguments."""
    torch.manual_seed(0)
    if form.startswith("ours"):
        model: nn.Module = random_model(shape, dtype=torch.bfloat16, device=device)
    else:
        with device:
            model = PlainDecoder(shape).bfloat16()
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                nn.init.normal_(parameter, std=0.02)
    model.requires_grad_(False)
    if form.endswith("fp8"):
        prompts = [torch.randint(0, shape.vocab_size, (64,)).tolist() for _ in range(2)]
        quantize_fp8(model, "per_tensor", input_scales=calibrate_input_scales(model, prompts))
    return model


def layout_of(form: str, shape: LlamaConfig) -> nn.Module:
    """The same module on the meta device: what a compile sees of it."""
    if form.startswith("ours"):
        model: nn.Module = empty_model(shape, torch.bfloat16, "meta")
    else:
        with torch.device("meta"):
            model = PlainDecoder(shape).bfloat16()
    model.requires_grad_(False)
    if form.endswith("fp8"):
        for parent in list(model.modules()):
            _quantise_layout(parent)
    return model


def _quantise_layout(parent: nn.Module) -> None:
    """As `quantize_fp8`: layers that read the same rows get the same scale by calibration, and share it."""
    scales: dict[object, nn.Parameter | None] = {}
    for name, linear in list(parent.named_children()):
        if not isinstance(linear, nn.Linear) or name == "lm_head":
            continue
        weight = torch.empty_like(linear.weight, dtype=torch.float8_e4m3fn)
        each, one = (torch.empty(size, dtype=torch.float32, device="meta") for size in (linear.out_features, 1))
        made = FP8Linear(weight, each, None, one)
        group = next((index for index, names in enumerate(_READ_THE_SAME) if name in names), name)
        made.input_scale = scales.setdefault(group, made.input_scale)
        setattr(parent, name, made)


def without_memory(form: str, shape: LlamaConfig, device: torch.device) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The module on `device` without memory, and arguments for a compile."""
    model = layout_of(form, shape)
    return model, torch_compat.without_memory(model, example_inputs(torch.device("cpu")), device)


def choose_attention(model: nn.Module, device: torch.device) -> None:
    for layer in attention_layers(model).values():
        layer.choose(TritonPaged, device)


def bind(model: nn.Module, rows: int, device: torch.device) -> ForwardContext:
    """Caches with values in them, and a step: decodes of `rows` requests, or beyond `DECODES` rows one prompt. Graphs read its tensors."""
    requests, length = (rows, CONTEXT + 1) if rows <= DECODES else (1, rows)
    blocks = -(-length // BLOCK)
    table = torch.arange(requests * blocks, dtype=torch.int32, device=device).view(requests, blocks)
    layers = attention_layers(model)
    for layer in layers.values():
        size = (requests * blocks, BLOCK, layer.spec.num_kv_heads, layer.spec.head_size)
        keys, values = (torch.randn(size, device=device).bfloat16() for _ in range(2))
        layer.bind(TritonPaged(layer.spec), KVCache(keys, values))
    each = rows // requests
    place = (length - each + torch.arange(each, device=device)).repeat(requests)
    owner = torch.arange(requests, device=device).repeat_interleave(each, output_size=rows)
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(0, rows + 1, each, dtype=torch.int32, device=device),
        seq_lens=torch.full((requests,), length, dtype=torch.int32, device=device),
        block_table=table,
        slot_mapping=table[owner, place // BLOCK].long() * BLOCK + place % BLOCK,
        num_requests=requests,
        num_actual_tokens=rows,
        max_query_len=each,
        max_seq_len=length,
        may_pad=False,
    )
    return ForwardContext(attention_layers=layers, attention_metadata=dict.fromkeys(layers, metadata), num_actual_tokens=rows)


def positions_of(rows: int, device: torch.device) -> torch.Tensor:
    return torch.full((rows,), CONTEXT, device=device) if rows <= DECODES else torch.arange(rows, device=device)
