from __future__ import annotations

from typing import Any

import pytest

from rung.models.load import _sampling_of
from rung.runner import sampling_defaults


@pytest.mark.parametrize(
    ("generation", "wanted"),
    [
        ({}, {}),
        ({"eos_token_id": [2], "temperature": 0.6, "top_p": 0.9}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": None}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": True, "min_p": 0.1}, {"temperature": 1.0, "min_p": 0.1}),
        ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ],
)
def test_a_generation_configuration(generation: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert sampling_defaults(generation) == wanted


def test_the_metadata_of_a_gguf_file() -> None:
    metadata = {"general.sampling.temp": 0.7, "general.sampling.top_k": 40, "general.sampling.penalty_repeat": 1.1, "general.name": "x"}
    assert sampling_defaults(_sampling_of(metadata)) == {"temperature": 0.7, "top_k": 40, "repetition_penalty": 1.1}
    assert sampling_defaults(_sampling_of({"general.sampling.temp": 0.0, "general.sampling.top_k": 40})) == {}
