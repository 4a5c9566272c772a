"""What of torch, its compiler and a device can change generated code."""

from __future__ import annotations

import hashlib

import torch


def toolchain_factors() -> dict[str, str]:
    """What in torch and its compiler can change generated code."""
    from torch._inductor import config as inductor_config
    from torch._inductor.codecache import torch_key

    portable = sorted((name, repr(value)) for name, value in inductor_config.save_config_portable().items())
    return {
        "torch": torch.__version__,
        "torch_key": torch_key().hex(),
        "cuda": str(torch.version.cuda),
        "inductor_config": hashlib.sha256(repr(portable).encode()).hexdigest(),
    }


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
