"""What of torch, its compiler and a device can change generated code."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from rung.torch_compat.triton_compile import triton_version


def toolchain_factors(device_type: str = "cpu") -> dict[str, Any]:
    """What in torch and the compilers below it can change generated code for such a device."""
    from torch._inductor import config as inductor_config
    from torch._inductor.codecache import torch_key

    found = {name: value for name, value in inductor_config.save_config_portable().items() if name != "cpp.vec_isa_ok"}  # saves a test
    portable = sorted((name, repr(value)) for name, value in found.items() if device_type == "cpu" or not name.startswith("cpp."))
    below = {"triton": triton_version()} if device_type == "cuda" else {"cpu": torch.backends.cpu.get_cpu_capability()}
    return {
        "torch": torch.__version__,
        "torch_key": torch_key().hex(),
        "cuda": str(torch.version.cuda),
        "inductor_config": hashlib.sha256(repr(portable).encode()).hexdigest(),
        "inductor_changed": _changed_settings(inductor_config, portable),
        **below,
    }


def _changed_settings(config: Any, portable: list[tuple[str, str]]) -> dict[str, str]:
    """The settings that somebody changed, so that a miss can name them."""
    entries = getattr(config, "_config", {})  # name -> entry with `default`; without it a miss names the hash alone
    defaults = {name: repr(getattr(entries.get(name), "default", None)) for name, _ in portable}
    return {name: value for name, value in portable if entries and value != defaults[name]}


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
