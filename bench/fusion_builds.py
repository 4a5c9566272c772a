"""Compiles of `bench.fusions` ahead of time, in processes beside the one that measures.

A child knows no device: it pretends one, as `rung precompile --target` does, and leaves plans and kernel images in the store, where the
measuring process finds them. It reads a job a line and answers with a line:

    python -m bench.fusion_builds h200
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Variant:
    """A model, compiled without some passes."""

    form: str
    shape: str
    without: tuple[str, ...] = ()  # sorted


def build(variant: Variant, rows: Sequence[int]) -> dict[str, Any]:
    """Compile for the pretended device, and build the images of our own kernels that steps of so many rows launch."""
    import torch

    from bench import fusion_models
    from rung import torch_compat
    from rung.attention import attention_layers
    from rung.compile.compiled import CompiledFunction
    from rung.context import set_forward_context
    from rung.counters import Counters
    from rung.launch import rehearse_launches
    from rung.runner.build import compile_example

    start, device = time.perf_counter(), torch.device("cuda")
    model, example = fusion_models.without_memory(variant.form, fusion_models.SHAPES[variant.shape], device)
    fusion_models.choose_attention(model, device)
    compiled, report = compile_example(model, example, max(rows), Counters(), without_passes=variant.without)
    owner = {compiled.plan.inputs[number].local: model for number in compiled.weights}
    quiet = CompiledFunction(compiled.plan, compiled.pieces_through(torch_compat.memoryless), owner)
    mode = torch_compat.fake_mode_of(model)
    with torch_compat.quiet_compiler(), mode, torch.no_grad(), rehearse_launches(90) as rehearsal:
        for count in rows:
            ids = torch.empty(count, dtype=torch.int32, device=device)
            with set_forward_context(fusion_models.bind(model, count, device)):
                quiet(ids, fusion_models.positions_of(count, device))
    for layer in attention_layers(model).values():
        layer.backend = layer.kv_cache = None
    built = rehearsal.build()
    return {"cache": report.cache, "images": [built.compiled, built.found], "seconds": round(time.perf_counter() - start, 1)}


class Builders:
    """Children that take jobs in the order in which they were given."""

    def __init__(self, place: str, count: int, rows: Sequence[int]) -> None:
        self._place, self._rows = place, list(rows)
        self._jobs: queue.SimpleQueue[tuple[Variant, Future[dict[str, Any]]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, variant: Variant) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        self._jobs.put((variant, future))
        return future

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)

    def _serve(self) -> None:
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        command = [sys.executable, "-m", "bench.fusion_builds", self._place]
        child: subprocess.Popen[str] | None = None
        while (job := self._jobs.get()) is not None:
            variant, future = job
            if child is None:  # the last children may never be needed
                child = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                child.stdin.write(json.dumps({**asdict(variant), "rows": self._rows}) + "\n")
                child.stdin.flush()
                line = child.stdout.readline()
            except OSError:
                line = ""
            future.set_result(json.loads(line) if line else {"failed": f"the child ended with {child.wait()}"})
            child = child if line else None
        if child is not None:
            assert child.stdin is not None
            child.stdin.close()
            child.wait()


def main() -> None:
    from rung.torch_compat import pretend_cuda

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # it is 0, and nothing runs here
    pretend_cuda(sys.argv[1])
    for line in sys.stdin:
        job = json.loads(line)
        try:
            found = build(Variant(job["form"], job["shape"], tuple(job["without"])), job["rows"])
        except Exception:
            found = {"failed": traceback.format_exc()[-1500:]}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
