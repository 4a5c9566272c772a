"""Unmodified transformers models over the flat batch: their attention modules call ours through transformers' own registry."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from rung.attention import Attention, AttentionSpec
from rung.errors import UnsupportedModuleError

IMPLEMENTATION = "rung_paged"
_ATTACHED = "rung_attention"  # the submodule that an attention module gets; it has no parameters


class FlatModel(nn.Module):
    """forward(input_ids [num_tokens], positions [num_tokens]) -> hidden [num_tokens, hidden_size], what the model's head takes.

    `model` is a causal language model of transformers; its classes and weights stay as they are. Each of its attention modules gets an
    `Attention` submodule, named `layers.<n>.attention` in the order in which they run, and the model's configuration names our
    implementation. Raises `UnsupportedModuleError` for a model whose attention does not go through transformers' registry, or that uses
    what paged attention has no answer for."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        register()
        self.model: Any = model
        self.head = model.get_output_embeddings()
        self.base: Any = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
        # Below transformers' decorators, which collect outputs that nobody asks for here and cannot be traced in a form that can be kept.
        self.plain_forward = inspect.unwrap(type(self.base).forward)
        _attach(self.base, _found_layers(self.base))
        _set_implementation(self.base, IMPLEMENTATION)

    @property
    def config(self) -> Any:
        """transformers' configuration, of which a runner reads `vocab_size` and `max_position_embeddings`."""
        return self.base.config

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = self.plain_forward(self.base, input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden.squeeze(0)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [num_rows, hidden_size] -> logits [num_rows, vocab_size], in the model's dtype."""
        logits: torch.Tensor = self.head(hidden)
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap


def register() -> None:
    """Make our implementation known to transformers under `IMPLEMENTATION`; doing so again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, _paged)
    AttentionInterface.register(f"{IMPLEMENTATION}_probe", _Probe.unbound)


def _paged(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """query [1, num_heads, num_tokens, head_size], key and value with num_kv_heads -> [1, num_tokens, num_heads, head_size]. The mask is of
    no use: which keys a row sees follows from the batch's metadata."""
    rows = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
    return getattr(module, _ATTACHED)(*rows).unsqueeze(0), None


class _Probe:
    """Notes the attention modules of a model and how they call attention, in one run on one token."""

    def __init__(self) -> None:
        self.layers: list[tuple[nn.Module, AttentionSpec]] = []

    def __call__(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        if options.get("s_aux") is not None or options.get("position_bias") is not None or key.shape[-1] != value.shape[-1]:
            raise UnsupportedModuleError(
                f"{type(module).__qualname__} needs attention sinks, a position bias or values of another size than keys",
                hint="wrap the model itself, without paged attention",
            )
        scale = options.get("scaling")
        spec = AttentionSpec(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_size=query.shape[3],
            scale=query.shape[3] ** -0.5 if scale is None else float(scale),
            sliding_window=options.get("sliding_window"),
            soft_cap=options.get("softcap"),
        )
        self.layers.append((module, spec))
        return query.transpose(1, 2), None

    @staticmethod
    def unbound(*_: Any, **__: Any) -> Any:
        raise AssertionError("the probe is only used by `FlatModel`")


def _found_layers(base: Any) -> list[tuple[nn.Module, AttentionSpec]]:
    """The attention modules in the order in which they run, and what each asks for."""
    from transformers import AttentionInterface

    probe, before = _Probe(), base.config._attn_implementation
    AttentionInterface.register(f"{IMPLEMENTATION}_probe", probe)
    device = next(base.parameters()).device
    try:
        _set_implementation(base, f"{IMPLEMENTATION}_probe")
        with torch.no_grad():
            token = torch.zeros(1, 1, dtype=torch.int64, device=device)
            base(input_ids=token, position_ids=token, use_cache=False)
    finally:
        _set_implementation(base, before)
        AttentionInterface.register(f"{IMPLEMENTATION}_probe", _Probe.unbound)
    if not probe.layers:
        raise UnsupportedModuleError(
            f"the attention of {type(base).__qualname__} does not go through transformers' AttentionInterface",
            hint="wrap the model itself, without paged attention",
        )
    return probe.layers


def _attach(base: nn.Module, layers: list[tuple[nn.Module, AttentionSpec]]) -> None:
    for number, (module, spec) in enumerate(layers):
        setattr(module, _ATTACHED, Attention(f"layers.{number}.attention", spec))


def _set_implementation(base: Any, name: str) -> None:
    for module in base.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = name
