"""The kernels of a decode step: which part of a layer each belongs to, and what time of the step is its own."""

from __future__ import annotations

import itertools
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.device_trace import Kernel

FIRST = "decode_inputs"  # in the name of the kernel that a decode graph begins with, once a step
PRODUCTS = ("qkv", "o", "gate_up", "down")

_KINDS = (  # the first that a name matches; order matters
    ("rope + cache write", r"rope|rotary|rotate|write_kv|reshape_and_cache"),
    ("combine", r"combine|reduce_splits"),
    ("attention", r"flash|attention|paged|fmha|attn"),
    ("sampling", r"sample|pick_|argmax|filter_kernel|logprob|bitmask"),
    ("input building", r"decode_inputs|positions|slot_mapping|prefill_ids|gather_block|advance_kernel|scatter_kernel|embedding"),
    ("split reduction", r"splitKreduce|split_reduce"),
    ("norm", r"add_norm|rsqrt|rms_norm|layer_norm|_norm_"),
    ("quantise", r"quantise|quantize"),
    ("activation", r"activate|silu|sigmoid|swiglu|gelu"),
    ("product", r"nvjet|gemm|gemv|cutlass|xmma|cublas|product_kernel|vector_kernel|matmul|\bdot_kernel|_scaled_mm"),
    ("copy or fill", r"copy|fill|zero|Memcpy|Memset"),
)
# what stands behind so many of a layer's four products, for kernels whose names do not say it
_BEHIND = ("norm", "rope + cache write", "norm", "activation")


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def kinds(names: Sequence[str], layers: int) -> list[str]:
    """The kind of each kernel of a step, in the order of their starts. Where there are four products a layer and the head's, each gets its
    place, and Inductor's kernels, whose names list whatever was joined, get theirs by the products around them."""
    by_name = {name: kind_of(name) for name in dict.fromkeys(names)}
    found = [by_name[name] for name in names]
    if found.count("product") != len(PRODUCTS) * layers + 1:
        return found
    passed, last = 0, ""
    for at, kind in enumerate(found):
        if kind == "product":
            found[at] = last = PRODUCTS[passed % len(PRODUCTS)] if passed < len(PRODUCTS) * layers else "head"
            passed += 1
        elif kind == "split reduction":  # it belongs to the product before
            found[at] = last or kind
        elif kind == "other" or names[at].startswith("triton_"):
            place = "input building" if passed == 0 else "sampling" if last == "head" else _BEHIND[passed % len(PRODUCTS)]
            found[at] = "norm" if passed == 0 and kind == "norm" else place
    return found


@dataclass(frozen=True, slots=True)
class Share:
    """What one kernel takes of its step, in us. A kernel that was launched programmatically starts while its predecessor runs, and waits:
    `own` counts that, `exclusive` only what lies behind the end of every earlier kernel. Exclusive times and gaps add up to the span."""

    own: float
    exclusive: float
    gap: float  # without any kernel, before this one


def shares(step: Sequence[Kernel]) -> list[Share]:
    """For kernels in the order of their starts."""
    found, end = [], step[0].start_us
    for one in step:
        begin = max(one.start_us, end)
        found.append(Share(one.us, max(0.0, one.end_us - begin), max(0.0, one.start_us - end)))
        end = max(end, one.end_us)
    return found


def split_steps(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """The steps that begin with FIRST and have the usual kernels. What runs before the first such kernel is left out."""
    firsts = [at for at, one in enumerate(kernels) if FIRST in one.name]
    steps = [list(kernels[first:last]) for first, last in itertools.pairwise([*firsts, len(kernels)])]
    if not steps:
        return []
    usual = Counter(tuple(one.name for one in step) for step in steps).most_common(1)[0][0]
    return [step for step in steps if tuple(one.name for one in step) == usual]


@dataclass(frozen=True, slots=True)
class StepShares:
    """Medians over the steps of a trace: for each kernel its share, for the step its span and what lies between it and the next, in us."""

    names: tuple[str, ...]
    kernels: tuple[Share, ...]
    span: float
    between: float | None  # without any kernel, from one step to the next that was seen; None for a single step


def medians(steps: Sequence[Sequence[Kernel]]) -> StepShares:
    of_steps = [shares(step) for step in steps]
    kernels = tuple(
        Share(*(statistics.median(getattr(step[at], field) for step in of_steps) for field in ("own", "exclusive", "gap")))
        for at in range(len(steps[0]))
    )
    between = [max(0.0, then[0].start_us - max(one.end_us for one in step)) for step, then in itertools.pairwise(steps)]
    return StepShares(
        names=tuple(one.name for one in steps[0]),
        kernels=kernels,
        span=statistics.median(max(one.end_us for one in step) - step[0].start_us for step in steps),
        between=statistics.median(between) if between else None,
    )
