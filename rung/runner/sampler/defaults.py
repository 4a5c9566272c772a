"""Sampling parameters that a model comes with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ALWAYS = ("repetition_penalty",)
_WHEN_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `SamplingParams` from a generation configuration, by the names of transformers' `generation_config.json`.

    As there, everything about sampling holds only with `do_sample`; a temperature that is not named is then 1."""
    names = (*_WHEN_SAMPLING, *_ALWAYS) if generation.get("do_sample") else _ALWAYS
    found = {name: generation[name] for name in names if generation.get(name) is not None}
    return {"temperature": 1.0, **found} if generation.get("do_sample") else found
