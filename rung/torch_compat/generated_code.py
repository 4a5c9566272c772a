"""What lies inside a loaded Inductor artifact: the wrapper's source, and its kernels as machine code.

Checked on torch 2.11.0, 2.12.0, 2.13.0 and 2.14.1. Everything here reads; what it does not know is refused with a `GeneratedCodeError`,
and the caller then keeps to Inductor's own loader.
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rung.errors import FakeKernelError
from rung.torch_compat.compiler import compile_lock
from rung.torch_compat.inductor import compiled_graph


class GeneratedCodeError(Exception):
    """Why the parts of an artifact cannot be told; never shown to a user as an error. `kind` is "wrapper", "kernel" or "constants"."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedConfig:
    """One compiled configuration of a generated Triton kernel."""

    cubin: bytes = field(repr=False)
    entry: str
    capability: int
    parameters: tuple[tuple[str, str], ...]  # (name, type) of what the machine code takes, without scratch
    scratch: tuple[bool, bool]  # whether the machine code takes a pointer to global and to profile scratch, always null
    num_warps: int
    shared_bytes: int
    before: tuple[str, ...]  # statements that the grid's expressions need
    grid: tuple[str, str, str]  # expressions over the names of `GeneratedKernel.takes`


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedKernel:
    """A kernel as the wrapper calls it: `takes` in order, then the stream."""

    takes: tuple[str, ...]
    written: tuple[str, ...]  # tensors that it updates in place
    configs: tuple[GeneratedConfig, ...]  # the one that Inductor would try first is the first


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedCode:
    """The parts of one artifact."""

    source: str
    kernels: Mapping[str, GeneratedKernel]
    libraries: Mapping[str, bytes]  # functions of shared libraries, by their name in the wrapper
    checked: tuple[int, ...]  # inputs that kernels take for aligned, which somebody has to look at in every call
    written: tuple[int, ...]  # inputs that are updated in place


def generated_code(artifact: Any) -> GeneratedCode:
    """Take a loaded artifact apart. Raises `GeneratedCodeError`."""
    graph = compiled_graph(artifact)
    source = str(getattr(graph, "source_code", "") or "")
    if graph is None or not source:
        raise GeneratedCodeError("wrapper", "there is no wrapper inside")
    if any(getattr(graph, name, None) for name in ("constants", "torchbind_constants", "frozen_param_names")):
        raise GeneratedCodeError("constants", "it holds constants")
    if getattr(graph, "cudagraph_info", None) is not None:
        raise GeneratedCodeError("wrapper", "Inductor captures graphs of it")
    names = _wrapper_names(graph.current_callable)
    cubins = _cubins(graph)
    kernels, libraries = {}, {}
    for name, value in names.items():
        if type(value).__module__.startswith("torch._inductor.runtime.triton_heuristics") and hasattr(value, "compile_results"):
            kernels[name] = _kernel(value, cubins)
        elif isinstance(value, types.BuiltinFunctionType) and f"{name} = async_compile." in source:
            libraries[name] = _library(value)
    return GeneratedCode(
        source=source,
        kernels=kernels,
        libraries=libraries,
        checked=tuple(graph.inputs_to_check),
        written=tuple(sorted(graph.mutated_input_idxs)),
    )


def _wrapper_names(call: Any) -> dict[str, Any]:
    """The globals of the generated module, below what Inductor put around its function."""
    waiting = [call]
    seen: set[int] = set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        plain = getattr(item, "__func__", item)
        found: dict[str, Any] = getattr(plain, "__globals__", {})
        if "assert_size_stride" in found and "empty_strided_cpu" in found:
            return found
        for cell in getattr(plain, "__closure__", None) or ():
            try:
                waiting.append(cell.cell_contents)
            except ValueError:  # an empty cell
                continue
        waiting.append(getattr(plain, "__wrapped__", None))
    raise GeneratedCodeError("wrapper", "the generated module was not found")


def _cubins(graph: Any) -> dict[str, bytes]:
    """Machine code by the hash under which Triton keeps a kernel."""
    bundle = getattr(graph, "_triton_bundle", None)
    found = {}
    for kernel in bundle.kernel_artifacts if bundle is not None else ():
        for part in kernel.artifacts:
            if part.filename.endswith(".cubin"):
                found[kernel.kernel_hash] = part.payload
    return found


def _kernel(tuner: Any, cubins: Mapping[str, bytes]) -> GeneratedKernel:
    name = str(tuner.inductor_meta.get("kernel_name", "a kernel"))
    if tuner.reset_to_zero_arg_names:
        raise GeneratedCodeError("kernel", f"{name} needs arguments to be zeroed")
    results = list(tuner.compile_results)
    if not results:
        raise GeneratedCodeError("kernel", f"{name} is not compiled")
    configs, takes = [], None
    for result in results:
        if not hasattr(result.kernel, "full_constexprs"):
            raise GeneratedCodeError("kernel", f"{name} is launched by Triton itself")
        config, of_config = _config(result, cubins, tuner.device_props)
        if takes not in (None, of_config):
            raise GeneratedCodeError("kernel", f"{name} takes other arguments with each configuration")
        configs.append(config)
        takes = of_config
    return GeneratedKernel(takes=takes or (), written=tuple(tuner.mutated_arg_names), configs=tuple(configs))


def _config(result: Any, cubins: Mapping[str, bytes], device: Any) -> tuple[GeneratedConfig, tuple[str, ...]]:
    from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key
    from torch._inductor.runtime.triton_heuristics import GridExpr

    kernel = result.kernel
    cubin = cubins.get(triton_hash_to_path_key(kernel.hash)) or getattr(kernel, "cubin_raw", None)
    if not cubin and kernel.cubin_path and Path(kernel.cubin_path).exists():
        cubin = Path(kernel.cubin_path).read_bytes()
    if not cubin:
        raise GeneratedCodeError("kernel", f"the machine code of {kernel.name} is not in the artifact")
    _, takes, none = result._get_arg_lists(kernel.arg_names, kernel.declared_constexprs)
    stay = [name for index, name in enumerate(kernel.arg_names) if index not in kernel.full_constexprs and name not in none]
    signature = result.compile_meta["signature"]
    grid = GridExpr.from_meta(result.inductor_meta, result.config)
    config = GeneratedConfig(
        cubin=bytes(cubin),
        entry=kernel.name,
        capability=10 * int(device.major) + int(device.cc) % 10,
        parameters=tuple((name, signature[name]) for name in stay),
        scratch=(bool(kernel.has_global_scratch), bool(kernel.has_profile_scratch)),
        num_warps=kernel.num_warps,
        shared_bytes=kernel.shared,
        before=tuple(grid.prefix),
        grid=_text_of(grid),
    )
    return config, tuple(takes)


def _text_of(grid: Any) -> tuple[str, str, str]:
    return str(grid.x_grid), str(grid.y_grid), str(grid.z_grid)


def _library(function: Any) -> bytes:
    path = getattr(getattr(function, "__self__", None), "__file__", None)
    if path is None:
        raise GeneratedCodeError("kernel", f"the shared library of {function.__name__} was not found")
    return Path(path).read_bytes()


def wrapper_names(ordinal: int | None) -> dict[str, Any]:
    """What generated wrappers use, without Inductor: functions of torch's C++ part, and the matrix products by the names that Inductor
    has for them. `ordinal` is the GPU of the piece, None on a CPU."""
    import math

    import torch

    guards: Any = torch._C._dynamo.guards
    names = {
        "torch": torch,
        "math": math,
        "inf": math.inf,
        "nan": math.nan,
        "aten": torch.ops.aten,
        "device": torch.device,
        "empty_strided": torch.empty_strided,
        "assert_size_stride": guards.assert_size_stride,
        "assert_alignment": guards.assert_alignment,
        "empty_strided_cpu": guards._empty_strided_cpu,
        "empty_strided_cpu_pinned": guards._empty_strided_cpu_pinned,
        "reinterpret_tensor": guards._reinterpret_tensor,
        "assert_tensor_metadata": _assert_tensor_metadata,  # from 2.14 on
        "extern_kernels": types.SimpleNamespace(**_products()),
    }
    # in 2.12 alone, from 2.13 on, and from 2.14 on
    for name in ("copy_misaligned", "copy_if_misaligned", "assert_size_stride_grouped"):
        if hasattr(guards, name):
            names[name] = getattr(guards, name)
    if ordinal is not None:
        names |= {
            "ordinal": ordinal,
            "device_guard": torch.cuda._DeviceGuard,
            "empty_strided_cuda": guards._empty_strided_cuda,
            "get_raw_stream": torch._C._cuda_getCurrentRawStream,
        }
    return names


def _assert_tensor_metadata(tensor: Any, size: Any, stride: Any, dtype: Any, op_name: str | None = None) -> None:
    """As Inductor's function of this name: an op has returned what its fake kernel said, if anything."""
    import torch

    if tensor is None:
        return
    if tensor.dtype != dtype:
        raise FakeKernelError(f"{op_name} returned {tensor.dtype} where {dtype} was expected", hint="mend its fake kernel")
    check: Any = torch._C._dynamo.guards.assert_size_stride
    check(tensor, size, stride, op_name)


def _products() -> dict[str, Any]:
    import torch

    found = {name: getattr(torch, name) for name in ("mm", "addmm", "bmm", "baddbmm", "_int_mm", "_scaled_mm", "convolution")}
    return {**found, "bias_addmm": _bias_addmm, "mm_dtype": torch.mm, "bmm_dtype": torch.bmm}


def _bias_addmm(bias: Any, left: Any, right: Any, *, out: Any = None, alpha: Any = 1, beta: Any = 1) -> Any:
    """As Inductor's function of this name: a bias of one row, given as a vector, takes cuBLASLt's faster epilogue."""
    import torch

    row = bias[0] if (bias.stride(0) == 0 and bias.size(0) != 0) or bias.size(0) == 1 else bias
    return torch.addmm(row, left, right, out=out, alpha=alpha, beta=beta)


def wrapper_builtins() -> Sequence[str]:
    """Names of Python's own that generated wrappers may use."""
    return ("abs", "bool", "float", "int", "len", "max", "min", "range", "sum", "tuple", "list", "zip", "None", "True", "False")


@contextlib.contextmanager
def tensor_address_protocol() -> Iterator[None]:
    """Inside, libraries that Inductor compiled for a CPU can be initialised: they look up the address of the function that reads a tensor's
    pointer in the environment of the process (`CppPythonBindingsCodeCache`), which `os.environ` does not get to see."""
    import torch

    guards: Any = torch._C._dynamo.guards
    name = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
    with compile_lock:
        os.putenv(name, str(guards._torchinductor_pyobject_tensor_data_ptr))
        try:
            yield
        finally:
            if name not in os.environ:
                os.unsetenv(name)
