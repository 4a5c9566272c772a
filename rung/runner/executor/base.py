"""How the engine reaches the workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from rung.runner.grammar.base import GrammarMask
from rung.runner.output import ModelRunnerOutput
from rung.runner.plan import StepPlan


class Executor(ABC):
    """The engine speaks to an executor, the executor to workers, a worker to its model runner; the engine never names a runner.

    Calls reach every worker in the order in which they were made."""

    @abstractmethod
    def collective_rpc(self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Future[Any]:
        """Call `method` on every worker and return at once; the future holds the output rank's result, or raises its error."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release the workers; later calls are refused."""

    def execute_model(self, plan: StepPlan) -> Future[ModelRunnerOutput | None]:
        """See `ModelRunner.execute_model`."""
        return self.collective_rpc("execute_model", (plan,))

    def sample_tokens(self, mask: GrammarMask | None = None) -> Future[ModelRunnerOutput | None]:
        """See `ModelRunner.sample_tokens`; the future's result is the output on the host, and waiting for it is the only wait of a step."""
        return self.collective_rpc("sample_tokens", (mask,))
