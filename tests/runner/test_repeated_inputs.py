"""Random plans through the runner with our kernels in Triton's interpreter, the inputs of most steps as launches of earlier ones."""

from __future__ import annotations

import pytest

from rung.runner.inputs import InputBuilder
from rung.runner.ops import StepOps
from tests.runner.test_random_plans import PLANS, follow


@pytest.mark.parametrize("decode_in_graph", [False, True])
def test_inputs_of_repeated_kinds_of_step_equal_the_oracles(
    triton_ops: StepOps, decode_in_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, build = [], InputBuilder.build

    def counted(self: InputBuilder, num_tokens_padded: int, has_prefill: bool) -> None:
        built.append(num_tokens_padded)
        build(self, num_tokens_padded, has_prefill)

    monkeypatch.setattr(InputBuilder, "build", counted)
    seen = follow(3, decode_in_graph=decode_in_graph, ops=triton_ops)
    assert 0 < len(built) < (PLANS - seen["replayed"]) // 2
