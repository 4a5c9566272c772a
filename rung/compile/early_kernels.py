"""Images of our own kernels that are built while Inductor still generates the code around them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from rung import torch_compat
from rung.counters import Count, Counters
from rung.launch import Rehearsal, capability_of, launch_road, rehearse_launches
from rung.launch.rehearsal import Building, Submit


class EarlyKernels:
    """What the comparison of pieces will launch, from the operations of ours that the passes leave, at the sizes of the comparison.

    `see` is for the end of the passes, in the midst of a compile: the compiler's workers build while this process goes on. `finish` waits
    for them and says whether that was all; where it was not (an operation that cannot run on tensors without memory, a worker that
    failed, a piece whose passes did not run), the pieces have to be asked."""

    def __init__(self, capability: int, submit: Submit, sizes: Sequence[int], counters: Counters) -> None:
        self._capability = capability
        self._submit = submit
        self._sizes = sizes
        self._counters = counters
        self._rehearsal = Rehearsal(capability)
        self._building = Building()
        self._seen: set[int] = set()  # pieces
        self._unseen = False

    @classmethod
    def of(cls, device: torch.device, sizes: Sequence[int], counters: Counters) -> EarlyKernels | None:
        """None where kernels have no images of ours, or nobody builds beside this process."""
        if device.type != "cuda" or launch_road() != "prebound":
            return None
        submit = torch_compat.compile_workers()
        return None if submit is None else cls(capability_of(device), submit, sizes, counters)

    def see(self, index: int, graph: fx.Graph) -> None:
        """Begin to build what the graph of a piece launches; passes have run over it."""
        self._seen.add(index)
        try:
            with rehearse_launches(self._capability, self._rehearsal):
                for node in graph.nodes:
                    if node.op == "call_function" and isinstance(node.target, torch_compat.OpOverload) and node.target.namespace == "rung":
                        for size in self._sizes:
                            torch_compat.run_memoryless(node, size)
        except Exception:  # whatever an operation may raise on such tensors
            self._unseen = True
            self._counters.add(Count.UNFORESEEN_KERNELS)
        self._rehearsal.begin(self._submit, self._building)

    def finish(self, num_pieces: int) -> bool:
        """Wait; whether the store has all images of so many pieces now."""
        failures = self._building.finish(self._capability)
        return not (failures or self._unseen) and len(self._seen) == num_pieces
