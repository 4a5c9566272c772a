"""Compare a piece's raw entry with the artifact's full wrapper once, on synthetic inputs, before the raw entry is trusted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rung import torch_compat
from rung.compile.pieces import Piece
from rung.compile.split import mutates
from rung.errors import InternalError

_SIZE = 3  # of every dynamic dimension
_RELATIVE_ERROR = {torch.bfloat16: 2e-2, torch.float16: 2e-3}


def check_piece(piece: Piece, blob: bytes, weights: Sequence[Any]) -> None:
    """Raises `InternalError` when both entries differ. `weights` are the module's tensors among the inputs, None elsewhere."""
    artifact = torch_compat.deserialize_artifact(blob)
    raw = torch_compat.raw_callable(artifact)
    if raw is None:
        raise InternalError("the compiled artifact has no callable inside", hint="report the torch version")
    placeholders = [node for node in piece.graph_module.graph.nodes if node.op == "placeholder"]
    generator = torch.Generator().manual_seed(0)
    values = [
        _sample(node.meta["example_value"], generator) if weight is None else weight
        for node, weight in zip(placeholders, weights, strict=True)
    ]
    in_place = any(mutates(node) for node in piece.graph_module.graph.nodes)
    with torch.no_grad():
        expected = artifact(*_own(values, in_place))
        actual = raw(_own(values, in_place))
    outputs = next(node for node in reversed(piece.graph_module.graph.nodes) if node.op == "output").args[0]
    for index, (node, want, got) in enumerate(zip(outputs, expected, actual, strict=True)):
        if _uninitialised(node):
            continue
        if not _agree(want, got):
            raise InternalError(f"output {index} of a piece differs between its raw entry and its wrapper", hint="report the torch version")


def _agree(want: Any, got: Any) -> bool:
    """Equal up to rounding: libraries may sum in another order when a buffer is aligned otherwise."""
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


def _sample(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, torch.Tensor):
        return torch_compat.evaluate_size(value, _SIZE)
    shape = [torch_compat.evaluate_size(extent, _SIZE) for extent in value.shape]
    stride = [torch_compat.evaluate_size(extent, _SIZE) for extent in value.stride()]
    result = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    if value.dtype.is_floating_point:
        return result.copy_(torch.randn(shape, generator=generator) * 0.5)
    return result.zero_()  # integers are mostly indices; 0 is valid for all of them
