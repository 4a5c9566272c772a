"""What must exist in torch for this package to work."""

from __future__ import annotations

from importlib import import_module

PROBES = (
    "torch._dynamo.convert_frame.fullgraph_capture",
    "torch._dynamo.utils.get_metrics_context",
    "torch._dynamo.utils.dynamo_timed",
    "torch._dynamo.decorators.mark_unbacked",
    "torch._dynamo.exc.TorchDynamoException",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.meta_utils.MetaTensorDescriber",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv",
    "torch.fx.experimental.symbolic_shapes._constrain_range_for_size",
    "torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode",
    "torch.fx.experimental.proxy_tensor.make_fx",
    "torch._guards.tracing",
    "torch._functorch._aot_autograd.autograd_cache.check_node_safe",
    "torch._inductor.standalone_compile",
    "torch._inductor.standalone_compile.AOTCompiledArtifact",
    "torch._inductor.output_code.CompiledFxGraph",
    "torch._inductor.runtime.cache_dir_utils.cache_dir",
    "torch._inductor.custom_graph_pass.CustomGraphPass",
    "torch._inductor.decomposition.select_decomp_table",
    "torch._inductor.config._config",
    "torch._inductor.fx_passes.reinplace.inplaceable_ops",
    "torch._inductor.fx_passes.reinplace.inplaceable_foreach_ops",
    "torch._inductor.fx_passes.reinplace._SCATTER_OP_TO_VIEW",
    "torch._higher_order_ops.triton_kernel_wrap.triton_kernel_wrapper_functional",
    "torch._inductor.async_compile.AsyncCompile",
    "torch._inductor.async_compile.get_compile_threads",
    "torch._inductor.codecache.CacheBase",
    "torch._C._dispatch_get_all_op_names",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._functorch.maybe_current_level",
    "torch._C._get_tracing_state",
    "torch._C._is_any_autocast_enabled",
    "torch._C._get_deterministic_algorithms",
    "torch._dispatch.python.enable_python_dispatcher",
    "torch.utils.hooks.RemovableHandle",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.cuda._sleep",
    "torch._prims_common.is_contiguous_or_false",
    "torch._scaled_mm",
    "torch.autograd.profiler._is_profiler_enabled",
)


def missing_apis() -> list[str]:
    """The probed names that this torch does not have."""
    return [name for name in PROBES if not _exists(name)]


def _exists(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    try:
        return hasattr(import_module(module), attribute)
    except ImportError:
        return False
