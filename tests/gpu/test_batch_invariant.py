"""The same bits for a row in every batch, on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rung.attention.backends.triton_paged import TritonPaged
from rung.models import quantize_fp8, random_model
from rung.models.config import LlamaConfig
from rung.passes.ir import LINEAR
from rung.passes.ir.fp8_linear import FP8_LINEAR
from tests.attention.cases import make_batch, make_spec
from tests.attention.test_batch_invariant import LENGTHS, part
from tests.gpu.test_fp8 import bf16, error
from tests.runner.test_batch_invariant import answers, engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")
ROWS = (1, 2, 8, 16, 63, 64, 65, 256, 700)
SHAPES = [(6144, 4096, ""), (14336, 4096, "silu"), (1152, 576, ""), (1000, 520, "")]  # outputs, k, activation


def check(product: Any, x: torch.Tensor) -> None:
    whole = product(x)
    for rows in ROWS:
        assert torch.equal(product(x[:rows]), whole[:rows])
        assert torch.equal(product(x[-rows:]), whole[-rows:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("n", "k", "activation"), SHAPES)
def test_products(n: int, k: int, activation: str, dtype: torch.dtype) -> None:
    weight, x = bf16(n * (2 if activation else 1), k, scale=k**-0.5).to(dtype), bf16(700, k).to(dtype)
    check(lambda x: torch.ops.rung.linear(x, weight, None, activation, True), x)
    found = torch.ops.rung.linear(x, weight, None, activation, True)
    assert error(found, LINEAR.body(x.double(), weight.double(), None, activation)) < (1e-5 if dtype == torch.float32 else 1e-2)


def test_products_by_e4m3_weights() -> None:
    weight = FP8_LINEAR.sample(1, torch.bfloat16, CUDA) if FP8_LINEAR.sample is not None else ()
    _, _, values, scale, bias, _ = weight
    x, x_scale = torch.ops.rung.fp8_quant_per_token(bf16(700, values.shape[1]))
    whole = torch.ops.rung.fp8_linear(x, x_scale, values, scale, bias, torch.bfloat16, True)
    for rows in ROWS:
        assert torch.equal(torch.ops.rung.fp8_linear(x[:rows], x_scale[:rows], values, scale, bias, torch.bfloat16, True), whole[:rows])
    assert error(whole, FP8_LINEAR.body(x, x_scale, values, scale, bias, torch.float32)) < 1e-2


@pytest.mark.parametrize("heads", [(8, 2, 128), (9, 3, 64), (4, 1, 256)])
@pytest.mark.parametrize("options", [{}, {"window": 20}, {"cap": 20.0}], ids=["full", "window", "cap"])
def test_attention(heads: tuple[int, int, int], options: dict[str, Any]) -> None:
    batch = make_batch(make_spec(*heads, **options), [(1, 3000), *LENGTHS], dtype=torch.bfloat16, device="cuda", padded_rows=2)
    backend = TritonPaged(batch.spec, batch_invariant=True)
    backend.write_kv(batch.key, batch.value, batch.cache, batch.metadata.slot_mapping)
    together = torch.empty_like(batch.query)
    backend.forward(batch.query, batch.cache, together, batch.metadata)
    starts = batch.metadata.query_start_loc.tolist()
    for request, rows in ((0, slice(0, 1)), (1, slice(0, 1)), (2, slice(5, 9)), (2, slice(28, 29)), (4, slice(0, 7)), (4, slice(39, 40))):
        query, metadata = part(batch, request, rows, host=False)
        found = torch.empty_like(query)
        backend.forward(query, batch.cache, found, metadata)
        assert torch.equal(found, together[starts[request] + rows.start : starts[request] + rows.stop])


@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
@pytest.mark.parametrize("graphs", ["none", "full_and_piecewise"])
def test_seeded_sampling_alone_and_in_a_batch_of_64(kind: str, graphs: str) -> None:
    shape = LlamaConfig(
        vocab_size=2048, hidden_size=512, intermediate_size=1024, num_layers=3, num_heads=8, num_kv_heads=2, head_size=64,
        max_position_embeddings=256, rms_norm_eps=1e-5, tie_word_embeddings=True,
    )  # fmt: skip
    model = random_model(shape, dtype=torch.bfloat16, device="cuda")
    options: dict[str, Any] = {"graphs": graphs}
    if kind == "fp8":
        quantize_fp8(model)
        options["kv_cache_dtype"] = "fp8"
    made = engine(model, **options)
    alone = answers(made, 0, 0)
    assert answers(made, 61, 1) == alone
    assert answers(made, 7, 2) == alone
    made.executor.shutdown()
