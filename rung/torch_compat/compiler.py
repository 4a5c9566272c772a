"""torch's compiler as one process-wide thing: its lock and its warnings."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator

compile_lock = threading.RLock()  # torch's compiler and its configuration are process-wide: one compile at a time


@contextlib.contextmanager
def quiet_compiler() -> Iterator[None]:
    """Keep the compiler's deprecation chatter out of a program that turns warnings into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores", category=UserWarning)  # the user's choice, not ours
        yield
