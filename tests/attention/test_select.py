from __future__ import annotations

import pytest
import torch

from rung.attention.select import backend_names, select_backend
from rung.errors import BackendUnavailableError
from tests.attention.cases import make_spec

CPU = torch.device("cpu")


def test_cpu_gets_the_reference() -> None:
    backend, reason = select_backend(make_spec(), torch.float32, CPU, 16)
    assert backend.name == "torch_reference"
    assert reason == "torch_reference: first that can serve the layer on cpu"


def test_named_backend_is_taken() -> None:
    backend, reason = select_backend(make_spec(), torch.float32, CPU, 16, "torch_reference")
    assert (backend.name, reason) == ("torch_reference", "torch_reference: requested by name")


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(BackendUnavailableError, match="got 'flash'") as caught:
        select_backend(make_spec(), torch.float32, CPU, 16, "flash")
    assert all(name in caught.value.message for name in backend_names())
    assert caught.value.hint


@pytest.mark.parametrize("name", ["flash_triton", "flash_attn", "flash_attn_2"])
def test_named_backend_is_never_replaced(name: str) -> None:
    with pytest.raises(BackendUnavailableError, match="needs a CUDA device"):
        select_backend(make_spec(), torch.bfloat16, CPU, 16, name)


def test_nothing_serves_ungroupable_heads() -> None:
    with pytest.raises(BackendUnavailableError, match="cannot be grouped"):
        select_backend(make_spec(4, 3), torch.float32, CPU, 16)
