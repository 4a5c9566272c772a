"""The runner: request slots, block tables, inputs, scheduler, sampler, and the engine on top."""

from rung.graphs import Dispatch
from rung.runner.build import StartUp, build_engine, build_runner
from rung.runner.completion import Completion, Update
from rung.runner.config import RunnerConfig
from rung.runner.engine import Engine
from rung.runner.executor import Executor, InProcessExecutor
from rung.runner.forward import EagerForward, Forward
from rung.runner.grammar import Grammar, GrammarCompiler, GrammarMask, GrammarMatcher
from rung.runner.hooks import StepHooks
from rung.runner.model_runner import ModelRunner
from rung.runner.output import EMPTY_OUTPUT, AsyncOutput, ModelRunnerOutput
from rung.runner.plan import CachedRequest, NewRequest, StepPlan
from rung.runner.request import FinishReason, Request
from rung.runner.sampler import SamplingParams, TokenLogprobs, sampling_defaults
from rung.runner.scheduler import Scheduler

__all__ = [
    "EMPTY_OUTPUT",
    "AsyncOutput",
    "CachedRequest",
    "Completion",
    "Dispatch",
    "EagerForward",
    "Engine",
    "Executor",
    "FinishReason",
    "Forward",
    "Grammar",
    "GrammarCompiler",
    "GrammarMask",
    "GrammarMatcher",
    "InProcessExecutor",
    "ModelRunner",
    "ModelRunnerOutput",
    "NewRequest",
    "Request",
    "RunnerConfig",
    "SamplingParams",
    "Scheduler",
    "StartUp",
    "StepHooks",
    "StepPlan",
    "TokenLogprobs",
    "Update",
    "build_engine",
    "build_runner",
    "sampling_defaults",
]
