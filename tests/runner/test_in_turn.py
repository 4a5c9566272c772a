"""`bench.in_turn` on a CPU: graphs of one engine are used in turn, and none changes what the others compute."""

from __future__ import annotations

import pytest

from bench.in_turn import CHOICES, PRODUCTS, SETTLING, Turns, chosen, joined, measure
from rung.graphs.program import ReplayProgram
from rung.models import SHAPES, random_model
from rung.passes.kernels import fp8_product, projections
from rung.passes.kernels.tiles import tiles_for
from rung.runner import RunnerConfig, SamplingParams, build_engine


def test_graphs_are_used_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunnerConfig(
        max_num_requests=4, max_num_tokens=64, max_model_len=200, capture_sizes=(4,), graphs="full_and_piecewise", prefix_cache=False
    )
    engine, runner, _ = build_engine(random_model("tiny"), config)
    prompts, params = [[at, 5, 6] for at in range(4)], SamplingParams(max_tokens=12, ignore_eos=True)
    wanted = [one.token_ids for one in engine.generate(prompts, params)]
    turns = Turns(runner, 4)
    for name in ("a", "b"):
        turns.capture(name)
    replayed: list[int] = []
    replay = ReplayProgram.replay
    monkeypatch.setattr(ReplayProgram, "replay", lambda program: (replayed.append(id(program)), replay(program)))
    found = measure(engine, turns, ["a", "b"], 4, 8, SETTLING + 2, SHAPES["tiny"].vocab_size)
    assert {name: len(each) for name, each in found.items()} == {"a": 2, "b": 2}
    assert all(ms > 0 for each in found.values() for ms in each)
    counts = {one: replayed.count(one) for one in set(replayed)}
    assert sum(count >= 2 * (SETTLING + 2) for count in counts.values()) == 2  # both, beside the first one
    for name in ("a", "b", ""):
        turns.use(name)
        assert [one.token_ids for one in engine.generate(prompts, params)] == wanted
    turns.release()
    assert [one.token_ids for one in engine.generate(prompts, params)] == wanted


@pytest.mark.parametrize("names", [*CHOICES, "cublas_o+wide_qkv"])
def test_choices_are_for_their_products_alone(names: str) -> None:
    choice = joined(names)
    assert set(choice) == {product for name in names.split("+") for product in CHOICES[name]}
    with chosen(choice):
        for (n, k), product in PRODUCTS.items():
            for module in (projections, fp8_product):
                assert module.tiles_for(1, n, k) == tiles_for(1, n, k)
                assert module.tiles_for(256, n, k, splittable=True) == choice.get(product, tiles_for(256, n, k, splittable=True))
                wanted = choice.get(product)
                if wanted is not None and wanted.splits > 1:
                    assert module.tiles_for(256, n, k) == tiles_for(256, n, k)
    assert projections.tiles_for is fp8_product.tiles_for is tiles_for
