"""What the scheduler asks of the runner for one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rung.runner.sampler.params import SamplingParams

BlockIds = tuple[tuple[int, ...], ...]  # one tuple for each KV-cache group


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """A request that enters a slot with this step: the first time, or again after it was preempted."""

    request_id: str
    token_ids: tuple[int, ...]  # the prompt; after a preemption the prompt and what was generated so far
    prompt_len: int
    block_ids: BlockIds
    sampling: SamplingParams
    num_computed_tokens: int = 0  # tokens whose keys and values are in the cache already
    stop_token_ids: frozenset[int] = frozenset()  # lets the device see the end of a request before the host does


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRequest:
    """A change of a request that has a slot; one that only goes on need not be named. `resumed` replaces its block ids, otherwise the new
    ones are appended."""

    request_id: str
    num_computed_tokens: int
    new_block_ids: BlockIds = ()
    resumed: bool = False
    # By group, how many entries at the front of the row have become the null block, because their tokens lie behind the window. Empty: as
    # before.
    num_null_blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The plan of one step. Requests leave their slots before new ones enter; a plan without tokens is applied too."""

    new_requests: tuple[NewRequest, ...] = ()
    cached_requests: tuple[CachedRequest, ...] = ()
    num_scheduled_tokens: Mapping[str, int] = field(default_factory=dict)  # request id -> tokens of this step
    finished_request_ids: frozenset[str] = frozenset()
    preempted_request_ids: frozenset[str] = frozenset()
    # Decode so many steps in a row; every request has one token to compute, and blocks for all of the steps.
    num_steps: int = 1
    # The caller hands a grammar mask to `sample_tokens`.
    has_bitmask: bool = False

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())
