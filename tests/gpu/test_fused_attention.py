"""Attention that writes e4m3, and what takes its rows, on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rung.attention.backends.triton_paged import TritonPaged
from rung.models import quantize_fp8, random_model
from rung.models.random import SHAPES
from rung.passes.ir.fp8 import E4M3, quant_static_body
from rung.passes.ir.fp8_linear import FP8_BLOCK
from rung.runner import RunnerConfig, SamplingParams, build_engine
from tests.attention.cases import make_batch, make_spec
from tests.gpu.test_fp8 import block, error, steps_apart

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the tiles were chosen for compute capability 9.0")


@pytest.mark.parametrize(
    "lengths", [[(1, 4000), (1, 3)], [(70, 30), (1, 5), (129, 0)], [(200, 0), (7, 0)]], ids=["split", "mixed", "first"]
)
@pytest.mark.parametrize("given", [False, True], ids=["cache", "given"])
def test_attention_writes_e4m3(lengths: list[tuple[int, int]], given: bool) -> None:
    batch = make_batch(make_spec(8, 2, 128), lengths, dtype=torch.bfloat16, device="cuda", padded_rows=3)
    backend, scale = TritonPaged(batch.spec), torch.full((1,), 0.004, device=CUDA)
    backend.write_kv(batch.key, batch.value, batch.cache, batch.metadata.slot_mapping)
    plain, found = torch.empty_like(batch.query), torch.empty(batch.query.shape, dtype=E4M3, device=CUDA)
    keys = (batch.key, batch.value) if given else None
    if keys is None:
        backend.forward(batch.query, batch.cache, plain, batch.metadata)
    else:
        backend.forward_given_keys(batch.query, *keys, batch.cache, plain, batch.metadata)
    backend.forward_quantised(batch.query, batch.cache, found, scale, batch.metadata, keys)
    assert steps_apart(found, quant_static_body(plain, scale)) <= 1
    assert not found[-3:].float().any()


@pytest.mark.parametrize("rows", [1, 2, 16, 64, 256, 700])
def test_block_takes_rows_that_are_e4m3(rows: int) -> None:
    x, *args = block(rows, SHAPES["llama-8b"])
    scale = (x.abs().max().float() / 448).reshape(1)
    given: tuple[Any, ...] = (quant_static_body(x, scale), *args[:2], scale, *args[3:])
    assert FP8_BLOCK.choose(*given)[0] is not None
    for found, wanted in zip(torch.ops.rung.fp8_block(*given), FP8_BLOCK.body(*given), strict=True):
        assert error(found, wanted) < 6e-2


@pytest.mark.parametrize("graphs", ["none", "full_and_piecewise"])
def test_model_whose_attention_writes_e4m3(graphs: str) -> None:
    model = random_model("tiny", dtype=torch.bfloat16, device="cuda")
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and "lm_head" not in name]
    quantize_fp8(model, "per_tensor", input_scales=dict.fromkeys(names, 0.02))
    config = RunnerConfig(
        max_num_requests=4, max_num_tokens=64, max_model_len=64, num_blocks=40, kv_cache_dtype="fp8", graphs=graphs,  # type: ignore[arg-type]
    )  # fmt: skip
    engine, runner, start = build_engine(model, config)
    found = engine.generate([[5, 6, 7, 8] * 5, [9, 10]], SamplingParams(max_tokens=8, ignore_eos=True))
    engine.executor.shutdown()
    assert [len(completion.token_ids) for completion in found] == [8, 8]
    assert start.compile is not None
    assert start.compile.whole_passes["attention_quant"] == {"attention_quant": len(runner.layers)}
