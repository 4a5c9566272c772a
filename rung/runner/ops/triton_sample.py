"""The sampler's operations over rows of logits in Triton: one launch for the filters, two for log-probabilities."""

from __future__ import annotations

import torch

from rung.launch import TritonLauncher
from rung.runner.ops.sample_base import RowFilters, SampleOps
from rung.runner.sampler.logprobs import LogprobTensors, gather_logprobs

_LOGPROBS = "rung.runner.ops.triton_logprob_kernels"  # named, not imported: it needs Triton, which a warm start does without
FILTER = TritonLauncher("rung.runner.ops.triton_filter_kernels", "filter_kernel")
LOGPROB_CHUNK = TritonLauncher(_LOGPROBS, "logprob_chunk_kernel")
LOGPROB_ROW = TritonLauncher(_LOGPROBS, "logprob_row_kernel")

_ONE_WAVE = 132  # multiprocessors of an H100 or H200
_CHUNK = 2048  # tokens of a row whose log-probabilities a program sums
TOPS = (0, 1, 5, 20, 32)  # numbers of most likely tokens that there are kernels for: those that interfaces offer
MAX_TOP = TOPS[-1]  # that are found by repeated maxima; more are sorted for


class TritonSampleOps(SampleOps):
    """Equal to `TorchSampleOps`, but for the last bits of exponentials: a sum of masses may pass a top-p one token earlier or later.

    A program filters a row, `block` tokens at a time; a pass of its search divides the interval into `ways` parts, until it holds no more
    than `room` tokens, which are searched without reading the row again."""

    def __init__(self, block: int | None = None, ways: int = 8, room: int = 1024, num_warps: int | None = None) -> None:
        self.block, self.ways, self.room, self.num_warps = block, ways, room, num_warps

    def rehearsal(self, max_rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(dict.fromkeys((min(_ONE_WAVE, max_rows), max_rows))), TOPS

    def _tiles(self, rows: int) -> tuple[int, int]:
        """Tokens and warps of a program, as measured: a row alone on its multiprocessor wants many of both (docs/performance.md)."""
        block, num_warps = (4096, 16) if rows <= _ONE_WAVE else (2048, 8)
        return self.block or block, self.num_warps or num_warps

    def filter(self, scores: torch.Tensor, idx_mapping: torch.Tensor, filters: RowFilters) -> torch.Tensor:
        rows, vocab = scores.shape
        assert scores.stride(1) == 1
        out = torch.empty(rows, vocab, dtype=torch.float32, device=scores.device)
        block, num_warps = self._tiles(rows)
        room = torch.empty(rows, self.room, dtype=torch.int32, device=scores.device)
        FILTER.run(
            (rows, 1, 1),
            scores, idx_mapping, filters.temperature, filters.log_min_p, filters.top_k, filters.top_p, out, room,
            scores.stride(0), out.stride(0), VOCAB=vocab, BLOCK=block, ROOM=self.room, WAYS=self.ways,
            num_warps=num_warps,
        )  # fmt: skip
        return out

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
        rows, vocab = logits.shape
        num_top = min(num_top, vocab)
        if num_top > MAX_TOP or rows == 0:
            return gather_logprobs(logits, token_ids, num_top)
        assert logits.stride(1) == 1
        chunks = -(-vocab // _CHUNK)
        device = logits.device
        wanted, num_top = num_top, min(vocab, next(top for top in TOPS if top >= num_top))
        bests, sums = torch.empty(2, rows, chunks, dtype=torch.float32, device=device)
        ranks_of = torch.empty(rows, chunks, dtype=torch.int32, device=device)
        tops = torch.empty(rows, chunks, num_top, dtype=torch.int64, device=device)
        logprobs, ranks = torch.empty(rows, dtype=torch.float32, device=device), torch.empty(rows, dtype=torch.int64, device=device)
        top_ids = torch.empty(rows, num_top, dtype=torch.int64, device=device)
        top_logprobs = torch.empty(rows, num_top, dtype=torch.float32, device=device)
        LOGPROB_CHUNK.run(
            (rows, chunks, 1),
            logits, token_ids, bests, sums, ranks_of, tops, vocab, logits.stride(0), chunks, CHUNK=_CHUNK, TOP=num_top, num_warps=4,
        )  # fmt: skip
        LOGPROB_ROW.run(
            (rows, 1, 1),
            logits, token_ids, bests, sums, ranks_of, tops, logprobs, ranks, top_ids, top_logprobs, vocab, logits.stride(0), chunks,
            CHUNKS=power_of_two(chunks), TOP=num_top, CANDIDATES=power_of_two(max(chunks * num_top, 1)), num_warps=4,
        )  # fmt: skip
        if wanted < num_top:
            top_ids, top_logprobs = top_ids[:, :wanted], top_logprobs[:, :wanted]
        return LogprobTensors(token_ids=token_ids, logprobs=logprobs, ranks=ranks, top_ids=top_ids, top_logprobs=top_logprobs)


def power_of_two(count: int) -> int:
    """`count` rounded up."""
    return 1 << (count - 1).bit_length()
