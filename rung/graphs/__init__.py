"""Ladders, descriptors, dispatch, capture and replay."""

from __future__ import annotations

from rung.graphs.backends import GraphBackend, make_backend
from rung.graphs.buffers import BufferSpec, StaticBuffer
from rung.graphs.capture_report import CaptureEntry, CaptureReport
from rung.graphs.descriptor import ConfiguredMode, Descriptor, GraphMode, Shape, exact
from rung.graphs.dispatch import Dispatch, Dispatcher
from rung.graphs.ladder import Ladder
from rung.graphs.manager import GraphManager
from rung.graphs.memory import MemoryModel, MemoryReport
from rung.graphs.memory_budget import MemoryBudget
from rung.graphs.outputs import Outputs
from rung.graphs.padding import check_padding
from rung.graphs.planned import plan_descriptors, resolve_mode
from rung.graphs.reasons import Reason
from rung.graphs.trace import StepTrace, TracedStep, TraceHeader, TraceRun, read_trace

__all__ = [
    "BufferSpec",
    "CaptureEntry",
    "CaptureReport",
    "ConfiguredMode",
    "Descriptor",
    "Dispatch",
    "Dispatcher",
    "GraphBackend",
    "GraphManager",
    "GraphMode",
    "Ladder",
    "MemoryBudget",
    "MemoryModel",
    "MemoryReport",
    "Outputs",
    "Reason",
    "Shape",
    "StaticBuffer",
    "StepTrace",
    "TraceHeader",
    "TraceRun",
    "TracedStep",
    "check_padding",
    "exact",
    "make_backend",
    "plan_descriptors",
    "read_trace",
    "resolve_mode",
]
