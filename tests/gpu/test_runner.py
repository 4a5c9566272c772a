"""Models through the runner on CUDA: every captured size against the compiled path, and the modes that steps take."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch

from rung.errors import UnknownModelError
from rung.graphs import Dispatch, GraphMode, Reason, Shape, exact
from rung.models import LoadedModel, find_quickstart, load_model, random_model
from rung.runner import Completion, ModelRunner, NewRequest, RunnerConfig, SamplingParams, StepPlan, build_engine, build_runner
from rung.runner.batch import gather_batch
from rung.runner.graph_forward import GraphForward
from tests.gpu.sync_debug import no_waiting
from tests.smollm2 import TOPICS, divergences, reference_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

MAX_REQUESTS = 512
# bf16 through 30 layers; kernels differ between sizes (cuBLAS picks by size), so rows agree within rounding only
RELATIVE_ERROR = 2e-2
BF16_NEAR_TIE = 0.25  # two logits about 20, each off by a rounding step of 0.125


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@cache
def runner() -> ModelRunner:
    """The 135M shape with random weights, 512 slots, everything captured, every slot 8 tokens into its request."""
    module = random_model("smollm2-135m", dtype=torch.bfloat16, device="cuda", seed=1)
    config = RunnerConfig(
        max_num_requests=MAX_REQUESTS,
        max_num_tokens=4096,
        max_model_len=512,
        num_blocks=MAX_REQUESTS * 4 + 64,
        graphs="full_and_piecewise",
        decode_in_graph=False,  # full graphs end with the hidden states, which are compared here
    )
    result, start = build_runner(module, config)
    assert start.capture is not None
    print(
        f"{start.attention}; {len(start.capture.entries)} captures in {start.capture.seconds:.2f} s, {start.capture.pool_bytes >> 20} MiB"
    )
    print({name: round(seconds, 2) for name, seconds in start.seconds.items()}, start.compile and start.compile.seconds)
    rng = np.random.default_rng(0)
    prompts = {f"r{i}": rng.integers(0, 49152, 8).tolist() for i in range(MAX_REQUESTS)}
    step(
        result,
        StepPlan(
            new_requests=tuple(new(name, ids, i) for i, (name, ids) in enumerate(prompts.items())),
            num_scheduled_tokens=dict.fromkeys(prompts, 8),
        ),
    )
    return result


def new(name: str, ids: list[int], index: int, blocks: int = 4) -> NewRequest:
    first = 1 + index * 4
    return NewRequest(
        request_id=name,
        token_ids=tuple(ids),
        prompt_len=len(ids),
        block_ids=(tuple(range(first, first + blocks)),),
        sampling=SamplingParams(temperature=0.0),
    )


def step(target: ModelRunner, plan: StepPlan) -> Dispatch:
    assert target.execute_model(plan) is None
    assert target.parked is not None
    dispatch = target.parked.dispatch
    output = target.sample_tokens()
    assert output is not None
    output.get_output()
    return dispatch


def hidden(target: ModelRunner, count: int, mode: GraphMode) -> tuple[torch.Tensor, Dispatch]:
    """A decode step of the first `count` requests in the given mode, over poisoned buffers; nothing is advanced."""
    forward = target.forward
    assert isinstance(forward, GraphForward)
    batch = gather_batch({f"r{i}": 1 for i in range(count)}, target.slots)
    shape = Shape(num_tokens=count, num_requests=count, uniform_query_len=1, max_query_len=1)
    if mode is GraphMode.NONE:
        dispatch = Dispatch(exact(shape), Reason.FORCED)
    else:
        dispatch = forward.dispatcher.dispatch(shape, best=mode)
    assert dispatch.mode is mode
    forward.manager.poison(torch.Generator(device=target.device).manual_seed(count))
    prepared = target.prepare(batch, dispatch)
    rows = dispatch.num_tokens
    out = forward.run(dispatch, target.buffers.input_ids[:rows], target.buffers.positions[:rows], prepared.context)
    return out[:count].clone(), dispatch


def test_full_and_piecewise_exist_for_all_51_sizes() -> None:
    forward = runner().forward
    assert isinstance(forward, GraphForward)
    by_mode = {
        mode: sorted(d.num_tokens for d in forward.manager.captured if d.mode is mode) for mode in (GraphMode.PIECEWISE, GraphMode.FULL)
    }
    assert len(by_mode[GraphMode.PIECEWISE]) == len(by_mode[GraphMode.FULL]) == 51
    assert by_mode[GraphMode.FULL][:6] == [1, 2, 4, 8, 16, 24]


def test_every_size_equals_the_compiled_path_with_poisoned_padding() -> None:
    target = runner()
    forward = target.forward
    assert isinstance(forward, GraphForward)
    sizes = sorted(d.num_tokens for d in forward.manager.captured if d.mode is GraphMode.FULL)
    counts = sorted({*sizes, *(size - 1 for size in sizes if size > 1)})
    worst = {GraphMode.PIECEWISE: 0.0, GraphMode.FULL: 0.0}
    for count in counts:
        reference, _ = hidden(target, count, GraphMode.NONE)
        for mode in worst:
            came, _ = hidden(target, count, mode)
            assert torch.isfinite(came).all(), (count, mode)
            error = float((came.float() - reference.float()).norm() / reference.float().norm())
            worst[mode] = max(worst[mode], error)
            assert error < RELATIVE_ERROR, (count, mode, error)
    print(f"{len(counts)} batch sizes, worst relative error: " + ", ".join(f"{mode} {error:.1e}" for mode, error in worst.items()))


def test_two_decodes_and_a_long_prompt_run_piecewise_304_then_three_decodes_full_4() -> None:
    target = runner()
    for name in ("r509", "r510", "r511"):
        assert name in target.slots.slot_of
    prompt = new("long", list(range(298)), MAX_REQUESTS, blocks=20)
    mixed = step(
        target,
        StepPlan(
            new_requests=(prompt,),
            num_scheduled_tokens={"r0": 1, "r1": 1, "long": 298},
            finished_request_ids=frozenset({"r511"}),
        ),
    )
    assert (mixed.mode, mixed.num_tokens, mixed.num_requests) == ("piecewise", 304, None)
    decodes = step(target, StepPlan(num_scheduled_tokens={"r0": 1, "r1": 1, "long": 1}))
    assert (decodes.mode, decodes.num_tokens, decodes.num_requests) == ("full", 4, 4)


def test_a_step_of_decodes_waits_for_nothing() -> None:
    target = runner()
    plan = StepPlan(num_scheduled_tokens={"r2": 1, "r3": 1})
    step(target, plan)
    torch.cuda.synchronize()
    with no_waiting():
        assert target.execute_model(plan) is None
        output = target.sample_tokens()
    assert output is not None
    assert len(output.get_output().sampled_token_ids) == 2


@cache
def smollm2(dtype: torch.dtype) -> LoadedModel:
    try:
        find_quickstart()
    except UnknownModelError as missing:
        pytest.skip(str(missing))
    return load_model("smollm2", dtype=dtype, device="cuda")


def chat_prompts(count: int) -> list[list[int]]:
    tokenizer = smollm2(torch.bfloat16).tokenizer
    return [tokenizer.apply_chat([{"role": "user", "content": topic}]) for topic in TOPICS[:count]]


def test_smollm2_answers_alike_in_every_mode() -> None:
    """In bf16, where kernels differ between sizes, a mode may leave the text of no graphs only where the two best tokens nearly tie."""
    loaded = smollm2(torch.bfloat16)
    answers: list[list[Completion]] = []
    for graphs in ("none", "piecewise", "full_and_piecewise"):
        config = RunnerConfig(max_num_requests=8, max_num_tokens=512, max_model_len=512, num_blocks=300, graphs=graphs)
        engine, made, _ = build_engine(loaded.module, config, tokenizer=loaded.tokenizer)
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2 if graphs == "none" else None)
        answers.append(engine.generate(chat_prompts(5), params))
        print(graphs, {name: count for name, count in made.counters.items() if name.startswith("step.")})
    reference = [(list(answer.token_ids), [token.top[0][1] - token.top[1][1] for token in answer.logprobs or ()]) for answer in answers[0]]
    assert all(len(set(tokens)) > 3 for tokens, _ in reference)
    for mode in answers[1:]:
        found = divergences([answer.token_ids for answer in mode], reference)
        print("divergences", found)
        assert len(found) < len(reference)
        assert [item for item in found if item.gap > BF16_NEAR_TIE] == []


def first_logits(dtype: torch.dtype, *, eager: bool) -> torch.Tensor:
    """Logits of the token behind each chat prompt, [prompts, vocab] in fp32."""
    loaded = smollm2(dtype)
    config = RunnerConfig(max_num_requests=20, max_num_tokens=2048, max_model_len=512, num_blocks=200, eager=eager)
    made, _ = build_runner(loaded.module, config)
    prompts = chat_prompts(20)
    requests = tuple(new(f"p{index}", ids, index, blocks=4) for index, ids in enumerate(prompts))
    assert (
        made.execute_model(StepPlan(new_requests=requests, num_scheduled_tokens={f"p{i}": len(ids) for i, ids in enumerate(prompts)}))
        is None
    )
    assert made.parked is not None
    order = [int(name[1:]) for name in made.parked.batch.request_ids]
    logits = torch.empty_like(made.parked.logits, dtype=torch.float32)
    logits[order] = made.parked.logits.float()
    return logits


def test_compiled_bf16_is_as_close_to_fp32_as_eager_bf16() -> None:
    reference = first_logits(torch.float32, eager=True)
    errors = {}
    for name, eager in (("eager", True), ("compiled", False)):
        came = first_logits(torch.bfloat16, eager=eager)
        errors[name] = float((came - reference).norm() / reference.norm())
    print({name: f"{error:.2e}" for name, error in errors.items()})
    assert errors["compiled"] < 1.3 * errors["eager"] + 1e-3


def _has_metadata(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def test_greedy_tokens_in_fp32_equal_generate() -> None:
    """The same weights in transformers on the CPU; a difference is allowed only at a near tie."""
    from tests.models.harness import transformers_gguf

    if importlib.util.find_spec("gguf") is None or not _has_metadata("gguf"):
        pytest.skip("transformers looks for the installed version of gguf")
    prompts = chat_prompts(4)
    reference = [reference_tokens(transformers_gguf(find_quickstart()), prompt, 24) for prompt in prompts]
    loaded = smollm2(torch.float32)
    config = RunnerConfig(max_num_requests=8, max_num_tokens=512, max_model_len=256, num_blocks=300, graphs="full_and_piecewise")
    engine, _, _ = build_engine(loaded.module, config)
    completions = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    found = divergences([completion.token_ids for completion in completions], reference)
    print("divergences", found)
    assert [item for item in found if item.gap >= 1e-3] == []
