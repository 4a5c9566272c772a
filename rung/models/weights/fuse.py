"""Copy a checkpoint into the module, tensor by tensor, each into its rows of the fused parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rung.errors import MissingWeightError, UnexpectedWeightError
from rung.models.config import LlamaConfig
from rung.models.gemma3 import Gemma3Config
from rung.models.llama import LlamaForCausalLM
from rung.models.weights.base import WeightSource

_IGNORABLE_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")  # derived values that old exports kept


@dataclass(frozen=True, slots=True)
class Target:
    """A run of rows in a parameter; None for all of it."""

    parameter: str
    rows: slice | None = None


@torch.no_grad()
def load_weights(module: LlamaForCausalLM, source: WeightSource) -> None:
    """Fill every parameter of `module` from `source`, converting dtype and device while copying.

    Raises `MissingWeightError` for an absent tensor or one of another shape, `UnexpectedWeightError` for one that no parameter takes."""
    targets = targets_of(module.config)
    parameters = dict(module.named_parameters())
    missing = dict(targets)
    for name in source.names():
        target = targets.get(name)
        if target is None:
            _check_ignorable(name, module.config, source)
            continue
        parameter = parameters[target.parameter]
        _copy(parameter if target.rows is None else parameter[target.rows], source.read(name), name, source)
        missing.pop(name, None)
    if missing:
        name = next(iter(missing))
        raise MissingWeightError(
            f"tensor {name!r} is not in {source.place()} ({len(missing)} missing in all)",
            hint="download the checkpoint completely, and check that its configuration belongs to it",
        )


def targets_of(config: LlamaConfig) -> dict[str, Target]:
    """The rows of our parameters that each tensor of a transformers checkpoint fills."""
    targets = {"model.embed_tokens.weight": Target("embed_tokens.weight"), "model.norm.weight": Target("norm.weight")}
    if not config.tie_word_embeddings:
        targets["lm_head.weight"] = Target("lm_head.weight")
    for layer in range(config.num_layers):
        targets |= _layer_targets(config, f"model.layers.{layer}", f"layers.{layer}")
    return targets


def _layer_targets(config: LlamaConfig, theirs: str, ours: str) -> dict[str, Target]:
    query_end, key_end = config.query_size, config.query_size + config.kv_size
    qkv = {"q": slice(0, query_end), "k": slice(query_end, key_end), "v": slice(key_end, key_end + config.kv_size)}
    gate_up = {"gate": slice(0, config.intermediate_size), "up": slice(config.intermediate_size, 2 * config.intermediate_size)}
    targets = {
        f"{theirs}.input_layernorm.weight": Target(f"{ours}.input_norm.weight"),
        f"{theirs}.post_attention_layernorm.weight": Target(f"{ours}.post_attention_norm.weight"),
    }
    for kind in ("weight", "bias"):
        if kind == "weight" or config.qkv_bias:
            targets |= {f"{theirs}.self_attn.{n}_proj.{kind}": Target(f"{ours}.attention.qkv_proj.{kind}", rows) for n, rows in qkv.items()}
        if kind == "weight" or config.output_bias:
            targets[f"{theirs}.self_attn.o_proj.{kind}"] = Target(f"{ours}.attention.o_proj.{kind}")
        if kind == "weight" or config.mlp_bias:
            targets |= {f"{theirs}.mlp.{n}_proj.{kind}": Target(f"{ours}.mlp.gate_up_proj.{kind}", rows) for n, rows in gate_up.items()}
            targets[f"{theirs}.mlp.down_proj.{kind}"] = Target(f"{ours}.mlp.down_proj.{kind}")
    if isinstance(config, Gemma3Config):
        targets |= {f"{theirs}.{when}_feedforward_layernorm.weight": Target(f"{ours}.{when}_mlp_norm.weight") for when in ("pre", "post")}
    if config.qk_norm:
        targets |= {f"{theirs}.self_attn.{n}_norm.weight": Target(f"{ours}.attention.{n}_norm.weight") for n in ("q", "k")}
    return targets


def _copy(destination: torch.Tensor, tensor: torch.Tensor, name: str, source: WeightSource) -> None:
    if tensor.shape != destination.shape:
        raise MissingWeightError(
            f"tensor {name!r} in {source.place(name)} must have shape {list(destination.shape)}, got {list(tensor.shape)}",
            hint="check that the configuration belongs to this checkpoint",
        )
    destination.copy_(tensor)


def _check_ignorable(name: str, config: LlamaConfig, source: WeightSource) -> None:
    tied_copy = name == "lm_head.weight" and config.tie_word_embeddings
    if tied_copy or name.endswith(_IGNORABLE_SUFFIXES):
        return
    raise UnexpectedWeightError(
        f"tensor {name!r} in {source.place(name)} belongs to no parameter of {config.architecture}",
        hint="the model may need a feature that this architecture does not have here; check `architectures` in its configuration",
    )
