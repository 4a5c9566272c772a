"""The step trace of a runner: its header from the configuration, its lines from the dispatches."""

from __future__ import annotations

from pathlib import Path

from rung.attention import CaptureSupport
from rung.graphs import ConfiguredMode, Descriptor, Dispatch, Ladder, plan_descriptors
from rung.graphs.memory_budget import Steps, traced_steps
from rung.graphs.trace import StepTrace, TraceHeader, read_trace
from rung.runner.batch import Batch
from rung.runner.config import RunnerConfig


def capture_ladder(config: RunnerConfig) -> Ladder:
    """The capture sizes that a configuration asks for."""
    if config.capture_sizes is None:
        longest = max(config.decode_query_lens)
        return Ladder.for_requests(config.max_num_requests, decode_query_len=longest, max_num_tokens=config.max_num_tokens)
    return Ladder.custom(config.capture_sizes)


def trace_header(config: RunnerConfig, support: CaptureSupport) -> TraceHeader:
    """What a reader of the steps must know about the runner."""
    mode = ConfiguredMode(config.graphs)
    return TraceHeader(
        graphs=mode,
        capture_support=support,
        ladder=() if mode is ConfiguredMode.NONE else capture_ladder(config).sizes,
        max_num_tokens=config.max_num_tokens,
        max_num_requests=config.max_num_requests,
        max_waste=config.max_waste,
    )


def open_step_trace(config: RunnerConfig, support: CaptureSupport) -> StepTrace | None:
    """The trace that the configuration asks for. Raises `ConfigError` when its file cannot be written."""
    return None if config.step_trace is None else StepTrace(config.step_trace, trace_header(config, support))


def recorded_steps(config: RunnerConfig) -> Steps | None:
    """What earlier runs left in the trace file, to tell a memory budget which graphs are worth most. None without one. Raises
    `TraceFileError` when the file is no trace."""
    path = None if config.step_trace is None else Path(config.step_trace)
    if path is None or config.graph_memory_bytes is None or not path.is_file() or not path.stat().st_size:
        return None
    return traced_steps(read_trace(path)) or None


def record_step(trace: StepTrace, batch: Batch, dispatch: Dispatch) -> None:
    """Add a step that ran."""
    trace.add(batch.shape, dispatch.mode, dispatch.num_tokens, dispatch.reason)


def planned_descriptors(config: RunnerConfig, support: CaptureSupport) -> tuple[Descriptor, ...]:
    """What graphs are captured for, with attention that can be captured so far."""
    found = plan_descriptors(
        capture_ladder(config),
        ConfiguredMode(config.graphs),
        max_num_requests=config.max_num_requests,
        uniform_query_lens=config.decode_query_lens,
        capture_support=support,
    )
    return tuple(found)
