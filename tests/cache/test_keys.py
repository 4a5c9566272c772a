from __future__ import annotations

from typing import Any

import pytest

from rung.cache import Factor, Factors, difference, key_of
from rung.cache.keys import describe
from rung.errors import ConfigError


def test_key_does_not_depend_on_the_order() -> None:
    assert key_of({"a": 1, "b": [2]}) == key_of({"b": [2], "a": 1})


@pytest.mark.parametrize("other", [{"a": 2}, {"a": "1"}, {"a": 1, "b": None}, {}])
def test_every_factor_counts(other: dict[str, Any]) -> None:
    assert key_of({"a": 1}) != key_of(other)


def test_difference_names_the_factors() -> None:
    assert difference({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 5, "d": 4}) == {"b": (2, 5), "d": (None, 4), "c": (3, None)}


def test_difference_goes_into_mappings() -> None:
    assert difference({"m": {"x": {"eps": 1}}, "n": {}}, {"m": {"x": {"eps": 2}}, "n": 1}) == {"m.x.eps": (1, 2), "n": ({}, 1)}


def test_description_is_short() -> None:
    text = describe({"a": ("1", "2"), "b": (None, ["x" * 100]), "c": (1, 2), "d": (1, 2)})
    assert text.startswith('a: 1 -> 2; b: nothing -> ["xxx')
    assert text.endswith("and 1 more")
    assert len(text) < 150


def test_a_factor_is_declared_once() -> None:
    with pytest.raises(ConfigError, match=r"two sources declare the cache factor 'a'"):
        Factors([Factor("a", 1), Factor("a", 2)])


def test_factors_that_do_not_change_code_stay_out_of_code_keys() -> None:
    factors = Factors([Factor("torch", "2"), Factor("entry", "Net", changes_code=False)])
    assert factors.values(code_only=True) == {"torch": "2"}
    assert list(factors.values()) == ["torch", "entry"]
