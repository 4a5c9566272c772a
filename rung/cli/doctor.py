"""`rung doctor`: what is here, what is missing, and why something is not used."""

from __future__ import annotations

import functools
import json
import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

from rung.cli.command import Command

_PACKAGES = ("torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "gguf", "flash-attn", "cuda-bindings", "depyf")


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Check versions, torch's private APIs, devices, the store and the backends. Exit status 1 when something is missing."""
    found = examine()
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _show(found)
    if found["missing_torch_apis"] or not found["store"]["usable"]:
        ctx.exit(1)


def examine() -> dict[str, Any]:
    import torch

    from rung import config, torch_compat
    from rung.launch import launch_road, why_no_nvrtc

    store = config.cache_dir()
    return {
        "versions": {"rung": version_of("rung"), "python": platform.python_version(), **{name: version_of(name) for name in _PACKAGES}},
        "missing_torch_apis": torch_compat.missing_apis(),
        "devices": devices(),
        "threads": torch.get_num_threads(),
        "store": {"path": str(store), **_store_state(store)},
        "variables": {name: config.variable(name) for name in config.VARIABLES},
        "attention_backends": _attention_backends(),
        "graph_backends": _graph_backends(),
        "graph_nodes": _graph_nodes(),
        "kernel_launches": launch_road(),
        "cuda_cpp": why_no_nvrtc() or "compiled by NVRTC",
    }


def version_of(package: str) -> str | None:
    """The installed version; rung itself counts as installed when it runs out of its source tree."""
    import rung

    try:
        return version(package)
    except PackageNotFoundError:
        return rung.__version__ if package == "rung" else None


def devices() -> list[str]:
    """The processor, then the CUDA devices."""
    import torch

    found = [f"cpu: {platform.machine()}, {os.cpu_count()} cores"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        memory_gib = properties.total_memory / 2**30
        found.append(
            f"cuda:{index}: {properties.name}, capability {capability}, {properties.multi_processor_count} SMs, {memory_gib:.0f} GiB"
        )
    return found


def _store_state(store: Any) -> dict[str, Any]:
    nearest = next(place for place in (store, *store.parents) if place.exists())
    files = [file for file in store.rglob("*") if file.is_file()] if store.exists() else []
    usable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    return {"usable": usable, "files": len(files), "bytes": sum(file.stat().st_size for file in files)}


def _attention_backends() -> dict[str, str]:
    import torch

    from rung.attention import AttentionSpec
    from rung.attention.select import backend_names, select_backend

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    spec = AttentionSpec(num_heads=32, num_kv_heads=8, head_size=128, scale=128**-0.5)
    return {name: _reason(functools.partial(select_backend, spec, dtype, device, 16, name)) for name in backend_names()}


def _graph_backends() -> dict[str, str]:
    import torch

    from rung.graphs.backends import CudaBackend, RecordedBackend

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {backend.name: backend.why_not(device) or "available" for backend in (CudaBackend, RecordedBackend)}


def _graph_nodes() -> str:
    from rung.graphs.backends.driver import why_no_driver

    return why_no_driver() or "counted"


def _reason(attempt: Callable[[], object]) -> str:
    from rung.errors import BackendUnavailableError

    try:
        attempt()
    except BackendUnavailableError as error:
        return error.message.partition("cannot be used: ")[2] or error.message
    return "available"


def _show(found: dict[str, Any]) -> None:
    from rung.cli.console import console, table

    missing = found["missing_torch_apis"]
    store = found["store"]
    state = f"{store['files']} files, {store['bytes'] / 2**20:.1f} MiB" if store["usable"] else "NOT WRITABLE"
    rows = [(name, value or "not installed") for name, value in found["versions"].items()]
    rows += [("torch's private APIs", "all there" if not missing else "MISSING: " + ", ".join(missing))]
    rows += [("device", device) for device in found["devices"]]
    rows += [("torch threads", found["threads"]), ("store", f"{store['path']} ({state})")]
    rows += [(name, value) for name, value in found["variables"].items() if value is not None]
    rows += [(f"attention {name}", reason) for name, reason in found["attention_backends"].items()]
    rows += [(f"graphs {name}", reason) for name, reason in found["graph_backends"].items()]
    rows += [("graph nodes", found["graph_nodes"])]
    rows += [("kernel launches", found["kernel_launches"]), ("kernels in CUDA C++", found["cuda_cpp"])]
    console().print(table("", ("what", "found"), rows))
