from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rung.passes.ir import IR_OPS, LINEAR, IROp, Provider, gelu_and_mul, linear, norm_linear, silu_and_mul
from rung.passes.ir.op import define_ir_op


def test_activations_equal_torch() -> None:
    x = torch.randn(3, 10)
    torch.testing.assert_close(silu_and_mul(x), F.silu(x[:, :5]) * x[:, 5:])
    torch.testing.assert_close(gelu_and_mul(x), F.gelu(x[:, :5], approximate="tanh") * x[:, 5:])


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_products_equal_torch(rows: int) -> None:
    x, weight, bias, norm = torch.randn(rows, 6), torch.randn(8, 6), torch.randn(8), torch.rand(6)
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))
    torch.testing.assert_close(linear(x, weight, None, "silu"), silu_and_mul(F.linear(x, weight)))
    wanted = F.linear(F.rms_norm(x, (6,), norm, 1e-5), weight, bias)
    torch.testing.assert_close(norm_linear(x, norm, 1e-5, weight, bias), wanted)


@pytest.mark.parametrize("op", [op for op in IR_OPS if op.providers], ids=lambda op: op.name)
def test_op_with_providers_can_be_tested(op: IROp) -> None:
    assert op.sample is not None
    assert op.tolerance
    args = op.sample(3, torch.float32, torch.device("cpu"))
    results = getattr(torch.ops.rung, op.name)(*args)
    for result, wanted in zip(results, op.body(*args), strict=True):
        assert torch.equal(result, wanted)
    for provider in op.providers:
        asked = provider.name == "batch_invariant"
        assert provider.why_not(*args) == ("batch invariance was not asked for" if asked else "'cpu' is no CUDA device")


LAYOUTS = {
    "rows": torch.randn(5, 8),
    "one row": torch.randn(1, 8),
    "no row": torch.randn(0, 8),
    "heads of a joined product": torch.randn(5, 40)[:, 8:32].unflatten(1, (3, 8)),
    "part of each row": torch.randn(5, 12)[:, 2:10],
    "columns": torch.randn(8, 5).t(),
    "heads first": torch.randn(5, 3, 8).transpose(0, 1),
    "repeated": torch.randn(1, 8).expand(5, 8),
    "a row alone": torch.randn(8),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "weight"), [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_the_shapes_of_a_norm_are_those_of_its_body(layout: str, dtype: torch.dtype, weight: torch.dtype) -> None:
    x = LAYOUTS[layout].to(dtype)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = torch.ops.rung.rms_norm(mode.from_tensor(x), torch.ones(8, dtype=weight), 1e-5)
    wanted = torch.ops.rung.rms_norm(x, torch.ones(8, dtype=weight), 1e-5)
    assert (fake.shape, fake.stride(), fake.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)


def test_a_norm_whose_weight_does_not_fit_is_refused_as_its_body_is() -> None:
    with torch._subclasses.FakeTensorMode(), pytest.raises(RuntimeError, match="broadcast"):
        torch.ops.rung.rms_norm(torch.ones(3, 8), torch.ones(7), 1e-5)


def test_reason_names_what_is_not_taken() -> None:
    provider, refused = LINEAR.choose(torch.randn(2, 3), torch.randn(4, 3), None, "")
    assert provider is None
    here = dict.fromkeys(("gemv", "triton", "cublas"), "'cpu' is no CUDA device")
    assert refused == {"batch_invariant": "batch invariance was not asked for", **here}


def test_the_provider_is_chosen_by_the_number_of_rows_and_the_report_says_where() -> None:
    def provider(name: str, most: int | None, added: float) -> Provider:
        def run(x: torch.Tensor) -> torch.Tensor:
            return x + added

        return Provider(name, lambda x: None, run, lambda x: "64x32", None if most is None else lambda rows, x: most)

    providers = provider("vector", 1, 1.0), provider("tiles", 4, 2.0), provider("none", 2, 3.0), provider("library", None, 4.0)
    op = define_ir_op("test_by_rows(Tensor x) -> Tensor", lambda x: x.clone(), providers)
    assert [float(op.overload(torch.zeros(rows, 1)).mean()) for rows in (1, 2, 4, 5)] == [1.0, 2.0, 2.0, 4.0]
    assert op.describe(torch.zeros(1, 1)) == "vector to 1, tiles to 4, library beyond: 64x32"


@pytest.mark.parametrize("gradients", [False, True])
def test_where_a_gradient_is_wanted_kernels_leave_it_to_the_body(gradients: bool) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return x * 5.0 if gradients else torch.full_like(x, 5.0)  # as a kernel does, which records nothing

    provider = Provider("kernel", lambda x: None, run, lambda x: "", gradients=gradients)
    op = define_ir_op(f"test_gradient_{gradients}(Tensor x) -> Tensor", lambda x: x * 3.0, (provider,))
    x = torch.ones(2, requires_grad=True)
    op.overload(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == ([5.0, 5.0] if gradients else [3.0, 3.0])
    for plain in (x.detach(), torch.ones(2)):
        assert op.overload(plain).tolist() == [5.0, 5.0]
    with torch.no_grad():
        assert op.overload(x).tolist() == [5.0, 5.0]


def test_a_product_has_a_provider_for_every_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rung.passes.kernels.support._why_not_device", lambda device: None)
    x, weight = torch.zeros(1, 4096, dtype=torch.bfloat16), torch.zeros(6144, 4096, dtype=torch.bfloat16)
    assert LINEAR.describe(x, weight, None, "") == "gemv to 1, triton to 64, cublas beyond: 6144x4096"
    assert LINEAR.describe(x, weight, None, "", True) == "batch_invariant: 6144x4096"


def _define(name: str, *providers: tuple[str, str | None]) -> IROp:
    def provider(label: str, reason: str | None) -> Provider:
        return Provider(label, lambda x: reason, lambda x: x + len(label), lambda x: "")

    return define_ir_op(f"{name}(Tensor x) -> Tensor", lambda x: x.clone(), tuple(provider(*item) for item in providers))


@pytest.mark.parametrize(
    ("name", "providers", "chosen", "added"),
    [
        ("test_first", (("a", None), ("bb", None)), "a", 1.0),
        ("test_second", (("a", "too small"), ("bb", None)), "bb", 2.0),
        ("test_none", (("a", "too small"), ("bb", "too big")), None, 0.0),
    ],
)
def test_first_provider_that_fits_runs(name: str, providers: Any, chosen: str | None, added: float) -> None:
    op = _define(name, *providers)
    x = torch.zeros(2)
    provider, refused = op.choose(x)
    assert (provider.name if provider else None) == chosen
    assert refused == dict(providers[: len(refused)])
    assert torch.equal(op.overload(x), x + added)
