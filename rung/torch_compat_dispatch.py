"""Private torch APIs that the recorded graph backend stands on: dispatch modes and storage counts. Checked on torch 2.11.0 and 2.13.0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # there is no public name


def storage_use_count(tensor: torch.Tensor) -> int:
    """How many tensors share the storage of `tensor`, itself included. Can go when torch shows publicly that memory is free."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # one reference is `storage` itself


def is_python_op(function: Any) -> bool:
    """Whether an OpOverload was defined from Python, so that its kernels are Python too."""
    return bool(getattr(function, "_defined_in_python", False))


def call_cpu_kernel(function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Call the CPU kernel of an OpOverload below the Python dispatch key: a dispatch mode then sees what the kernel calls, not the op."""
    return function.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *arguments, **keywords)


def generator_key(generator: torch.Generator) -> int:
    """Tells generators apart: a dispatch mode is given a new Python object for the same one. Can go when they compare equal."""
    return int(generator._cdata)  # type: ignore[attr-defined]
