"""Requests with a grammar among others: the mask is made in the window between the two calls."""

from __future__ import annotations

import importlib.util
import json
import random
from typing import Any

import numpy as np
import pytest

from rung.errors import BackendUnavailableError, GrammarError
from rung.graphs import ConfiguredMode
from rung.runner import FinishReason, GrammarCompiler, GrammarMask, SamplingParams, StepPlan
from tests.runner.grammars import OneOf
from tests.runner.test_engine import assert_nothing_left, count_preemptions
from tests.runner.test_graph_forward import make
from tests.runner.tiny import VOCAB, TinyModel, make_engine

END = 96
CHOICES = [[5, 6, 7, 8, 9], [5, 6, 11, 12], [20, 21, 22, 23, 24, 25]]


def constrained(grammar: OneOf, **more: Any) -> SamplingParams:
    return SamplingParams(grammar=grammar, stop_token_ids=[END], max_tokens=12, **more)


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_outputs_follow_the_grammar_and_other_requests_are_as_they_were(steps_in_flight: int, temperature: float) -> None:
    model = TinyModel()
    engine, runner = make_engine(model, steps_in_flight=steps_in_flight, max_num_tokens=16)
    grammar = OneOf(CHOICES, END)
    prompts = [[3, 4], [1] * 20, [9, 9, 2], [7]]
    params = [constrained(grammar, temperature=temperature, seed=i) if i % 2 else SamplingParams(max_tokens=9) for i in range(4)]
    completions = engine.generate(prompts, params)
    for at, completion in enumerate(completions):
        if at % 2:
            assert completion.token_ids in grammar.choices
            assert completion.finish_reason is FinishReason.STOP
        else:
            assert list(completion.token_ids) == model.greedy(prompts[at], 9)
    assert [matcher.accepted in grammar.choices for matcher in grammar.matchers] == [True, True]
    assert_nothing_left(engine, runner)


def test_the_grammar_is_followed_across_preemptions() -> None:
    chance = random.Random(6)
    engine, runner = make_engine(num_blocks=13, block_size=4, max_model_len=48, max_num_tokens=16)
    preemptions = count_preemptions(engine)
    grammar = OneOf([list(range(10, 30))], END)
    prompts = [[chance.randrange(VOCAB) for _ in range(chance.randint(5, 15))] for _ in range(6)]
    completions = engine.generate(prompts, SamplingParams(grammar=grammar, stop_token_ids=[END], max_tokens=22))
    assert {completion.token_ids for completion in completions} == {(*range(10, 30), END)}
    assert sum(preemptions.values()) > 0
    assert_nothing_left(engine, runner)


@pytest.mark.parametrize("replay_steps", [1, 4])
def test_a_decode_graph_leaves_sampling_to_the_sampler_only_while_a_grammar_runs(replay_steps: int) -> None:
    engine, runner, _ = make(ConfiguredMode.FULL_AND_PIECEWISE, decode_in_graph=True, replay_steps=replay_steps)
    plans: list[StepPlan] = []
    execute = runner.execute_model

    def watched(plan: StepPlan) -> Any:
        plans.append(plan)
        return execute(plan)

    runner.execute_model = watched  # type: ignore[method-assign]
    grammar = OneOf([[5, 6, 7]], END)
    free, bound = engine.generate([[3, 4], [1, 2]], [SamplingParams(max_tokens=24), constrained(grammar)])
    assert bound.token_ids == (5, 6, 7, END)
    assert list(free.token_ids) == runner.module.greedy([3, 4], 24)
    masked = [plan.has_bitmask for plan in plans if plan.num_scheduled_tokens]
    assert 4 <= sum(masked) <= 6
    assert masked == sorted(masked, reverse=True)  # none after the grammar's end
    assert any(plan.num_steps > 1 for plan in plans) == (replay_steps > 1)


def test_only_rows_with_a_grammar_are_in_the_mask() -> None:
    engine, _ = make_engine()
    masks: list[GrammarMask | None] = []
    sample = engine.executor.sample_tokens

    def watched(mask: GrammarMask | None = None) -> Any:
        masks.append(mask)
        return sample(mask)

    engine.executor.sample_tokens = watched  # type: ignore[method-assign]
    for number in range(3):
        engine.add_request([1, 2], SamplingParams(max_tokens=6), request_id=f"free{number}")
    engine.add_request([1, 2], constrained(OneOf([[5, 6]], END)), request_id="bound")
    while engine.has_work:
        engine.step()
    assert {tuple(mask.rows) for mask in masks if mask is not None} == {("bound",)}
    assert [mask is None for mask in masks].count(True) >= 2


def test_a_prompt_in_chunks_is_masked_at_its_last_one() -> None:
    engine, _ = make_engine(max_num_tokens=8)
    grammar = OneOf([[5]], END)
    engine.generate([[1] * 30], constrained(grammar))
    assert grammar.matchers[0].fills <= 4  # two tokens, and what ran ahead


def test_a_grammar_that_contradicts_the_parameters_ends_its_request_alone() -> None:
    model = TinyModel()
    engine, runner = make_engine(model)
    bad, good = engine.generate(
        [[1, 2], [3, 4]], [constrained(OneOf([[5, 6]], END), allowed_token_ids=[5, 7]), SamplingParams(max_tokens=5)]
    )
    assert bad.token_ids == (5,)
    assert bad.finish_reason is FinishReason.ERROR
    assert bad.error is not None
    assert "no token may be sampled" in bad.error
    assert list(good.token_ids) == model.greedy([3, 4], 5)
    assert_nothing_left(engine, runner)


def test_a_mask_of_free_rows_is_none() -> None:
    matcher = OneOf([[5]], END).matcher()
    matcher.accepted = (5, END)
    assert GrammarMask.of({"a": matcher}, VOCAB) is None


# --- xgrammar ---

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture
def compiler() -> GrammarCompiler:
    pytest.importorskip("xgrammar")
    tokenizers = pytest.importorskip("tokenizers")
    characters = [chr(code) for code in range(32, 127)]
    vocab = {character: index for index, character in enumerate(characters)} | {"</s>": len(characters)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["</s>"])
    return GrammarCompiler(backend, vocab_size=VOCAB, stop_ids=[95])


def text_of(token_ids: tuple[int, ...]) -> str:
    return "".join(chr(token + 32) for token in token_ids if token < 95)


def test_random_samples_are_json_of_the_schema(compiler: GrammarCompiler) -> None:
    engine, _ = make_engine()
    grammar = compiler.json_schema(SCHEMA)
    params = [SamplingParams(grammar=grammar, stop_token_ids=[95], temperature=5.0, seed=i, max_tokens=100) for i in range(8)]
    done = [c for c in engine.generate([[1, 2]] * 8, params) if c.finish_reason is FinishReason.STOP]
    assert len(done) >= 3
    for completion in done:
        value = json.loads(text_of(completion.token_ids))
        assert isinstance(value["a"], int)
        assert value["b"] in "xy"


def test_a_regular_expression_and_an_ebnf(compiler: GrammarCompiler) -> None:
    engine, _ = make_engine()
    grammars = [compiler.regex("[ab]{3}c"), compiler.ebnf('root ::= "no" | "yes"')]
    texts = [
        text_of(c.token_ids)
        for c in engine.generate([[1], [2]], [SamplingParams(grammar=one, stop_token_ids=[95], max_tokens=9) for one in grammars])
    ]
    assert len(texts[0]) == 4
    assert set(texts[0][:3]) <= {"a", "b"}
    assert texts[0][3] == "c"
    assert texts[1] in ("no", "yes")


def test_a_matcher_says_what_it_takes(compiler: GrammarCompiler) -> None:
    matcher = compiler.regex("ab").matcher()
    row = np.zeros(-(-VOCAB // 32), np.int32)
    assert not matcher.accept(ord("b") - 32)
    assert matcher.accept(ord("a") - 32)
    assert matcher.fill(row)
    assert np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist() == [ord("b") - 32]
    assert matcher.accept(ord("b") - 32)
    assert matcher.accept(95)
    assert not matcher.fill(row)
    assert not matcher.accept(95)


@pytest.mark.parametrize(("kind", "source"), [("json_schema", "{nope"), ("regex", "((("), ("ebnf", "root = ")])
def test_what_xgrammar_refuses_is_an_error_with_its_reason(compiler: GrammarCompiler, kind: str, source: str) -> None:
    with pytest.raises(GrammarError, match="xgrammar does not take this"):
        getattr(compiler, kind)(source)


def test_a_vocabulary_without_an_end_is_refused() -> None:
    pytest.importorskip("xgrammar")
    with pytest.raises(GrammarError, match="no end token"):
        GrammarCompiler(None, vocab_size=5, stop_ids=[])


def test_without_xgrammar_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rung.runner.grammar.xgrammar.find_spec", lambda name: None)
    with pytest.raises(BackendUnavailableError, match="not installed") as caught:
        GrammarCompiler(None, vocab_size=5, stop_ids=[1])
    assert caught.value.hint == "pip install 'rung[grammar]'"
    assert importlib.util.find_spec("rung.runner.grammar") is not None
