"""Files as the store writes and reads them: a reader sees a whole file or none, and what was written survives a crash."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
import time
from pathlib import Path

from rung.errors import UntrustedStoreError

PART = ".part-"  # how the names of unfinished files begin
_ATTEMPTS = 4
# Of shared folders, and of a folder that somebody removes meanwhile: the same write may succeed a moment later.
_PASSING = frozenset({errno.ENOENT, errno.EBUSY, errno.ESTALE})


class Disk:
    """The steps of a write, one method each, in this order; a test makes any of them fail."""

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def create(self, folder: Path) -> tuple[int, str]:
        """(file descriptor, name) of a new file that is locked while its writer lives."""
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=PART)
        with contextlib.suppress(OSError):  # a file system without locks: leftovers are then told by their age alone
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor, name

    def write(self, descriptor: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def rename(self, name: str, path: Path) -> None:
        os.replace(name, path)

    def sync_folder(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_file(disk: Disk, path: Path, data: bytes) -> None:
    """Put `data` at `path`, replacing what is there. Raises `OSError`, and then leaves no unfinished file."""
    for attempt in range(_ATTEMPTS):
        try:
            return _write_once(disk, path, data)
        except OSError as error:
            if error.errno not in _PASSING or attempt == _ATTEMPTS - 1:
                raise
            time.sleep(0.01 * 4**attempt)


def _write_once(disk: Disk, path: Path, data: bytes) -> None:
    disk.make_folder(path.parent)
    descriptor, name = disk.create(path.parent)
    try:
        try:
            disk.write(descriptor, data)
            disk.sync(descriptor)
            disk.rename(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    finally:
        os.close(descriptor)
    disk.sync_folder(path.parent)


def read_file(path: Path, *, any_owner: bool = False) -> bytes:
    """The bytes of a regular file that no other user could have written. Raises `OSError`, or `UntrustedStoreError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "no regular file")
        if not any_owner:
            refuse_foreign(path, status)
        return file.read()


def refuse_foreign(path: Path, status: os.stat_result) -> None:
    """Raise `UntrustedStoreError` when another user (root aside) owns the file or folder, or everybody may write it."""
    if status.st_uid not in (os.geteuid(), 0):
        why = f"belongs to user {status.st_uid}, and you are {os.geteuid()}"
    elif status.st_mode & stat.S_IWOTH:
        why = "may be written by everybody"
    else:
        return
    raise UntrustedStoreError(
        f"{path} {why}; artifacts are code, so it is not used",
        hint="copy the store (cp -r) or chmod o-w it; RUNG_CACHE_TRUST=any uses it as it is",
    )


def remove_leftovers(folder: Path, *, older_than_seconds: float = 60) -> int:
    """Remove the unfinished files of writers that died; returns how many."""
    removed = 0
    for path in folder.glob(f"**/{PART}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime < older_than_seconds:
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the writer lives
                path.unlink()
                removed += 1
            finally:
                os.close(descriptor)
    return removed
