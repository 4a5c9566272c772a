"""Known failures of compile caches, played against the store: other configurations, edited sources, full disks, races, other processes."""

from __future__ import annotations

import copy
import errno
import json
import os
import subprocess
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rung
from rung.cache import Manifest, Store, key_of, use_store
from rung.cache.disk import PART, Disk
from rung.compile import stored_plans
from rung.compile.piece_compiler import PieceCompiler
from rung.compile.report import CompileReport
from rung.compile.sizes import SizeRange
from rung.config import CompileConfig
from rung.counters import Count, Counters
from rung.errors import CacheMissError
from tests.compile.cases import Net, assert_same

ROOT = Path(__file__).parents[2]
OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "no bias": {"bias": False},
    "tanh": {"activation": "tanh"},
    "epsilon": {"epsilon": 0.1},
    "wider": {"hidden": 32},
}


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def made(name: str) -> Net:
    torch.manual_seed(0)
    return Net(**OPTIONS[name])


def call(module: nn.Module) -> Any:
    """The handle after a call whose result is that of eager mode."""
    wrapped: Any = rung.wrap(copy.deepcopy(module), dynamic={"x": {0: "rows"}})
    x = torch.randn(3, 8)
    assert_same(wrapped(x), module(x))
    return wrapped.rung


@pytest.mark.parametrize("order", [1, -1])
def test_instances_of_one_class_are_told_apart_cold_and_from_disk(order: int) -> None:
    names = list(OPTIONS)[::order]
    keys = [call(made(name)).report()[0]["plan_key"] for name in names]
    assert len(set(keys)) == len(names)
    for name, key in zip(reversed(names), reversed(keys), strict=True):
        with use_store(require_hit=True):
            assert call(made(name)).report()[0]["plan_key"] == key


class Inner(nn.Module):
    """Calls a method and a function, which are traced through."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return scaled(self.linear(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method(x)


class Outer(nn.Module):
    """A submodule within."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


TRACED = ("Outer.forward", "Inner.forward", "Inner.method", "scaled")


@pytest.mark.parametrize("edited", TRACED)
def test_an_edit_of_any_traced_function_misses_and_names_it(edited: str, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = call(Outer())
    sources = next(iter(handle._entry.variants.values())).compiled.plan.sources
    assert {ref.qualname for ref in sources} == set(TRACED)
    real = stored_plans.current_digest
    monkeypatch.setattr(stored_plans, "current_digest", lambda ref: "edited" if ref.qualname == edited else real(ref))
    with use_store(require_hit=True), pytest.raises(CacheMissError, match=f"the source of {edited} changed"):
        call(Outer())


class Failing(Disk):
    """Refuses one kind of step, for want of space."""

    def __init__(self, step: str) -> None:
        self.refused = 0

        def refuse(self: Failing, *_: object) -> None:
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        setattr(self, step, types.MethodType(refuse, self))


@pytest.mark.parametrize("step", ["make_folder", "create", "write", "sync", "rename", "sync_folder"])
def test_a_run_survives_a_disk_that_is_full_at_any_step(step: str, rung_cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Failing(step)
    original = Store.__init__

    def with_disk(self: Store, *args: Any, **named: Any) -> None:
        original(self, *args, **{**named, "disk": disk})

    monkeypatch.setattr(Store, "__init__", with_disk)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        call(made("as it is"))
    assert disk.refused
    assert not [path for path in rung_cache_dir.rglob("*") if PART in path.name]
    monkeypatch.setattr(Store, "__init__", original)
    call(made("as it is"))
    with use_store(require_hit=True):
        assert call(made("as it is")).counters[Count.DYNAMO_TRACES] == 0


_RACE = """
import json, os, sys
import torch, rung
from torch import nn
torch.set_num_threads(1)
from rung import torch_compat
torch_compat.import_tracer(); torch_compat.import_inductor()
class Racer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        return torch.tanh(self.linear(x)) * 3
children = []
for number in range(8):
    reader, writer = os.pipe()
    if os.fork() == 0:
        torch.manual_seed(0)
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(number)
        module = rung.wrap(Racer(), dynamic={"x": {0: "rows"}})
        with torch.no_grad():
            y = module(torch.ones(3, 8)).tolist()
        counts = module.rung.counters
        found = [y, counts["inductor_compiles"], counts["dynamo_traces"], module.rung.report()[0]["plan_key"]]
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
    os.close(writer)
    children.append(reader)
print(json.dumps([json.loads(os.fdopen(reader, "rb").read()) for reader in children]))
"""


@pytest.mark.slow
def test_eight_processes_with_other_ranks_compile_once(rung_cache_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "race.py").write_text(_RACE)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", "import race"], env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    outputs, compiles, traces, keys = zip(*found, strict=True)
    assert (len(found), sum(compiles), sum(traces)) == (8, 1, 1)
    assert all(output == outputs[0] for output in outputs)
    assert len(set(keys)) == 1
    assert not [path for path in rung_cache_dir.rglob("*") if PART in path.name]


def test_a_piece_of_another_format_is_a_miss_and_not_an_error(tmp_path: Path) -> None:
    store = Store(tmp_path)
    pieces = PieceCompiler(CompileConfig(), store, Counters())
    code = pieces.factors(torch.device("cpu"))
    factors = {"piece": "p", "sizes": [1, 8], **code.values(code_only=True)}
    digest = store.put_blob(b'{"version": 99}')
    manifest = Manifest(
        kind="pieces",
        key=key_of(factors),
        title="p",
        factors=factors,
        seconds={"compile": 1.0},
        blobs=(digest,),
        data={"bound": None, "compared": True},
    )
    store.put(manifest)
    with pytest.warns(RuntimeWarning, match="is no artifact of version 1"):
        assert pieces.stored("p", code, SizeRange(1, 8), CompileReport(title="p")) is None


def test_no_blob_names_a_folder_of_the_machine_that_compiled(rung_cache_dir: Path) -> None:
    rung.wrap(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()).requires_grad_(False))(torch.ones(3, 8))
    folders = (str(Path(torch.__file__).parent), sysconfig.get_path("include"), os.environ["TORCHINDUCTOR_CACHE_DIR"])
    blobs = {blob.name: blob.read_bytes() for blob in (rung_cache_dir / "blobs").iterdir()}
    assert any(data.startswith(b"\x7fELF") for data in blobs.values())
    assert [(name, folder) for name, data in blobs.items() for folder in folders if folder.encode() in data] == []
