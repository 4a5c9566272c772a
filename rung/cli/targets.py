"""What `rung bench` may be pointed at: a model, or `module:attr` with an input builder."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rung import torch_compat
from rung.errors import ConfigError, RungError

Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # positional and named arguments


def is_module_target(target: str) -> bool:
    """Whether `target` reads `module:attr` and is no file."""
    return ":" in target and not Path(target).exists()


def import_object(text: str, option: str) -> Any:
    """The object that `package.module:attr.attr` names; the current folder is searched too. Raises `ConfigError`."""
    module_name, _, path = text.partition(":")
    if not module_name or not path:
        raise ConfigError(f"{option}: expected module:attr, got {text!r}", hint="for example examples.wrap_mlp:build")
    if "" not in sys.path:
        sys.path.insert(0, "")
    with _users(f"{option}: {module_name!r} cannot be imported"):
        try:
            found: Any = importlib.import_module(module_name)
        except ImportError as error:
            raise ConfigError(
                f"{option}: {module_name!r} cannot be imported: {error}", hint="run from the folder that holds the module"
            ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{option}: {module_name!r} has no {path!r}", hint="name an attribute of the module")
        found = getattr(found, part)
    return found


def open_module(text: str, inputs: str | None, dtype: torch.dtype | None, device: torch.device) -> tuple[nn.Module, InputBuilder]:
    """The module that a target names, and the builder of its inputs. Raises `ConfigError`, before anything is built when one is missing."""
    if inputs is None:
        raise missing_inputs(text)
    found = import_object(text, "TARGET")
    build = InputBuilder(import_object(inputs, "--inputs"), device)
    module = _module_of(found, text)
    return (module if dtype is None else module.to(dtype)), build


def missing_inputs(text: str) -> ConfigError:
    """What is wrong with a target that came without --inputs: above all that it cannot be imported."""
    try:
        import_object(text, "TARGET")
    except ConfigError as error:
        return error
    return ConfigError(f"{text} needs --inputs", hint="name a function that takes a size and returns the arguments of forward")


def _module_of(found: Any, text: str) -> nn.Module:
    """The `nn.Module` that a target names: an instance, or a class or function that builds one without arguments."""
    if not isinstance(found, nn.Module) and callable(found):
        with _users(f"TARGET: {text}() failed"):
            found = found()
    if not isinstance(found, nn.Module):
        raise ConfigError(f"{text} is a {type(found).__name__}, not an nn.Module", hint="name a module, or a function that returns one")
    return found.eval().requires_grad_(False)


@contextmanager
def _users(what: str) -> Iterator[None]:
    """The user's code runs inside of the block: its errors become a `ConfigError`, those of rung are left."""
    try:
        yield
    except RungError:
        raise
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if torch_compat.is_user_file(frame.filename)]
        place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames and not frames[-1].filename.startswith("<") else ""
        hint = "run again with --debug for the traceback"
        raise ConfigError(f"{what}{place}: {type(error).__name__}: {error}", hint=hint) from error


class InputBuilder:
    """Calls the user's function and gives its result one form."""

    def __init__(self, function: Callable[[int], Any], device: torch.device) -> None:
        self._function = function
        self._device = device

    def __call__(self, size: int, seed: int = 0) -> Inputs:
        """The arguments for `size`, on the device; random numbers drawn from torch's generator depend on `seed`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            with _users(f"--inputs: the function failed for size {size}"):
                made = self._function(size)
        if isinstance(made, Mapping):
            return (), {name: self._place(value) for name, value in made.items()}
        values = made if isinstance(made, tuple | list) else (made,)
        return tuple(self._place(value) for value in values), {}

    def _place(self, value: Any) -> Any:
        return value.to(self._device) if isinstance(value, torch.Tensor) else value


def growing_dims(module: nn.Module, build: InputBuilder, sizes: tuple[int, int], name: str) -> dict[str, dict[int, str]]:
    """Argument -> {dim: name}: the dimensions that differ between the inputs of two sizes. Raises `ConfigError` when there is none."""
    signature = inspect.signature(module.forward)
    made = [build(size) for size in sizes]
    try:
        small, large = (signature.bind(*args, **kwargs).arguments for args, kwargs in made)
    except TypeError as error:
        hint = "return the arguments of forward: one, a tuple, or a mapping of names"
        raise ConfigError(f"--inputs: they do not fit forward: {error}", hint=hint) from error
    dims: dict[str, dict[int, str]] = {}
    for argument, value in small.items():
        if not isinstance(value, torch.Tensor):
            continue
        grown = [dim for dim, (a, b) in enumerate(zip(value.shape, large[argument].shape, strict=True)) if a != b]
        if grown:
            dims[argument] = dict.fromkeys(grown, name)
    if not dims:
        raise ConfigError(
            f"--inputs: no dimension differs between sizes {sizes[0]} and {sizes[1]}", hint="let the builder use its argument"
        )
    return dims
