from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = (
    "tests/runner/test_step_ops.py",
    "tests/runner/test_input_buffers.py",
    "tests/runner/test_repeated_inputs.py",
    "tests/runner/test_block_table.py",
    "tests/runner/test_decode_ops.py",
    "tests/runner/test_processors.py",
    "tests/runner/test_sample_ops.py",
    "tests/graphs/test_recorded_launches.py",
    "tests/attention/test_repeated_attention.py",
)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_kernels_in_the_interpreter() -> None:
    """Triton decides at import whether it interprets, so the kernels run in a process of their own."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FILES],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None
    assert int(passed.group(1)) >= 120
    assert "skipped" not in result.stdout
