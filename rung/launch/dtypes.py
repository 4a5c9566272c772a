"""Names of element types: torch's dtypes in the words of kernel signatures."""

from __future__ import annotations

from rung.errors import KernelArgumentError

_KINDS = {
    "bool": "u1", "uint8": "u8", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "uint16": "u16", "uint32": "u32",
    "uint64": "u64", "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64",
    "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5",
}  # fmt: skip


def kind_of_pointer(dtype: object) -> str:
    """ "*bf16" for torch.bfloat16. Raises `KernelArgumentError` for a dtype that kernels do not know."""
    name = str(dtype).removeprefix("torch.")
    if name not in _KINDS:
        raise KernelArgumentError(f"kernels take no tensors of {dtype}", hint=f"known are {', '.join(_KINDS)}")
    return f"*{_KINDS[name]}"


def accepts(kind: str, dtype: object) -> bool:
    """Whether a pointer parameter of `kind` may point to elements of `dtype`; "*k..." is a pointer to constants."""
    given = kind_of_pointer(dtype)
    return given in (kind, kind.replace("*k", "*")) or (given == "*u1" and kind == "*i1")
