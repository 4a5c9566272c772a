from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MORE = [
    "tests/passes/test_fp8_kernels.py",
    "tests/passes/test_invariant.py::test_a_row_has_the_same_bits_in_every_batch",
    "tests/passes/test_persistent.py",
]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_kernels_in_the_interpreter() -> None:
    """Triton decides at import whether it interprets, so the kernel tests run in a process of their own."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/passes/test_product_kernels.py", *MORE],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None
    assert int(passed.group(1)) >= 100
    assert "skipped" not in result.stdout
