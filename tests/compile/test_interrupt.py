"""A compile that is interrupted or killed at any moment: no half entry, no stray process, and the next call compiles."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rung
from rung import torch_compat
from rung.cache import Store, open_store
from rung.cache.inspect import verify_store
from rung.compile import selfcheck
from rung.compile.artifact import PieceLoader
from tests.compile.cases import Block, Stack, assert_same

ROOT = Path(__file__).parents[2]
# Where the signal arrives: in a call of this function, the n-th, before or behind its work.
MOMENTS: dict[str, tuple[Any, str, int]] = {
    "imports": (torch_compat, "import_inductor", 1),
    "trace": (torch_compat, "capture_graph", 1),
    "first piece": (torch_compat, "compile_piece", 1),
    "last piece": (torch_compat, "compile_piece", 3),
    "serialise": (torch_compat, "serialize_artifact", 2),
    "blob": (Store, "put_blob", 2),
    "manifest": (Store, "put", 2),
    "plan": (Store, "put", 4),
    "comparison": (selfcheck, "check_piece", 2),
    "load": (PieceLoader, "bind", 5),  # each of three pieces once for the comparison, then once for good
}


def interrupting(work: Callable[..., Any], nth: int, behind: bool) -> Callable[..., Any]:
    """`work`, with a SIGINT in its n-th call."""
    calls = iter(range(1, 1000))

    def call(*arguments: Any, **named: Any) -> Any:
        now = next(calls) == nth
        if now and not behind:
            os.kill(os.getpid(), signal.SIGINT)
        result = work(*arguments, **named)
        if now and behind:
            os.kill(os.getpid(), signal.SIGINT)
        return result

    return call


def leftovers(root: Path) -> list[str]:
    """Files of the store that are no entry: half written ones, and locks."""
    return [str(path) for path in root.rglob("*") if path.is_file() and (path.parent.name == "locks" or ".tmp" in path.name)]


def is_whole() -> bool:
    return all(problem is None for problem in verify_store(open_store()))


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupt_leaves_nothing_half(moment: str, behind: bool, rung_cache_dir: Path) -> None:
    owner, name, nth = MOMENTS[moment]
    eager = Stack([Block() for _ in range(3)])
    module = copy.deepcopy(eager)
    rung.wrap(module, dynamic={"x": {0: "rows"}}, split_ops=("rungtest::write",))
    x = torch.randn(3, 8)
    with torch.no_grad():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, interrupting(getattr(owner, name), nth, behind))
            with pytest.raises(KeyboardInterrupt):
                module(x)
        assert leftovers(rung_cache_dir) == []
        assert is_whole()
        assert_same(module(x), eager(x))
    assert [one["pieces"] for one in module.rung.report()] == [4]  # type: ignore[operator, union-attr]


# --- processes -----------------------------------------------------------------------------------------------------------------------

COMPILE = textwrap.dedent(
    """
    import torch, rung
    from tests.compile.cases import Block, Stack
    torch.manual_seed(0)
    module = Stack([Block() for _ in range(3)])
    rung.wrap(module, dynamic={"x": {0: "rows"}}, split_ops=("rungtest::write",))
    print("compiling", flush=True)
    with torch.no_grad():
        module(torch.ones(3, 8))
    print(module.rung.report()[0]["source"], flush=True)
    """
)


def start(store: Path) -> subprocess.Popen[str]:
    """A process that compiles, the first of a session of its own."""
    env = {**os.environ, "RUNG_CACHE_DIR": str(store), "TORCHINDUCTOR_CACHE_DIR": str(store / "inductor"), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", COMPILE], cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, start_new_session=True)


def members(session: int) -> list[int]:
    """The living processes of a session; proc(5) has the state and the session behind the name."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, owner, *_ = path.read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            continue
        if int(owner) == session and state != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
@pytest.mark.parametrize("seconds", [0.5, 4.0])
def test_a_process_that_is_ended_leaves_no_process_and_the_next_one_heals(number: signal.Signals, seconds: float, tmp_path: Path) -> None:
    process = start(tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "compiling\n"
    time.sleep(seconds)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode != 0
    limit = time.monotonic() + 20
    while members(process.pid) and time.monotonic() < limit:
        time.sleep(0.2)
    assert members(process.pid) == []
    again = start(tmp_path)
    out, _ = again.communicate(timeout=300)
    assert (again.returncode, out.split()) == (0, ["compiling", "compiled"])
    assert all(problem is None for problem in verify_store(Store(tmp_path)))
