"""Run a traced graph on fake tensors and follow the rows of its dynamic dimensions through every ATen op that it reaches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from rung import torch_compat
from rung.compile.regions import Region
from rung.compile.rows.call import Call
from rung.compile.rows.rules import apply
from rung.compile.rows.state import Axis, Refusal, State, Verdict, mixes, unknown
from rung.passes.ir import IR_OPS

_BODIES: Mapping[Any, Callable[..., Any]] = {op.overload: op.body for op in IR_OPS}


def prove_rows(
    graph_module: fx.GraphModule,
    symbols: Mapping[str, str],
    bounds: Mapping[str, int | None],
    names: Collection[str],
    row_wise: Collection[str] = (),
    regions: Mapping[str, Region] | None = None,
    met: set[str] | None = None,
) -> dict[str, Verdict | None]:
    """For each dimension in `names`: None when row i of every output depends on row i of the inputs alone, else what prevents the proof.

    `symbols` and `bounds` are those of a `TracedGraph`, whose graph is read and not changed. `row_wise` names ops (such as
    "mylib::scale") that are taken to keep rows apart. `regions` are those of the trace: their ops are gone by now, and are not run. `met`
    takes the names of the ops that were looked at.
    A proof holds for all sizes that the trace serves, when padding goes behind the real rows."""
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    inputs = [node.meta["example_value"] for node in placeholders]
    known = {str(symbol): symbol for value in inputs for symbol in torch_compat.free_symbols(value)}
    wanted = {name: known[symbol] for symbol, name in symbols.items() if name in names and symbol in known}
    rows = {name: Rows(symbol, bounds.get(name), frozenset(row_wise)) for name, symbol in wanted.items()}
    if not rows:
        return {}
    mode = _Follow(list(rows.values()), set() if met is None else met)
    for node, value in zip(placeholders, inputs, strict=True):
        mode.node = node
        for item in rows.values():
            item.take_input(value, node)
    fake_mode: Any = next(found for value in inputs if (found := getattr(value, "fake_mode", None)) is not None)
    try:
        with fake_mode, torch.no_grad(), torch_compat.python_dispatcher():
            _Walk(graph_module, mode, regions or {}).run(*inputs)
    except Exception as error:  # whatever torch raises for code that it cannot run on fake tensors: nothing is proved then
        for item in rows.values():
            item.refuse(mode.node, unknown(f"it could not be followed: {type(error).__name__}: {str(error).strip()[:200]}"))
    still_free = {symbol for value in inputs for symbol in torch_compat.free_symbols(value)}
    for item in rows.values():
        if item.symbol not in still_free:
            item.refuse(mode.node, unknown("it was followed for one size only"))
    return {name: item.verdict for name, item in rows.items()}


def output_dims(graph_module: fx.GraphModule, symbols: Mapping[str, str]) -> tuple[dict[int, str], ...]:
    """For each flat output the dimensions that are exactly one of the dynamic dimensions."""
    output = next(node for node in reversed(graph_module.graph.nodes) if node.op == "output")
    found: list[dict[int, str]] = []
    for item in output.args[0]:
        value = item.meta.get("example_value") if isinstance(item, fx.Node) else None
        shape = value.shape if isinstance(value, torch.Tensor) else ()
        names = {dim: symbols.get(str(torch_compat.symbol_of(extent))) for dim, extent in enumerate(shape)}
        found.append({dim: name for dim, name in names.items() if name is not None})
    return tuple(found)


class Rows:
    """The rows of one dimension during a walk. `verdict` is the first reason against a proof that an output or a buffer depends on."""

    def __init__(self, symbol: Any, bound: int | None, row_wise: frozenset[str]) -> None:
        self.symbol = symbol
        self.bound = bound
        self.row_wise = row_wise
        self.verdict: Verdict | None = None
        self._states: dict[int, tuple[torch.Tensor, State]] = {}  # id -> (the tensor, kept alive; its state)
        self._spoilt: dict[int, Verdict] = {}  # storage that something unproved was written to
        self._written: set[int] = set()  # storages that were written in place
        self._inputs: dict[int, State] = {}  # storage of a graph input -> state of the whole input

    def take_input(self, value: Any, node: fx.Node) -> None:
        if not isinstance(value, torch.Tensor):
            return
        dims = [dim for dim, extent in enumerate(value.shape) if self.symbol in torch_compat.free_symbols(extent)]
        plain = all(torch_compat.symbol_of(value.shape[dim]) == self.symbol for dim in dims)
        state: State = Axis(dims[0]) if dims else None
        if len(dims) > 1 or not plain:
            state = _verdict(node, unknown("an input does not count rows in one dimension"))
        self._set(value, state)
        self._inputs[torch_compat.storage_identity(value)] = state

    def refuse(self, node: fx.Node, reason: Refusal, op: Any = None) -> None:
        self.verdict = self.verdict or _verdict(node, reason, op)

    def state(self, tensor: torch.Tensor) -> State:
        state = self._states.get(id(tensor), (tensor, None))[1]
        if not self._written:
            return state
        storage = torch_compat.storage_identity(tensor)
        if storage in self._written and isinstance(state, Axis):
            state = state.at(state.dim)  # it held known values
        return self._spoilt.get(storage, state)

    def visit(self, op: torch_compat.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, node: fx.Node) -> None:
        """Take note of one call."""
        call = Call(op, args, kwargs, result, self.symbol, self.bound, self.state)
        outputs = call.outputs()
        spoilt = next((state for tensor in call.tensors() if isinstance(state := self.state(tensor), Verdict)), None)
        states: list[State] = [spoilt] * len(outputs)
        reason: Verdict | None = spoilt
        if spoilt is None and self._is_concerned(call):
            try:
                states = self._judge(call, outputs, node)
            except Refusal as refusal:
                reason = _verdict(node, refusal, op)
                states = [reason] * len(outputs)
        before = {id(tensor): self.state(tensor) for tensor in call.tensors()}
        for tensor, state in zip(outputs, states, strict=True):
            if id(tensor) not in before:
                self._set(tensor, state)
        self._write(call, dict(zip(map(id, outputs), states, strict=True)), before, reason, node)

    def visit_region(self, region: Region, tensors: Sequence[torch.Tensor], node: fx.Node) -> None:
        """Take note of a region that runs eagerly. It may keep what it sees, so that rows which reach it are enough for a refusal."""
        found = [state for tensor in tensors if (state := self.state(tensor)) is not None]
        spoilt = next((state for state in found if isinstance(state, Verdict)), None)
        if found:
            why = "it runs eagerly because it would not trace, so nothing says how its rows depend on each other"
            made = Verdict("unknown", region.label, region.where or torch_compat.node_location(node), node.name, why)
            self.verdict = self.verdict or spoilt or made

    def _is_concerned(self, call: Call) -> bool:
        """Whether rows take part at all, as elements or as a number."""
        touched = any(self.state(tensor) is not None for tensor in call.tensors())
        return touched or any(call.mentions(leaf) for leaf in torch_compat.tree_leaves((tuple(call.arguments.values()), call.outputs())))

    def _judge(self, call: Call, outputs: Sequence[torch.Tensor], node: fx.Node) -> list[State]:
        result = apply(call, self.row_wise)
        found = list(result) if isinstance(result, Sequence) else [result] * len(outputs)
        states: list[State] = [_verdict(node, item, call.op) if isinstance(item, Refusal) else item for item in found]
        for tensor, state in zip(outputs, states, strict=True):
            if not isinstance(state, Verdict):
                self._check_shape(call, tensor, state)
        return states

    def _check_shape(self, call: Call, tensor: torch.Tensor, state: Axis | None) -> None:
        """The rows that a rule claims must be those that the shape shows."""
        dims = [dim for dim, extent in enumerate(tensor.shape) if call.mentions(extent)]
        if len(dims) > 1:
            raise mixes("its result holds the dimension twice: every row meets every other")
        shown = dims[0] if dims else None
        if shown != (state.dim if state is not None else None):
            raise unknown(f"its result of shape {list(tensor.shape)} does not hold rows where they are expected")
        if state is not None and call.shape(tensor)[state.dim] != state.outer * self.symbol * state.inner:
            raise unknown(f"its result of shape {list(tensor.shape)} does not hold every row once")

    def _write(self, call: Call, results: Mapping[int, State], before: Mapping[int, State], reason: Verdict | None, node: fx.Node) -> None:
        """What the op writes in place: memory keeps its meaning, or nobody may use it any more."""
        for argument in call.op._schema.arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in (leaf for leaf in torch_compat.tree_leaves(call[argument.name]) if isinstance(leaf, torch.Tensor)):
                old, new = before[id(tensor)], results.get(id(tensor), before[id(tensor)])
                storage = torch_compat.storage_identity(tensor)
                self._written.add(storage)
                fault = reason or (new if isinstance(new, Verdict) else None)
                if fault is None and new != old:
                    fault = _verdict(node, unknown("it writes rows over memory that holds other rows"), call.op)
                if fault is None and isinstance(old, Axis) and self._inputs.get(storage, old) is None:
                    fault = _verdict(node, mixes("it writes rows into a tensor of the module, padded ones too"), call.op)
                if fault is not None:
                    self._spoilt[storage] = fault
                    if storage in self._inputs:  # it outlives the call
                        self.verdict = self.verdict or fault

    def finish(self, outputs: Sequence[Any], node: fx.Node) -> None:
        """Look at the flat outputs of the graph."""
        for index, value in enumerate(outputs):
            state = self.state(value) if isinstance(value, torch.Tensor) else None
            if isinstance(state, Verdict):
                self.verdict = self.verdict or state
            elif state is not None and not state.is_plain:
                made = next((used for used in node.all_input_nodes if used.meta.get("rung_output") == index), node)
                self.refuse(made, unknown(f"output {index} holds rows and another dimension in one"))

    def _set(self, tensor: torch.Tensor, state: State) -> None:
        self._states[id(tensor)] = (tensor, state)


class _Follow(torch_compat.TorchDispatchMode):
    """Shows every ATen call to the rows. IR ops are followed through their bodies."""

    def __init__(self, rows: Sequence[Rows], met: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = rows
        self.met = met  # names of the ops that ran
        self.node: Any = None  # the node of the graph that is running

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _BODIES:
            with self:
                return _BODIES[func](*args, **kwargs)
        result = func(*args, **kwargs)
        self.met.add(func.name().partition(".")[0])
        for rows in self.rows:
            rows.visit(func, args, kwargs, result, self.node)
        return result


class _Walk(fx.Interpreter):
    """Runs the graph under the mode, which it tells the current node."""

    def __init__(self, module: fx.GraphModule, mode: _Follow, regions: Mapping[str, Region]) -> None:
        super().__init__(module)
        self.mode = mode
        self.regions = regions

    def run_node(self, n: fx.Node) -> Any:
        self.mode.node = n
        if n.op == "output":
            values, _ = self.fetch_args_kwargs_from_env(n)
            for rows in self.mode.rows:
                rows.finish(torch_compat.tree_leaves(values), n)
            return values
        region = self.regions.get(n.target.name().partition(".")[0]) if isinstance(n.target, torch_compat.OpOverload) else None
        if region is not None:
            tensors, _ = self.fetch_args_kwargs_from_env(n)
            for rows in self.mode.rows:
                rows.visit_region(region, tensors, n)
            return region.empty(tensors)
        with self.mode:
            return super().run_node(n)


def _verdict(node: fx.Node, reason: Refusal, op: Any = None) -> Verdict:
    return Verdict(reason.kind, _readable(node, op), torch_compat.node_location(node), node.name, reason.why)


def _readable(node: fx.Node, op: Any) -> str:
    """The op as the user wrote it; the ATen op behind it too where the name differs."""
    written = str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target)).strip("_")
    schema = getattr(op, "_schema", None)
    if schema is None or schema.name.rpartition("::")[2].strip("_") == written:
        return written
    return f"{written} ({schema.name})"
