"""What launching a kernel costs the host: Triton's own launcher, torch's static launcher, and prebound launches. Needs a GPU.

python -m bench.bench_launch --json FILE
python -m bench.bench_launch --parts graphs,attention    # 20 seconds
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.bursts import burst_us

ROUNDS, BURST = 15, 200  # the median of rounds; a burst stays below the driver's queue of launches
host_us = partial(burst_us, burst=BURST, rounds=ROUNDS)
BLOCK = 128
TOYS = "tests.launch.toy_kernels"
Row = tuple[str, str, float | str]


def captured_us(launch: Callable[[], object]) -> float:
    """Host us a launch inside a capture."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            start = time.perf_counter()
            for _ in range(BURST):
                launch()
            times.append((time.perf_counter() - start) / BURST * 1e6)
    return statistics.median(times)


def static_launcher(compiled: Any) -> Any:
    """torch's static launcher for a compiled Triton kernel; raises what it raises."""
    from torch._inductor.runtime.static_triton_launcher import StaticallyLaunchedCudaKernel

    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(compiled.asm["cubin"])
    compiled._cubin_path = file.name
    try:
        kernel = StaticallyLaunchedCudaKernel(compiled)
        kernel.load_kernel(0)
    finally:
        os.unlink(file.name)
    return kernel


def cases() -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """(label, kernel, arguments)."""
    tensors = [torch.zeros(1024, device="cuda") for _ in range(9)]
    yield "3 arguments", "add_kernel", (tensors[0], tensors[1], 1000)
    yield "20 arguments", "many_kernel", (*tensors, 100, 2, 3, 4, 5, 6, 7, 8, 9, 0.5, 1.5)


def host_rows() -> Iterator[Row]:
    from rung.launch import LoadedKernel, PreboundKernel, TritonLauncher
    from tests.launch import toy_kernels

    stream = torch.cuda.current_stream().cuda_stream
    for label, name, arguments in cases():
        kernel, launcher = getattr(toy_kernels, name), TritonLauncher(TOYS, name)
        tensors, numbers = [a for a in arguments if torch.is_tensor(a)], [a for a in arguments if not torch.is_tensor(a)]

        def triton(kernel: Any = kernel, arguments: Any = arguments) -> None:
            kernel[(1,)](*arguments, BLOCK=BLOCK)

        def ours(launcher: Any = launcher, arguments: Any = arguments) -> None:
            launcher.run((1, 1, 1), *arguments, BLOCK=BLOCK)

        ours()
        loaded = launcher.loaded[0]
        bound = PreboundKernel(loaded, arguments, (1, 1, 1))
        programmatic = PreboundKernel(LoadedKernel(loaded.image, 0, loaded.driver), arguments, (1, 1, 1), programmatic=True)

        def prebound(bound: Any = bound) -> None:
            bound.launch(stream)

        def patched(bound: Any = bound, first: Any = tensors[0]) -> None:
            bound.set(0, first)
            bound.launch(stream)

        def pdl(programmatic: Any = programmatic) -> None:
            programmatic.launch(stream)

        launches = {"triton kernel[grid]": triton, "TritonLauncher": ours, "prebound": prebound, "prebound, one patched": patched}
        launches["prebound, programmatic"] = pdl
        static = static_launcher(kernel.warmup(*arguments, BLOCK=BLOCK, grid=(1,)))

        def torch_static(static: Any = static, arguments: Any = (*tensors, *numbers)) -> None:
            static.run(1, 1, 1, stream, *arguments)

        launches["torch static launcher"] = torch_static
        for launch_name, launch in launches.items():
            yield f"{label}: us a launch", launch_name, host_us(launch)

        def current_static(static: Any = static, arguments: Any = (*tensors, *numbers)) -> None:
            static.run(1, 1, 1, torch.cuda.current_stream().cuda_stream, *arguments)

        def current_prebound(bound: Any = bound) -> None:
            bound.launch(torch.cuda.current_stream().cuda_stream)

        in_capture = {"triton kernel[grid]": triton, "TritonLauncher": ours, "prebound": current_prebound}
        in_capture["torch static launcher"] = current_static
        for launch_name, launch in in_capture.items():
            yield f"{label}: us a captured launch", launch_name, captured_us(launch)


def refusals() -> Iterator[Row]:
    """What torch's static launcher says to launches beyond the plain one, and what it leaves out without a word."""
    from tests.launch.toy_kernels import add_kernel

    x = torch.zeros(1024, device="cuda")
    for options in ({"num_ctas": 2}, {"launch_cooperative_grid": True}, {"launch_pdl": True}):
        try:
            static = static_launcher(add_kernel.warmup(x, x, 1000, BLOCK=BLOCK, grid=(1,), **options))
        except Exception as error:  # whatever it is, it is the answer
            yield "static launcher", str(options), f"refused: {error}"
        else:
            kept = [name for name in options if name in vars(static)]
            yield "static launcher", str(options), "honoured" if kept else "accepted, attribute not passed"


WARM = {
    "prebound (no Triton)": """
from rung.launch import TritonLauncher
launcher = TritonLauncher("tests.launch.toy_kernels", "add_kernel")
launcher.run((1, 1, 1), x, x, 1000, BLOCK=128)
assert launcher.images.store_hits == 1 or first
assert first or "triton" not in sys.modules
""",
    "triton, cached": """
from tests.launch.toy_kernels import add_kernel
add_kernel[(1,)](x, x, 1000, BLOCK=128)
""",
    "torch static launcher, from a cubin": """
import importlib
if first:
    from bench.bench_launch import static_launcher
    from tests.launch.toy_kernels import add_kernel
    compiled = add_kernel.warmup(x, x, 1000, BLOCK=128, grid=(1,))
    kernel = static_launcher(compiled)
    import pickle, pathlib
    kernel.__dict__.pop("C_impl", None)
    pathlib.Path(os.environ["BENCH_LAUNCH"], "cubin").write_bytes(compiled.asm["cubin"])
    pathlib.Path(os.environ["BENCH_LAUNCH"], "pickled").write_bytes(pickle.dumps(kernel))
else:
    import pickle, pathlib
    kernel = pickle.loads(pathlib.Path(os.environ["BENCH_LAUNCH"], "pickled").read_bytes())
    kernel.cubin_path = os.environ["BENCH_LAUNCH"] + "/cubin"
    kernel.load_kernel(0)
kernel.run(8, 1, 1, torch.cuda.current_stream().cuda_stream, x, x, 1000)
""",
}
PROCESS = """
import os, sys, time
import torch
x = torch.zeros(1024, device="cuda"); torch.cuda.synchronize()
first = bool(int(sys.argv[1]))
start = time.perf_counter()
{body}
torch.cuda.synchronize()
print("took", time.perf_counter() - start)
"""


def warm_rows() -> Iterator[Row]:
    """ms from a process that has torch and its CUDA context to the end of the first launch, every cache being full."""
    for name, body in WARM.items():
        with tempfile.TemporaryDirectory() as folder:
            places = {"RUNG_CACHE_DIR": f"{folder}/rung", "TRITON_CACHE_DIR": f"{folder}/triton", "BENCH_LAUNCH": folder}
            times = []
            for number in range(4):
                command = [sys.executable, "-c", PROCESS.format(body=body), str(int(number == 0))]
                result = subprocess.run(command, env={**os.environ, **places}, capture_output=True, text=True, check=False)
                if result.returncode:
                    yield "ms to the first launch", name, result.stderr.strip().splitlines()[-1][:90]
                    break
                times.append(float(result.stdout.split("took")[1]) * 1e3)
            else:
                yield "ms to the first launch", name, statistics.median(times[1:])


@contextmanager
def through_triton() -> Iterator[None]:
    """Triton's own launcher for the attention kernels."""
    from rung.attention.backends import triton_paged
    from rung.launch import TritonLauncher

    before = {name: found for name, found in vars(triton_paged).items() if isinstance(found, TritonLauncher)}
    for name, found in before.items():
        setattr(triton_paged, name, TritonLauncher(found.module, found.name, road="triton: asked for"))
    yield
    for name, found in before.items():
        setattr(triton_paged, name, found)


def attention_rows() -> Iterator[Row]:
    """Host us of one attention break (cache write and attention) with 32 heads over 8 KV heads of 128, bf16."""
    from rung.attention.backends.triton_paged import TritonPaged
    from rung.launch import Workspace, record_launches
    from tests.attention.cases import make_batch, make_spec

    spec = make_spec(32, 8, 128)
    for label, lengths in {"8 decodes": [(1, 128)] * 8, "256 decodes": [(1, 128)] * 256}.items():
        batch = make_batch(spec, lengths, dtype=torch.bfloat16, device="cuda").without_host()
        backend, out = TritonPaged(spec), torch.empty_like(batch.query)

        def one(batch: Any = batch, backend: Any = backend, out: Any = out) -> None:
            backend.write_kv(batch.key, batch.value, batch.cache, batch.metadata.slot_mapping)
            backend.forward(batch.query, batch.cache, out, batch.metadata)

        yield f"attention, {label}: us a break", "prebound", host_us(one)
        with record_launches(Workspace()) as record:
            one()
        yield f"attention, {label}: us a break", f"its {len(record)} launches repeated", host_us(record.repeat())
        with through_triton():
            yield f"attention, {label}: us a break", "triton kernel[grid]", host_us(one)


def graph_rows() -> Iterator[Row]:
    """Host us a replay of a graph of one kernel: torch's, ours around it, and the driver's call."""
    from cuda.bindings import driver

    from rung.graphs.backends.cuda import CudaGraph

    x, ours = torch.zeros(1024, device="cuda"), CudaGraph()
    graph = ours.graph
    assert graph is not None
    with torch.cuda.graph(graph):
        x.add_(1)
    yield "a graph: us a replay", "torch", host_us(graph.replay)
    yield "a graph: us a replay", "CudaGraph", host_us(ours.replay)
    executable, stream = driver.CUgraphExec(graph.raw_cuda_graph_exec()), driver.CUstream(torch.cuda.current_stream().cuda_stream)
    yield "a graph: us a replay", "cuGraphLaunch", host_us(lambda: driver.cuGraphLaunch(executable, stream))


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "launches": host_rows,
    "graphs": graph_rows,
    "refusals": refusals,
    "attention": attention_rows,
    "first": warm_rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    rows = []
    for part in options.parts.split(","):
        for row in PARTS[part]():
            rows.append(row)
            what, name, value = row
            print(f"{what:38} {name:36} {value if isinstance(value, str) else format(value, '.2f')}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
