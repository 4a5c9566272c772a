"""Inputs that generated kernels take for aligned: looked at in every call, copied where they are not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

ALIGNMENT = 16  # bytes that generated kernels rely on
Call = Callable[[list[Any]], Sequence[Any]]


def aligned_entry(call: Call, checked: Sequence[int], written: Collection[int], names: dict[str, Any]) -> Call:
    """`call` behind a look at the addresses of the inputs `checked`; those of them in `written` get back what `call` wrote into a copy.

    The entry is a function over `names`, as `call` is."""
    if not checked:
        return call

    def realigned(args: list[Any]) -> Sequence[Any]:
        copies = []
        for index in checked:
            given = args[index]
            if given.data_ptr() % ALIGNMENT:
                args[index] = aligned_copy(given)
                copies += [(given, args[index])] if index in written else []
        results = call(args)
        for given, copy in copies:
            given.copy_(copy)
        return results

    names |= {"_call": call, "_realigned": realigned}
    addresses = " | ".join(f"args[{index}].data_ptr()" for index in checked)
    exec(f"def _entry(args):\n    return _realigned(args) if ({addresses}) & {ALIGNMENT - 1} else _call(args)\n", names)
    entry: Call = names["_entry"]
    return entry


def aligned_copy(tensor: Any) -> Any:
    """A copy of the same sizes and strides, overlapping elements included, at an address of its own."""
    extent = 0 if 0 in tensor.shape else sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.as_strided((extent,), (1,)).clone().as_strided(tensor.shape, tensor.stride())
