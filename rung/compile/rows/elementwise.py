"""Rules of ops that keep their dimensions: pointwise ops, reductions, norms, ops along a dimension, and tensors made from sizes."""

from __future__ import annotations

import re

import torch

from rung.compile.rows.call import Call, dims_of
from rung.compile.rows.state import Axis, State, mixes, unknown

# Pointwise, but not tagged so in torch 2.13.
POINTWISE = frozenset(
    [
        "copy",
        "copy_",
        "fill",
        "fill_",
        "zero_",
        "_conj",
        "conj_physical",
        "resolve_conj",
        "prelu",
        "_prelu_kernel",
        "isin",
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "zero",
        "zero_",
        "masked_fill",
        "masked_fill_",
        "positive",
    ]
)
FACTORIES = frozenset(
    ["zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "empty_strided", "new_empty_strided"]
)
REDUCTIONS = frozenset(
    [
        "sum",
        "mean",
        "amax",
        "amin",
        "aminmax",
        "max",
        "min",
        "argmax",
        "argmin",
        "prod",
        "any",
        "all",
        "var",
        "std",
        "var_mean",
        "std_mean",
        "logsumexp",
        "nansum",
        "nanmean",
        "median",
        "nanmedian",
        "mode",
        "count_nonzero",
        "norm",
        "linalg_vector_norm",
        "kthvalue",
    ]
)
ALONG = frozenset(
    [
        "_softmax",
        "_log_softmax",
        "_safe_softmax",
        "softmax",
        "log_softmax",
        "cumsum",
        "cumprod",
        "logcumsumexp",
        "cummax",
        "cummin",
        "sort",
        "topk",
        "argsort",
        "glu",
        "flip",
        "roll",
        "renorm",
        "cumsum_",
        "cumprod_",
    ]
)
_SPATIAL = re.compile(
    r"_?(?:adaptive_)?(?:avg|max)_pool(\d)d(?:_with_indices)?|upsample_[a-z_]*(\d)d|_upsample_[a-z_]*(\d)d|(?:reflection|replication)_pad(\d)d"
)


def is_pointwise(op: object, name: str) -> bool:
    return torch.Tag.pointwise in getattr(op, "tags", ()) or name in POINTWISE


def pointwise(call: Call) -> State:
    """Each element of the result depends on the elements at its own place, after broadcasting."""
    rank = max((output.dim() for output in call.outputs()), default=0)
    return broadcast(call, list(call.tensors()), rank)


def broadcast(call: Call, tensors: list[torch.Tensor], rank: int) -> Axis | None:
    """Where rows lie after `tensors` were broadcast to `rank` dimensions."""
    found: Axis | None = None
    for tensor in tensors:
        axis = call.axis_of(tensor)
        if axis is None:
            continue
        moved = axis.at(axis.dim + rank - tensor.dim())
        if found is not None and moved != found:
            raise mixes("it broadcasts rows against rows: every row meets every other")
        found = moved
    return found


def converted(call: Call) -> State:
    """Another dtype, device or copy of the same values."""
    return call.state(call["self"])


def factory(call: Call) -> State:
    return call.positional()


def arange(call: Call) -> State:
    start, step = call.arguments.get("start", 0), call.arguments.get("step", 1)
    if call.mentions(start) or call.mentions(step):
        raise mixes("its values depend on the number of rows")
    axis = call.positional()
    plain = axis is not None and axis.is_plain and start == 0
    return Axis(axis.dim, axis.outer, axis.inner, step if plain else None) if axis is not None else None


def reduction(call: Call) -> State:
    axis = call.only("self")
    rank = call["self"].dim()
    dims = dims_of(call["dim"], rank) if "dim" in call else set(range(rank))
    if axis.dim in dims:
        raise mixes(f"it reduces over dimension {axis.dim}, which counts rows")
    keep = bool(call.arguments.get("keepdim", False))
    return axis.at(axis.dim if keep else axis.dim - sum(dim < axis.dim for dim in dims))


def along(call: Call) -> State:
    """The shape stays (or changes along `dim` alone), elements along `dim` mix."""
    axis = call.only("self")
    dims = dims_of(call["dims"] if "dims" in call else call["dim"], call["self"].dim())
    if "dim" in call and call["dim"] is None:
        raise unknown("it works on no stated dimension")
    if axis.dim in dims:
        raise mixes(f"it works along dimension {axis.dim}, which counts rows")
    return axis.at(axis.dim)


def spatial_dims(name: str) -> int | None:
    """How many trailing dimensions a pooling, upsampling or padding op works on, None for other ops."""
    found = _SPATIAL.fullmatch(name)
    return int(next(group for group in found.groups() if group)) if found else None


def leading(call: Call, trailing: int, *names: str) -> Axis:
    """The op works on the last `trailing` dimensions, for each index of those before them."""
    axis = call.only(*names)
    owner = next(call[name] for name in names if call.axis_of(call[name]) is not None)
    if axis.dim >= owner.dim() - trailing:
        raise mixes(f"it works along dimension {axis.dim}, which counts rows")
    return axis.at(axis.dim)


def layer_norm(call: Call) -> State:
    return leading(call, len(call["normalized_shape"]), "input")


def group_norm(call: Call) -> State:
    return leading(call, call["input"].dim() - 1, "input")


def batch_norm(call: Call) -> list[State]:
    """Running statistics do not mix rows; statistics of the batch are taken over all dimensions but dim 1."""
    training = call.arguments.get("training", call.op._schema.name.rpartition("::")[2] == "_batch_norm_with_update")
    axis = call.axis("input")
    statistics: State = None
    if axis is not None and axis.dim == 1:  # rows among the channels, as instance norm has it
        vectors = {call.axis_of(tensor) for tensor in call.tensors() if tensor.dim() == 1} - {None, axis.at(0)}
        if vectors:
            raise unknown("its weights do not belong to the same rows as its channels")
        statistics = axis.at(0) if training else None
        return [axis, *[statistics] * (len(call.outputs()) - 1)]
    if training and axis is not None:
        raise mixes("it takes statistics over all rows of the batch (training mode)")
    return [call.only("input"), *[statistics] * (len(call.outputs()) - 1)]


def constant_pad(call: Call) -> State:
    axis = call.only("self")
    from_last = call["self"].dim() - 1 - axis.dim
    if any(bool(amount != 0) for amount in call["pad"][2 * from_last : 2 * from_last + 2]):
        raise mixes(f"it pads dimension {axis.dim}, which counts rows")
    return axis.at(axis.dim)
