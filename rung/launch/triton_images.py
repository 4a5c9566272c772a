"""Images of our own Triton kernels: from the store where it has them, else compiled and kept there.

A kernel is named by the module and the function that hold it. The keys are over the source text of the module and of what it imports from
its own package, so a warm start imports neither the module nor Triton.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rung.cache import Manifest, Store, key_of
from rung.errors import ArtifactError, CacheError, CacheMissError, KernelExportError
from rung.launch.cuda_source import CudaKernel, why_no_nvrtc
from rung.launch.export import export_kernel
from rung.launch.image import KernelImage
from rung.launch.specialise import Specialisation
from rung.torch_compat import TritonParameter, triton_parameters, triton_version

_FORMAT = 2
_IMAGES = "kernels"
_PARAMETERS = "kernel-parameters"
_NVRTC = {"compiler": "NVRTC"}


class TritonImages:
    """The images of one kernel. `compiles` and `store_hits` count where they came from; `unsaved` says why the last was not kept, or is
    empty."""

    def __init__(self, module: str, name: str, store: Store) -> None:
        self.module, self.name, self.store = module, name, store
        self.compiles = self.store_hits = 0
        self.unsaved = ""
        self._ahead: dict[str, KernelImage] = {}  # built before a launch asked, by key
        self._factors = {"format": _FORMAT, "module": module, "kernel": name, "source": _source_hash(module), "triton": triton_version()}

    @property
    def title(self) -> str:
        return f"{self.module}:{self.name}"

    def parameters(self) -> tuple[TritonParameter, ...]:
        """The kernel's parameters."""
        key = key_of(self._factors)
        if (found := self._read(lambda: self.store.get(_PARAMETERS, key))) is not None:
            return tuple(TritonParameter(**parameter) for parameter in found.data["parameters"])
        kernel = self.kernel()
        parameters = kernel.parameters if isinstance(kernel, CudaKernel) else triton_parameters(kernel)
        data = {"parameters": [asdict(parameter) for parameter in parameters]} | (_NVRTC if isinstance(kernel, CudaKernel) else {})
        manifest = Manifest(kind=_PARAMETERS, key=key, title=self.title, factors=self._factors, data=data)
        self._write(lambda: self.store.put(manifest))
        return parameters

    def image(self, specialisation: Specialisation, options: Mapping[str, Any], capability: int) -> KernelImage:
        """The image for a specialisation. Raises `KernelExportError` when it does not compile."""
        image = self.find(specialisation, options, capability)
        compiled = image is None or self._ahead.pop(key_of(self._image_factors(specialisation, options, capability)), None) is not None
        if image is None:
            image = self._compile(specialisation, options, capability)
        self.compiles += compiled
        self.store_hits += not compiled
        return image

    def find(self, specialisation: Specialisation, options: Mapping[str, Any], capability: int) -> KernelImage | None:
        """The image where it was built ahead or the store has it, else None; `CacheMissError` where the store requires a hit. Counts
        nothing; any number of threads may call."""
        factors = self._image_factors(specialisation, options, capability)
        key = key_of(factors)
        found: KernelImage | None = self._ahead.get(key) or self._read(lambda: self._stored(key))
        if found is None and self.store.require_hit:
            why = self.store.explain_miss(_IMAGES, factors, title=self.title)
            compiler, hint = self._other_compiler()
            raise CacheMissError(f"kernel {self.title} would have to be compiled: {why}{compiler}", hint=hint)
        return found

    def compile_ahead(self, specialisation: Specialisation, options: Mapping[str, Any], capability: int) -> None:
        """Compile an image that nobody has, for the store and for `image`. Any number of threads may call."""
        image = self._compile(specialisation, options, capability)
        self._ahead[key_of(self._image_factors(specialisation, options, capability))] = image

    def keep_ahead(
        self, specialisation: Specialisation, options: Mapping[str, Any], capability: int, image: KernelImage, seconds: float
    ) -> None:
        """Take an image that another process compiled in so many seconds."""
        factors = self._image_factors(specialisation, options, capability)
        key = key_of(factors)
        self._write(lambda: self._keep(key, factors, image, {"compile": seconds}))
        self._ahead[key] = image

    def _compile(self, specialisation: Specialisation, options: Mapping[str, Any], capability: int) -> KernelImage:
        factors = self._image_factors(specialisation, options, capability)
        start = time.perf_counter()
        image = export_kernel(self.kernel(), specialisation, options, capability)
        seconds = {"compile": time.perf_counter() - start}
        self._write(lambda: self._keep(key_of(factors), factors, image, seconds))
        return image

    def _image_factors(self, specialisation: Specialisation, options: Mapping[str, Any], capability: int) -> dict[str, Any]:
        return {
            **self._factors,
            "capability": capability,
            "kinds": dict(specialisation.kinds),
            "constants": {name: repr(value) for name, value in specialisation.constants.items()},
            "divisible_by_16": sorted(specialisation.divisible_by_16),
            "options": {name: repr(value) for name, value in options.items()},
        }

    def kernel(self) -> Any:
        """The `@triton.jit` function itself, whose module imports Triton, or the `CudaKernel`."""
        return getattr(importlib.import_module(self.module), self.name)

    def _other_compiler(self) -> tuple[str, str]:
        """What NVRTC has to do with a miss, or nothing, and a hint. It is part of no key: with it another kernel is asked for, of the rows
        that no Triton kernel is good for."""
        filled_with = any(_NVRTC.items() <= manifest.data.items() for _, manifest in self.store.manifests(_PARAMETERS))
        missing = why_no_nvrtc()
        if self._is_cuda():
            if not filled_with and any(self.store.manifests(_IMAGES)):
                why = "; NVRTC: none where the store was filled (or no batch was large enough for the kernel) -> there is one"
                return why, "build it with `rung precompile` where NVRTC is: pip install nvidia-cuda-nvrtc cuda-bindings"
        elif filled_with and missing is not None:
            return (
                f"; NVRTC: where the store was filled -> {missing}",
                "pip install nvidia-cuda-nvrtc cuda-bindings, or fill a store without",
            )
        return "", "build it with `rung precompile`"

    def _is_cuda(self) -> bool:
        """Whether NVRTC compiles the kernel. Nobody needs Triton to be told what is missing."""
        found = self._read(lambda: self.store.get(_PARAMETERS, key_of(self._factors)))
        if found is not None:
            return bool(_NVRTC.items() <= found.data.items())
        try:
            return isinstance(self.kernel(), CudaKernel)
        except ImportError:
            return False

    def _stored(self, key: str) -> KernelImage | None:
        manifest = self.store.get(_IMAGES, key)
        return None if manifest is None else KernelImage.from_bytes(self.store.get_blob(manifest.blobs[0]))

    def _keep(self, key: str, factors: Mapping[str, object], image: KernelImage, seconds: Mapping[str, float]) -> None:
        blobs = (self.store.put_blob(image.to_bytes()),)
        self.store.put(Manifest(kind=_IMAGES, key=key, title=self.title, factors=factors, data={}, blobs=blobs, seconds=seconds))

    def _read(self, get: Callable[[], Any]) -> Any:
        try:
            return get()
        except ArtifactError as error:
            warnings.warn(f"a stored kernel could not be used and is built again: {error.message}", RuntimeWarning, stacklevel=2)
            return None

    def _write(self, put: Callable[[], None]) -> None:
        try:
            put()
        except CacheError as error:  # a store that cannot be written costs the next process a compile, and this one nothing
            self.unsaved = error.message


@functools.cache
def _source_hash(module: str) -> str:
    """Hash of the text of a module and, transitively, of the modules of its top package that it imports; nothing is imported."""
    texts: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise KernelExportError(f"there is no module {name}", hint="name the module that holds the kernel")
        texts[name] = Path(spec.origin).read_text(encoding="utf-8")
        waiting += [found for found in _imports(texts[name], module.partition(".")[0]) if found not in texts]
    return hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()


def _imports(text: str, package: str) -> list[str]:
    """The modules of `package` that a source imports by their full names."""
    nodes = list(ast.walk(ast.parse(text)))
    names = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return [name for name in names if name.startswith(package + ".")]
