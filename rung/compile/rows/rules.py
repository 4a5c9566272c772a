"""The closed table of ops that keep rows apart: everything else is not proved."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rung.compile.rows import contraction, elementwise, movement
from rung.compile.rows.call import Call
from rung.compile.rows.state import Refusal, State, mixes, unknown

Result = State | Refusal | Sequence[State | Refusal]  # one for all results of the op, or one for each
Rule = Callable[[Call], Result]

_ATTENTION = frozenset({"rung::attention", "rung::kv_cache_write", "rung::rotate_and_write"})
_VIEWS = ("view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy")
# Ops whose integers are sizes and places; for all others a number of rows among their arguments is a value.
_SIZED = frozenset({*_VIEWS, *elementwise.FACTORIES, "arange", "expand", "repeat", "slice", "split_with_sizes", "native_group_norm"})

_RULES: dict[str, Rule] = {
    **dict.fromkeys(elementwise.FACTORIES, elementwise.factory),
    **dict.fromkeys(elementwise.REDUCTIONS, elementwise.reduction),
    **dict.fromkeys(elementwise.ALONG, elementwise.along),
    **contraction.RULES,
    **dict.fromkeys(("_to_copy", "clone", "detach", "alias", "lift_fresh", "lift_fresh_copy"), elementwise.converted),
    "arange": elementwise.arange,
    "native_layer_norm": elementwise.layer_norm,
    "_fused_rms_norm": elementwise.layer_norm,
    "native_group_norm": elementwise.group_norm,
    **dict.fromkeys(
        (
            "native_batch_norm",
            "cudnn_batch_norm",
            "miopen_batch_norm",
            "_native_batch_norm_legit",
            "_native_batch_norm_legit_no_training",
            "_batch_norm_with_update",
            "_batch_norm_no_update",
        ),
        elementwise.batch_norm,
    ),
    "constant_pad_nd": elementwise.constant_pad,
    "bucketize": lambda call: call.only("self"),
    "searchsorted": lambda call: call.only("self"),
    **dict.fromkeys(_VIEWS, movement.view),
    "permute": movement.permute,
    "transpose": movement.transpose,
    "t": movement.transpose,
    "unsqueeze": movement.unsqueeze,
    "squeeze": movement.squeeze,
    "expand": movement.expand,
    "repeat": movement.repeat,
    "slice": movement.narrow,
    "select": movement.select,
    "unbind": movement.unbind,
    **dict.fromkeys(
        ("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "tensor_split"),
        movement.separate,
    ),
    "cat": movement.join,
    "stack": movement.stack,
    "embedding": movement.embedding,
    "_embedding_bag": movement.embedding_bag,
    "_embedding_bag_forward_only": movement.embedding_bag,
    "index_select": movement.index_select,
    "gather": movement.gather,
    **dict.fromkeys(("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"), movement.scatter),
    "index": movement.index,
    **dict.fromkeys(("index_put", "index_put_"), movement.index_put),
    "linear": contraction.linear,
    **dict.fromkeys(("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"), contraction.convolution),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
        ),
        contraction.attention,
    ),
    "_native_multi_head_attention": contraction.fused_attention_block,
    "_transformer_encoder_layer_fwd": contraction.fused_attention_block,
}


def apply(call: Call, row_wise: frozenset[str]) -> Result:
    """What the results of a call hold. Raises `Refusal` when the op mixes rows or has no rule."""
    qualified = call.op._schema.name
    namespace, _, name = qualified.partition("::")
    if qualified in _ATTENTION:
        raise mixes("attention reads the keys of other rows through the cache")
    if qualified in row_wise:
        return _declared(call)
    if namespace != "aten":
        raise unknown("it is no op of torch; name it in `row_wise_ops` if row i of its results depends on row i of its arguments alone")
    if call.uses_count(sized=name in _SIZED) and name != "arange":
        raise mixes("it uses the number of rows as a value")
    if torch.Tag.nondeterministic_seeded in call.op.tags and call.arguments.get("dropout_p") != 0:
        raise unknown("it draws random numbers for all rows together")
    trailing = elementwise.spatial_dims(name)
    if trailing is not None:
        return elementwise.leading(call, trailing, "input" if "input" in call else "self")
    rule = _RULES.get(name)
    if rule is not None:
        return rule(call)
    if elementwise.is_pointwise(call.op, name):
        return elementwise.pointwise(call)
    raise unknown("no rule says how its rows depend on each other")


def _declared(call: Call) -> State:
    """An op that the user declared: rows stay in their dimension, which is the same for all arguments."""
    found = {axis for tensor in call.tensors() if (axis := call.axis_of(tensor)) is not None}
    if len(found) > 1:
        raise unknown("it is declared row-wise, but its arguments hold rows in different dimensions")
    return next(iter(found), None)
