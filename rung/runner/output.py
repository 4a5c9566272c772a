"""The result of a step, on its way to the host."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """The tokens of a step, or of several; a request whose prompt is only partly computed has none."""

    request_ids: tuple[str, ...] = ()
    sampled_token_ids: tuple[tuple[int, ...], ...] = field(default=())


EMPTY_OUTPUT = ModelRunnerOutput()


class AsyncOutput:
    """A device-to-host copy in flight. `get_output` is the only wait; an error of the device surfaces there.

    On CUDA the copy runs on `copy_stream` behind what the current stream has enqueued, so the next step does not wait for it. The device
    tensors are kept until the copy is done, since the allocator knows nothing of the second stream."""

    def __init__(
        self,
        request_ids: tuple[str, ...],
        sampled: torch.Tensor,  # int64 [num_steps, num_requests]
        num_sampled: torch.Tensor | None,  # int32 [num_steps, num_requests], 0 or 1; None: -1 in `sampled` stands for no token
        copy_stream: torch.cuda.Stream | None,
    ) -> None:
        self._request_ids = request_ids
        self._device_tensors: tuple[torch.Tensor | None, ...] = (sampled, num_sampled)
        self._event: torch.cuda.Event | None = None
        if copy_stream is None:
            self._sampled, self._num_sampled = sampled, num_sampled
            return
        copy_stream.wait_stream(torch.cuda.current_stream(sampled.device))
        with torch.cuda.stream(copy_stream):
            self._sampled = _to_pinned(sampled)
            self._num_sampled = None if num_sampled is None else _to_pinned(num_sampled)
            self._event = torch.cuda.Event(blocking=True)
            self._event.record(copy_stream)

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the copy; rows are trimmed to what was sampled."""
        if self._event is not None:
            self._event.synchronize()
        self._device_tensors = ()
        sampled = self._sampled if self._num_sampled is None else self._sampled.masked_fill(self._num_sampled == 0, -1)
        steps = sampled.tolist()
        if len(steps) == 1:
            tokens = tuple((token,) if token >= 0 else () for token in steps[0])
        else:
            tokens = tuple(tuple(token for token in row if token >= 0) for row in zip(*steps, strict=True))
        return ModelRunnerOutput(request_ids=self._request_ids, sampled_token_ids=tokens)


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
