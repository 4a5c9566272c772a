"""Python functions made from text: lines, and the objects that they refer to by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Source:
    """Lines of a generated function and the objects that it refers to by name."""

    def __init__(self, function: str, parameters: str) -> None:
        self.head = f"    def {function}({parameters}):"
        self.function = function
        self.prefix = ""  # of the names that `bind` makes up
        self.lines: list[str] = []
        self.bound: dict[str, Any] = {}

    def bind(self, value: Any, name: str = "") -> str:
        """A name for `value` inside the generated function."""
        name = name or f"{self.prefix}bound_{len(self.bound)}"
        self.bound[name] = value
        return name

    def text(self) -> str:
        body = "\n".join(f"        {line}" for line in self.lines)
        return f"def make({', '.join(self.bound)}):\n{self.head}\n{body}\n    return {self.function}\n"

    def build(self, label: str) -> Callable[..., Any]:
        namespace: dict[str, Any] = {}
        exec(compile(self.text(), f"<rung {label}>", "exec"), namespace)
        result: Callable[..., Any] = namespace["make"](**self.bound)
        return result
