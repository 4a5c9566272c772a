"""How Dynamo writes down a change of autocast, gradient or inference mode: calls without a tensor, between which the mode holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def mode_change(node: fx.Node) -> str:
    """What a node of a traced graph changes: "autocast" or "/autocast" (its end, whose argument is the beginning), "grad" for gradient and
    inference modes, or an empty text."""
    if node.op != "call_function":
        return ""
    from torch.amp import autocast_mode
    from torch.autograd import grad_mode

    known = {
        autocast_mode._enter_autocast: "autocast",
        autocast_mode._exit_autocast: "/autocast",
        torch._C._set_grad_enabled: "grad",
        grad_mode._enter_inference_mode: "grad",
        grad_mode._exit_inference_mode: "grad",
    }
    return known.get(node.target, "") if callable(node.target) else ""


def enter_autocast(graph: fx.Graph, settings: tuple[Any, ...]) -> fx.Node:
    """A node behind which autocast holds: (device type, dtype or None, enabled, whether casts of weights are kept)."""
    from torch.amp import autocast_mode

    return graph.call_function(autocast_mode._enter_autocast, settings)


def exit_autocast(graph: fx.Graph, entered: fx.Node) -> fx.Node:
    """The end of what `enter_autocast` began."""
    from torch.amp import autocast_mode

    return graph.call_function(autocast_mode._exit_autocast, (entered,))


# AOTAutograd refuses to serialise a graph that calls them, although they are functions of their arguments alone. The values enter its key.
# Can go when they are on its list of safe functions (torch/_functorch/_aot_autograd/autograd_cache.py, `check_node_safe`).
CACHEABLE = {f"torch.amp.autocast_mode.{name}": "arguments alone" for name in ("_enter_autocast", "_exit_autocast")}
