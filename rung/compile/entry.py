"""The callable that stands in for a wrapped function: finds or makes the variant for a call, or runs eagerly with a counted reason."""

from __future__ import annotations

import functools
import itertools
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any

import torch

from rung import config as configuration
from rung import torch_compat
from rung.cache import open_store
from rung.compile.arguments import Leaf, Signature, dynamic_dims, has_strides, leaves, signature_of
from rung.compile.driver import Driver
from rung.compile.fingerprint import RuntimeState
from rung.compile.paths import Path
from rung.compile.signature import own_signature
from rung.compile.variant import Variant, modes
from rung.config import CompileConfig
from rung.counters import Count, Counters
from rung.errors import GuardError, InputMismatchError, LazyStateError, UnsupportedModuleError

_log = logging.getLogger(__name__)


class EagerReason(StrEnum):
    """Why a call of a wrapped function did not run compiled."""

    DISABLED = "disabled"  # RUNG_DISABLE is set
    GRADIENT = "gradient"  # a gradient could be asked for; compiled functions are for inference
    AUTOCAST = "autocast"  # the ambient autocast would change the dtypes that were traced
    TENSOR_SUBCLASS = "tensor_subclass"  # an argument is no plain tensor
    LAYOUT = "layout"  # an argument, a parameter or a buffer is sparse, quantized or nested
    SHARED_MEMORY = "shared_memory"  # the function writes a tensor that shares memory with another argument
    EMPTY = "empty"  # a dynamic dimension has size 0; code is generated for sizes from 1
    LAZY_STATE = "lazy_state"  # forward makes attributes at its first call that later ones read
    GLOBAL_HOOKS = "global_hooks"  # hooks of all modules are registered, which also run around modules that compiled code has inside
    META = "meta"  # an argument has no memory
    VALUES = "values"  # a graph of torch.compile reads a number or a size from a tensor
    TRANSFORM = "transform"  # somebody watches or transforms single operations: a dispatch mode, torch.func, torch.jit.trace


class Entry(RuntimeState):
    """Callable with the signature of `function` (a function or a bound method). One lock guards compiling; calls need none."""

    def __init__(
        self,
        function: Callable[..., Any],
        config: CompileConfig,
        counters: Counters | None = None,
        *,
        prepare: Callable[[Entry, Variant], None] | None = None,
    ) -> None:
        self.function = function
        self.config = config
        self.counters = Counters() if counters is None else counters
        self.variants: dict[Signature, Variant] = {}
        self._prepare = prepare  # gives a new variant its graphs
        self._fixed: set[tuple[str, int]] = set()  # (argument, dim) that nobody declared and that a trace fixed
        self._chain: list[Variant] = []  # in the order in which their generated entries are tried
        self._fast: Callable[..., Any] | None = None  # the first of them
        self._lock = threading.RLock()
        functools.update_wrapper(self, function)

    @property
    def __code__(self) -> types.CodeType:
        """Of the wrapped function, for torch.export, which takes `forward` for a function."""
        return getattr(self.function, "__func__", self.function).__code__

    @property
    def owner(self) -> Any:
        return getattr(self.function, "__self__", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.function(*args, **kwargs)
        fast = self._fast
        return self._slow(*args, **kwargs) if fast is None else fast(*args, **kwargs)

    def _slow(self, *args: Any, **kwargs: Any) -> Any:
        return self.call_variant(lambda variant, inputs: variant.run(*inputs), args, kwargs)

    def call_variant(self, call: Callable[[Variant, list[Any]], Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call with every check, in which a compiled one goes through `call(variant, inputs)`."""
        bound = own_signature(self.function).bind(*args, **kwargs)
        bound.apply_defaults()
        found = leaves(bound.arguments)
        reason = self._eager_reason(found, dynamic_dims(self.function, found, self.config.dynamic))
        if reason is None:
            try:
                variant = self.variant(bound.arguments, found)
            except LazyStateError as lazy:
                return self._first_call(lazy, args, kwargs)
            if not variant.overlaps(bound.arguments):
                variant.check_sizes(bound.arguments)
                return call(variant, variant.inputs(bound.arguments))
            reason = EagerReason.SHARED_MEMORY
        self.counters.add(Count.EAGER_CALLS)
        self.counters.add(f"eager.{reason}")
        return self.function(*args, **kwargs)

    def _first_call(self, lazy: LazyStateError, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run eagerly what makes state for later calls; the next one is traced. State stays usable outside of inference mode."""
        self.counters.add(Count.EAGER_CALLS)
        self.counters.add(f"eager.{EagerReason.LAZY_STATE}")
        _log.info("%s: ran eagerly, since it makes %s", getattr(self.function, "__qualname__", self.function), ", ".join(lazy.names))
        result = self.function(*args, **kwargs)
        for name in lazy.names:
            path, _, attribute = name.rpartition(".")
            holder = self.owner.get_submodule(path)
            value = getattr(holder, attribute, None)
            if isinstance(value, torch.Tensor) and value.is_inference():
                with torch.inference_mode(False):
                    setattr(holder, attribute, value.clone())
        return result

    def prepare_call(self, *args: Any, **kwargs: Any) -> tuple[Variant, list[Any]]:
        """The variant for these arguments and the tensors that its `run` takes, without running it."""
        bound = own_signature(self.function).bind(*args, **kwargs)
        bound.apply_defaults()
        variant = self.variant(bound.arguments)
        return variant, variant.inputs(bound.arguments)

    def variant(self, locals_: Mapping[str, Any], found: list[Leaf] | None = None) -> Variant:
        """The variant for these bound arguments, compiled or loaded if it is new."""
        found = leaves(locals_) if found is None else found
        dims = self._free(dynamic_dims(self.function, found, self.config.dynamic))
        key = self._key(found, dims)
        variant, _ = self._known(key)
        if variant is None:
            with self._lock:
                variant, violated = self._known(key)
                if variant is None:
                    variant = self._compile(key, locals_, found, dims, violated)
        if variant.fast is None or self._fast is None:
            with self._lock:
                self._link(variant)
        return variant

    def _link(self, variant: Variant) -> None:
        """Put the variant's generated entry behind those of the others: each calls the next where its checks fail."""
        if variant.fast is None:
            variant.fast = variant.entry(self.function, self.owner, self._slow)
            if self._chain:
                self._chain[-1].miss = variant.fast
            self._chain.append(variant)
        self._fast = self._chain[0].fast if self._chain else None

    def _known(self, key: Signature) -> tuple[Variant | None, str]:
        """The variant of this signature that was traced from things as they are now; without one, what the last of its kind read that was
        changed."""
        violated = ""
        for state in itertools.count():
            variant = self.variants.get((*key, state))
            if variant is None:
                return None, violated
            with self._lock:
                violated = variant.violation(self.owner)
                if not violated:
                    return variant, ""
        raise AssertionError

    def _compile(
        self, key: Signature, locals_: Mapping[str, Any], found: list[Leaf], dims: dict[str, dict[int, str]], violated: str
    ) -> Variant:
        if violated and self.config.on_guard_violation == "raise":
            raise GuardError(
                f"{getattr(self.function, '__qualname__', self.function)} was traced when {violated}",
                hint='put it back, wrap again, or pass on_guard_violation="retrace"',
            )
        if len(self.variants) >= self.config.max_variants:
            raise InputMismatchError(
                f"{getattr(self.function, '__qualname__', self.function)} was called with {len(self.variants) + 1} different signatures; "
                f"the last differs in {violated or self._difference(key)}",
                hint="pass changing numbers as tensors, name changing dimensions in `dynamic`, or raise `max_variants`",
            )
        if any(torch_compat.global_hooks()):  # a call would run eagerly; this one asked for compiled code
            raise UnsupportedModuleError(
                "hooks of all modules are registered (such as by register_module_forward_hook of torch), which compiled code does not run",
                hint="remove them while it is compiled",
            )
        driver = Driver(self.config, open_store(self.counters), self.counters)
        tensors = [(path, value) for path, value in found if isinstance(value, torch.Tensor)]
        compiled, report = driver.compile(self.function, locals_, tensors, dims)
        fixed = {
            (path.dotted(), dim)
            for path, spec in compiled.plan.tensors
            for dim in dims.get(path.dotted(), {})
            if isinstance(spec.shape[dim], int)
        }
        if fixed:
            self._fixed |= fixed
            key = self._key(found, self._free(dims))
        if violated:
            self.counters.add(Count.GUARD_RETRACES)
            report.retraced = violated
            _log.info("%s was traced again: %s", getattr(self.function, "__qualname__", self.function), violated)
        variant = Variant(compiled, report, found, self.function, self.config.drop_guards)
        if self._prepare is not None:
            self._prepare(self, variant)
        self.variants[(*key, next(n for n in itertools.count() if (*key, n) not in self.variants))] = variant
        return variant

    def _key(self, found: list[Leaf], dims: Mapping[str, Mapping[int, str]]) -> Signature:
        return (*signature_of(found, dims), modes(), getattr(self.owner, "training", None))

    def _free(self, dims: dict[str, dict[int, str]]) -> dict[str, dict[int, str]]:
        return {name: {dim: symbol for dim, symbol in d.items() if (name, dim) not in self._fixed} for name, d in dims.items()}

    def _difference(self, key: Signature) -> str:
        last = next(reversed(self.variants))
        changed = [new for old, new in zip(last, key, strict=False) if old != new]
        return ", ".join(_name_of(item) for item in changed) or "attributes of the module that its forward reads"

    def _eager_reason(self, found: list[Leaf], dims: Mapping[str, Mapping[int, str]]) -> EagerReason | None:
        tensors = [value for _, value in found if isinstance(value, torch.Tensor)]
        if configuration.disabled():
            return EagerReason.DISABLED
        if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in tensors):
            return EagerReason.TENSOR_SUBCLASS
        if not all(map(has_strides, (*tensors, *self._weights()))):
            return EagerReason.LAYOUT
        if torch_compat.transforming():
            return EagerReason.TRANSFORM
        if any(torch_compat.global_hooks()):
            return EagerReason.GLOBAL_HOOKS
        if any(tensor.is_meta for tensor in tensors):
            return EagerReason.META
        if torch.is_grad_enabled() and (any(t.requires_grad for t in tensors) or self._weights_need_grad()):
            return EagerReason.GRADIENT
        if any(torch.is_autocast_enabled(device_type) for device_type in {tensor.device.type for tensor in tensors}):
            return EagerReason.AUTOCAST
        named = [(value, dims[path.dotted()]) for path, value in found if isinstance(value, torch.Tensor) and path.dotted() in dims]
        if any(dim < value.dim() and value.shape[dim] == 0 for value, names in named for dim in names):
            return EagerReason.EMPTY
        return None

    def _weights_need_grad(self) -> bool:
        return isinstance(self.owner, torch.nn.Module) and any(parameter.requires_grad for parameter in self.owner.parameters())

    def _weights(self) -> Iterator[torch.Tensor]:
        return itertools.chain(self.owner.parameters(), self.owner.buffers()) if isinstance(self.owner, torch.nn.Module) else iter(())

    def weights_changed(self, *, recapture: bool = False) -> None:
        """Read the module's tensors again, after parameters were replaced; `recapture` captures again what was captured."""
        with self._lock:
            for variant in self.variants.values():
                if not variant.state.violation():
                    variant.replaced(self.owner, recapture=recapture)
            self._fast = None

    def release(self) -> None:
        """Drop all variants."""
        with self._lock:
            for variant in self.variants.values():
                variant.release()
            self.variants.clear()
            self._chain.clear()
            self._fast = None

    # --- copies start uncompiled: they own no trace of the original ---------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Entry:
        import copy

        owner = self.owner
        function: Any = self.function
        if owner is not None:
            function = types.MethodType(function.__func__, copy.deepcopy(owner, memo))
        return Entry(function, self.config, prepare=self._prepare)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """A decorated function is found by its name, like any function."""
        name = getattr(self.function, "__qualname__", "")
        if self.owner is None and getattr(sys.modules.get(self.function.__module__), name, None) is self:
            return name
        return (_rebuild, (self.function, self.config, self._prepare))


def _name_of(item: Any) -> str:
    """What an item of a key stands for."""
    if isinstance(item, tuple):
        return str(item[0].dotted()) if isinstance(item[0], Path) else "the default dtype or another global mode"
    return "training"


def _rebuild(function: Callable[..., Any], config: CompileConfig, prepare: Callable[[Entry, Variant], None] | None) -> Entry:
    return Entry(undecorated(function), config, prepare=prepare)


def is_decorated(function: object) -> bool:
    """Whether `function` is the method of a decorated class itself; what another decorator puts around it has its attributes too."""
    original = getattr(function, "__rung_original__", None)
    return original is not None and original is getattr(function, "__wrapped__", None)


def undecorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """The method behind one of a decorated class: a copy out of a pickle finds the decorated one, which calls the entry."""
    if not is_decorated(function):
        return function
    original: Callable[..., Any] = function.__rung_original__  # type: ignore[attr-defined]
    owner = getattr(function, "__self__", None)
    return original if owner is None else original.__get__(owner)
