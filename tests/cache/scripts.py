"""Programs that run in a process of their own, without torch, and fork."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_HEAD = """
import os, random, signal, sys, time, traceback
from pathlib import Path
from rung.cache import Manifest, Store, key_of
from rung.errors import ArtifactError
assert "torch" not in sys.modules

def entry(store, number):
    blobs = tuple(store.put_blob(bytes([number, part]) * 20_000) for part in range(3))
    store.put(Manifest(kind="pieces", key=key_of({"n": number}), factors={"n": number}, data={"n": number}, blobs=blobs))

def whole(store, number):
    found = store.get("pieces", key_of({"n": number}))
    return found is not None and all(store.get_blob(digest) for digest in found.blobs)

def fork(work):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child

root = Path(sys.argv[1])
"""

RACE = (
    _HEAD
    + """
def usable(store):
    try:
        return whole(store, 1)
    except ArtifactError:  # a blob went between two reads
        return False

def work():
    store = Store(root)
    with store.lock("pieces", key_of({"n": 1})):
        if not usable(store):
            time.sleep(0.05)  # a compile
            entry(store, 1)
            with open(sys.argv[2], "a") as log:
                log.write("built\\n")
    if sys.argv[3] == "kept":
        assert usable(Store(root))

def remove():
    import shutil
    for _ in range(3):
        shutil.rmtree(root, ignore_errors=True)
        time.sleep(0.02)

children = [fork(work) for _ in range(8)]
if sys.argv[3] == "removed":
    children.append(fork(remove))
print([os.waitpid(child, 0)[1] for child in children])
"""
)

KILL = (
    _HEAD
    + """
random.seed(0)
def counting(save, last):  # calls and returns during a save; the one with the number `last` is the end of the process
    events = 0
    def event(*_):
        nonlocal events
        events += 1
        if events == last:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.setprofile(event)
    save()
    sys.setprofile(None)
    return events
store = Store(root)
entry(store, 0)
a_save = counting(lambda: entry(store, 1), 0)
half, killed = 0, 0
for number in range(2, 52):
    last = random.randrange(1, int(1.5 * a_save))
    child = fork(lambda: counting(lambda: entry(Store(root), number), last))
    killed += os.waitpid(child, 0)[1] == signal.SIGKILL
    fresh = Store(root)
    found = fresh.get("pieces", key_of({"n": number}))  # raises when it is half written
    if found is None:
        half += 1
        entry(fresh, number)  # the next run
    assert all(whole(fresh, n) for n in (0, number)), number
from rung.cache.disk import remove_leftovers
remove_leftovers(root, older_than_seconds=0)
assert all(whole(Store(root), n) for n in range(52))
print(killed, half, len([path for path in root.rglob("*") if path.is_file()]))
"""
)

HOLDER = (
    _HEAD
    + """
store = Store(root)
def hold():
    with store.lock("pieces", "key"):
        print("held", flush=True)
        time.sleep(60)
child = fork(hold)
time.sleep(0.3)
impatient = Store(root, lock_seconds=0.05)
with impatient.lock("pieces", "key") as again:
    print("gave up", again, flush=True)
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
start = time.perf_counter()
with store.lock("pieces", "key"):
    print("healed", time.perf_counter() - start < 5)
"""
)


def run(script: str, root: Path, *args: str) -> list[str]:
    """The words of the script's last line."""
    done = subprocess.run(
        [sys.executable, "-c", script, str(root), *args],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()
