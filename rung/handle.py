"""What stands in `module.rung`: reports, captures and the life cycle of a wrapped object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rung.compile.entry import Entry, is_decorated
from rung.compile.fingerprint import RuntimeState
from rung.compile.named_ops import unused_lines
from rung.compile.variant import Variant
from rung.counters import Counters
from rung.errors import ConfigError


class Handle(RuntimeState):
    """`module.rung`: what was compiled for a wrapped object, its counts, and its life cycle."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    @property
    def counters(self) -> Counters:
        """Counts of this object alone; `rung.counters` sums all of them."""
        return self._entry.counters

    def method(self, name: str) -> Handle:
        """The handle of another compiled method of the same module: `module.rung.method("encode")`."""
        method: Any = getattr(self._entry.owner, name, None)
        if isinstance(method, Entry):
            return Handle(method)
        if not is_decorated(method):
            raise ConfigError(f"no method {name!r} was compiled", hint="name one that was given as `method` to rung.wrap or rung.compiled")
        return Handle(method.__rung_entry__(self._entry.owner))

    def report(self) -> list[dict[str, Any]]:
        """One dict a trace: where it came from and why, seconds by phase, pieces, unique pieces, what the passes did.

        `rows` says for each padded dimension None when its rows are proved independent, else what prevents the proof; `graph_memory` has
        the bytes of captured graphs by size, None without any. `guards` counts by kind what the trace has read and is checked, and lists
        kinds that were dropped and what cannot be checked; `variants` says for each size and range with code of its own how it stands, and
        how often it ran; `retraced` is what had changed when an earlier trace could no longer serve. `unused_ops` has the names in
        `split_ops` and `row_wise_ops` that the trace did not meet."""
        return [
            {
                "plan_key": variant.report.plan_key,
                "source": variant.report.source,
                "reason": variant.report.reason,
                "cache": variant.report.cache,
                "hit_pieces": variant.report.hit_pieces,
                "saved_seconds": variant.report.saved_seconds,
                "seconds": dict(variant.report.seconds),
                "pieces": variant.report.pieces,
                "unique_pieces": variant.report.unique_pieces,
                "steps": [step.name for step in variant.compiled.plan.steps],
                "breaks": [{"name": r.label, "where": r.where.strip(), "reason": r.reason} for r in variant.compiled.plan.regions],
                "bounds": dict(variant.compiled.plan.bounds),
                "rows": {name: verdict and str(verdict) for name, verdict in variant.compiled.plan.rows.items()},
                "passes": variant.report.passes,
                "whole_passes": variant.report.whole_passes,
                "unused_ops": {setting: list(names) for setting, names in variant.compiled.plan.unused_ops.items()},
                "guards": _guards(variant, self._entry.config.drop_guards),
                "retraced": variant.report.retraced,
                "variants": [] if variant.report.variants is None else variant.report.variants.as_json(),
                "graph_memory": _graph_memory(variant),
            }
            for variant in self._entry.variants.values()
        ]

    def phases(self) -> str:
        """Where the time of each compile or load went, as a table: one row a phase, one column a trace, the sum last. Imports have rows of
        their own, since only the first compile of a process pays for them."""
        columns = [dict(item["seconds"]) for item in self.report()]
        names = list(dict.fromkeys(name for column in columns for name in column))
        width = max([len(name) for name in names], default=0)
        rows = [f"{name:<{width}}" + "".join(f"{column.get(name, 0.0):9.2f}" for column in columns) for name in names]
        return "\n".join([*rows, f"{'sum':<{width}}" + "".join(f"{sum(column.values()):9.2f}" for column in columns)])

    def explain(self) -> str:
        """The report as text, and how often calls ran in which mode and why not in a better one."""
        from rung.graphs.explain import step_lines
        from rung.graphs.program import piece_lines
        from rung.graphs.repeats import break_lines

        lines = []
        for item, variant in zip(self.report(), self._entry.variants.values(), strict=True):
            phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in item["seconds"].items())
            lines += [f"{one['name']} runs eagerly {one['where']}: {one['reason']}" for one in item["breaks"]]
            lines.append(f"{variant.report}: {item['pieces']} pieces, {item['unique_pieces']} unique; {phases}")
            lines += unused_lines(variant.compiled.plan.unused_ops)
            lines += [f"sizes {one['sizes']}: {one['state']}, {one['calls']} calls {one['error']}".rstrip() for one in item["variants"]]
        lines += [*step_lines(self.counters), *piece_lines(self.counters), *break_lines(self.counters)]
        return "\n".join(lines) or "nothing was compiled yet: call the module once"

    def capture(self, sizes: Sequence[int | Mapping[str, int]], *args: Any, **kwargs: Any) -> None:
        """Capture graphs for `sizes` of the dynamic dimension now (of each by name when there are several), instead of at the first call of
        each. The arguments are those of a call, with valid values; their rows are repeated."""
        variant, inputs = self._entry.prepare_call(*args, **kwargs)
        capture = getattr(variant.run, "capture", None)
        if capture is None:
            raise ConfigError("nothing to capture: the module was wrapped without graphs", hint='pass graphs="piecewise", "full" or "auto"')
        capture(sizes, inputs)

    def wait_for_variants(self, seconds: float | None = None) -> bool:
        """Wait until variants that are compiled in the background serve; whether all do. Raises the error of one that failed."""
        found = [variant.report.variants for variant in self._entry.variants.values() if variant.report.variants is not None]
        return all(one.wait(seconds) for one in found)

    def last_step(self) -> dict[str, Any] | None:
        """How the latest call with graphs ran: mode, descriptor, rows of padding, and a reason with its sentence and advice. With several
        traces it is the latest of the one traced last that has any."""
        from rung.graphs.explain import as_dict

        return next((as_dict(graphs.last) for graphs in reversed(self._graphs()) if graphs.last is not None), None)

    def flush_steps(self) -> None:
        """Write the lines of the step trace (option `step_trace`) that are still kept."""
        for graphs in self._graphs():
            if graphs.log is not None:
                graphs.log.flush()

    def suspend(self) -> None:
        """Free the graphs and their memory and remember which there were; calls run without graphs until `resume`."""
        for graphs in self._graphs():
            graphs.suspend()

    def resume(self) -> None:
        """Capture again what `suspend` freed."""
        for graphs in self._graphs():
            graphs.resume()

    def recapture(self) -> None:
        """Read parameters and buffers again, wherever they lie now, and capture the same graphs again."""
        self._entry.weights_changed(recapture=True)

    def into(self, out: Any) -> Callable[..., Any]:
        """A call that copies its output tensors into those of `out` and returns `out`: `module.rung.into(out)(x)`.

        `out` is a tensor, or any structure with one tensor (or None: not wanted) for each output tensor, of the same shape and dtype. With
        graphs this is the only copy of the outputs. Raises `InputMismatchError` before anything is written."""

        def call(*args: Any, **kwargs: Any) -> Any:
            from rung.graphs.outputs import copy_into, output_tensors
            from rung.torch_compat import tree_leaves

            def run(variant: Variant, inputs: list[Any]) -> Any:
                into = getattr(variant.run, "into", None)
                return variant.run(*inputs) if into is None else into(out, *inputs)

            result = self._entry.call_variant(run, args, kwargs)
            if result is not out:
                with torch.no_grad():
                    copy_into(tree_leaves(out), output_tensors(result))
            return out

        return call

    def weights_changed(self) -> None:
        """Tell that parameters or buffers were replaced (not updated in place); `on_address_change` is followed where graphs read them."""
        self._entry.weights_changed()

    def release(self) -> None:
        """Drop everything compiled or captured; the next call starts again (from the store)."""
        self._entry.release()

    def _graphs(self) -> list[Any]:
        """The `WrappedGraphs` of each trace; none when the object was wrapped without graphs."""
        return [variant.run for variant in self._entry.variants.values() if hasattr(variant.run, "suspend")]

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        import copy

        return Handle(copy.deepcopy(self._entry, memo))


def _graph_memory(variant: Variant) -> dict[str, Any] | None:
    memory = getattr(variant.run, "memory", None)
    report = None if memory is None else memory()
    return None if report is None else report.as_json()


def _guards(variant: Variant, dropped: Sequence[str]) -> dict[str, Any]:
    checked = Counter(str(guard.kind) for guard in variant.state.guards.guards)
    return {"checked": dict(checked), "dropped": list(dropped), "unknown": list(variant.state.guards.unknown)}
