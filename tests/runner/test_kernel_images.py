"""Which kernels a start will launch, asked before it launches any."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rung import torch_compat
from rung.attention import attention_layers
from rung.counters import Count, Counters
from rung.launch import Built
from rung.models.build import empty_model
from rung.models.config import LlamaConfig
from rung.runner import RunnerConfig, StartUp, build
from rung.runner.kernel_images import shadow_of

CONFIG = LlamaConfig(
    vocab_size=320,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_size=64,
    max_position_embeddings=512,
    tie_word_embeddings=True,
)


@pytest.fixture
def module() -> nn.Module:
    return empty_model(CONFIG, torch.bfloat16, "meta")


def test_a_shadow_has_the_layouts_and_no_memory_of_its_module(module: nn.Module) -> None:
    before = dict(module.named_parameters())
    shadow = shadow_of(module, torch.device("cpu"))
    assert all(now is before[name] for name, now in module.named_parameters())
    for name, parameter in shadow.named_parameters():
        assert torch_compat.is_fake(parameter)
        assert (parameter.shape, parameter.stride(), parameter.dtype) == (before[name].shape, before[name].stride(), before[name].dtype)
    assert len({id(one) for one in shadow.parameters()}) == len({id(one) for one in module.parameters()})  # ties are kept
    assert list(attention_layers(shadow)) == list(attention_layers(module))


def test_a_start_that_cannot_be_rehearsed_says_why(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise TypeError("a lock cannot be copied")

    monkeypatch.setattr(build, "shadow_of", fail)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    start, counters = StartUp(), Counters()
    build.build_kernels(module, None, RunnerConfig(), torch.device("cuda", 0), start, counters)  # type: ignore[arg-type]
    assert start.kernels == Built(reason="the start could not be rehearsed: TypeError: a lock cannot be copied")
    assert counters[Count.UNFORESEEN_KERNELS] == 1
