"""Rules of ops that move elements: views, cuts, joins, and choices by index."""

from __future__ import annotations

import torch

from rung.compile.rows.call import Call, dims_of
from rung.compile.rows.elementwise import broadcast
from rung.compile.rows.state import Axis, Refusal, State, mixes, ratio, reshaped, unknown


def view(call: Call) -> State:
    axis = call.only("self")
    return reshaped(axis, call.shape(call["self"]), call.shape(call.outputs()[0]), call.rows)


def permute(call: Call) -> State:
    axis = call.only("self")
    dims = [dim % call["self"].dim() for dim in call["dims"]]
    return axis.at(dims.index(axis.dim))


def transpose(call: Call) -> State:
    axis = call.only("self")
    rank = call["self"].dim()
    first, second = (call[name] % rank for name in ("dim0", "dim1")) if "dim0" in call else (0, rank - 1)
    return axis.at({first: second, second: first}.get(axis.dim, axis.dim))


def unsqueeze(call: Call) -> State:
    axis = call.only("self")
    at = call["dim"] % (call["self"].dim() + 1)
    return Axis(axis.dim + (at <= axis.dim), axis.outer, axis.inner, axis.step)


def squeeze(call: Call) -> State:
    axis = call.only("self")
    source = call["self"]
    asked = dims_of(call["dim"], source.dim()) if "dim" in call else set(range(source.dim()))
    gone = {dim for dim in asked if isinstance(source.shape[dim], int) and source.shape[dim] == 1}
    return axis.at(axis.dim - sum(dim < axis.dim for dim in gone))


def expand(call: Call) -> State:
    axis = call.axis("self")
    if axis is None:
        return call.positional()
    return axis.at(axis.dim + call.outputs()[0].dim() - call["self"].dim())


def repeat(call: Call) -> State:
    """Copy c of element e along a dimension of size n lies at c * n + e."""
    source, repeats = call["self"], call["repeats"]
    axis = call.axis("self")
    missing = len(repeats) - source.dim()
    if axis is None:
        dims = [dim for dim, count in enumerate(repeats) if call.mentions(count)]
        dim = dims[0]
        inner = ratio(call.size(call.outputs()[0].shape[dim]), call.rows)
        return Axis(dim, 1, inner)
    dim = axis.dim + missing
    return Axis(dim, axis.outer * call.size(repeats[dim]), axis.inner)


def narrow(call: Call) -> State:
    """`slice`: of another dimension, of all rows, or of the first `rows` entries of a table."""
    source, (output,) = call["self"], call.outputs()
    axis = call.axis("self")
    dim = call["dim"] % source.dim()
    start, step = call["start"], call.arguments.get("step", 1)
    if axis is None:
        if call.mentions(start):
            raise mixes("it cuts at the number of rows")
        found = call.positional()
        if found is not None and not found.is_plain:
            raise unknown("it cuts a table at a multiple of the number of rows")
        return found
    if axis.dim != dim:
        return axis
    if not start and step == 1 and call.size(output.shape[dim]) == call.size(source.shape[dim]):
        return axis
    raise mixes(f"it cuts dimension {dim}, which counts rows, at a fixed place")


def select(call: Call) -> State:
    axis = call.only("self")
    dim = call["dim"] % call["self"].dim()
    if axis.dim == dim:
        raise mixes("it reads a row at a fixed place for all others")
    return axis.at(axis.dim - (dim < axis.dim))


def separate(call: Call) -> State:
    """`split` and `chunk`: several results along `dim`."""
    axis = call.only("self")
    if axis.dim == call["dim"] % call["self"].dim():
        raise mixes(f"it splits dimension {axis.dim}, which counts rows")
    return axis.at(axis.dim)


def unbind(call: Call) -> State:
    return select(call)


def join(call: Call) -> State:
    """`cat`. Tensors without rows cannot be among the arguments: their other dimensions are those of the result."""
    axis = call.only("tensors")
    if axis.dim == call["dim"] % call.outputs()[0].dim():
        raise mixes(f"it joins along dimension {axis.dim}, which counts rows")
    return axis


def stack(call: Call) -> State:
    axis = call.only("tensors")
    at = call["dim"] % call.outputs()[0].dim()
    return axis.at(axis.dim + (at <= axis.dim))


# --- choices by index ----------------------------------------------------------------------------------------------------------------


def embedding(call: Call) -> State:
    return call.only("indices")


def embedding_bag(call: Call) -> list[State | Refusal]:
    """Bags of one length, one a row: `offsets` counts in steps of that length. Other offsets say where the next row begins."""
    indices, offsets = call.axis("indices"), call.axis("offsets")
    if call.axis("weight") is not None:
        raise mixes("it reads other rows of its table")
    regular = indices is not None and offsets is not None and offsets.step is not None and bool(offsets.step == indices.inner)
    if not regular or indices is None or bool(indices.outer != 1):
        raise mixes("a bag ends where the next row's begins; pass bags of one length as a matrix of indices")
    extra = unknown("rows of this result of embedding_bag are not followed")
    return [Axis(0), *[extra for _ in call.outputs()[1:]]]


def index_select(call: Call) -> State:
    source, index = call.axis("self"), call.axis("index")
    dim = call["dim"] % call["self"].dim()
    if source is None:
        return index.at(dim) if index is not None else None
    if index is not None or source.dim == dim:
        raise mixes("it chooses among rows by index")
    return source


def gather(call: Call) -> State:
    source, index = call.axis("self"), call.axis("index")
    dim = call["dim"] % max(call["self"].dim(), 1)
    if source is not None and source.dim == dim:
        raise mixes("it chooses among rows by index")
    if source is not None and source != index:
        raise unknown("its index holds rows in another dimension than its source")
    return index


def scatter(call: Call) -> State:
    """Writes along `dim`, so rows must lie in another dimension of all arguments."""
    axis = call.only("self", "index", "src", "value")
    if axis.dim == call["dim"] % call["self"].dim():
        raise mixes("it writes to rows that are chosen by index")
    held = [call.axis_of(call[name]) for name in ("self", "index", "src") if isinstance(call.arguments.get(name), torch.Tensor)]
    if None in held:
        raise unknown("only some of its arguments hold rows")
    return axis


def index(call: Call) -> State:
    """`x[i, j, ...]` with tensors for some dimensions."""
    source = call.axis("self")
    given = {dim: tensor for dim, tensor in enumerate(call["indices"]) if tensor is not None}
    if any(tensor.dtype in (torch.bool, torch.uint8) for tensor in given.values()):
        raise unknown("it chooses elements by a mask, so the number of results depends on values")
    rank = max(tensor.dim() for tensor in given.values())
    chosen = broadcast(call, list(given.values()), rank)
    positions = sorted(given)
    contiguous = positions[-1] - positions[0] + 1 == len(positions)
    front = positions[0] if contiguous else 0
    if source is None:
        return chosen.at(front + chosen.dim) if chosen is not None else None
    if source.dim in given:
        own = call.axis_of(given[source.dim])
        if own is None or chosen is None or own.step is None or own.step != 1 or not source.is_plain:
            raise mixes("it chooses among rows by index")
        return chosen.at(front + chosen.dim)
    if chosen is not None:
        raise mixes("it pairs every row with every row's index")
    before = sum(dim < source.dim for dim in positions)
    behind = not contiguous or source.dim > positions[0]
    return source.at(source.dim - before + (rank if behind else 0))


def index_put(call: Call) -> State:
    """`x[i, j, ...] = values`: indices without rows in other dimensions, or a mask of the shape of x and one value."""
    axis = call.only("self", "indices", "values")
    own = call.axis("self")
    given = {dim: tensor for dim, tensor in enumerate(call["indices"]) if tensor is not None}
    masks = [tensor for tensor in given.values() if tensor.dtype == torch.bool]
    if masks:
        if len(given) == 1 and 0 in given and call.axis_of(masks[0]) == own and call["values"].numel() == 1:
            return own
        raise unknown("it writes where a mask says")
    if own is None or own.dim in given or any(call.axis_of(tensor) for tensor in given.values()):
        raise mixes("it writes to rows that are chosen by index")
    if call.axis("values") is not None:
        raise unknown("it writes rows of values by index")
    return axis
