from __future__ import annotations

import json
from collections.abc import Callable

from click.testing import Result

from rung.cli.explain_passes import kernels
from tests.cli.conftest import refused

Rung = Callable[..., Result]
TARGET = ("explain", "passes", "tests.cli.targets:Normed", "--inputs", "tests.cli.targets:rows", "--device", "cpu")


def test_json_has_matches_near_misses_and_kernels(rung: Rung) -> None:
    result = rung(*TARGET, "--json")
    assert result.exit_code == 0, result.stderr
    (piece,) = json.loads(result.stdout)["pieces"]
    assert (piece["piece"], piece["uses"]) == ("piece_00", 1)
    assert piece["passes"]["rms_norm"] == {"rms_norm": 1}
    assert piece["passes"]["lowering"] == {"rms_norm": 1}
    assert [miss["reason"] for miss in piece["near_misses"] if miss["pattern"] == "rms_norm"] == ["constant 2 expected, found 4"]
    assert piece["kernels"]["before"] == piece["kernels"]["after"] > 0
    # the same from the store, as tables
    text = rung(*TARGET, "--no-before").stdout
    assert "constant 2 expected, found 4" in text
    assert "rms_norm" in text


def test_kernels_and_calls_are_counted() -> None:
    source = """
def call(self, args):
    cpp_fused_add_0(buf0, buf1)
    extern_kernels.mm(buf0, buf1, out=buf2)
    triton_poi_fused_0.run(buf2, 4, stream=stream0)
    buf3 = torch.ops.rung.norm_linear.default(buf2)
    buf4 = empty_strided_cpu((3, 4), (4, 1), torch.float32)
"""
    assert kernels("cpp_fused_before = async_compile()\n" + source) == 4


def test_inputs_for_a_model_are_refused(rung: Rung) -> None:
    assert "--inputs" in refused(rung("explain", "passes", "tiny", "--inputs", "tests.cli.targets:rows", "--device", "cpu"))
