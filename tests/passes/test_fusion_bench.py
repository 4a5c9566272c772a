"""What `bench.fusions` plans, and how it reads reports and profiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.fusion_builds import Variant
from bench.fusion_measure import Found, by_name, parted, short
from bench.fusion_models import FORMS, SHAPES, model_of, without_memory
from bench.fusions import GROUPS, LINES, Group, Line, lines_of, matches, table, variants_of
from rung.compile.fingerprint import fingerprint
from rung.passes.defaults import pass_names

SMALL = replace(SHAPES["qwen3-0.6b"], hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_size=16)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_children_compile_for_the_module_that_is_measured(form: str, qk_norm: bool) -> None:
    shape = replace(SMALL, qk_norm=qk_norm)
    cpu = torch.device("cpu")
    real, (layout, _) = model_of(form, shape, cpu), without_memory(form, shape, cpu)
    assert fingerprint(real) == fingerprint(layout)  # tensors by layout, which of them are the same, attributes, classes


def test_lines_name_passes_and_compare_with_what_is_compiled() -> None:
    assert set(LINES) == set(FORMS)
    for form, shape in GROUPS:
        variants = variants_of(form, shape)
        assert variants[0] == Variant(form, shape)
        assert len(set(variants)) == len(variants) <= 10
        for line in lines_of(form, shape):
            assert {line.off, *line.given} <= set(pass_names())
            assert Variant(form, shape, line.before) in variants
            assert Variant(form, shape, line.without) in variants
    assert [line.off for line in lines_of("plain", "8b")].count("qk_norm_rope") == 0


def test_matches_leave_out_near_misses_and_what_was_fused_already() -> None:
    passes = [{"projections": {"linear": 3, "near miss: a reason": 5}}, {"projections": {"linear": 1}, "add_norm": {"add_norm": 0}}]
    whole = {"rope_kv_write": {"rope_kv_write": 0, "already fused": 4}, "attention_quant": {"attention_quant": 2}}
    names = ("projections", "add_norm", "rope_kv_write", "attention_quant", "norm_quant")
    assert [matches(passes, whole, name) for name in names] == [4, 0, 0, 2, 0]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("void at::native::(anonymous namespace)::elementwise<4, foo::bar>(int, foo::baz)", "elementwise"),
        ("at::cuda::(anonymous namespace)::spin_kernel(long)", "spin_kernel"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<int> >(int)", "device_kernel"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
    ],
)
def test_short_names(name: str, wanted: str) -> None:
    assert short(name) == wanted


def test_a_profile_is_cut_at_the_marks_and_added_up_by_name() -> None:
    mark = ("at::cuda::(anonymous namespace)::spin_kernel(long)", 9.0)
    parts = parted([("early", 1.0), mark, ("a", 1.0), ("b", 3.0), ("a", 1.0), ("b", 5.0), mark, ("a", 2.0)])
    assert parts == [[("a", 1.0), ("b", 3.0), ("a", 1.0), ("b", 5.0)], [("a", 2.0)]]
    assert by_name(parts[0], 2) == {"b": (1.0, 4.0), "a": (1.0, 1.0)}


def test_the_table_has_what_is_lost_and_what_did_not_match() -> None:
    found = {
        (): [Found(us=400.0, kernels={"product_kernel": (28.0, 300.0), "add_norm_kernel": (8.0, 40.0)})],
        ("projections",): [Found(us=440.0, kernels={"nvjet": (28.0, 380.0)})],
    }
    group = Group("plain", "8b", [64], found, {Line("projections"): 6, Line("act_mul"): 0})
    text = table(group)
    (line,) = (line.split() for line in text if line.startswith("projections"))
    assert line == ["projections", "6", "7.00", "110.0", "10.0"]
    assert next(line for line in text if line.startswith("act_mul")).split() == ["act_mul", "no", "match"]
    assert "product_kernel 7 x 75.0, add_norm_kernel 2 x 10.0" in text[-1]
    lines = group.as_json()["lines"]
    assert [line["lost"] for line in lines] == [[10.0], None]
