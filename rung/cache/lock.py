"""One writer a key, over processes and threads."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FIRST_WAIT, _LONGEST_WAIT = 0.002, 0.1  # seconds between two tries


@contextmanager
def key_lock(path: Path, *, limit_seconds: float) -> Iterator[bool]:
    """Hold the lock file at `path` inside the block; yields whether somebody else held it before, so that looking again may pay.

    The kernel frees the lock of a process that dies. After the time limit, or where a file system has no locks, the block runs without
    the lock: at worst something is built twice. The file is removed at the end, so none are left behind."""
    descriptor, contested = None, False
    with contextlib.suppress(OSError):
        descriptor, contested = _acquire(path, time.monotonic() + limit_seconds)
    if descriptor is None:
        yield contested
        return
    try:
        yield contested
    finally:
        with contextlib.suppress(OSError):
            path.unlink()  # while the lock is held: who waits for this file sees that it is gone, and makes another
        os.close(descriptor)


def _acquire(path: Path, deadline: float) -> tuple[int | None, bool]:
    """(file descriptor, or None after the deadline; whether somebody else held the lock)."""
    wait, contested = _FIRST_WAIT, False
    while True:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # somebody removed the folder in between
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                return descriptor, contested
            os.close(descriptor)
            contested = True
            continue
        except BlockingIOError:
            os.close(descriptor)
            contested = True
        except OSError:
            os.close(descriptor)
            raise
        if time.monotonic() >= deadline:
            return None, True
        time.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file still is the one under its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
