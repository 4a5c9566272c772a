"""Why Inductor did not compile a piece, in words that help."""

from __future__ import annotations

import re

from torch import fx

from rung import torch_compat
from rung.errors import CompileError


def compile_error(index: int, error: Exception, graph: fx.Graph) -> CompileError:
    """What to raise for `error`, which compiling piece `index` of the trace `graph` ended with."""
    if isinstance(error, torch_compat.NotSerialisableError) and (found := torch_compat.distrusted_call(graph)) is not None:
        what, node = found
        return CompileError(
            f"forward has {what}{torch_compat.node_location(node)}, of which Inductor makes nothing that can be stored",
            hint=_hint(what),
        )
    language = torch_compat.missing_compiler(error)
    if language:
        variable = {"C++": "CXX", "C": "CC"}[language]
        return CompileError(
            f"Inductor found no {language} compiler to build piece {index} with",
            hint=f"install one (the package g++ or gcc-c++ of the system) or name it in {variable}; a store that was filled elsewhere "
            "needs none (`rung cache import`, RUNG_CACHE_DIR), and RUNG_DISABLE=1 runs the module eagerly",
        )
    lines = str(error).strip().splitlines() or [""]
    said = next((line for line in lines if re.search(r"\berror: ", line)), "")  # of a C++ compiler, far below its command line
    reason = lines[0][:300] + (f" ({said.strip()[:300]})" if said and said != lines[0] else "")
    return CompileError(
        f"Inductor could not compile piece {index}: {type(error).__name__}: {reason}",
        hint="RUNG_DUMP=<folder> writes the piece; TORCH_LOGS=+inductor tells more",
    )


def _hint(what: str) -> str:
    if "`.data`" in what:
        return "write the values in place, `tensor.copy_(value)`, which compiled code and graphs see"
    instead = "use torch's operations instead, or " if what.startswith("NumPy") else ""
    return f"{instead}move it into a function of its own that is a rung.eager_break"
