"""Ops, trees and storages below the dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils import _pytree as pytree  # public only as torch.utils._pytree
from torch.utils._python_dispatch import TorchDispatchMode as _DispatchMode  # there is no public name

OpOverload = torch._ops.OpOverload  # one overload of a registered op


class TorchDispatchMode(_DispatchMode):
    """The base of dispatch modes. torch wraps the method of each mode so that Dynamo does not trace it, which imports Dynamo at its first
    call; nothing of ours is traced while a mode of ours is on."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def single_overload(target: Any) -> Any:
    """The overload behind an op packet that has only one; anything else as it is."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        names = target.overloads()
        return getattr(target, names[0]) if len(names) == 1 else target
    return target


def num_updates(tensor: torch.Tensor) -> int:
    """How often the tensor, or one with its memory, was updated in place by ops of torch; 0 where nobody counts.

    Checked on torch 2.11 and 2.13."""
    return 0 if tensor.is_inference() else tensor._version


def op_names() -> set[str]:
    """Every registered op as "namespace::name", whatever overloads it has."""
    return {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}


def packet_name(target: Any) -> str:
    """The "namespace::name" of an op packet, an empty text for anything else."""
    return str(target._qualified_op_name) if isinstance(target, torch._ops.OpOverloadPacket) else ""


def torch_name(target: Any) -> str:
    """The name of a function of torch or of an ATen op, also where it stands for the one of numpy; an empty text for anything else."""
    if isinstance(target, OpOverload | torch._ops.OpOverloadPacket):
        qualified = target.name() if isinstance(target, OpOverload) else packet_name(target)
        namespace, _, name = qualified.partition("::")
        return name.partition(".")[0] if namespace == "aten" else ""
    name = str(getattr(target, "__name__", ""))
    return name.removeprefix("wrapped_") if name.startswith("wrapped_") else name if getattr(torch, name, None) is target else ""


def is_python_op(function: Any) -> bool:
    """Whether an OpOverload was defined from Python, so that its kernels are Python too."""
    return bool(getattr(function, "_defined_in_python", False))


def call_device_kernel(function: Any, device_type: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Call the CPU or CUDA kernel of an OpOverload below the Python dispatch key: a dispatch mode then sees what the kernel calls, not the
    op."""
    key = torch._C.DispatchKey.CUDA if device_type == "cuda" else torch._C.DispatchKey.CPU
    return function.redispatch(torch._C.DispatchKeySet(key), *arguments, **keywords)


def in_dispatch_mode() -> bool:
    """Whether a Python dispatch mode sees the operations of this thread."""
    return bool(torch._C._len_torch_dispatch_stack())


def python_dispatcher() -> AbstractContextManager[Any]:
    """Composite ops run by their Python decompositions, as in a trace. Their C++ bodies ask for sizes as numbers, so that 2.11 and 2.12 can
    run a batched matmul on a free size only so (pytorch/pytorch#183398). Can go with 2.12."""
    from torch._dispatch.python import enable_python_dispatcher

    dispatcher: AbstractContextManager[Any] = enable_python_dispatcher()
    return dispatcher


def transforming() -> bool:
    """Whether somebody watches or transforms the operations of this thread one by one: a dispatch mode, torch.func, torch.jit.trace."""
    return any(check() for check in transform_checks())


def transform_checks() -> tuple[Callable[[], Any], ...]:
    """What `transforming` asks: functions whose result is false where nobody does."""
    return torch._C._len_torch_dispatch_stack, torch._C._functorch.maybe_current_level, torch._C._get_tracing_state


def no_dispatch_modes() -> AbstractContextManager[Any]:
    """Operations inside go past all Python dispatch modes."""
    from torch.utils._python_dispatch import _disable_current_modes

    modes: AbstractContextManager[Any] = _disable_current_modes()
    return modes


def occupy_stream(cycles: int) -> None:
    """Keep the current CUDA stream busy for so many clock cycles. Can go when torch has a public kernel that waits."""
    torch.cuda._sleep(cycles)


def tree_leaves(values: Any) -> list[Any]:
    """The leaves of nested tuples, lists and dicts."""
    return list(pytree.tree_leaves(values))


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """Apply `function` to every tensor of nested tuples, lists and dicts."""
    return pytree.tree_map_only(torch.Tensor, function, values)


def storage_identity(tensor: torch.Tensor) -> int:
    """Equal for tensors (fake ones too) that share a storage."""
    return int(tensor.untyped_storage()._cdata)


def storage_use_count(tensor: torch.Tensor) -> int:
    """How many tensors share the storage of `tensor`, itself included. Can go when torch shows publicly that memory is free."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # one reference is `storage` itself


def generator_key(generator: torch.Generator) -> int:
    """Tells generators apart: a dispatch mode is given a new Python object for the same one. Can go when they compare equal."""
    return int(generator._cdata)  # type: ignore[attr-defined]


def end_allocation_to_pool(device: torch.device, handle: tuple[int, int]) -> None:
    """Take the caching allocator out of capture mode after a capture that could not be ended: until then it refuses `empty_cache` and
    retries after running out of memory (pytorch/pytorch#190308). Raises when the failed end has done it already."""
    torch._C._cuda_endAllocateToPool(device.index or 0, handle)


def is_op(value: object) -> bool:
    """Whether an object is a registered op, with or without its overload named."""
    from torch._ops import OpOverload, OpOverloadPacket

    return isinstance(value, OpOverload | OpOverloadPacket)
