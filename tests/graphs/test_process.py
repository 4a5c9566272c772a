"""Forked children and captured graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from rung.errors import ForkedProcessError
from rung.graphs import Descriptor, GraphMode
from tests.graphs.toys import data, fresh_break_plan, make_manager, run_padded

FULL_4 = Descriptor(mode=GraphMode.FULL, num_tokens=4)


def in_child(work: Callable[[], object]) -> str:
    """What `work` returns or raises in a forked child, as text."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = repr(work())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as file:
        return file.read()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_of_the_process_that_captured_is_told() -> None:
    """T75."""
    plan = fresh_break_plan()
    manager = make_manager(plan)
    manager.capture([FULL_4])
    with manager._lock:  # as if another thread of the parent were in a step
        text = in_child(lambda: manager.run(FULL_4))
    assert text.startswith(ForkedProcessError.__name__)
    assert f"captured in process {os.getpid()}" in text
    assert "hint: start workers with the method" in text
    x = data(4, 1)
    assert torch.equal(run_padded(manager, FULL_4, x)[0], plan(x)[0])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_captures_when_its_parent_has_not() -> None:
    """T75."""
    plan = fresh_break_plan()
    manager = make_manager(plan)

    def work() -> bool:
        manager.capture([FULL_4])
        x = data(4, 1)
        return torch.equal(run_padded(manager, FULL_4, x)[0], plan(x)[0])

    assert in_child(work) == "True"


def test_import_and_decoration_leave_cuda_alone() -> None:
    """T75."""
    code = (
        "import torch, rung, rung.graphs, rung.runner\n"
        "module = rung.wrap(torch.nn.Linear(2, 2), graphs='full')\n"
        "@rung.compiled\n"
        "def function(x: torch.Tensor) -> torch.Tensor: return x * 2\n"
        "print(torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=os.getcwd())
    assert done.stdout.strip() == "False"
