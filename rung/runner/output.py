"""The result of a step, on its way to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from rung.errors import StateError
from rung.runner.sampler.failures import MESSAGES
from rung.runner.sampler.logprobs import StepLogprobs, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """The tokens of a step, or of several; a request whose prompt is only partly computed has none."""

    request_ids: tuple[str, ...] = ()
    sampled_token_ids: tuple[tuple[int, ...], ...] = field(default=())
    errors: Mapping[str, str] = field(default_factory=dict)  # request id -> why no further token could be sampled
    logprobs: Mapping[str, Sequence[TokenLogprobs]] = field(default_factory=dict)  # of the tokens, where asked for
    # Of a part of the prompt, where asked for: the position of the first one, and one entry for each.
    prompt_logprobs: Mapping[str, tuple[int, Sequence[TokenLogprobs]]] = field(default_factory=dict)


EMPTY_OUTPUT = ModelRunnerOutput()


@dataclass(frozen=True, slots=True)
class RecordedTokens:
    """Tokens that replays write where the host can read them. `tolist` is for when the replays are done. Raises `StateError` once the
    history has come round to their rows again."""

    history: npt.NDArray[np.int64]  # [H, R]
    first_step: int
    num_steps: int
    num_requests: int
    steps_so_far: Callable[[], int]  # replays that were enqueued by now

    def tolist(self) -> list[list[int]]:
        """By step and request, -1 where nothing was sampled."""
        rows_kept = len(self.history)
        if self.steps_so_far() > self.first_step + rows_kept:
            raise StateError(
                f"the tokens of a step were read more than {rows_kept} steps later, when they were no longer kept",
                hint="read an output before so many further steps are enqueued",
            )
        first = self.first_step % rows_kept
        end = first + self.num_steps
        rows: list[list[int]] = self.history[first:end, : self.num_requests].tolist()
        if end > rows_kept:
            rows += self.history[: end - rows_kept, : self.num_requests].tolist()
        return rows


class AsyncOutput:
    """Tokens on their way to the host. `get_output` is the only wait; an error of the device surfaces there.

    On CUDA, tensors are copied on `copy_stream` behind what the current stream has enqueued, so the next step does not wait for the copy.
    The device tensors are kept until it is done, since the allocator knows nothing of the second stream. Recorded tokens need no copy, only
    the event behind the replays: a copy costs the host 90 to 150 us on the way."""

    def __init__(
        self,
        request_ids: tuple[str, ...],
        sampled: torch.Tensor | RecordedTokens,  # int64 [num_steps, num_requests]
        num_sampled: torch.Tensor | None,  # int32 [num_steps, num_requests], 0 or 1; None: -1 in `sampled` stands for no token
        copy_stream: torch.cuda.Stream | None,
        logprobs: Sequence[StepLogprobs] = (),
        prompt_logprobs: Sequence[StepLogprobs] = (),
    ) -> None:
        self._request_ids = request_ids
        self._device_tensors: tuple[object, ...] = (sampled, num_sampled, logprobs, prompt_logprobs)
        self._event: torch.cuda.Event | None = None
        if isinstance(sampled, RecordedTokens):
            self._sampled: torch.Tensor | RecordedTokens = sampled
            self._num_sampled, self._logprobs, self._prompt_logprobs = num_sampled, logprobs, prompt_logprobs
            if copy_stream is not None:
                self._event = torch.cuda.Event(blocking=True)
                self._event.record(torch.cuda.current_stream(copy_stream.device))
            return
        if copy_stream is None:
            self._sampled, self._num_sampled = sampled, num_sampled
            self._logprobs, self._prompt_logprobs = logprobs, prompt_logprobs
            return
        copy_stream.wait_stream(torch.cuda.current_stream(sampled.device))
        with torch.cuda.stream(copy_stream):
            self._sampled = _to_pinned(sampled)
            self._num_sampled = None if num_sampled is None else _to_pinned(num_sampled)
            self._logprobs, self._prompt_logprobs = _logprobs_to_pinned(logprobs), _logprobs_to_pinned(prompt_logprobs)
            self._event = torch.cuda.Event(blocking=True)
            self._event.record(copy_stream)

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the tokens; rows are trimmed to what was sampled."""
        self._wait()
        sampled = self._sampled
        if self._num_sampled is not None:
            assert isinstance(sampled, torch.Tensor), "recorded tokens say themselves which count"
            sampled = sampled.masked_fill(self._num_sampled == 0, -1)
        steps = sampled.tolist()
        errors: dict[str, str] = {}
        tokens: tuple[tuple[int, ...], ...] = tuple(zip(*steps, strict=True))
        lowest = min(map(min, steps))
        if lowest < -1:
            tokens, errors = self._split_failures(tokens)
        elif lowest < 0:
            tokens = tuple(tuple(token for token in row if token >= 0) for row in tokens)
        return ModelRunnerOutput(
            request_ids=self._request_ids,
            sampled_token_ids=tokens,
            errors=errors,
            logprobs=self._read_logprobs() if self._logprobs else {},
            prompt_logprobs=_read_prompt_logprobs(self._prompt_logprobs) if self._prompt_logprobs else {},
        )

    def _wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
        self._device_tensors = ()

    def _split_failures(self, rows: Iterable[Sequence[int]]) -> tuple[tuple[tuple[int, ...], ...], dict[str, str]]:
        """The tokens of each request before its first failure, and why those that failed did."""
        tokens, errors = [], {}
        for request_id, row in zip(self._request_ids, rows, strict=True):
            end = next((at for at, token in enumerate(row) if token < -1), len(row))
            tokens.append(tuple(token for token in row[:end] if token >= 0))
            if end < len(row):
                errors[request_id] = MESSAGES[row[end]]
        return tuple(tokens), errors

    def _read_logprobs(self) -> dict[str, Sequence[TokenLogprobs]]:
        found: dict[str, list[TokenLogprobs]] = {}
        for step in self._logprobs:
            for rows in step.rows:
                found.setdefault(rows.request_id, []).extend(step.tensors.read(rows.first, rows.count, rows.num_top))
        return dict(found)


def _read_prompt_logprobs(parts: Sequence[StepLogprobs]) -> dict[str, tuple[int, Sequence[TokenLogprobs]]]:
    return {
        rows.request_id: (rows.position, part.tensors.read(rows.first, rows.count, rows.num_top)) for part in parts for rows in part.rows
    }


def _logprobs_to_pinned(steps: Sequence[StepLogprobs]) -> Sequence[StepLogprobs]:
    return [StepLogprobs(step.tensors.map(_to_pinned), step.rows) for step in steps]


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
