"""How Triton specialises a kernel on its arguments, and the generated function that finds the specialisation of a call cheaply.

Triton's rules: an integer 1 becomes a constant; addresses and integers divisible by 16 are promised to be so; integers are 32 or 64 bits by
value. Parameters may be exempt (`do_not_specialize`, `do_not_specialize_on_alignment`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rung.errors import KernelArgumentError
from rung.launch.dtypes import kind_of_pointer
from rung.launch.grid import checked_grid
from rung.torch_compat import TritonParameter

OPTIONS = {"num_warps": 4, "num_stages": 3, "num_ctas": 1, "launch_pdl": False, "launch_cooperative_grid": False}


@dataclass(frozen=True, slots=True)
class Specialisation:
    """What a compile needs of a call's arguments."""

    kinds: Mapping[str, str]  # of the parameters that stay
    constants: Mapping[str, Any]  # constexprs, and integers that are 1
    divisible_by_16: tuple[str, ...]

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for specialisations that take one image."""
        return tuple(self.kinds.items()), tuple((name, repr(value)) for name, value in self.constants.items()), self.divisible_by_16


def _data_ptr(tensor: Any) -> int:
    return int(tensor.data_ptr())


def specialise(
    parameters: Sequence[TritonParameter],
    values: Sequence[Any],
    constants: Mapping[str, Any],
    *,
    address: Callable[[Any], int] = _data_ptr,
) -> Specialisation:
    """The specialisation of a call; `values` are those of the parameters that are no constexprs, in order. `address` says where a tensor
    lies, as far as its alignment counts."""
    kinds: dict[str, str] = {}
    fixed, divisible = dict(constants), []
    for parameter, value in zip([p for p in parameters if not p.constexpr], values, strict=True):
        kind, number = _kind(parameter, value, address)
        if parameter.by_value and kind in ("i32", "i64") and value == 1:
            fixed[parameter.name] = 1
            continue
        kinds[parameter.name] = kind
        if parameter.by_alignment and number is not None and number % 16 == 0:
            divisible.append(parameter.name)
    return Specialisation(kinds, fixed, tuple(divisible))


def _kind(parameter: TritonParameter, value: Any, address: Callable[[Any], int]) -> tuple[str, int | None]:
    """The kind of a value, and the number whose divisibility counts."""
    if isinstance(value, bool):
        return "u1", None
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise KernelArgumentError(
                f"{parameter.name} is an integer of {value.bit_length()} bits, more than 64", hint="pass a smaller number"
            )
        return "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64", value
    if isinstance(value, float):
        return "fp32", None
    if isinstance(value, bytes):
        return "tensormap", None
    if hasattr(value, "data_ptr"):
        return kind_of_pointer(value.dtype), address(value)
    raise KernelArgumentError(
        f"{parameter.name} must be a tensor or a number, got {type(value).__name__}", hint="pass a tensor, an int or a float"
    )


def generate_run(parameters: Sequence[TritonParameter], values: Sequence[Any], names: Mapping[str, Any]) -> Callable[..., None]:
    """`run(grid, *arguments, **constexprs_and_options)` for a kernel; the first call's `values` say which arguments are tensors.

    The key holds dtypes, devices and alignment of tensors, specialised integers as they are, constexprs and options; other numbers are not
    looked at before they are packed. `names` must give `find(key)`, `miss(key, values, constants, options)`, `current_device()`,
    `current_stream(ordinal)`, `record()` for the `LaunchRecord` that wants to know of the launch, or None, and its `driver`,
    `elsewhere(ordinal, entry, grid)` for another device than the current one, and
    `refused(ordinal, grid, entry, values, constants, options)` for numbers that do not fit the entry's parameters or a grid. An entry has
    `lock`, `pack_into`, `bytes` and `launch(x, y, z, stream)`."""
    arguments = [p for p in parameters if not p.constexpr]
    constexprs = [p.name for p in parameters if p.constexpr]
    if len(values) != len(arguments):
        raise KernelArgumentError(f"{len(values)} arguments for {', '.join(p.name for p in arguments)}", hint="pass constexprs by name")
    tensors = [p for p, value in zip(arguments, values, strict=True) if hasattr(value, "data_ptr")]
    if not tensors:
        raise KernelArgumentError("a kernel needs a tensor argument: its device is where the kernel runs", hint="pass one")
    address = {p.name: f"_address{index}" for index, p in enumerate(tensors)}
    aligned = [address[p.name] for p in tensors if p.by_alignment]
    numbers = [
        p.name
        for p, value in zip(arguments, values, strict=True)
        if isinstance(value, int) and not isinstance(value, bool) and (p.by_value or p.by_alignment)
    ]
    key = ["_device", *(f"{p.name}.get_device()" for p in tensors[1:]), *(f"{p.name}.dtype" for p in tensors), "_aligned"]
    key += [*numbers, *constexprs, *OPTIONS]
    packed = [address.get(p.name, p.name) for p in arguments]
    given = f"({', '.join(p.name for p in arguments)},), {{{', '.join(f'{n!r}: {n}' for n in constexprs)}}}, "
    given += f"{{{', '.join(f'{n!r}: {n}' for n in OPTIONS)}}}"
    lines = [
        f"def run(_grid, {', '.join(p.name for p in arguments)}, *, "
        + ", ".join([*constexprs, *(f"{name}={default!r}" for name, default in OPTIONS.items())])
        + "):",
        "    try:",
        "        _x, _y, _z = _grid",
        "    except (TypeError, ValueError):",
        "        _checked_grid(_grid)",
        "        raise",
        "    if not (_x and _y and _z):",
        "        return",
        f"    _device = {tensors[0].name}.get_device()",
        *(f"    {place} = {name}.data_ptr()" for name, place in address.items()),
        f"    _aligned = ({' | '.join(aligned or ['0'])}) & 15",
        "    if _aligned:",
        f"        _aligned = ({''.join(f'{place} & 15 == 0, ' for place in aligned)})",
        f"    _key = ({', '.join(key)},)",
        "    _entry = _find(_key)",
        "    if _entry is None:",
        f"        _entry = _miss(_key, {given})",
        "    try:",
        "        with _entry.lock:",
        f"            _entry.pack_into(_entry.bytes, 0, {', '.join(packed)})",
        "            if _device == _current_device():",
        "                _entry.launch(_x, _y, _z, _current_stream(_device))",
        "                if (_written := _record()) is not None:",
        "                    _written.bound(_entry, (_x, _y, _z), _device, _driver)",
        "            else:",
        "                _elsewhere(_device, _entry, _grid)",
        "    except _misfits:",
        f"        _refused(_device, _grid, _entry, {given})",
    ]
    space: dict[str, Any] = {f"_{name}": value for name, value in names.items()}
    space["_misfits"] = (struct.error, OverflowError, TypeError)  # of a number, or of the grid's, which cuda-bindings refuse
    space["_checked_grid"] = checked_grid
    exec("\n".join(lines), space)
    run: Callable[..., None] = space["run"]
    return run
