"""`bench.roofline` without a device: how it cuts a trace into steps, names kernels, and shares out the time of a step."""

from __future__ import annotations

import pytest

from bench.device_trace import Kernel
from bench.roofline import floor_us, floors, show, table
from bench.steady import decoding
from bench.step_kernels import kinds, medians, shares, split_steps
from rung.models import SHAPES, random_model
from rung.runner import RunnerConfig, build_engine

ONE_ROW = ["decode_inputs_kernel", "triton_poi_fused_0", "triton_per_fused_rms_norm_0"]
ONE_ROW_LAYER = ["vector_kernel", "rotate_and_write_kernel", "paged_attention_kernel", "reduce_splits_kernel", *["vector_kernel"] * 3]
MANY_ROWS_LAYER = [
    "nvjet_tst_64x8_64x16_1x4_v_bz_TNT",
    "rotate_and_write_kernel",
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...> > >(flash::Params)",
    "product_kernel",
    "add_norm_kernel",
    "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT",
    "triton_poi_fused_mul_rms_norm_silu_split_3",
    "nvjet_tst_64x8_64x16_1x4_v_bz_splitK_TNT",
    "void cublasLt::splitKreduce_kernel<32, 16, int>(cublasLt::cublasSplitKParams<float>)",
    "triton_per_fused_add_rms_norm_4",
]


def run(*spans: tuple[str, float, float]) -> list[Kernel]:
    return [Kernel(name, start, us) for name, start, us in spans]


def test_a_layer_of_one_row_has_its_products_in_their_order() -> None:
    found = kinds([*ONE_ROW, *ONE_ROW_LAYER, *ONE_ROW_LAYER, "vector_kernel", "sample_chunk_kernel", "sample_row_kernel"], layers=2)
    assert found[:3] == ["input building", "input building", "norm"]
    assert found[3:10] == ["qkv", "rope + cache write", "attention", "combine", "o", "gate_up", "down"]
    assert found[10:17] == found[3:10]
    assert found[17:] == ["head", "sampling", "sampling"]


def test_products_of_both_makers_count_and_joined_kernels_get_their_place() -> None:
    found = kinds([*ONE_ROW, *MANY_ROWS_LAYER, "nvjet_head", "triton_red_fused_argmax"], layers=1)
    assert found[3:] == [
        *("qkv", "rope + cache write", "attention", "o", "norm", "gate_up", "activation", "down", "down", "norm"),
        *("head", "sampling"),
    ]


def test_kernels_of_fp8_have_kinds() -> None:
    layer = ["add_norm_quantise_kernel", "product_kernel", "rotate_and_write_kernel", "paged_attention_kernel", "quantise_kernel"]
    layer += ["product_kernel", "add_norm_quantise_kernel", "product_kernel", "quantise_kernel", "product_kernel"]
    found = kinds(["decode_inputs_kernel", *layer, "nvjet_head"], layers=1)
    assert found[1:] == [
        *("norm", "qkv", "rope + cache write", "attention", "quantise", "o", "norm", "gate_up", "quantise", "down", "head"),
    ]


def test_products_that_cannot_be_told_apart_stay_products() -> None:
    assert set(kinds(["nvjet_a", "nvjet_b", "triton_poi_fused_silu_0"], layers=2)) == {"product", "activation"}


def test_exclusive_times_and_gaps_add_up_to_the_span_when_kernels_overlap() -> None:
    # b was launched programmatically: it starts inside a and waits; d ends inside c
    step = run(("a", 0.0, 10.0), ("b", 2.0, 12.0), ("c", 15.0, 10.0), ("d", 16.0, 3.0))
    found = shares(step)
    assert [one.own for one in found] == [10.0, 12.0, 10.0, 3.0]
    assert [one.exclusive for one in found] == [10.0, 4.0, 10.0, 0.0]
    assert [one.gap for one in found] == [0.0, 0.0, 1.0, 0.0]
    assert sum(one.exclusive + one.gap for one in found) == medians([step]).span == 25.0


def test_steps_are_cut_at_their_first_kernel_and_odd_ones_are_left_out() -> None:
    first = "decode_inputs_kernel"
    trace = run(("tail", 0, 1), (first, 2, 1), ("x", 4, 1), (first, 10, 1), ("x", 12, 1), ("copy", 14, 1), (first, 20, 1), ("x", 22, 1))
    steps = split_steps(trace)
    assert [[one.start_us for one in step] for step in steps] == [[2, 4], [20, 22]]
    assert medians(steps).between == 15.0
    assert split_steps(run(("x", 0, 1))) == []


def test_the_table_of_a_step_adds_up() -> None:
    names = [*ONE_ROW, *ONE_ROW_LAYER * 3, "vector_kernel", "sample_chunk_kernel"]
    step = run(*((name, at * 4.0, 5.0) for at, name in enumerate(names)))
    found = table(3, medians([step]), floors(SHAPES["tiny"], 1, 128))
    assert found["exclusive_us"] + found["gaps_us"] == pytest.approx(found["span_us"])
    assert found["floor_us"] + found["over_us"] == pytest.approx(found["exclusive_us"])
    assert sum(row["exclusive_us"] for row in found["rows"]) == pytest.approx(found["exclusive_us"])
    assert set(found["inside other kernels"]) == {"activation"}
    assert found["kernels_a_layer"] == 22 / 3  # the first layer's norm is a kernel of its own
    lines = show({"target": "tiny", "batch": 1, "context": 128, "step_ms": 0.1, "steps": 1, **found}).splitlines()
    assert len(lines) <= 16
    assert max(map(len, lines)) <= 130


def test_e4m3_weights_halve_the_floor_of_the_layers_products() -> None:
    bf16, fp8 = (floors(SHAPES["llama-8b"], 256, 128, weight, 2) for weight in (2, 1))
    for kind in ("qkv", "o", "gate_up", "down"):
        assert 0.49 < floor_us(fp8[kind]) / floor_us(bf16[kind]) < 0.62
    assert fp8["head"] == bf16["head"]


def test_steady_requests_all_decode_and_leave_nothing() -> None:
    module = random_model("tiny")
    config = RunnerConfig(max_num_requests=5, max_num_tokens=16, max_model_len=128, num_blocks=64, eager=True, prefix_cache=False)
    engine, _, _ = build_engine(module, config)
    with decoding(engine, 5, 12, 10, module.config.vocab_size) as steady:
        before = steady.context()
        for _ in range(10):
            assert len(engine.step()) == 5
        assert steady.context() == before + 10
    assert not engine.has_work
    assert engine.generate([[1, 2, 3]])[0].token_ids  # the slots are free
