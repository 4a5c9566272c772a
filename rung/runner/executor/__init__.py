"""Executors: one contract, one file for each way to run workers."""

from rung.runner.executor.base import Executor
from rung.runner.executor.in_process import AsyncOutputFuture, InProcessExecutor

__all__ = ["AsyncOutputFuture", "Executor", "InProcessExecutor"]
