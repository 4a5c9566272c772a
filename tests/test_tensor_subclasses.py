"""Modules whose weights torchao has quantised, before and after they were wrapped: refused by the name of the tensor subclass."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rung
from rung.errors import UnsupportedModuleError


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("when", ["before", "after"])
def test_quantised_weights_are_named(when: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).eval().requires_grad_(False)
    quantise = lambda: quantization.quantize_(net, quantization.Int8WeightOnlyConfig())  # noqa: E731
    x = torch.randn(3, 64)
    with torch.no_grad():
        if when == "before":
            quantise()
            rung.wrap(net, dynamic={"input": {0: "rows"}})
        else:
            rung.wrap(net, dynamic={"input": {0: "rows"}})
            net(x)
            quantise()
        with pytest.raises(UnsupportedModuleError, match=r"'self\.0\.weight' is a \w+, a subclass of torch\.Tensor"):
            net(x)
