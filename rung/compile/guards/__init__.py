"""Guards: what a trace has read of the program, and how a call finds out that it still holds."""

from rung.compile.guards.base import NO_GUARDS, Guard, GuardSet, Kind
from rung.compile.guards.collect import collect_guards
from rung.compile.guards.roots import Roots
from rung.compile.guards.state import GuardState

__all__ = ["NO_GUARDS", "Guard", "GuardSet", "GuardState", "Kind", "Roots", "collect_guards"]
