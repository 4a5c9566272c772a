from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from rung import errors

ROOTS = (errors.RungError, errors.UserError, errors.InternalError)
ALL = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__]
CONCRETE = [cls for cls in ALL if cls not in ROOTS]


@pytest.mark.parametrize("cls", CONCRETE, ids=lambda cls: cls.__name__)
def test_every_error_is_in_exactly_one_branch(cls: type[errors.RungError]) -> None:
    assert issubclass(cls, errors.UserError) != issubclass(cls, errors.InternalError)


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_every_error_says_what_it_means(cls: type[errors.RungError]) -> None:
    assert cls.__name__.endswith("Error")
    assert (cls.__doc__ or "").strip().endswith(".")


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_the_hint_is_the_last_line(cls: type[errors.RungError]) -> None:
    error = cls("expected 1, came 2", hint="give it 1")
    assert str(error).splitlines() == ["expected 1, came 2", "hint: give it 1"]
    assert (error.message, error.hint) == ("expected 1, came 2", "give it 1")


def test_without_a_hint_the_message_stands_alone() -> None:
    assert str(errors.RungError("expected 1, came 2")) == "expected 1, came 2"


def test_the_hint_must_be_named() -> None:
    with pytest.raises(TypeError):
        errors.RungError("message", "hint")  # type: ignore[misc]


@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
def test_an_error_survives_the_way_between_processes(again) -> None:
    error = again(errors.RequestError("prompt is empty", hint="give at least one token"))
    assert isinstance(error, errors.RequestError)
    assert (str(error), error.message, error.hint) == (
        "prompt is empty\nhint: give at least one token",
        "prompt is empty",
        "give at least one token",
    )


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.InputMismatchError, TypeError),
        (errors.RequestError, ValueError),
        (errors.ContextError, RuntimeError),
        (errors.StateError, RuntimeError),
    ],
    ids=lambda cls: cls.__name__,
)
def test_errors_are_caught_as_the_builtin_they_resemble(cls: type[errors.RungError], builtin: type[Exception]) -> None:
    assert issubclass(cls, builtin)
