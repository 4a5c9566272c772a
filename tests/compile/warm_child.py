"""A process that wraps and calls one module; prints what it computed and what it imported. Run by `test_warm_start` and on a GPU by
`tests/gpu/test_warm_start`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import rung


class Net(nn.Module):
    """Products, norms, an activation: library calls and generated kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(nn.functional.gelu(self.up(x))) + x).softmax(-1)


def engine(device: torch.device) -> None:
    """Greedy tokens of a small model with graphs, from the runner that serves."""
    from rung.models import random_model
    from rung.runner import RunnerConfig, SamplingParams, build_engine

    module = random_model("tiny", dtype=torch.bfloat16 if device.type == "cuda" else torch.float32, device=device)
    settings: dict[str, Any] = {"max_num_requests": 4, "max_num_tokens": 64, "max_model_len": 128, "num_blocks": 64}
    runner, _, _ = build_engine(module, RunnerConfig(**settings, graphs="full_and_piecewise", capture_sizes=(1, 2)))
    (completion,) = runner.generate([[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True))
    print(json.dumps({"outputs": list(completion.token_ids), **state()}))  # noqa: T201


def main() -> None:
    device = torch.device(sys.argv[1])
    if sys.argv[2:] == ["engine"]:
        return engine(device)
    torch.manual_seed(0)
    module = Net().to(device)
    inputs = [torch.randn(rows, 64).to(device) for rows in (5, 1, 33)]
    wrapped = rung.wrap(module, dynamic={"x": {0: "rows"}})
    with torch.no_grad():
        outputs = [wrapped(x) for x in inputs]
        expected = [module(x) for x in inputs]
    error = max(float((got - want).abs().max()) for got, want in zip(outputs, expected, strict=True))
    print(json.dumps({"outputs": [out.cpu().tolist() for out in outputs], "error": error, **state()}))  # noqa: T201


def state() -> Mapping[str, Any]:
    """Counters, and what of torch's compiler this process has imported."""
    roots = ("torch._dynamo", "torch._inductor", "triton", "sympy")
    imported = sorted(name for name in sys.modules if name in roots or name.startswith(tuple(f"{root}." for root in roots)))
    return {"counters": dict(rung.counters), "imported": imported}


if __name__ == "__main__":
    main()
