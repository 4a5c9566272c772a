"""Which kernels a start will launch, asked before it launches any."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rung import torch_compat
from rung.attention import SPLIT_OPS, CaptureSupport, attention_layers
from rung.attention.backends import decode_attention, triton_paged
from rung.attention.backends.decode_attention import plan_decode
from rung.attention.backends.torch_reference import TorchReference
from rung.context import get_forward_context
from rung.counters import Count, Counters
from rung.graphs import Descriptor, Dispatch
from rung.launch import Built, rehearse_launches
from rung.models.build import empty_model
from rung.models.config import LlamaConfig
from rung.passes.kernels import support
from rung.runner import RunnerConfig, StartUp, build, kernel_images
from rung.runner.config import Mode
from rung.runner.graph_forward import is_decode_graph
from rung.runner.kernel_images import NoTransfer, _Captured, _decode_graphs, shadow_of
from rung.runner.model_runner import ModelRunner
from rung.runner.ops import TorchStepOps, TritonStepOps
from rung.runner.rehearsal import padded_decodes
from rung.runner.step_trace import planned_descriptors
from tests.compile.cases import uncompiled

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


def test_decode_graphs_are_rehearsed_as_they_are_captured(module: nn.Module) -> None:
    """With settled metadata, for which the rotation is joined with the attention behind it; other steps without."""
    config = RunnerConfig(max_num_requests=6, max_num_tokens=16, max_model_len=512, graphs="full_and_piecewise")
    device = torch.device("meta")
    settled: dict[bool, set[tuple[bool, bool]]] = {}
    with torch.no_grad(), rehearse_launches(90):
        runner = ModelRunner(
            module,
            config,
            backend=TorchReference,
            forward=_Captured(module),
            ops=TorchStepOps(),
            num_blocks=2,
            transfer=NoTransfer(device),
        )
        for descriptor in planned_descriptors(config, CaptureSupport.ALWAYS):
            with runner.dummy_context(Dispatch(descriptor)):
                (metadata,) = {id(one): one for one in get_forward_context().attention_metadata.values()}.values()
            settled.setdefault(is_decode_graph(descriptor), set()).add((metadata.settled, metadata.may_pad))
    assert settled == {True: {(True, False)}, False: {(False, True)}}


@pytest.mark.parametrize(("graphs", "kinds"), [("piecewise", {(32, False)}), ("full_and_piecewise", {(0, False), (32, True)})])
def test_decodes_are_rehearsed_with_the_rotation_where_they_are_piecewise(
    graphs: Mode, kinds: set[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs that are rotated inside, and whether what else it reads is settled: of every kernel for decodes that is built ahead."""
    for owner in (decode_attention, triton_paged):
        monkeypatch.setattr(owner, "why_not_decode_layer", lambda *layer: None)
    monkeypatch.setattr(triton_paged, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(kernel_images, "default_ops", lambda device, **options: (TritonStepOps(), "a test"))
    monkeypatch.setattr(support, "_why_not_device", lambda device: None)
    model = empty_model(CONFIG, torch.bfloat16, "meta")
    config = RunnerConfig(max_num_requests=6, max_num_tokens=16, max_model_len=512, graphs=graphs, capture_sizes=(1, 8))
    example, rows = build.example_inputs(torch.device("meta")), {0: "rows"}
    compiled, _ = uncompiled(model.forward, **example, dynamic=dict.fromkeys(example, rows), split_ops=SPLIT_OPS)
    with torch.no_grad(), rehearse_launches(90) as rehearsal:
        kernel_images._rehearse(model, compiled, config)
    found = [one.constants for launcher, one, _ in rehearsal.wanted.values() if launcher.name == "decode_attention_kernel"]
    assert {(constants["ROTATED"], constants["SETTLED"]) for constants in found} == kinds
    most = padded_decodes(config)
    (spec,) = {layer.spec for layer in attention_layers(model).values()}
    plans = {plan_decode(spec, rows, 512, kept_size=2) for rows in range(1, most + 1)}
    for kind in kinds - {(32, True)}:  # of graphs, which are for the longest request alone
        built = {(c["WARPS"], c["BLOCKS"], c["SLOTS"]) for c in found if (c["ROTATED"], c["SETTLED"]) == kind}
        assert built >= {(plan.warps, plan.blocks, plan.slots) for plan in plans}


def test_every_launch_of_decode_graphs_is_rehearsed(module: nn.Module) -> None:
    runner = SimpleNamespace(
        config=RunnerConfig(max_num_requests=256, max_model_len=4096, graphs="full_and_piecewise"),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        layers=attention_layers(module),
    )
    decodes = [found for found in planned_descriptors(runner.config, CaptureSupport.ALWAYS) if is_decode_graph(found)]
    (spec,) = {layer.spec for layer in runner.layers.values()}

    def plans(descriptors: list[Descriptor]) -> set[object]:
        return {plan_decode(spec, found.num_tokens, 4096, kept_size=kept) for found in descriptors for kept in (1, 2)}

    chosen = _decode_graphs(runner, decodes)  # type: ignore[arg-type]
    assert len(chosen) < len(decodes) / 2
    assert plans(chosen) == plans(decodes)
    assert len(plans(chosen)) > 3
