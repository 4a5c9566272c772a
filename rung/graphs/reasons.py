"""Why a step ran in its mode: a closed list, each with the sentence that is shown to the user."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Counted as `step.<mode>.<reason>`."""

    BEST = "best"
    GRAPHS_OFF = "graphs_off"
    MIXED_BATCH = "mixed_batch"
    QUERY_LENGTH = "query_length"
    TOO_MANY_TOKENS = "too_many_tokens"
    TOO_MANY_REQUESTS = "too_many_requests"
    OTHER_DIMENSION = "other_dimension"
    BACKEND_LIMIT = "backend_limit"
    HOST_BREAK = "host_break"
    ADAPTERS = "adapters"
    VARIANT = "variant"
    FORCED = "forced"
    PADDING = "padding"
    EMPTY = "empty"
    CAPTURE_FAILED = "capture_failed"
    MEMORY_BUDGET = "memory_budget"
    NOT_CAPTURED = "not_captured"
    CAPTURE_PENDING = "capture_pending"
    SUSPENDED = "suspended"
    ADDRESS_CHANGED = "address_changed"
    NESTED = "nested"

    @property
    def sentence(self) -> str:
        return _SENTENCES[self]

    @property
    def advice(self) -> str:
        """What a user can do about it."""
        return _ADVICE[self]


_SENTENCES: dict[Reason, str] = {
    Reason.BEST: "the best configured mode ran",
    Reason.GRAPHS_OFF: "graphs are switched off by the configuration",
    Reason.MIXED_BATCH: "full graphs exist for uniform batches only, and this batch mixes query lengths",
    Reason.QUERY_LENGTH: "no full graph was planned for this query length",
    Reason.TOO_MANY_TOKENS: "the step has more tokens than the largest captured size",
    Reason.TOO_MANY_REQUESTS: "the step has more requests than any full graph holds",
    Reason.OTHER_DIMENSION: "another named dimension is larger than any captured size",
    Reason.BACKEND_LIMIT: "the attention backend cannot run this batch inside a captured graph",
    Reason.HOST_BREAK: "a break that decides on the host cuts the full graph into several",
    Reason.ADAPTERS: "no graph was captured for this number of adapters",
    Reason.VARIANT: "no graph was captured for this variant",
    Reason.FORCED: "the caller asked for a slower mode",
    Reason.PADDING: "the next captured size would pad the step beyond the waste cap",
    Reason.EMPTY: "the step has no tokens",
    Reason.CAPTURE_FAILED: "the capture of the fitting graph failed",
    Reason.MEMORY_BUDGET: "the fitting graph was left out to stay within the memory budget of graphs",
    Reason.NOT_CAPTURED: "the configuration plans no graph for this kind of batch",
    Reason.CAPTURE_PENDING: "the graph for this size is captured once it was asked for often enough",
    Reason.SUSPENDED: "the graphs were suspended and not resumed",
    Reason.ADDRESS_CHANGED: 'a tensor that the graphs read was replaced, and on_address_change is "none"',
    Reason.NESTED: "a break called the module that it is part of, whose buffers were in use",
}

_ADVICE: dict[Reason, str] = {
    Reason.BEST: "nothing",
    Reason.GRAPHS_OFF: 'set graphs="full_and_piecewise" if this was not meant',
    Reason.MIXED_BATCH: 'set graphs="full" if the attention backend can capture mixed batches',
    Reason.QUERY_LENGTH: "plan full graphs for this query length",
    Reason.TOO_MANY_TOKENS: "capture a larger size, or lower the token budget of a step (max_num_tokens, long_prefill_chunk)",
    Reason.TOO_MANY_REQUESTS: "capture up to max_num_requests, or lower max_num_requests",
    Reason.OTHER_DIMENSION: "capture larger sizes of the other dimension",
    Reason.BACKEND_LIMIT: "choose an attention backend that can be captured (rung doctor lists them)",
    Reason.HOST_BREAK: "keep the decision on the device and drop the op's tag cudagraph_unsafe",
    Reason.ADAPTERS: "capture this number of adapters",
    Reason.VARIANT: "capture this variant",
    Reason.FORCED: "nothing: the caller asked for it",
    Reason.PADDING: "capture a size between the step and the next one, or raise max_waste",
    Reason.EMPTY: "nothing: there is no work",
    Reason.CAPTURE_FAILED: "see the error of the capture, raised when it happened",
    Reason.MEMORY_BUDGET: "raise graph_memory_bytes, or plan fewer sizes: rung ladder plan --memory",
    Reason.CAPTURE_PENDING: "nothing: wait, or lower capture_after",
    Reason.SUSPENDED: "call resume()",
    Reason.NOT_CAPTURED: 'capture such batches too: graphs="full_and_piecewise" in a runner, a size in capture_sizes for a module',
    Reason.ADDRESS_CHANGED: 'update weights in place (copy_), capture again, or set on_address_change="recapture"',
    Reason.NESTED: "nothing; wrap a copy of the module for the inner call if that should have graphs",
}
