"""Choices as a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rung.cache import Store
from rung.counters import Counters
from rung.errors import ConfigError
from rung.launch.choices import MeasuredChoices, choice_entry
from rung.launch.program import ProgramConfig, ProgramKernel
from rung.launch.tuning_file import keep_tuning, read_tuning, tuning_of

GRID = ("1", "1", "1")
KERNEL = ProgramKernel(("x",), (ProgramConfig("another build's a", "a", GRID), ProgramConfig("another build's b", "b", GRID)))


def test_what_was_measured_there_is_taken_here(tmp_path: Path) -> None:
    there, here = Store(tmp_path / "there"), Store(tmp_path / "here")
    there.put(choice_entry(["a", "b"], "a GPU", "b", [2.0, 1.0]))
    there.put(choice_entry(["a", "b"], "another GPU", "a", [1.0, 2.0]))
    choices = read_tuning(json.dumps(tuning_of(there)), "file")
    assert keep_tuning(here, choices, "a GPU") == 1
    assert MeasuredChoices(here, "a GPU", Counters()).known(KERNEL) == 1
    assert MeasuredChoices(here, "another GPU", Counters()).known(KERNEL) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 2, "choices": []}',
        '{"format": 1, "choices": [{"device": "a", "codes": ["x"], "code": "y", "microseconds": []}]}',
    ],
)
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="file is no tuning file of format 1"):
        read_tuning(text, "file")
