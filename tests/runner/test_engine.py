from __future__ import annotations

import gc
import random
import weakref
from concurrent.futures import Future
from typing import Any

import pytest

from rung.errors import PromptTooLongError, RequestError, StateError
from rung.runner import Completion, FinishReason, SamplingParams, Update
from rung.runner.grammar import Grammar, GrammarMatcher
from rung.runner.text import StopText
from tests.runner.tiny import VOCAB, LetterDetokenizer, LetterTokenizer, TinyModel, make_engine


def test_random_arrivals_with_chunked_prompts_equal_the_model_without_cache() -> None:
    model, chance = TinyModel(), random.Random(5)
    engine, runner = make_engine(model, max_num_tokens=16, max_num_requests=4)
    prompts = {f"r{i}": [chance.randrange(VOCAB) for _ in range(chance.randint(1, 50))] for i in range(12)}
    counts = {name: chance.randint(1, 12) for name in prompts}
    waiting, done = list(prompts), {}
    while waiting or engine.has_work:
        if waiting and chance.random() < 0.4:
            name = waiting.pop(0)
            engine.add_request(prompts[name], SamplingParams(max_tokens=counts[name]), request_id=name)
        for update in engine.step():
            if update.completion:
                done[update.request_id] = list(update.completion.token_ids)
    assert done == {name: model.greedy(prompts[name], counts[name]) for name in prompts}
    assert max(model.calls) == 16
    assert_nothing_left(engine, runner)


def test_an_engine_that_goes_lets_its_runner_go_at_once() -> None:
    """Not at the next garbage collection: the KV cache hangs on it."""
    gc.collect()
    gc.disable()
    try:
        engine, runner = make_engine(TinyModel())
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
        alive = weakref.ref(runner)
        del engine, runner
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_preemption_changes_no_token(steps_in_flight: int) -> None:
    model, chance = TinyModel(), random.Random(6)
    engine, runner = make_engine(model, num_blocks=13, block_size=4, max_model_len=48, max_num_tokens=16, steps_in_flight=steps_in_flight)
    prompts = [[chance.randrange(VOCAB) for _ in range(chance.randint(5, 20))] for _ in range(6)]
    preemptions = count_preemptions(engine)
    completions = engine.generate(prompts, SamplingParams(max_tokens=14))
    assert [list(c.token_ids) for c in completions] == [model.greedy(prompt, 14) for prompt in prompts]
    assert sum(preemptions.values()) > 0
    assert_nothing_left(engine, runner)


def count_preemptions(engine: object) -> dict[str, int]:
    seen: dict[str, int] = {}
    scheduler = engine.scheduler  # type: ignore[attr-defined]
    preempt = scheduler._preempt

    def counted(request: object, draft: object) -> None:
        seen[request.request_id] = seen.get(request.request_id, 0) + 1  # type: ignore[attr-defined]
        preempt(request, draft)

    scheduler._preempt = counted
    return seen


def assert_nothing_left(engine: object, runner: object) -> None:
    assert sorted(runner.slots.free_slots) == list(range(runner.config.max_num_requests))  # type: ignore[attr-defined]
    assert engine.scheduler.blocks.num_free == runner.num_blocks - 1  # type: ignore[attr-defined]


def test_a_context_that_is_full_ends_the_request() -> None:
    model = TinyModel()
    engine, _ = make_engine(model, max_model_len=32)
    (completion,) = engine.generate([[3] * 28])
    assert (list(completion.token_ids), completion.finish_reason) == (model.greedy([3] * 28, 4), FinishReason.LENGTH)


def test_a_prompt_that_leaves_no_room_is_refused_before_anything_is_scheduled() -> None:
    engine, runner = make_engine(max_model_len=32)
    with pytest.raises(PromptTooLongError, match="the prompt has 32 tokens; with max_model_len=32 a prompt may have 31"):
        engine.generate([[1, 2], [3] * 32])
    assert not engine.has_work
    assert runner.module.calls == []


@pytest.mark.parametrize(
    ("prompt", "text"),
    [([], "the prompt is empty"), ([1, VOCAB], f"token 1 of the prompt is {VOCAB}"), ([-1], "token 0"), ("hello", "has no tokenizer")],
)
def test_bad_prompts_leave_other_requests_unharmed(prompt: object, text: str) -> None:
    model = TinyModel()
    engine, _ = make_engine(model)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=5), request_id="good")
    engine.step()
    with pytest.raises(RequestError, match=text):
        engine.add_request(prompt)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="request id 'good' is in use"):
        engine.add_request([1], request_id="good")
    assert list(drain(engine)["good"].token_ids) == model.greedy([1, 2, 3], 5)


def drain(engine: object) -> dict[str, Completion]:
    updates: list[Update] = []
    while engine.has_work:  # type: ignore[attr-defined]
        updates += engine.step()  # type: ignore[attr-defined]
    return {u.request_id: u.completion for u in updates if u.completion}


def test_a_stop_token_ends_the_request_and_is_not_shown() -> None:
    model = TinyModel()
    tokens = model.greedy([10, 11], 8)
    stop = tokens[5]
    first = tokens.index(stop)
    engine, runner = make_engine(model, LetterTokenizer([stop]))
    (completion,) = engine.generate([[10, 11]], SamplingParams(max_tokens=8))
    assert completion.finish_reason is FinishReason.STOP
    assert list(completion.token_ids) == tokens[: first + 1]
    assert completion.text == "".join(chr(t + 32) for t in tokens[:first])
    assert_nothing_left(engine, runner)
    (longer,) = engine.generate([[10, 11]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert list(longer.token_ids) == tokens


def test_a_stop_text_ends_the_request_and_its_beginning_is_held_back() -> None:
    model = TinyModel()
    text = "".join(chr(t + 32) for t in model.greedy([10, 11], 8))
    engine, runner = make_engine(model, LetterTokenizer())
    parts, completion = [], None
    for _, update in engine.stream([[10, 11]], SamplingParams(max_tokens=8, stop=text[3:5])):
        parts.append(update.text)
        completion = update.completion
    at = text.find(text[3:5])
    assert completion is not None
    assert (completion.finish_reason, completion.text) == (FinishReason.STOP, text[:at])
    assert "".join(parts) == text[:at]
    assert_nothing_left(engine, runner)


def test_stop_texts_are_found_across_parts() -> None:
    watch = StopText(["###", "END"])
    assert [watch.add(part) for part in ("ab#", "#c", "E", "N", "Dx", "y")] == ["ab", "##c", "", "", "", ""]
    assert watch.found


def test_text_that_was_only_the_beginning_of_a_stop_text_comes_at_the_end() -> None:
    watch = StopText(["END"])
    assert (watch.add("thE"), watch.finish(), watch.found) == ("th", "E", False)


def test_an_aborted_request_frees_everything() -> None:
    engine, runner = make_engine()
    engine.add_request([1, 2, 3], request_id="a")
    engine.add_request([4, 5], SamplingParams(max_tokens=3), request_id="b")
    engine.step()
    engine.abort("a")
    done = drain(engine)
    assert {name: c.finish_reason for name, c in done.items()} == {"a": FinishReason.ABORT, "b": FinishReason.LENGTH}
    assert_nothing_left(engine, runner)


def test_closing_a_stream_cancels_its_requests() -> None:
    engine, runner = make_engine()
    stream = engine.stream([[1], [2]])
    next(stream)
    stream.close()
    drain(engine)
    assert_nothing_left(engine, runner)


def test_seeded_sampling_is_the_same_alone_and_in_a_batch() -> None:
    model = TinyModel()
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=6) for i in range(6)]
    prompts = [[i + 1, 5, 9] for i in range(6)]
    together = [c.token_ids for c in make_engine(model)[0].generate(prompts, params)]
    alone = [make_engine(model)[0].generate([p], [s])[0].token_ids for p, s in zip(prompts, params, strict=True)]
    assert together == alone
    assert len(set(together)) == 6


def test_seeded_sampling_alone_equals_that_in_a_batch_of_64() -> None:
    """Rounding of the CPU's products depends on the number of rows (1e-6 of a logit), so two scores that close could change places."""
    model = TinyModel()
    settings: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 12}, {"temperature": 1.5, "top_p": 0.8}, {}]
    params = [SamplingParams(seed=i, max_tokens=5, **settings[i % 4]) for i in range(64)]
    prompts = [[i % 90 + 1, 5, *range(i % 7)] for i in range(64)]
    engine, _ = make_engine(model, max_num_requests=64, num_blocks=129)
    together = [c.token_ids for c in engine.generate(prompts, params)]
    single, _ = make_engine(TinyModel(), max_num_requests=1, prefix_cache=False)
    alone = [single.generate([prompts[i]], params[i])[0].token_ids for i in range(0, 64, 3)]
    assert alone == together[::3]
    assert len(set(together)) > 40


def test_an_unseeded_request_tells_its_seed() -> None:
    model = TinyModel()
    engine, _ = make_engine(model)
    first, second = engine.generate([[1, 2]] * 2, SamplingParams(temperature=1.0, max_tokens=12))
    assert first.seed != second.seed
    (again,) = engine.generate([[1, 2]], SamplingParams(temperature=1.0, max_tokens=12, seed=first.seed))
    assert again.token_ids == first.token_ids


def test_a_wrong_number_of_parameters_is_refused() -> None:
    with pytest.raises(RequestError, match="1 sampling parameters came for 2 prompts"):
        make_engine()[0].generate([[1], [2]], [SamplingParams()])


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_a_failed_step_ends_its_requests_and_no_others(steps_in_flight: int) -> None:
    model = TinyModel()
    engine, runner = make_engine(model, steps_in_flight=steps_in_flight, max_num_tokens=16, max_num_requests=4)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=30), request_id="early")
    for _ in range(4):
        engine.step()
    forward = runner.forward.run
    failing = iter([True])

    def run(*arguments: object) -> object:
        if next(failing, False):
            raise RuntimeError("out of luck")
        return forward(*arguments)  # type: ignore[arg-type]

    runner.forward.run = run  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.step()
    engine.add_request([4, 5], SamplingParams(max_tokens=6), request_id="late")
    done: dict[str, Completion] = {}
    while engine.has_work:
        done |= {update.request_id: update.completion for update in engine.step() if update.completion}
    assert done["early"].finish_reason is FinishReason.ERROR
    assert done["early"].error == "RuntimeError: out of luck"
    assert list(done["early"].token_ids) == model.greedy([1, 2, 3], 30)[: len(done["early"].token_ids)]
    assert list(done["late"].token_ids) == model.greedy([4, 5], 6)
    assert_nothing_left(engine, runner)


def test_tokens_that_cannot_be_read_end_their_requests() -> None:
    model = TinyModel()
    engine, runner = make_engine(model, max_num_tokens=16, max_num_requests=4)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=30), request_id="early")
    engine.step()
    engine._in_flight[0] = Future()
    engine._in_flight[0].set_exception(RuntimeError("device lost a page"))
    with pytest.raises(RuntimeError, match="lost a page"):
        engine.step()
    assert engine.generate([[4, 5]], SamplingParams(max_tokens=6))[0].token_ids == tuple(model.greedy([4, 5], 6))
    assert_nothing_left(engine, runner)


@pytest.mark.parametrize("request_id", [3, ("a",), "", ["a"], b"a"], ids=str)
def test_an_id_is_a_text(request_id: Any) -> None:
    engine, _ = make_engine(TinyModel())
    with pytest.raises(RequestError, match="a request id must be a text that is not empty, got "):
        engine.add_request([1], request_id=request_id)
    assert not engine.has_work


def test_own_ids_pass_over_those_in_use() -> None:
    engine, _ = make_engine(TinyModel())
    engine.add_request([1], request_id="request-0")
    assert engine.add_request([2]) != "request-0"


def test_second_runner_of_one_module_is_noticed_by_the_first() -> None:
    model = TinyModel()
    first, _ = make_engine(model)
    first.add_request([1, 2, 3], SamplingParams(max_tokens=6))
    first.step()
    make_engine(model)
    with pytest.raises(StateError, match="another runner"):
        first.step()


@pytest.mark.parametrize("prompt", [None, 5, [True]])
def test_prompt_that_is_none(prompt: object) -> None:
    engine, _ = make_engine(TinyModel())
    with pytest.raises(RequestError):
        engine.add_request(prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_stop_text_that_is_complete_first_wins_however_the_text_is_cut(size: int) -> None:
    stop, text = StopText(["a", "bab"]), "babaa"
    assert "".join(stop.add(text[at : at + size]) for at in range(0, len(text), size)) == "b"


class Misbehaving(Grammar, GrammarMatcher):
    """A grammar, and its matcher, that fails where it is told to."""

    def __init__(self, where: str) -> None:
        self.where = where

    def matcher(self) -> GrammarMatcher:
        return self

    def accept(self, token: int) -> bool:
        if self.where == "accept":
            raise ValueError("lost its place")
        return self.where != "refuse"

    def fill(self, row: object) -> bool:
        if self.where == "fill":
            raise ValueError("lost its place")
        return False


@pytest.mark.parametrize(("where", "error"), [("accept", "lost its place"), ("fill", "lost its place"), ("refuse", "refused token")])
def test_a_grammar_that_fails_ends_its_own_request_alone(where: str, error: str) -> None:
    model = TinyModel()
    engine, runner = make_engine(model, max_num_tokens=16, max_num_requests=4)
    engine.add_request([5, 6, 7], SamplingParams(max_tokens=6), request_id="good")
    engine.add_request([1, 2], SamplingParams(max_tokens=6, grammar=Misbehaving(where)), request_id="bad")
    done: dict[str, Completion] = {}
    while engine.has_work:
        done |= {update.request_id: update.completion for update in engine.step() if update.completion}
    assert list(done["good"].token_ids) == model.greedy([5, 6, 7], 6)
    assert done["bad"].finish_reason is FinishReason.ERROR
    assert error in str(done["bad"].error)
    assert_nothing_left(engine, runner)


def test_a_completion_that_waits_survives_a_step_that_fails() -> None:
    engine, runner = make_engine(TinyModel(), max_num_tokens=16, max_num_requests=4)
    for name in ("a", "b"):
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=30), request_id=name)
    engine.step()
    engine.abort("a")
    engine._in_flight[0] = Future()
    engine._in_flight[0].set_exception(RuntimeError("device lost a page"))
    with pytest.raises(RuntimeError, match="lost a page"):
        engine.step()
    done = {}
    while engine.has_work:
        done |= {update.request_id: update.completion.finish_reason for update in engine.step() if update.completion}
    assert done == {"a": FinishReason.ABORT, "b": FinishReason.ERROR}
    assert_nothing_left(engine, runner)


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_stream_that_was_never_read_cancels_its_requests(how: str) -> None:
    engine, runner = make_engine(TinyModel(), max_num_tokens=16, max_num_requests=4)
    stream = engine.stream([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=30))
    if how == "close":
        stream.close()  # type: ignore[attr-defined]
    del stream
    while engine.has_work:
        engine.step()
    assert not engine._outputs
    assert_nothing_left(engine, runner)


def test_an_id_used_again_has_its_own_prompt_log_probabilities() -> None:
    engine, runner = make_engine(TinyModel(), max_num_tokens=16, max_num_requests=4)
    params = SamplingParams(max_tokens=2, prompt_logprobs=1)
    engine.add_request([1, 2, 3], params, request_id="x")
    engine.step()
    engine.abort("x")
    engine.add_request([8, 7, 6, 5], params, request_id="x")
    done = [update.completion for _ in range(20) if engine.has_work for update in engine.step() if update.completion]
    found = done[-1].prompt_logprobs
    assert found is not None
    assert [None if one is None else one.token_id for one in found] == [None, 7, 6, 5]
    assert_nothing_left(engine, runner)


@pytest.mark.parametrize("prompts", [None, 3, iter([[1]])], ids=["none", "number", "iterator"])
def test_prompts_are_a_list(prompts: Any) -> None:
    engine, _ = make_engine(TinyModel())
    with pytest.raises(RequestError, match=r"the prompts are a .*\nhint: give a list"):
        engine.generate(prompts)


def test_a_tokenizer_that_raises_schedules_nothing() -> None:
    class Broken(LetterTokenizer):
        calls = 0

        def detokenizer(self) -> LetterDetokenizer:
            self.calls += 1
            if self.calls == 2:
                raise ValueError("out of letters")
            return super().detokenizer()

    engine, runner = make_engine(TinyModel(), tokenizer=Broken())
    with pytest.raises(ValueError, match="out of letters"):
        engine.generate([[1, 2], [3]], SamplingParams(max_tokens=3))
    assert_nothing_left(engine, runner)
    assert list(engine.generate([[1, 2]], SamplingParams(max_tokens=3))[0].token_ids) == runner.module.greedy([1, 2], 3)


def test_one_text_is_no_list_of_prompts() -> None:
    engine, _ = make_engine(TinyModel(), max_num_tokens=16)
    with pytest.raises(RequestError, match="one text"):
        engine.generate("abc")
    with pytest.raises(RequestError, match="sampling parameters are a dict"):
        engine.generate([[1]], {"max_tokens": 3})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="stops at a text"):
        engine.generate([[1]], SamplingParams(stop=["x"]))
    with pytest.raises(RequestError, match="ignore_eos"):
        engine.generate([[1]], SamplingParams(grammar=Misbehaving(""), ignore_eos=True))
