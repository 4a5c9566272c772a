"""The modes of a wrapped module against the module itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import rung
from rung.cli.check_row import Check, error_of, graph_check, piece_checks, rows_of
from rung.cli.targets import InputBuilder, growing_dims
from rung.compile.build import SplitGraph
from rung.compile.retrace import traced_pieces
from rung.compile.signature import own_signature
from rung.errors import ConfigError
from rung.graphs import Descriptor, GraphManager, GraphMode, StaticBuffer, make_backend
from rung.graphs.module_io import buffer_specs, dimensions, kept_state, with_valid_range
from rung.graphs.outputs import cut_output
from rung.graphs.verify import TOLERANCES, check_graph
from rung.graphs.verify_pieces import PieceError, compare_pieces
from rung.torch_compat import tree_leaves

ROWS = "rows"


class ModuleVerify:
    """Compiled once; every size gets a piecewise and a full graph, in one pool."""

    def __init__(
        self,
        module: nn.Module,
        build: InputBuilder,
        sizes: Sequence[int],
        *,
        sets: int,
        device: torch.device,
        tolerance: float | None,
        by_piece: bool,
    ) -> None:
        if max(sizes) < 2:
            raise ConfigError("--sizes needs a size above 1", hint="the size is what changes from call to call")
        self.module = module.to(device)
        self._build = build
        self._sizes = sorted(sizes)
        self._sets = sets
        dynamic = growing_dims(self.module, build, (max(sizes) - 1, max(sizes)), ROWS)
        options: dict[str, Any] = {"dynamic": dynamic, "maximum": max(sizes)}
        self._wrapped = rung.wrap(copy.deepcopy(self.module), graphs="full", pad=(ROWS,), capture_sizes=tuple(self._sizes), **options)
        args, kwargs = build(max(sizes))
        with torch.no_grad():
            variant, example = self._wrapped.rung._entry.prepare_call(*args, **kwargs)
        self.compiled = variant.compiled
        verdict = self.compiled.plan.rows.get(ROWS)
        self.padding = "padded rows are proved harmless" if verdict is None else f"exact sizes only: {verdict}"
        self._pads = verdict is None
        specs = buffer_specs(self.compiled)
        self._dim = dimensions(specs)[0]
        buffers = [
            StaticBuffer(with_valid_range(spec, value), capacity={self._dim: max(sizes)}, device=device)
            for spec, value in zip(specs, example, strict=True)
        ]
        self.manager = GraphManager(self.compiled, make_backend(device), inputs=buffers, dim=self._dim)
        self._tolerance = tolerance
        self._by_piece = by_piece
        self._traced: SplitGraph | None = None

    @torch.no_grad()
    def run(self, size: int) -> Iterator[Check]:
        """All rows for `size`."""
        for data in range(self._sets):
            rows = rows_of(self._sizes, size, data) if self._pads else size
            args, kwargs = self._build(rows, data)
            with kept_state(self.compiled):
                want = tree_leaves(self.module(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
            inputs = self._wrapped.rung._entry.prepare_call(*args, **kwargs)[1]
            fields: dict[str, Any] = {"size": size, "data": data, "rows": rows, "tolerance": self._limit(want)}
            with kept_state(self.compiled):
                got = tree_leaves(self.compiled(*inputs))
            yield Check(mode="compiled", error=error_of(got, want), **fields)
            if self._by_piece and data == 0:
                yield from piece_checks(self._pieces(inputs, args, kwargs), **fields)
            for mode in (GraphMode.PIECEWISE, GraphMode.FULL):
                yield self._graph(mode, inputs, want, fields)

    def _pieces(self, inputs: Sequence[Any], args: Any, kwargs: Any) -> list[PieceError]:
        entry = self._wrapped.rung._entry
        if self._traced is None:
            bound = own_signature(entry.function).bind(*args, **kwargs)
            bound.apply_defaults()
            self._traced = traced_pieces(entry.function, dict(bound.arguments), entry.config, self.compiled.plan)
        with kept_state(self.compiled):
            return compare_pieces(self.compiled, self._traced, inputs)

    def _graph(self, mode: GraphMode, inputs: Sequence[Any], want: Sequence[Any], fields: dict[str, Any]) -> Check:
        descriptor = Descriptor(mode=mode, num_tokens=fields["size"])
        rows = {self._dim: fields["rows"]}

        @contextmanager
        def setup(poison: bool) -> Iterator[None]:
            for buffer, value in zip(self.manager.inputs, inputs, strict=True):
                if poison:
                    buffer.poison(self._noise())
                    buffer.view({self._dim: fields["size"]})[tuple(slice(0, extent) for extent in value.shape)].copy_(value)
                else:
                    buffer.write(value, {self._dim: fields["size"]})
            with kept_state(self.compiled):
                yield

        def cut(flat: Sequence[Any]) -> list[Any]:
            return [cut_output(value, names, rows) for value, names in zip(flat, self.compiled.plan.output_dims, strict=True)]

        difference = check_graph(self.manager, descriptor, setup, cut)
        with setup(False):
            flat = cut(self.manager.run(descriptor).borrow())
            got = tree_leaves(self.compiled.restore([v.clone() if isinstance(v, torch.Tensor) else v for v in flat], inputs))
        return graph_check(difference, mode=str(mode), error=error_of(got, want), **fields)

    def _limit(self, want: Sequence[Any]) -> float:
        if self._tolerance is not None:
            return self._tolerance
        return max((TOLERANCES.get(value.dtype, 0.0) for value in want if isinstance(value, torch.Tensor)), default=0.0)

    def _noise(self) -> torch.Generator:
        return torch.Generator(self.manager.backend.device).manual_seed(1)
