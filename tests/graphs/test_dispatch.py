"""Descriptors, what fits them, and the reasons (dispatch parts of TV4 and TV5, T21)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.attention.base import CaptureSupport
from rung.errors import LadderError
from rung.graphs import ConfiguredMode, Descriptor, Dispatcher, GraphMode, Ladder, Reason, Shape, plan_descriptors, resolve_mode
from rung.graphs.descriptor import misfit

LADDER = Ladder.up_to(512)


def decode(requests: int, query_len: int = 1) -> Shape:
    return Shape(num_tokens=requests * query_len, num_requests=requests, uniform_query_len=query_len, max_query_len=query_len)


def mixed(tokens: int, requests: int, longest: int) -> Shape:
    return Shape(num_tokens=tokens, num_requests=requests, uniform_query_len=None, max_query_len=longest)


def dispatcher(mode: ConfiguredMode, support: CaptureSupport = CaptureSupport.UNIFORM_BATCH, max_num_requests: int = 512) -> Dispatcher:
    planned = plan_descriptors(LADDER, mode, max_num_requests=max_num_requests, capture_support=support)
    return Dispatcher(planned, resolved=resolve_mode(mode, support))


def test_full_exists_for_all_sizes_with_512_requests() -> None:
    planned = plan_descriptors(LADDER, ConfiguredMode.FULL_AND_PIECEWISE, max_num_requests=512)
    assert sum(d.mode is GraphMode.PIECEWISE for d in planned) == 51
    assert [d.num_tokens for d in planned if d.mode is GraphMode.FULL] == list(reversed(LADDER.sizes))


def test_256_requests_give_51_piecewise_and_35_full() -> None:
    planned = plan_descriptors(LADDER, ConfiguredMode.FULL_AND_PIECEWISE, max_num_requests=256)
    assert [sum(d.mode is mode for d in planned) for mode in (GraphMode.PIECEWISE, GraphMode.FULL)] == [51, 35]


def test_capture_order_is_piecewise_first_largest_first() -> None:
    planned = plan_descriptors(Ladder.up_to(4), ConfiguredMode.FULL_AND_PIECEWISE, max_num_requests=4)
    assert [(d.mode.value, d.num_tokens) for d in planned] == [
        ("piecewise", 4), ("piecewise", 2), ("piecewise", 1), ("full", 4), ("full", 2), ("full", 1),
    ]  # fmt: skip


def test_largest_decode_batch_has_a_full_graph_off_the_ladder() -> None:
    chosen = dispatcher(ConfiguredMode.FULL_AND_PIECEWISE, max_num_requests=100).dispatch(decode(99))
    assert (chosen.descriptor.mode, chosen.descriptor.num_tokens, chosen.padding) == (GraphMode.FULL, 100, 1)


def test_tv5_mixed_batch_runs_piecewise_304() -> None:
    shape = mixed(300, 3, 298)
    chosen = dispatcher(ConfiguredMode.FULL_AND_PIECEWISE)
    result = chosen.dispatch(shape)
    assert (result.descriptor.mode, result.descriptor.num_tokens, result.descriptor.num_requests) == (GraphMode.PIECEWISE, 304, None)
    assert (result.padding, result.reason) == (4, Reason.MIXED_BATCH)


def test_tv4_prefill_step_runs_piecewise_8_and_three_decodes_full_4() -> None:
    chosen = dispatcher(ConfiguredMode.FULL_AND_PIECEWISE)
    first, second = chosen.dispatch(mixed(8, 3, 6)), chosen.dispatch(decode(3))
    assert (first.descriptor.mode, first.descriptor.num_tokens) == (GraphMode.PIECEWISE, 8)
    assert (second.descriptor.mode, second.descriptor.num_tokens, second.descriptor.num_requests) == (GraphMode.FULL, 4, 4)
    assert second.reason is Reason.BEST


@pytest.mark.parametrize("tokens", [513, 5120])
def test_sizes_above_the_top_run_exactly_and_say_so(tokens: int) -> None:
    result = dispatcher(ConfiguredMode.PIECEWISE).dispatch(mixed(tokens, 3, 300))
    assert (result.descriptor.mode, result.descriptor.num_tokens, result.padding) == (GraphMode.NONE, tokens, 0)
    assert result.reason is Reason.TOO_MANY_TOKENS


def test_mixed_step_above_the_top_is_too_large_rather_than_mixed() -> None:
    result = dispatcher(ConfiguredMode.FULL_AND_PIECEWISE).dispatch(mixed(513, 3, 300))
    assert (result.descriptor.mode, result.reason) == (GraphMode.NONE, Reason.TOO_MANY_TOKENS)


def test_more_decodes_than_full_graphs_hold() -> None:
    result = dispatcher(ConfiguredMode.FULL_AND_PIECEWISE, max_num_requests=64).dispatch(decode(65))
    assert (result.descriptor.mode, result.reason) == (GraphMode.PIECEWISE, Reason.TOO_MANY_REQUESTS)


@pytest.mark.parametrize(
    ("mode", "support", "decode_mode", "mixed_mode"),
    [
        (ConfiguredMode.NONE, CaptureSupport.ALWAYS, "none", "none"),
        (ConfiguredMode.PIECEWISE, CaptureSupport.ALWAYS, "piecewise", "piecewise"),
        (ConfiguredMode.FULL_AND_PIECEWISE, CaptureSupport.ALWAYS, "full", "piecewise"),
        (ConfiguredMode.FULL_AND_PIECEWISE, CaptureSupport.NEVER, "piecewise", "piecewise"),
        (ConfiguredMode.FULL_DECODE_ONLY, CaptureSupport.UNIFORM_BATCH, "full", "none"),
        (ConfiguredMode.FULL, CaptureSupport.UNIFORM_BATCH, "full", "piecewise"),
        (ConfiguredMode.FULL, CaptureSupport.ALWAYS, "full", "full"),
    ],
)
def test_modes_by_batch(mode: ConfiguredMode, support: CaptureSupport, decode_mode: str, mixed_mode: str) -> None:
    chosen = dispatcher(mode, support)
    assert chosen.dispatch(decode(3)).descriptor.mode == decode_mode
    assert chosen.dispatch(mixed(20, 3, 18)).descriptor.mode == mixed_mode


def test_full_for_all_batches_is_the_best_mode_for_mixed_ones() -> None:
    assert dispatcher(ConfiguredMode.FULL, CaptureSupport.ALWAYS).dispatch(mixed(20, 3, 18)).reason is Reason.BEST


def test_backend_that_cannot_capture_is_named_as_the_reason() -> None:
    assert dispatcher(ConfiguredMode.FULL_AND_PIECEWISE, CaptureSupport.NEVER).dispatch(decode(3)).reason is Reason.BACKEND_LIMIT
    assert dispatcher(ConfiguredMode.FULL, CaptureSupport.UNIFORM_BATCH).dispatch(mixed(9, 2, 8)).reason is Reason.BACKEND_LIMIT


def test_query_length_above_one_needs_uniform_batch_support() -> None:
    single = CaptureSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert resolve_mode(ConfiguredMode.FULL_AND_PIECEWISE, single, uniform_query_len=3).decode is GraphMode.PIECEWISE


def test_uniform_query_length_three_rounds_sizes_to_whole_requests() -> None:
    planned = plan_descriptors(Ladder.up_to(16), ConfiguredMode.FULL_DECODE_ONLY, max_num_requests=5, uniform_query_lens=(3,))
    assert {(d.num_requests, d.num_tokens) for d in planned} == {(1, 3), (2, 6), (3, 9), (5, 15)}


def test_configured_none_says_graphs_are_off() -> None:
    assert dispatcher(ConfiguredMode.NONE).dispatch(decode(1)).reason is Reason.GRAPHS_OFF


def test_forced_mode_is_respected() -> None:
    chosen = dispatcher(ConfiguredMode.FULL_AND_PIECEWISE)
    assert chosen.dispatch(decode(3), best=GraphMode.PIECEWISE).descriptor.mode is GraphMode.PIECEWISE
    result = chosen.dispatch(decode(3), best=GraphMode.NONE)
    assert (result.descriptor.mode, result.reason) == (GraphMode.NONE, Reason.FORCED)


def test_step_without_tokens_runs_nothing() -> None:
    assert dispatcher(ConfiguredMode.FULL_AND_PIECEWISE).dispatch(Shape(num_tokens=0)).reason is Reason.EMPTY


def test_failed_captures_are_passed_over() -> None:
    failed: set[Descriptor] = set()
    planned = plan_descriptors(LADDER, ConfiguredMode.FULL_AND_PIECEWISE, max_num_requests=512)
    chosen = Dispatcher(planned, failed=failed)
    failed.add(chosen.dispatch(decode(3)).descriptor)
    assert chosen.dispatch(decode(3)).descriptor.num_tokens == 8
    failed.update(d for d in planned if d.mode is GraphMode.FULL)
    assert chosen.dispatch(decode(3)).reason is Reason.CAPTURE_FAILED


def test_module_without_requests_gets_full_for_every_size() -> None:
    planned = plan_descriptors(Ladder.up_to(8), ConfiguredMode.FULL)
    assert Dispatcher(planned).dispatch(Shape(num_tokens=3)).descriptor == Descriptor(mode=GraphMode.FULL, num_tokens=4)


@pytest.mark.parametrize(
    ("shape", "fitting"),
    [
        (decode(4), True),
        (decode(2), True),
        (mixed(4, 2, 3), False),
        (decode(5), False),
        (Shape(num_tokens=4), False),
        (Shape(num_tokens=2, num_requests=2, uniform_query_len=1, max_query_len=1, adapters=1), False),
        (Shape(num_tokens=2, num_requests=2, uniform_query_len=1, max_query_len=1, variant="b"), False),
    ],
)
def test_misfit(shape: Shape, fitting: bool) -> None:
    full = Descriptor(mode=GraphMode.FULL, num_tokens=4, num_requests=4, uniform_query_len=1, max_query_len=1)
    assert (misfit(full, shape) is None) is fitting


def test_further_dimensions_are_part_of_the_match() -> None:
    captured = Descriptor(mode=GraphMode.FULL, num_tokens=8, symbols=(("frames", 16),))
    assert misfit(captured, Shape(num_tokens=3, symbols=(("frames", 9),))) is None
    result = Dispatcher([captured]).dispatch(Shape(num_tokens=3, symbols=(("frames", 17),)))
    assert result.reason is Reason.OTHER_DIMENSION


def test_every_reason_has_a_sentence() -> None:
    assert all(reason.sentence for reason in Reason)


def capped(sizes: list[int], max_waste: float | None, mode: ConfiguredMode = ConfiguredMode.PIECEWISE) -> Dispatcher:
    return Dispatcher(plan_descriptors(Ladder.custom(sizes), mode, max_num_requests=64), max_waste=max_waste)


@pytest.mark.parametrize(
    ("tokens", "max_waste", "mode", "reason"),
    [
        (31, 2.0, "none", Reason.PADDING),
        (32, 2.0, "piecewise", Reason.BEST),
        (31, None, "piecewise", Reason.BEST),
        (50, 1.2, "none", Reason.PADDING),
        (65, 2.0, "none", Reason.TOO_MANY_TOKENS),
    ],
)
def test_step_is_not_padded_beyond_the_waste_cap(tokens: int, max_waste: float | None, mode: str, reason: Reason) -> None:
    result = capped([4, 64], max_waste).dispatch(mixed(tokens, 2, tokens - 1))
    assert (result.descriptor.mode, result.reason) == (mode, reason)
    assert result.descriptor.num_tokens == (tokens if mode == "none" else 64)


def test_padding_to_eight_is_never_too_much() -> None:
    assert capped([8, 16], 2.0).dispatch(mixed(1, 1, 1)).descriptor.num_tokens == 8
    assert capped([16], 2.0).dispatch(mixed(1, 1, 1)).reason is Reason.PADDING


def test_wasteful_full_graph_gives_way_to_a_piecewise_one() -> None:
    piecewise = Descriptor(mode=GraphMode.PIECEWISE, num_tokens=16)
    full = Descriptor(mode=GraphMode.FULL, num_tokens=64, num_requests=64, uniform_query_len=1, max_query_len=1)
    result = Dispatcher([piecewise, full]).dispatch(decode(10))
    assert (result.descriptor, result.reason) == (piecewise, Reason.PADDING)


def test_failed_capture_below_a_wasteful_one_is_the_reason() -> None:
    failed = {Descriptor(mode=GraphMode.PIECEWISE, num_tokens=16)}
    planned = [*failed, Descriptor(mode=GraphMode.PIECEWISE, num_tokens=64)]
    assert Dispatcher(planned, failed=failed).dispatch(mixed(10, 2, 9)).reason is Reason.CAPTURE_FAILED


@pytest.mark.parametrize("query_len", [1, 3])
def test_the_default_ladder_never_meets_the_waste_cap(query_len: int) -> None:
    for maximum in range(1, 130):
        planned = plan_descriptors(Ladder.up_to(maximum), ConfiguredMode.PIECEWISE, max_num_requests=maximum)
        chosen = Dispatcher(planned)
        assert all(chosen.dispatch(decode(n, query_len)).reason is Reason.BEST for n in range(1, maximum // query_len + 1))


def test_waste_cap_below_one_is_refused() -> None:
    with pytest.raises(LadderError, match=r"0\.5"):
        capped([4], 0.5)


def test_every_reason_has_an_advice() -> None:
    assert all(reason.advice for reason in Reason)


def test_a_step_like_an_earlier_one_gets_the_same_decision() -> None:
    chosen = dispatcher(ConfiguredMode.FULL_AND_PIECEWISE)
    assert chosen.dispatch(decode(3)) is chosen.dispatch(decode(3))


def test_a_capture_that_succeeds_later_is_used_again() -> None:
    failed: set[Descriptor] = set()
    chosen = Dispatcher(plan_descriptors(Ladder.up_to(8), ConfiguredMode.PIECEWISE), failed=failed)
    first = chosen.dispatch(Shape(num_tokens=3)).descriptor
    failed.add(first)
    assert chosen.dispatch(Shape(num_tokens=3)).descriptor.num_tokens == 8
    failed.discard(first)
    assert chosen.dispatch(Shape(num_tokens=3)).descriptor == first


def frames(num_tokens: int, size: int) -> Shape:
    return Shape(num_tokens=num_tokens, symbols=(("frames", size),))


def test_several_dimensions_are_planned_as_a_product() -> None:
    planned = plan_descriptors(Ladder.custom([1, 4]), ConfiguredMode.FULL, symbols={"frames": Ladder.custom([64, 128])})
    assert [(d.num_tokens, dict(d.symbols)["frames"]) for d in planned] == [(4, 128), (4, 64), (1, 128), (1, 64)]


def test_least_padding_over_all_dimensions_wins() -> None:
    long_and_narrow = Descriptor(mode=GraphMode.FULL, num_tokens=4, symbols=(("frames", 128),))
    short_and_wide = Descriptor(mode=GraphMode.FULL, num_tokens=6, symbols=(("frames", 64),))
    chosen = Dispatcher([long_and_narrow, short_and_wide]).dispatch(frames(4, 64))
    assert (chosen.descriptor, chosen.padding) == (short_and_wide, 6 * 64 - 4 * 64)


def test_each_dimension_has_its_own_waste_cap() -> None:
    chosen = Dispatcher([Descriptor(mode=GraphMode.FULL, num_tokens=16, symbols=(("frames", 64),))])
    assert chosen.dispatch(frames(9, 33)).descriptor.num_tokens == 16  # less than twice in each, 3.4 times in all
    assert chosen.dispatch(frames(16, 31)).reason is Reason.PADDING


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20), st.sampled_from(["", "b"]), st.integers(0, 2)), min_size=1, max_size=12),
    st.tuples(st.integers(1, 20), st.integers(1, 20), st.sampled_from(["", "b"]), st.integers(0, 2)),
)
def test_dispatch_agrees_with_the_predicate(captured: list[tuple[int, int, str, int]], step: tuple[int, int, str, int]) -> None:
    """The bisect finds what a search over all descriptors finds."""

    def values(one: tuple[int, int, str, int]) -> dict[str, object]:
        return {"num_tokens": one[0], "symbols": (("frames", one[1]),), "variant": one[2], "adapters": one[3]}

    planned = {Descriptor(mode=GraphMode.FULL, **values(one)) for one in captured}  # type: ignore[arg-type]
    shape = Shape(**values(step))  # type: ignore[arg-type]
    chosen = Dispatcher(planned, max_waste=None).dispatch(shape).descriptor
    fitting = [descriptor for descriptor in planned if misfit(descriptor, shape) is None]
    assert (chosen in fitting) if fitting else chosen.mode is GraphMode.NONE
    assert not fitting or chosen.volume == min(descriptor.volume for descriptor in fitting)


def test_two_query_lengths_have_full_graphs_of_their_own() -> None:
    planned = plan_descriptors(LADDER, ConfiguredMode.FULL_AND_PIECEWISE, max_num_requests=32, uniform_query_lens=(1, 4))
    chosen = Dispatcher(planned)
    for query_len in (1, 4):
        found = chosen.dispatch(decode(5, query_len))
        assert (found.descriptor.mode, found.descriptor.uniform_query_len, found.reason) == (GraphMode.FULL, query_len, Reason.BEST)
    assert chosen.dispatch(decode(5, 3)).reason is Reason.QUERY_LENGTH
    assert sum(d.mode is GraphMode.PIECEWISE for d in planned) == 51


def test_single_token_backend_runs_longer_decodes_piecewise_and_says_why() -> None:
    single = CaptureSupport.UNIFORM_SINGLE_TOKEN_DECODE
    options = {"max_num_requests": 32, "uniform_query_lens": (1, 4), "capture_support": single}
    planned = plan_descriptors(LADDER, ConfiguredMode.FULL_AND_PIECEWISE, **options)  # type: ignore[arg-type]
    chosen = Dispatcher(planned, resolved=resolve_mode(ConfiguredMode.FULL_AND_PIECEWISE, single, uniform_query_len=4))
    assert chosen.dispatch(decode(5)).reason is Reason.BEST
    found = chosen.dispatch(decode(5, 4))
    assert (found.descriptor.mode, found.reason) == (GraphMode.PIECEWISE, Reason.BACKEND_LIMIT)


def test_adapters_and_variants_are_keys() -> None:
    planned = plan_descriptors(Ladder.up_to(4), ConfiguredMode.PIECEWISE, adapters=(0, 1, 4), variants=("", "draft"))
    chosen = Dispatcher(planned)
    assert chosen.dispatch(Shape(num_tokens=2, adapters=2)).descriptor.adapters == 4
    assert chosen.dispatch(Shape(num_tokens=2, adapters=5)).reason is Reason.ADAPTERS
    assert chosen.dispatch(Shape(num_tokens=2, variant="draft")).descriptor.variant == "draft"
    assert chosen.dispatch(Shape(num_tokens=2, variant="other")).descriptor.mode is GraphMode.NONE


def test_a_full_graph_that_a_break_cuts_says_so() -> None:
    resolved = resolve_mode(ConfiguredMode.FULL, host_breaks=True)
    chosen = Dispatcher(plan_descriptors(Ladder.up_to(4), ConfiguredMode.FULL), resolved=resolved)
    found = chosen.dispatch(Shape(num_tokens=2))
    assert found.counter == "step.full.host_break"
