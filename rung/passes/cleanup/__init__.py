"""Passes that take away what a graph does for nothing, one file each."""

from rung.passes.cleanup.dead_code import DeadCode
from rung.passes.cleanup.duplicates import Duplicates
from rung.passes.cleanup.in_place import InPlace
from rung.passes.cleanup.keep_apart import KeepApart
from rung.passes.cleanup.kept_copies import KeepCopies
from rung.passes.cleanup.noop import NoopElimination

__all__ = ["DeadCode", "Duplicates", "InPlace", "KeepApart", "KeepCopies", "NoopElimination"]
