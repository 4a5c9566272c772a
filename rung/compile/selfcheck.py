"""Compare a piece's compiled entries with the traced graph once, on synthetic inputs, before they are trusted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rung import torch_compat
from rung.compile.fake_kernels import CheckedInterpreter
from rung.compile.pieces import Piece
from rung.compile.split import mutates
from rung.errors import InternalError

_SIZES = (1, 3)  # of every dynamic dimension
_RELATIVE_ERROR = {torch.bfloat16: 2e-2, torch.float16: 2e-3}


def check_piece(piece: Piece, blob: bytes, weights: Sequence[Any]) -> None:
    """Raises `InternalError` when the raw entry, the wrapper and the traced graph differ at size 1 or 3.

    Size 1 is checked because the code was generated for sizes from 2: there a dimension of size 1 is addressed like any other, which is
    right because its only index is 0. A piece that talks to other ranks is not run. `weights` are the module's tensors among the inputs,
    None elsewhere."""
    if torch_compat.communicates(piece.graph_module):  # it would wait for ranks that may load what this one compiles
        return
    artifact = torch_compat.deserialize_artifact(blob)
    raw = torch_compat.raw_callable(artifact)
    if raw is None:
        raise InternalError("the compiled artifact has no callable inside", hint="report the torch version")
    nodes = list(piece.graph_module.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    outputs = next(node for node in reversed(nodes) if node.op == "output").args[0]
    in_place = any(mutates(node) for node in nodes)
    generator = torch.Generator().manual_seed(0)
    for size in _SIZES:
        values = [
            _sample(node.meta["example_value"], size, generator) if weight is None else weight
            for node, weight in zip(placeholders, weights, strict=True)
        ]
        runs: dict[str, Callable[[], Sequence[Any]]] = {
            "graph": lambda: CheckedInterpreter(piece.graph_module).run(*_own(values, in_place)),  # noqa: B023 - called in this iteration
            "wrapper": lambda: artifact(*_own(values, in_place)),  # noqa: B023
            "raw entry": lambda: raw(_own(values, in_place)),  # noqa: B023
        }
        with torch.no_grad():
            expected = _run_seeded(runs.pop("graph"), values)
            for entry, run in runs.items():
                came = _run_seeded(run, values)
                for index, (node, want, got) in enumerate(zip(outputs, expected, came, strict=True)):
                    if not _uninitialised(node) and not _agree(want, got):
                        raise InternalError(
                            f"output {index} of a piece differs between its {entry} and the traced graph at size {size}",
                            hint="report it with the files that RUNG_DUMP=<folder> writes",
                        )


def _run_seeded(run: Callable[[], Sequence[Any]], values: Sequence[Any]) -> Sequence[Any]:
    """Random numbers are the same in every run, and the caller's generators stay where they are."""
    devices = {value.device.index for value in values if isinstance(value, torch.Tensor) and value.device.type == "cuda"}
    with torch.random.fork_rng(sorted(devices)):
        torch.manual_seed(0)
        return run()


def _agree(want: Any, got: Any) -> bool:
    """Equal up to rounding: fused code rounds fewer intermediates, and libraries sum in other orders."""
    if not isinstance(want, torch.Tensor):
        return bool(want == got)
    if want.shape != got.shape or want.dtype != got.dtype:
        return False
    if not want.dtype.is_floating_point:
        return torch.equal(want, got)
    difference = (want.double().nan_to_num() - got.double().nan_to_num()).norm()
    return bool(difference <= _RELATIVE_ERROR.get(want.dtype, 1e-4) * want.double().nan_to_num().norm())


def _own(values: Sequence[Any], in_place: bool) -> list[Any]:
    """Inputs that a run may write: copies of everything when the piece writes at all, of the buffers always (batch norm counts in them)."""
    return [_copy(value) if in_place or not isinstance(value, torch.nn.Parameter) else value for value in values]


def _copy(value: Any) -> Any:
    """A copy of the same layout: `clone` makes views of a wider buffer dense, and pieces are compiled for exact strides."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)


def _uninitialised(node: torch.fx.Node) -> bool:
    """Whether a value is memory that nobody has written yet: an attention output before its break."""
    name = str(getattr(node.target, "__name__", node.target))
    if name in ("empty", "empty_like", "new_empty", "empty_strided"):
        return True
    return name in ("view", "reshape", "flatten", "unsqueeze", "transpose") and _uninitialised(node.all_input_nodes[0])


def _sample(value: Any, size: int, generator: torch.Generator) -> Any:
    if not isinstance(value, torch.Tensor):
        return torch_compat.evaluate_size(value, size)
    shape = [torch_compat.evaluate_size(extent, size) for extent in value.shape]
    stride = [torch_compat.evaluate_size(extent, size) for extent in value.stride()]
    result = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    if value.dtype.is_floating_point:
        return result.copy_(torch.randn(shape, generator=generator) * 0.5)
    return result.zero_()  # integers are mostly indices; 0 is valid for all of them
