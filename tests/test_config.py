from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rung import config
from rung.compile.guards import Kind
from rung.config import CompileConfig
from rung.errors import ConfigError

BAD: list[dict[str, Any]] = [
    {"graphs": "some"},
    {"outputs": "keep"},
    {"maximum": 0},
    {"max_variants": 0},
    {"inductor": {"post_grad_custom_pre_pass": print}},
    {"inductor": {"joint_custom_pre_pass": print}},
    {"pad": ("rows",)},
    {"capture_sizes": 5, "graphs": "full"},
    {"capture_sizes": "5", "graphs": "full"},
    {"capture_sizes": (), "graphs": "full"},
    {"capture_sizes": {"rows": ()}, "graphs": "full"},
    {"capture_sizes": ("a",), "graphs": "full"},
    {"pad": ("rows",), "graphs": "full", "dynamic": {"x": {0: "tokens"}}},
    {"pad": ("rows",), "graphs": "full"},
    {"capture_sizes": {"rows": (1,)}, "graphs": "full"},
    {"capture_sizes": {"rows": (1,)}, "graphs": "full", "dynamic": {"x": {0: "tokens"}}},
    {"dynamic": "x"},
    {"dynamic": ("x",)},
    {"dynamic": {"x": "rows"}},
    {"dynamic": {"x": ["rows"]}},
    {"dynamic": {"x": {0: 3}}},
    {"dynamic": {"x": {0: ""}}},
    {"dynamic": {"x": {0: "~x"}}},
    {"dynamic": {"x": {"0": "rows"}}},
    {"dynamic": {0: {0: "rows"}}},
    {"step_trace": 3, "graphs": "full"},
    {"maximum": "8"},
    {"maximum": 8.0},
    {"maximum": True},
    {"variants": 4},
    {"variants": "4"},
    {"variants": ("4",)},
    {"variants": (1.5,)},
    {"variants": (None,)},
    {"variants": ((1, 2, 3),)},
    {"variants": ((1, "2"),)},
    {"expect": 3},
    {"expect": ("add_norm",)},
    {"expect": {"add_norm": True}},
    {"split_ops": "mylib::attention"},
    {"split_ops": ("attention",)},
    {"split_ops": ("mylib.attention",)},
    {"split_ops": ("mylib::attention.default",)},
    {"split_ops": ("::attention",)},
    {"split_ops": (len,)},
    {"row_wise_ops": ("scale",), "graphs": "full", "pad": ("rows",)},
    {"row_wise_ops": ("mylib::scale",), "graphs": "full"},
    {"pad_unproved": True, "graphs": "full"},
    {"factors": 3},
    {"factors": ("A",)},
    {"factors": {1: "a"}},
]


@pytest.mark.parametrize("options", BAD, ids=str)
def test_bad_value_is_an_error_with_a_hint(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="hint: "):
        CompileConfig(**options)


def test_defaults_are_valid() -> None:
    assert CompileConfig().graphs == "none"


def test_every_kind_of_guard_can_be_dropped() -> None:
    assert {*config.GUARD_KINDS} == {*Kind, "submodules"}


def test_a_guard_that_is_none_is_answered_with_the_kinds() -> None:
    with pytest.raises(ConfigError, match=f"hint: name some of {', '.join(config.GUARD_KINDS)}"):
        CompileConfig(drop_guards=("x",))


@pytest.mark.parametrize("given", ["mylib.attention", "mylib::attention.default"])
def test_a_name_that_other_tools_take_is_answered_with_ours(given: str) -> None:
    with pytest.raises(ConfigError, match=r"hint: write 'mylib::attention'"):
        CompileConfig(split_ops=(given,))


def test_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        CompileConfig().maximum = 3  # type: ignore[misc]


def test_undeclared_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match="hint: "):
        config.variable("RUNG_SOMETHING")


@pytest.mark.parametrize(("value", "disabled"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_disabled(value: str | None, disabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUNG_DISABLE", raising=False)
    if value is not None:
        monkeypatch.setenv("RUNG_DISABLE", value)
    assert config.disabled() is disabled


def test_cache_dir_prefers_the_variable_then_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNG_CACHE_DIR", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert config.cache_dir() == Path("/a")
    monkeypatch.delenv("RUNG_CACHE_DIR")
    assert config.cache_dir() == Path("/b/rung")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert config.cache_dir() == Path.home() / ".cache" / "rung"
