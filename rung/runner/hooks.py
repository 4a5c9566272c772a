"""Hooks around a step: the seam for connectors that move keys and values of requests elsewhere."""

from __future__ import annotations

from rung.runner.plan import StepPlan


class StepHooks:
    """Called by a `ModelRunner`, on its thread; these do nothing. Set `ModelRunner.hooks` between steps.

    For each plan that was accepted and applied there is one call of `before_forward` and, unless the step fails, one of `after_step`; or
    one call of `no_work`. Device work that a hook enqueues on the current stream runs in that order with the step's own. A hook must not
    wait for the device, and finds what it needs in the runner: `kv_caches` (replaced by `allocate_kv_cache` alone), `kv_groups`, and the
    rows of `slots.slot_of[request_id]` in `block_tables`. Dummy runs and captures call no hook. What a hook raises fails its step
    (`StepFailedError`)."""

    def before_forward(self, plan: StepPlan) -> None:
        """Slots and block tables are those of the plan; its forward pass is not enqueued. The place to load keys and values."""

    def no_work(self, plan: StepPlan) -> None:
        """A plan without tokens was applied: requests may have left, nothing runs. Transfers can go on."""

    def after_step(self, plan: StepPlan) -> None:
        """Forward, sampling and the slots' advance are enqueued, for all `num_steps` of the plan. The place to store keys and values."""
