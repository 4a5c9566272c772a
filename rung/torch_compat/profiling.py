"""Whether torch.profiler runs. Its ranges cost a microsecond each even when nobody listens, so they are opened only then."""

from __future__ import annotations

from torch.autograd import profiler


def profiling() -> bool:
    """Whether a profiler of torch is active in this process. Checked on torch 2.11 to 2.14; can go when torch has a public name for it."""
    return bool(profiler._is_profiler_enabled)
