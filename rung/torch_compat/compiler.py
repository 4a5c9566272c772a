"""torch's compiler as one process-wide thing: its lock and its warnings."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from importlib import import_module

compile_lock = threading.RLock()  # torch's compiler and its configuration are process-wide: one compile at a time


def hash_compilers() -> None:
    """Begin to hash what Inductor's keys have of Triton and the device (0.3 to 0.5 s, the first piece waits for it), beside the trace:
    hashing large files holds no lock of Python's. A failure is Inductor's to report, when it asks for the same."""
    from torch._inductor.codecache import CacheBase

    def ask() -> None:
        with contextlib.suppress(Exception):
            CacheBase.get_system()

    threading.Thread(target=ask, name="rung-hash-compilers", daemon=True).start()


def import_tracer() -> None:
    """Load Dynamo, which takes seconds, so that the time is not taken for that of the first trace."""
    import_module("torch._dynamo.convert_frame")


def import_inductor() -> None:
    """Load what the first piece would load."""
    import_module("torch._inductor.compile_fx")
    import_module("torch._inductor.standalone_compile")


def missing_compiler(error: BaseException) -> str:
    """The language ("C++" or "C") of the compiler that Inductor or Triton did not find, an empty text for any other error. Inductor wraps
    what it raises, in the worker processes as text; the wording is that of torch 2.11 to 2.14 and Triton 3.6 to 3.8."""
    seen: BaseException | None = error
    while seen is not None:
        text = f"{type(seen).__name__}: {seen}"
        if "InvalidCxxCompiler" in text:
            return "C++"
        if "Failed to find C compiler" in text:
            return "C"
        seen = seen.__cause__ or seen.__context__
    return ""


@contextlib.contextmanager
def quiet_compiler() -> Iterator[None]:
    """Keep the compiler's deprecation chatter out of a program that turns warnings into errors. Filters are the process's: one thread at a
    time."""
    with compile_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores", category=UserWarning)  # the user's choice, not ours
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # it is 0, and nothing is read there
        yield
