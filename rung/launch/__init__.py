"""Kernels without their compilers: load a cubin, pack its parameters once, launch it.

`KernelImage` is a compiled kernel as bytes, `LoadedKernel` one on a device, `PreboundKernel` one with its arguments bound,
`TritonLauncher` runs a kernel of ours that way, in Triton or a `CudaKernel`, and `PieceRuntime` a compiled piece (`Program`).
Nothing here imports a compiler before something is compiled.
"""

from rung.launch.choices import Chooser, FirstConfig, MeasuredChoices
from rung.launch.cuda_source import CudaKernel, why_no_nvrtc
from rung.launch.driver import CudaDriver, Driver, LaunchAttributes
from rung.launch.image import KernelImage, Parameter, Scratch
from rung.launch.kernel import LoadedKernel, PreboundKernel, torch_scratch
from rung.launch.piece_runtime import PieceRuntime, run_source
from rung.launch.program import Program, ProgramConfig, ProgramKernel
from rung.launch.record import LaunchRecord, RepeatedLaunches, Workspace, record_launches, workspace
from rung.launch.rehearsal import Built, Rehearsal, capability_of, current_rehearsal, launches_early, multiprocessors, rehearse_launches
from rung.launch.triton_export import export_triton
from rung.launch.triton_launcher import TritonLauncher, launch_road, watched_launches

__all__ = [
    "Built",
    "Chooser",
    "CudaDriver",
    "CudaKernel",
    "Driver",
    "FirstConfig",
    "KernelImage",
    "LaunchAttributes",
    "LaunchRecord",
    "LoadedKernel",
    "MeasuredChoices",
    "Parameter",
    "PieceRuntime",
    "PreboundKernel",
    "Program",
    "ProgramConfig",
    "ProgramKernel",
    "Rehearsal",
    "RepeatedLaunches",
    "Scratch",
    "TritonLauncher",
    "Workspace",
    "capability_of",
    "current_rehearsal",
    "export_triton",
    "launch_road",
    "launches_early",
    "multiprocessors",
    "record_launches",
    "rehearse_launches",
    "run_source",
    "torch_scratch",
    "watched_launches",
    "why_no_nvrtc",
    "workspace",
]
