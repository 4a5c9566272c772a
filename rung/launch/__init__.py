"""Kernels without their compilers: load a cubin, pack its parameters once, launch it.

`KernelImage` is a compiled kernel as bytes, `LoadedKernel` one on a device, `PreboundKernel` one with its arguments bound, and
`TritonLauncher` runs a Triton kernel of ours that way. Nothing here imports a compiler before something is compiled.
"""

from rung.launch.driver import CudaDriver, Driver, LaunchAttributes
from rung.launch.image import KernelImage, Parameter, Scratch
from rung.launch.kernel import LoadedKernel, PreboundKernel, torch_scratch
from rung.launch.rehearsal import Built, Rehearsal, current_rehearsal, rehearse_launches
from rung.launch.triton_export import export_triton
from rung.launch.triton_launcher import TritonLauncher, launch_road, watched_launches

__all__ = [
    "Built",
    "CudaDriver",
    "Driver",
    "KernelImage",
    "LaunchAttributes",
    "LoadedKernel",
    "Parameter",
    "PreboundKernel",
    "Rehearsal",
    "Scratch",
    "TritonLauncher",
    "current_rehearsal",
    "export_triton",
    "launch_road",
    "rehearse_launches",
    "torch_scratch",
    "watched_launches",
]
