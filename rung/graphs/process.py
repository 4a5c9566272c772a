"""Which process a manager's graphs belong to."""

from __future__ import annotations

import os

from rung.errors import ForkedProcessError


class HomeProcess:
    """The process that captured. A CUDA context does not survive a fork, so a child must not touch what its parent captured; a manager
    that captured nothing may still be used there."""

    def __init__(self) -> None:
        self._id: int | None = None

    def enter(self) -> None:
        """This process captures. Raises like `check`."""
        self.check()
        self._id = os.getpid()

    def check(self) -> None:
        """Raise `ForkedProcessError` in a child of the process that captured. Asked before the lock, which another thread of the parent may
        have held when it forked."""
        if self._id is not None and self._id != os.getpid():
            raise ForkedProcessError(
                f"these graphs were captured in process {self._id}, and this is its forked child {os.getpid()}",
                hint='start workers with the method "spawn", or fork before the first capture',
            )
