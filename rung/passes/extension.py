"""Passes and providers that come from outside: by object, by import path, or by entry point."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from torch import fx

from rung.errors import PassError
from rung.passes.identity import code_identity, digest, value_identity
from rung.passes.manager import GraphPass
from rung.passes.providers import OwnProvider
from rung.passes.report import PassOutcome

GROUP = "rung.passes"
PROVIDERS = "rung.providers"


class SourcePass:
    """A pass without a `uuid` of its own: its key is the source of the module that defines it, and its attributes."""

    def __init__(self, item: Any) -> None:
        self.item = item
        self.name: str = item.name

    def uuid(self) -> str:
        attributes = value_identity(sorted(getattr(self.item, "__dict__", {}).items()), f"pass {self.name!r}")
        return digest(self.name, code_identity(type(self.item).run), attributes)

    def run(self, graph: fx.Graph) -> Mapping[str, int] | PassOutcome:
        outcome: Mapping[str, int] | PassOutcome = self.item.run(graph)
        return outcome


def load_object(text: str, group: str = GROUP) -> Any:
    """What `package.module:attribute`, or the name of an entry point of `group`, stands for. Raises `PassError`."""
    module, colon, path = text.partition(":")
    try:
        if not colon:
            found = [entry for entry in entry_points(group=group) if entry.name == text]
            if not found:
                known = sorted(entry.name for entry in entry_points(group=group)) or "none"
                raise PassError(
                    f"{text!r} is no entry point of {group} (known: {known})", hint="name one of them, or give package.module:attribute"
                )
            return found[0].load()
        value: Any = importlib.import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise PassError(f"{text!r} cannot be loaded: {error}", hint="give package.module:attribute of something importable") from error
    return value


def load_pass(given: str | Any) -> GraphPass:
    """A pass out of an object, a class or function that makes one, or a text that names either. Raises `PassError`."""
    found = load_object(given) if isinstance(given, str) else given
    if isinstance(found, type) or (callable(found) and not hasattr(found, "run")):
        maker: Callable[[], Any] = found
        found = maker()
    if not callable(getattr(found, "run", None)) or not isinstance(getattr(found, "name", None), str):
        raise PassError(
            f"{given!r} gives a {type(found).__name__}, which is no pass", hint="a pass has `name`, `run(graph)` and, if it likes, `uuid()`"
        )
    result: GraphPass = found if callable(getattr(found, "uuid", None)) else SourcePass(found)
    if not isinstance(result.uuid(), str):
        raise PassError(f"pass {result.name!r}: uuid() must return a text", hint="cover source and parameters with it, or leave it out")
    return result


def load_provider(given: str | Any) -> OwnProvider:
    """A provider out of an object, a function that makes one, or a text that names either. Raises `PassError`."""
    found = load_object(given, PROVIDERS) if isinstance(given, str) else given
    if callable(found):
        found = found()
    if not isinstance(found, OwnProvider):
        raise PassError(
            f"{given!r} gives a {type(found).__name__}, which is no provider", hint="make a rung.passes.providers.OwnProvider of it"
        )
    return found
