"""Inductor's module, rewritten to run without Inductor."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from rung import torch_compat
from rung.compile.stock_reasons import NotPortableError, StockReason
from rung.compile.wrapper_source import portable_source
from rung.errors import FakeKernelError
from rung.launch import run_source

HEAD = '''
# AOT ID: ['0_inference']
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
aten = torch.ops.aten
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda
async_compile = AsyncCompile()
kernel_0 = async_compile.triton('kernel_0', """the source""", device_str='cuda')
async_compile.wait(globals())
del async_compile
'''
TAIL = """
class Runner:
    def __init__(self, partitions):
        self.partitions = partitions
    def call(self, args):
        {body}
runner = Runner(partitions=[])
call = runner.call
def get_args():
    from torch._dynamo.testing import rand_strided
if __name__ == "__main__":
    get_args()
"""
ON_GPU = """x, = args
        args.clear()
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf0 = empty_strided_cuda((4,), (1,), torch.bfloat16)
            kernel_0.run(x, buf0, 4, stream=get_raw_stream(0))
            made = torch.ops.aten.zeros.default([4], device=device(type='cuda', index=0))
        return (buf0, made)"""


def rewritten(body: str, *, on_cuda: bool = True) -> str:
    return portable_source(HEAD + TAIL.format(body=body), {"kernel_0"}, on_cuda=on_cuda)


def test_only_the_function_stays_and_the_ordinal_is_a_name() -> None:
    text = rewritten(ON_GPU)
    for gone in ("import", "async_compile", "set_device", "get_args", "__main__", "(0)", "index=0"):
        assert gone not in text
    assert "device_guard(ordinal)" in text
    assert "get_raw_stream(ordinal)" in text
    assert "index=ordinal" in text


def test_it_runs_on_the_device_that_the_loader_names() -> None:
    seen: list[Any] = []

    class Guard:
        def __init__(self, ordinal: int) -> None:
            seen.append(("guard", ordinal))

        def __enter__(self) -> None:
            return None

        def __exit__(self, *_: object) -> None:
            return None

    class Kernel:
        def run(self, *arguments: Any, stream: int) -> None:
            seen.append((arguments, stream))

    names = {
        **torch_compat.wrapper_names(None),
        "ordinal": 3,
        "device_guard": Guard,
        "empty_strided_cuda": lambda size, stride, dtype: "buffer",
        "get_raw_stream": lambda ordinal: 100 + ordinal,
        "device": lambda **named: torch.device("meta") if named["index"] == 3 else None,
        "kernel_0": Kernel(),
    }
    call = run_source(rewritten(ON_GPU), names)
    given = ["x"]
    buffer, made = call(given)
    assert (given, buffer, made.device.type) == ([], "buffer", "meta")
    assert seen == [("guard", 3), (("x", "buffer", 4), 103)]


def test_the_device_that_compiled_it_leaves_no_trace() -> None:
    other = re.sub(r"(_DeviceGuard|get_raw_stream|set_device)\(0\)|index=0", lambda found: found[0].replace("0", "1"), ON_GPU)
    assert other != ON_GPU
    assert rewritten(other) == rewritten(ON_GPU)


@pytest.mark.parametrize(
    ("body", "reason", "detail"),
    [
        ("return run_intermediate_hooks(args)", StockReason.NAME, "run_intermediate_hooks"),
        ("return (torch.randn(3),)", StockReason.NAME, "torch.randn"),
        ("return (torch.cuda.synchronize(),)", StockReason.NAME, "torch.cuda.synchronize"),
        ("return extern_kernels.unheard_of(args)", StockReason.NAME, "extern_kernels.unheard_of"),
        ("return args.__class__.__base__", StockReason.NAME, "args.__class__"),
        ("import os\n        return os", StockReason.NAME, "import os"),
        ("return empty_strided_xpu((4,), (1,), torch.float32)", StockReason.NAME, "empty_strided_xpu"),
        ("return get_raw_stream(1), get_raw_stream(2)", StockReason.DEVICES, "device 2 beside 1"),
        ("return get_raw_stream(args)", StockReason.DEVICES, "device args"),
        ("return (", StockReason.WRAPPER, "does not parse"),
    ],
)
def test_what_the_runtime_does_not_have_is_refused(body: str, reason: StockReason, detail: str) -> None:
    with pytest.raises(NotPortableError, match=detail) as refused:
        rewritten(body)
    assert refused.value.reason is reason


@pytest.mark.parametrize("made", ["cutlass", "metal", "triton"])
def test_a_kernel_without_machine_code_is_refused(made: str) -> None:
    text = HEAD.replace("async_compile.triton", f"async_compile.{made}") + TAIL.format(body="return ()")
    with pytest.raises(NotPortableError, match=f"kernel_0 is made by async_compile.{made}"):
        portable_source(text, set(), on_cuda=True)


def test_gpu_names_are_unknown_on_a_cpu() -> None:
    with pytest.raises(NotPortableError, match="empty_strided_cuda"):
        rewritten("return (empty_strided_cuda((4,), (1,), torch.bfloat16),)", on_cuda=False)


def test_every_name_of_the_runtime_exists_here() -> None:
    names = torch_compat.wrapper_names(None)
    assert names["empty_strided_cpu"]((2, 3), (3, 1), torch.float32).shape == (2, 3)
    x = torch.arange(6.0)
    assert names["reinterpret_tensor"](x, (2, 2), (2, 1), 1).tolist() == [[1.0, 2.0], [3.0, 4.0]]
    names["assert_size_stride"](x, (6,), (1,))
    bias, left, right = torch.randn(1, 4), torch.randn(3, 5), torch.randn(5, 4)
    products = names["extern_kernels"]
    assert torch.equal(products.bias_addmm(bias.expand(3, 4), left, right), torch.addmm(bias[0], left, right))
    assert torch.equal(products.mm(left, right), left @ right)


def test_the_look_at_what_an_op_returned_is_that_of_inductor() -> None:
    """In wrappers from 2.14 on."""
    look = torch_compat.wrapper_names(None)["assert_tensor_metadata"]
    look(None, (2, 3), (3, 1), torch.float32, "mylib::op")
    look(torch.ones(2, 3), (2, 3), (3, 1), torch.float32, "mylib::op")
    with pytest.raises(FakeKernelError, match=r"mylib::op returned torch.float64 where torch.float32 was expected"):
        look(torch.ones(2, 3).double(), (2, 3), (3, 1), torch.float32, "mylib::op")
    with pytest.raises(AssertionError, match="mylib::op"):
        look(torch.ones(3, 2), (2, 3), (3, 1), torch.float32, "mylib::op")
