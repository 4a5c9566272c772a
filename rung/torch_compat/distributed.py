"""Process groups: how ranks are laid out, and which operations talk to other ranks."""

from __future__ import annotations

from typing import Any

from torch import fx

from rung.torch_compat.dispatch import is_op

_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional", "_dtensor", "symm_mem")


def topology() -> tuple[Any, ...]:
    """The number of ranks and the shapes of this rank's groups, empty without torch.distributed. A group is written relative to its first
    rank, so that all ranks of a regular layout say the same."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return ()
    from torch.distributed import distributed_c10d

    groups = [dist.get_process_group_ranks(group) for group in distributed_c10d._world.pg_map]
    return dist.get_world_size(), tuple(sorted({tuple(rank - ranks[0] for rank in ranks) for ranks in groups}))


def communicates(graph_module: fx.GraphModule) -> bool:
    """Whether a graph holds an operation that other ranks take part in."""
    targets = [node.target for node in graph_module.graph.nodes if node.op == "call_function"]
    return any(str(target).partition(".")[0] in _NAMESPACES for target in targets if is_op(target))
