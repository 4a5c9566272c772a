"""Every private torch API that rung stands on, one small function each, resolved when first used.

Checked on torch 2.11.0, 2.13.0 and 2.14.1 unless a function says otherwise. `PROBES` names what must exist and `missing_apis` reports
what does not.
"""

from __future__ import annotations

from rung.torch_compat.ambient import enter_autocast, exit_autocast, mode_change
from rung.torch_compat.capture import (
    Capture,
    NoTensorOpsError,
    capture_graph,
    is_capture_error,
    is_size_decision,
    mark_unbacked,
    node_location,
    readable,
    where_fixed,
)
from rung.torch_compat.compiler import compile_lock, hash_compilers, import_inductor, import_tracer, quiet_compiler
from rung.torch_compat.dispatch import (
    OpOverload,
    TorchDispatchMode,
    call_device_kernel,
    end_allocation_to_pool,
    generator_key,
    in_dispatch_mode,
    is_op,
    is_python_op,
    map_tensors,
    no_dispatch_modes,
    occupy_stream,
    python_dispatcher,
    single_overload,
    storage_identity,
    storage_use_count,
    transform_checks,
    transforming,
    tree_leaves,
)
from rung.torch_compat.distributed import communicates, topology
from rung.torch_compat.fresh_symbols import FreshSymbols
from rung.torch_compat.generated_code import (
    GeneratedCode,
    GeneratedCodeError,
    GeneratedConfig,
    GeneratedKernel,
    generated_code,
    tensor_address_protocol,
    wrapper_builtins,
    wrapper_names,
)
from rung.torch_compat.guards import DynamoGuard, function_modes, global_hooks, hook_registrations, mode_checks
from rung.torch_compat.inductor import (
    artifact_source,
    compile_piece,
    deserialize_artifact,
    needs_size_asserts,
    raw_callable,
    serialize_artifact,
)
from rung.torch_compat.keys import device_factors, toolchain_factors
from rung.torch_compat.memoryless import fake_mode_of, fakes_of, memoryless, run_memoryless
from rung.torch_compat.passes import PASS_OPTION, StopCompile, graph_pass, may_return_view, trace_body, trace_example
from rung.torch_compat.pretend_cuda import GPUS, is_fake, pretend_cuda, why_no_pretending, without_memory
from rung.torch_compat.probes import PROBES, missing_apis
from rung.torch_compat.profiling import profiling
from rung.torch_compat.scaled_mm import scaled_mm
from rung.torch_compat.sizes import (
    bounding_constant,
    evaluate_size,
    free_symbols,
    is_surely_contiguous,
    is_sym_int_node,
    resolved_symbol,
    symbol_of,
    unproved_relations,
    upper_bound,
)
from rung.torch_compat.streams import raw_stream_calls
from rung.torch_compat.triton_compile import (
    CompiledTriton,
    TritonParameter,
    compile_triton,
    triton_interpreted,
    triton_parameters,
    triton_version,
    why_no_triton_export,
)
from rung.torch_compat.user_code import is_user_file, place
from rung.torch_compat.workers import compile_workers, start_workers

__all__ = [
    "wrapper_names",
    "wrapper_builtins",
    "tensor_address_protocol",
    "generated_code",
    "GeneratedKernel",
    "GeneratedConfig",
    "GeneratedCodeError",
    "GeneratedCode",
    "scaled_mm",
    "Capture",
    "CompiledTriton",
    "DynamoGuard",
    "FreshSymbols",
    "GPUS",
    "NoTensorOpsError",
    "OpOverload",
    "PASS_OPTION",
    "PROBES",
    "StopCompile",
    "TorchDispatchMode",
    "TritonParameter",
    "artifact_source",
    "bounding_constant",
    "call_device_kernel",
    "capture_graph",
    "communicates",
    "compile_lock",
    "compile_piece",
    "compile_triton",
    "compile_workers",
    "deserialize_artifact",
    "device_factors",
    "end_allocation_to_pool",
    "enter_autocast",
    "evaluate_size",
    "exit_autocast",
    "fake_mode_of",
    "fakes_of",
    "free_symbols",
    "function_modes",
    "generator_key",
    "global_hooks",
    "hook_registrations",
    "in_dispatch_mode",
    "graph_pass",
    "hash_compilers",
    "import_inductor",
    "import_tracer",
    "is_capture_error",
    "is_fake",
    "is_op",
    "is_python_op",
    "is_size_decision",
    "is_user_file",
    "place",
    "is_surely_contiguous",
    "is_sym_int_node",
    "map_tensors",
    "may_return_view",
    "mode_change",
    "mode_checks",
    "no_dispatch_modes",
    "mark_unbacked",
    "memoryless",
    "missing_apis",
    "needs_size_asserts",
    "node_location",
    "occupy_stream",
    "pretend_cuda",
    "profiling",
    "python_dispatcher",
    "quiet_compiler",
    "raw_callable",
    "raw_stream_calls",
    "readable",
    "resolved_symbol",
    "run_memoryless",
    "serialize_artifact",
    "single_overload",
    "start_workers",
    "storage_identity",
    "storage_use_count",
    "symbol_of",
    "toolchain_factors",
    "topology",
    "trace_body",
    "trace_example",
    "transform_checks",
    "transforming",
    "tree_leaves",
    "triton_interpreted",
    "triton_parameters",
    "triton_version",
    "unproved_relations",
    "upper_bound",
    "where_fixed",
    "why_no_pretending",
    "why_no_triton_export",
    "without_memory",
]
