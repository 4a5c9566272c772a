"""The executor of one worker that lives in the engine's own process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from rung.errors import StateError
from rung.runner.executor.base import Executor
from rung.runner.output import AsyncOutput


class AsyncOutputFuture(Future[Any]):
    """Resolved by reading the output: `result` waits for the device-to-host copy. The timeout has no effect."""

    def __init__(self, output: AsyncOutput) -> None:
        super().__init__()
        self._output: AsyncOutput | None = output

    def result(self, timeout: float | None = None) -> Any:
        if self._output is not None:
            output, self._output = self._output, None
            try:
                self.set_result(output.get_output())
            except Exception as error:
                self.set_exception(error)
        return super().result(timeout)


class InProcessExecutor(Executor):
    """Runs each call at once; `worker` is a `ModelRunner`, or anything with its methods."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def collective_rpc(self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Future[Any]:
        if self._worker is None:
            raise StateError("the executor is shut down", hint="build a new one")
        future: Future[Any] = Future()
        try:
            result = getattr(self._worker, method)(*args, **(kwargs or {}))
        except Exception as error:
            future.set_exception(error)
            return future
        if isinstance(result, AsyncOutput):
            return AsyncOutputFuture(result)
        future.set_result(result)
        return future

    def shutdown(self) -> None:
        self._worker = None
