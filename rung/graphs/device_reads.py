"""Which operations wait for the device because they need its values on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def waits_for_device(function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Whether this call of an OpOverload would copy values to the host when its tensors lie on a device."""
    if torch.Tag.data_dependent_output in function.tags:
        return True
    name = function._schema.name
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        masked = any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in arguments[1])
        return masked and (name == "aten::index" or arguments[2].numel() != 1)
    if name == "aten::repeat_interleave":
        unknown = keywords.get("output_size") is None and (len(arguments) < 3 or arguments[2] is None)
        return unknown and isinstance(arguments[0], torch.Tensor)
    return torch.Tag.dynamic_output_shape in function.tags
