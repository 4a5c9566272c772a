"""Making torch, Inductor and Triton believe that a GPU is there, so that a process without one compiles for it.

For a process of its own that does nothing else (`rung.cli.precompile_child`): torch is patched for good, and what would run on the GPU
must not be called. Checked on torch 2.11.0 to 2.14.1 (CUDA 13.0, Triton 3.6 to 3.8). Each patch goes when torch can compile for a device
it does not have.
"""

from __future__ import annotations

import collections
import re
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rung.errors import BackendUnavailableError

_LATER = ("torch._dynamo.device_interface", "torch._inductor.compile_fx")


@dataclass(frozen=True, slots=True)
class Gpu:
    """What generated code depends on, as the driver reports it."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int  # of a block that asks for it
    l2_bytes: int
    memory_bytes: int
    measured: bool = False  # whether artifacts built here were run on one


GPUS = {
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 232448, 62914560, 150_000_000_000, measured=True),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 232448, 52428800, 85_000_000_000),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, 41943040, 85_000_000_000),
    "l40s": Gpu("NVIDIA L40S", (8, 9), 142, 101376, 100663296, 47_000_000_000),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 232448, 132644864, 190_000_000_000),
}


def why_no_pretending() -> str | None:
    """The reason why this torch cannot compile for a GPU that is not there, or None."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return None


def pretend_cuda(name: str) -> Gpu:
    """Patch this process so that cuda:0 is the named GPU. Call it before Dynamo or Inductor are imported."""
    reason = why_no_pretending()
    if reason is not None:
        raise BackendUnavailableError(f"cannot compile for {name}: {reason}", hint="install torch's CUDA build; it needs no GPU")
    if any(module in sys.modules for module in _LATER):
        raise BackendUnavailableError("Dynamo or Inductor are imported already", hint="use a fresh process")
    gpu = GPUS[name]
    _torch_sees(gpu)
    _fake_tensors_stay_fake()
    _triton_sees(gpu)
    _inductor_loads_nothing()
    return gpu


def _replace(owner: Any, name: str, value: Any) -> None:
    if not hasattr(owner, name):
        raise BackendUnavailableError(f"this torch has no {getattr(owner, '__name__', owner)}.{name}", hint="use torch 2.11")
    setattr(owner, name, value)


def _torch_sees(gpu: Gpu) -> None:
    major, minor = gpu.capability
    properties = types.SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        total_memory=gpu.memory_bytes,
        multi_processor_count=gpu.multiprocessors,
        L2_cache_size=gpu.l2_bytes,
        max_threads_per_multi_processor=1536 if gpu.capability == (8, 9) else 2048,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        warp_size=32,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=gpu.shared_bytes,
        shared_memory_per_multiprocessor=gpu.shared_bytes + 1024,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
        memory_bus_width=6144,
        memory_clock_rate=3201000,
        clock_rate=1980000,
    )
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: gpu.capability,
        "get_device_name": lambda device=None: gpu.name,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_tf32_supported": lambda: True,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "synchronize": lambda device=None: None,
        "mem_get_info": lambda device=None: (gpu.memory_bytes, gpu.memory_bytes),
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),  # Dynamo keeps the global state
        "set_rng_state": lambda state, device="cuda": None,
        "is_current_stream_capturing": lambda: False,
        "_lazy_init": lambda: None,
    }
    for name, answer in answers.items():
        _replace(torch.cuda, name, answer)


def _fake_tensors_stay_fake() -> None:
    import torch._subclasses.fake_tensor as fake_tensor

    _replace(fake_tensor, "init_gpu_context", lambda device: None)
    _replace(fake_tensor.FakeTensorMode, "avoid_device_init", property(lambda self: True))
    torch._C._ensureCUDADeviceGuardSet()  # the guard of CUDA devices becomes the one that does nothing
    _marks_count_on_fake_tensors()


def _marks_count_on_fake_tensors() -> None:
    """From 2.13 on Dynamo takes over the sizes of a fake tensor that another mode made, and so forgets which dimensions were marked;
    before, it did with them as with those of any tensor. Checked on 2.13.0 and 2.14.1; can go when marked sizes that are numbers become
    symbols in `transfer_symbols_from_foreign_shape_env`."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    taken_over = getattr(ShapeEnv, "transfer_symbols_from_foreign_shape_env", None)
    if taken_over is None:
        return

    def transfer(
        self: Any, sizes: Any, strides: Any, offset: Any, source: Any, *, symbolic_context: Any = None, hint_overrides: Any = None
    ) -> Any:
        named = {"symbolic_context": symbolic_context, "hint_overrides": hint_overrides}
        if symbolic_context is None or not all(type(size) is int for size in (*sizes, *strides, offset)):
            return taken_over(self, sizes, strides, offset, source, **named)
        return self._create_symbolic_sizes_strides_storage_offset(sizes, strides, offset, [False] * len(sizes), source, **named)

    _replace(ShapeEnv, "transfer_symbols_from_foreign_shape_env", transfer)


def _triton_sees(gpu: Gpu) -> None:
    from triton.backends.driver import GPUDriver
    from triton.backends.nvidia import driver

    properties = {
        "max_shared_mem": gpu.shared_bytes,
        "max_num_regs": 65536,
        "multiprocessor_count": gpu.multiprocessors,
        "warpSize": 32,
        "sm_clock_rate": 1980000,
        "mem_clock_rate": 3201000,
        "mem_bus_width": 6144,
    }

    def init(self: Any) -> None:
        self.utils = types.SimpleNamespace(get_device_properties=lambda device: properties, load_binary=None)
        self.launcher_cls = None
        GPUDriver.__init__(self)

    _replace(driver.CudaDriver, "__init__", init)
    _replace(driver.CudaDriver, "is_active", staticmethod(lambda: True))


def _inductor_loads_nothing() -> None:
    import torch._dynamo.variables.streams as streams
    import torch._inductor.fx_passes.joint_graph as joint_graph
    import torch._inductor.runtime.static_triton_launcher as static_launcher
    from triton.compiler.compiler import CompiledKernel

    # else it asks the driver for the current stream
    _replace(streams.SymbolicStreamState, "__init__", lambda self: setattr(self, "cur_stream_stack", collections.deque()))
    _replace(static_launcher.StaticallyLaunchedCudaKernel, "C_impl", _NoLauncher)

    def on_cpu(function: Any) -> Any:
        """Constant folding executes `full` on the device, and keeps the number alone."""

        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _on_cpu_mode():
                return function(self, *args, **kwargs)

        return run

    for name in ("__init__", "run"):
        _replace(joint_graph.UniformValueConstantFolder, name, on_cpu(getattr(joint_graph.UniformValueConstantFolder, name)))

    def init_handles(self: Any) -> None:
        self.module, self.function, self._run = 1, 1, lambda *args: None
        self.n_regs = self.n_spills = 0
        self.n_max_threads = 1024

    _replace(CompiledKernel, "_init_handles", init_handles)


class _NoLauncher:
    """Stands for the C++ launcher: reads the registers of a cubin from the file, as the driver would report them."""

    @staticmethod
    def _load_kernel(cubin_path: str, name: str, shared: int, device: int) -> tuple[int, ...]:
        registers, spills = _resources(cubin_path)
        loaded = (1, registers, spills)
        return loaded if torch.__version__ < "2.13" else (1, *loaded)  # from 2.13 on the module comes first

    @staticmethod
    def _unload_kernel(*_: Any) -> None:
        return None

    @staticmethod
    def _launch_kernel(*_: Any) -> None:
        raise BackendUnavailableError("there is no GPU here: a kernel was launched while compiling", hint="report the model")


def _resources(cubin_path: str) -> tuple[int, int]:
    """(registers, spilled words) of a kernel; Triton's wheel brings cuobjdump."""
    from triton.backends.nvidia import driver

    tool = Path(driver.__file__).parent / "bin" / "cuobjdump"
    text = subprocess.run([tool, "-res-usage", cubin_path], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    return (0, 0) if found is None else (int(found[1]), (int(found[2]) + int(found[3])) // 4)


def _on_cpu_mode() -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map_only

    class OnCpu(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cpu = torch.device("cpu")
            args, kwargs = tree_map_only(torch.device, lambda d: cpu if d.type == "cuda" else d, (args, dict(kwargs or {})))
            return func(*args, **kwargs)

    mode: Any = OnCpu
    return mode()


def without_memory(module: torch.nn.Module, inputs: Any, device: torch.device) -> Any:
    """Replace the tensors of a module by ones of the same layout on `device` that have no memory; returns `inputs` so replaced."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.utils._pytree import tree_map_only

    mode = FakeTensorMode(shape_env=ShapeEnv())
    made: dict[int, Any] = {}  # tied tensors stay tied

    def fake(tensor: torch.Tensor) -> Any:
        with mode:
            like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return torch.nn.Parameter(like, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else like

    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = (tensor, fake(tensor))  # the old one lives on, so that no other gets its id
                    table[name] = made[id(tensor)][1]
    return tree_map_only(torch.Tensor, fake, inputs)


def is_fake(value: Any) -> bool:
    """Whether a tensor has no memory."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)
