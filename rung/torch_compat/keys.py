"""What of torch, its compiler and a device can change generated code. Nothing here imports the compiler: a warm start computes keys too."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from rung.torch_compat.triton_compile import triton_version

_CONFIG = "torch._inductor.config"
# Settings that change no code: what torch leaves out of its own keys, what is cached where, and how compiles are run.
_NO_CODE = re.compile(
    r"_|trace\.|(cuda|cutlass|xpu)\.cutlass_dir|worker_|compile_threads|compile_worker|quiesce|joint_custom|pre_grad_custom|pre_grad_pass"
    r"|post_grad_custom|cpp\.vec_isa_ok|fx_graph_|(autotune|bundled_autotune)_(local|remote)_cache|.*binary_remote_cache|remote_gemm|bundle_"
    r"|search_autotune|cudagraph_policy|unsafe_|profile_|precompilation_timeout|file_lock|log_tlparse|generate_intermediate|save_args"
    r"|verbose|debug$|enabled_metric|force_disable_c|non_blocking_remote|(use|strict)_static_triton"
)
# The same for the variables of the environment that torch's configuration reads when it is imported.
_NO_CODE_VARIABLES = re.compile(
    r"TORCHINDUCTOR_(COMPILE_THREADS|WORKER_|VEC_ISA_OK|SAVE_ARGS|FILE_LOCK|QUIESCE|PRECOMPILATION|PROFILE|ENABLED_METRIC|DEFAULT_AUTOTUNE"
    r"|COMPILE_WORKER|DISTRIBUTED_|FX_GRAPH|AUTOGRAD|AUTOTUNE_(LOCAL|REMOTE|NUM|IN_SUBPROC|MULTI)|BUNDLE|FORCE_DISABLE|NON_BLOCKING"
    r"|RUN_JIT|PROVENANCE|REMOTE|KEEP_STATIC|TRITON_PROTON|COLLECTIVE|WARN_|.*(STATIC_CUDA_LAUNCHER|_DIR|_PATH)$)"
    r"|(?!TORCHINDUCTOR_|ENABLE_|CUTEDSL_)"
)


def toolchain_factors(device_type: str = "cpu") -> dict[str, Any]:
    """What in torch and the compilers below it can change generated code for such a device."""
    below = {"triton": triton_version()} if device_type == "cuda" else {"cpu": torch.backends.cpu.get_cpu_capability()}
    cpu = device_type == "cpu"
    changed = {name: value for name, value in _changed_settings().items() if cpu or not name.startswith("cpp.")}
    variables = {name: os.environ[name] for name in _variables() if name in os.environ}
    return {
        "torch": torch.__version__,
        "torch_sources": _sources_hash(),
        "cuda": str(torch.version.cuda),
        "inductor_changed": changed,
        "inductor_variables": {n: v for n, v in variables.items() if cpu or not n.startswith("TORCHINDUCTOR_CPP_")},
        **below,
    }


def _root() -> Path:
    return Path(torch.__file__).parent / "_inductor"


@functools.cache
def _sources_hash() -> str:
    """Hash of the sources of Inductor, as torch's own `torch_key` has it; 10 MB, 0.03 s."""
    hasher = hashlib.sha256(str(torch.version.git_version).encode())
    root = _root()
    for path in sorted(root.rglob("*.py")):
        hasher.update(path.relative_to(root).as_posix().encode())
        hasher.update(path.read_bytes())
    return hasher.hexdigest()


@functools.cache
def _variables() -> tuple[str, ...]:
    """Names of the variables that Inductor's configuration reads and that can change code."""
    text = (_root() / "config.py").read_text(encoding="utf-8")
    found = sorted(set(re.findall(r"[\"']([A-Z][A-Z0-9_]{4,})[\"']", text)))
    return tuple(name for name in found if not _NO_CODE_VARIABLES.match(name))


def _changed_settings() -> dict[str, str]:
    """What Python code changed in Inductor's configuration. Nobody did where it is not imported."""
    config: Any = sys.modules.get(_CONFIG)
    if config is None:
        return {}
    found = {}
    for name, entry in config._config.items():
        value = entry.user_override
        value = value.get() if isinstance(value, ContextVar) else value  # a ContextVar from 2.13 on
        if type(value) is object or _NO_CODE.match(name):  # the sentinel of what was not set
            continue
        if repr(value) != repr(entry.default):
            found[name] = repr(value)
    return dict(sorted(found.items()))


def device_factors(device: torch.device) -> dict[str, str]:
    """What of a device enters generated code: never its ordinal."""
    if device.type != "cuda":
        return {"device": device.type}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
    }
