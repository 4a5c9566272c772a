"""Names of ops in `split_ops` and `row_wise_ops` that lead nowhere are errors, those that a trace has not are told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import rung
from rung.errors import ConfigError, UnsupportedModuleError
from tests.compile.cases import double

ROWS = {"x": {0: "rows"}}
PADDED: dict[str, Any] = {"graphs": "auto", "pad": ("rows",), "maximum": 8}


def doubled(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(double(x + 1), 1) * 3


@pytest.mark.parametrize(("setting", "options"), [("split_ops", {}), ("row_wise_ops", PADDED)])
def test_an_op_that_nobody_registered_is_an_error_with_its_neighbours(setting: str, options: dict[str, Any]) -> None:
    module = rung.wrap(doubled, dynamic=ROWS, **{setting: ("rungtest::double", "rungtest::duble")}, **options)
    with pytest.raises(
        ConfigError, match=rf"{setting} names 'rungtest::duble', and no such op is registered\nhint: did you mean 'rungtest::double'"
    ):
        module(torch.ones(3, 4))


def test_an_op_may_be_registered_after_the_wrap() -> None:
    module = rung.wrap(doubled, dynamic=ROWS, split_ops=("rung_late::op", "rungtest::double"))
    library = torch.library.Library("rung_late", "DEF")
    library.define("op(Tensor x) -> Tensor")
    assert module(torch.ones(3, 4)).shape == (3, 4)


def test_ops_that_the_trace_has_not_are_in_the_report_cold_and_warm() -> None:
    for source in ("compiled", "loaded"):
        module = rung.wrap(doubled, dynamic=ROWS, split_ops=("rungtest::pair", "rungtest::double", "aten::softmax"))
        module(torch.ones(3, 4))
        (report,) = module.rung.report()
        assert (report["source"], report["unused_ops"]) == (source, {"split_ops": ["rungtest::pair", "aten::softmax"]})
        told = module.rung.explain()
        assert "split_ops: rungtest::pair does not occur\n" in told
        assert "split_ops: aten::softmax does not occur; only calls through torch.ops are cut at" in told


def test_row_wise_ops_that_no_proof_met_are_in_the_report() -> None:
    names = ("rungtest::double", "rungtest::pair", "aten::_softmax")  # the proof sees what torch.softmax calls
    module = rung.wrap(doubled, dynamic=ROWS, row_wise_ops=names, **PADDED)
    module(torch.ones(3, 4))
    (report,) = module.rung.report()
    assert report["rows"] == {"rows": None}
    assert report["unused_ops"] == {"row_wise_ops": ["rungtest::pair"]}


def test_nothing_is_told_when_every_name_occurs() -> None:
    module = rung.wrap(doubled, dynamic=ROWS, split_ops=("rungtest::double",))
    module(torch.ones(3, 4))
    assert module.rung.report()[0]["unused_ops"] == {}
    assert "does not occur" not in module.rung.explain()


@pytest.fixture
def overloaded() -> Iterator[Any]:
    library = torch.library.Library("rung_overloads", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.define("twice.by(Tensor x, float factor) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    library.impl("twice.by", lambda x, factor: x * factor, "CompositeExplicitAutograd")
    yield torch.ops.rung_overloads.twice
    library._destroy()


def test_a_split_op_of_several_overloads_says_which(overloaded: Any) -> None:
    def vague(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = overloaded(x + 1) * 3
        return result

    def clear(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = overloaded.default(x + 1) * 3
        return result

    options: dict[str, Any] = {"dynamic": ROWS, "split_ops": ("rung_overloads::twice",)}
    module = rung.wrap(clear, **options)
    assert torch.equal(module(torch.ones(3, 4)), torch.full((3, 4), 12.0))
    assert len(module.rung.report()[0]["steps"]) == 3
    with pytest.raises(UnsupportedModuleError, match=r"several overloads.*test_named_ops.py(.|\n)*torch.ops.rung_overloads.twice.default"):
        rung.wrap(vague, **options)(torch.ones(3, 4))
