"""Which operations keep rows apart, and what is said of those that do not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rung.compile.rows import Verdict, output_dims, prove_rows
from rung.compile.trace import trace
from rung.errors import DynamicShapeError
from rung.graphs import BufferSpec, check_padding
from rung.passes.ir import linear, norm_linear, rms_norm, silu_and_mul
from tests.compile.cases import bound, double

Function = Callable[..., Any]


def prove(function: Function, *args: torch.Tensor, dynamic: Any = None, row_wise: tuple[str, ...] = ()) -> dict[str, Verdict | None]:
    try:
        traced = trace(function, bound(function, args), dynamic or {"x": {0: "rows"}})
    except DynamicShapeError:
        if torch.__version__ < "2.13":  # 2.11 cannot be told that a free size is not 0, and both decide on more sizes than later versions
            pytest.skip("this torch decides on the free size inside of the op")
        raise
    return prove_rows(traced.graph_module, traced.symbols, traced.bounds, set(traced.symbols.values()), row_wise)


def prove_of(body: Function, *args: torch.Tensor) -> Verdict | None:
    def forward(x: torch.Tensor) -> Any:
        return body(x)

    return prove(forward, *(args or (torch.randn(3, 4),)))["rows"]


def written_in_place(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y[:, 1] = x.sum(1)
    y[:, :2].add_(1)
    y[x > 0] = 0.0
    return y


PROVED: dict[str, Function] = {
    "pointwise": lambda x: torch.where(x > 0, x.relu() * 2, x.neg().exp()).clamp(max=3).to(torch.float64),
    "broadcast": lambda x: x * x.sum(1, keepdim=True) + torch.ones(4),
    "linear": lambda x: F.linear(x, torch.ones(5, 4), torch.ones(5)),
    "matmul": lambda x: x.view(-1, 2, 2) @ x.view(-1, 2, 2).transpose(1, 2),
    "einsum": lambda x: torch.einsum("bi,bj->bij", x, x),
    "norms": lambda x: F.group_norm(F.layer_norm(F.normalize(x, dim=1), (4,)), 2),
    "rms_norm": lambda x: rms_norm(x, torch.ones(4), 1e-5),
    "joined products": lambda x: silu_and_mul(linear(norm_linear(x, torch.ones(4), 1e-5, torch.ones(6, 4)), torch.ones(8, 6))),
    "softmax": lambda x: x.softmax(-1).log_softmax(1),
    "reductions": lambda x: (x.mean(1), x.var(-1), x.max(1).values, x.argmin(1), x.logsumexp(1), x.norm(dim=1), (x > 0).any(1)),
    "along": lambda x: (x.cumsum(1), x.sort(1).values, x.flip(1), x.roll(1, 1), x.topk(2, 1).indices),
    "views": lambda x: x.reshape(-1, 2, 2).permute(2, 0, 1).flatten(0).view(2, -1, 2).transpose(0, 1).unsqueeze(0).squeeze(0),
    "merged and split again": lambda x: F.linear(x.view(-1, 2), torch.ones(3, 2)).view(-1, 6),
    "cat": lambda x: torch.stack([torch.cat([x, x], 1), torch.cat(x.chunk(2, 1) * 2, 1)], 1).unbind(1),
    "slices": lambda x: x[:, 1:3] + x[:, 0, None],
    "expand": lambda x: torch.cat([torch.ones(1, 2).expand(x.shape[0], -1), x], 1),
    "factories": lambda x: x + torch.zeros(x.shape[0], 1) + torch.full_like(x, 2) + torch.arange(x.shape[0])[:, None],
    "repeat": lambda x: x.repeat(1, 2) + torch.ones(1, 8).repeat(x.shape[0], 1),
    "indices": lambda x: (x.gather(1, x.argmax(1, keepdim=True)), torch.ones(4, 2)[x.argmax(1)], x[:, [2, 0]]),
    "own row by index": lambda x: x[torch.arange(x.shape[0]), x.argmax(1)],
    "embedding": lambda x: F.embedding(x.argmax(1), torch.ones(4, 3)),
    "embedding bag": lambda x: F.embedding_bag(x.argsort(1), torch.ones(4, 3), mode="sum"),
    "one hot": lambda x: F.one_hot(x.argmax(1), 4),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(-1, 1, 2, 2)] * 3, is_causal=True),
    "convolution": lambda x: F.conv1d(x.unsqueeze(1), torch.ones(2, 1, 3), padding=1),
    "pooling": lambda x: F.avg_pool2d(F.max_pool2d(x.view(-1, 1, 2, 2), 1), 2),
    "batch norm": lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "pad": lambda x: F.pad(x, (1, 2)),
    "in place": written_in_place,
    "unused mean": lambda x: (x.mean(0), x * 2)[1],
    "transposed": lambda x: x.t().contiguous(),
}

MIXED: dict[str, tuple[Function, str]] = {
    "mean": (lambda x: x - x.mean(0), "mean"),
    "sum": (lambda x: x.sum(), "sum"),
    "amax": (lambda x: x / x.abs().amax(), "amax"),
    "softmax": (lambda x: x.softmax(0), "softmax"),
    "sort": (lambda x: x.sort(dim=0).values, "sort"),
    "flip": (lambda x: x.flip(0), "flip"),
    "roll": (lambda x: x.roll(1, 0), "roll"),
    "cumsum": (lambda x: x.cumsum(0), "cumsum"),
    "norm": (lambda x: F.normalize(x, dim=0), "normalize"),
    "gram": (lambda x: x @ x.t(), "matmul"),
    "covariance": (lambda x: x.t() @ x, "matmul"),
    "distances": (lambda x: x[:, None] - x[None], "sub"),
    "attention": (lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3), "scaled_dot_product_attention"),
    "first row": (lambda x: x + x[0], "getitem"),
    "fixed cut": (lambda x: x - x[:1], "getitem"),
    "cat": (lambda x: torch.cat([x, x], 0), "cat"),
    "index": (lambda x: x[x.argmax(1)], "getitem"),
    "index select": (lambda x: x.index_select(0, x.argmax(1)), "index_select"),
    "divided by the count": (lambda x: x / x.shape[0], "truediv"),
    "count as a value": (lambda x: x + torch.full((x.shape[0], 1), x.shape[0]), "full"),
    "count as a shift": (lambda x: x.roll(x.shape[0], 1), "roll"),
    "pad": (lambda x: F.pad(x, (0, 0, 1, 0))[1:], "pad"),
    "convolution": (lambda x: F.conv1d(x.t()[None], torch.ones(4, 4, 3), padding=1), "conv1d"),
}

UNKNOWN: dict[str, tuple[Function, str]] = {
    "random": (lambda x: x + torch.rand_like(x), "rand_like"),
    "dropout": (lambda x: F.dropout(x, 0.5, training=True), "dropout"),
    "custom op": (double, "double"),
    "merged output": (lambda x: x.view(-1), "output"),
    "no rule": (lambda x: x.unfold(1, 2, 1), "unfold"),
}


@pytest.mark.parametrize("name", PROVED)
def test_operations_that_keep_rows_apart(name: str) -> None:
    assert prove_of(PROVED[name]) is None


@pytest.mark.parametrize("name", MIXED)
def test_operations_that_mix_rows_are_named(name: str) -> None:
    function, op = MIXED[name]
    verdict = prove_of(function)
    assert verdict is not None
    assert (verdict.kind, verdict.op.partition(" ")[0]) == ("mixes", op)
    assert f" at {__file__}:" in verdict.place


@pytest.mark.parametrize("name", UNKNOWN)
def test_operations_without_a_rule_are_not_proved(name: str) -> None:
    function, op = UNKNOWN[name]
    verdict = prove_of(function)
    assert verdict is not None
    assert (verdict.kind, verdict.op.partition(" ")[0]) == ("unknown", op)


def test_a_custom_op_can_be_declared_row_wise() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return double(x)

    assert prove(forward, torch.randn(3, 4), row_wise=("rungtest::double",)) == {"rows": None}


def test_attention_through_the_cache_mixes() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.rung.attention(x, x, x, out, "layers.0.attention")
        return out

    verdict = prove(forward, torch.randn(3, 2, 4))["rows"]
    assert verdict is not None
    assert (verdict.kind, verdict.node) == ("mixes", "attention")


def test_rotation_on_the_way_into_the_cache_mixes() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        rotated = torch.empty_like(x)
        angles = x[:, :1, :2]
        torch.ops.rung.rotate_and_write(x, x, x, rotated, angles, angles, "layers.0.attention")
        return rotated

    verdict = prove(forward, torch.randn(3, 2, 4))["rows"]
    assert verdict is not None
    assert (verdict.kind, verdict.node) == ("mixes", "rotate_and_write")


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 cannot be told that sizes begin at 1, which a batch norm asks")
@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_mixes_in_training_alone(training: bool) -> None:
    verdict = prove(Normed().train(training).forward, torch.randn(3, 3, 2, 2))["rows"]
    assert (verdict is not None and verdict.why) == (
        "it takes statistics over all rows of the batch (training mode)" if training else False
    )


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(64, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[: x.shape[0]]


class Writer(Table):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table[: x.shape[0]] = x
        return x * 2


def test_the_first_entries_of_a_table_belong_to_their_rows() -> None:
    assert prove(Table().forward, torch.randn(3, 4)) == {"rows": None}


def test_rows_written_into_a_buffer_are_refused() -> None:
    verdict = prove(Writer().forward, torch.randn(3, 4))["rows"]
    assert verdict is not None
    assert (verdict.kind, verdict.op.partition(" ")[0]) == ("mixes", "setitem")


def test_each_dimension_has_a_verdict_of_its_own() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(1, keepdim=True)

    verdicts = prove(forward, torch.randn(3, 5, 4), dynamic={"x": {0: "batch", 1: "frames"}})
    assert verdicts["batch"] is None
    assert verdicts["frames"] is not None
    assert verdicts["frames"].why == "it reduces over dimension 1, which counts rows"


def test_ragged_bags_mix() -> None:
    def forward(ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(ids, torch.ones(9, 4), offsets)

    verdict = prove(forward, torch.zeros(9, dtype=torch.int64), torch.tensor([0, 3, 5]), dynamic={"offsets": {0: "rows"}})["rows"]
    assert verdict is not None
    assert "a bag ends where the next row's begins" in verdict.why


def test_output_dims_are_read_from_the_trace() -> None:
    def forward(x: torch.Tensor) -> tuple[Any, ...]:
        return x.transpose(0, 1), x.sum(1), torch.ones(3), x.shape[0]

    traced = trace(forward, {"x": torch.randn(3, 5, 4)}, {"x": {0: "batch", 1: "frames"}})
    assert output_dims(traced.graph_module, traced.symbols) == ({0: "frames", 1: "batch"}, {0: "batch"}, {}, {})


def test_verdicts_survive_json() -> None:
    verdict = prove_of(lambda x: x.mean(0))
    assert verdict is not None
    assert Verdict.from_json(verdict.to_json()) == verdict


# --- random graphs -------------------------------------------------------------------------------------------------------------------

ROW_WISE: list[Function] = [
    lambda x: x.relu() + 1,
    lambda x: x * x.sum(1, keepdim=True).tanh(),
    lambda x: F.layer_norm(x, (4,)),
    lambda x: x.softmax(1),
    lambda x: x.view(-1, 2).sin().view(-1, 4),
    lambda x: F.linear(x, torch.ones(4, 4) / 4),
    lambda x: torch.cat([x[:, 2:], x[:, :2]], 1),
    lambda x: x.t().cos().t(),
    lambda x: (x.view(-1, 2, 2) @ x.view(-1, 2, 2)).reshape(-1, 4).tanh(),
    lambda x: x + torch.arange(x.shape[0])[:, None].sin(),
    lambda x: F.conv1d(x.unsqueeze(1), torch.ones(1, 1, 3) / 3, padding=1).squeeze(1),
    lambda x: x.gather(1, x.argsort(1)),
]
INJECTED: dict[str, Function] = {
    "mean": lambda x: x - x.mean(0),
    "softmax": lambda x: x.softmax(0),
    "flip": lambda x: x + x.flip(0),
    "cumsum": lambda x: x.cumsum(0),
    "amax": lambda x: x / (x.abs().amax() + 1),
    "roll": lambda x: x.roll(1, 0),
}


def chain(functions: list[Function]) -> Function:
    def forward(x: torch.Tensor) -> torch.Tensor:
        for function in functions:
            x = x + function(x)
        return x

    return forward


@pytest.mark.parametrize("seed", range(8))
def test_random_row_wise_graphs_are_proved_and_equal_under_padding(seed: int) -> None:
    forward = chain(random.Random(seed).choices(ROW_WISE, k=5))
    assert prove(forward, torch.randn(3, 4)) == {"rows": None}
    spec = BufferSpec(name="x", shape=("rows", 4), dtype=torch.float32)
    assert check_padding(lambda values: [forward(*values)], [spec], [torch.randn(3, 4)], {"rows": 8}) == ({0: "rows"},)


@pytest.mark.parametrize("seed", range(8))
def test_one_mixing_op_in_a_random_graph_is_named(seed: int) -> None:
    dice = random.Random(seed)
    functions = dice.choices(ROW_WISE, k=5)
    name = dice.choice(list(INJECTED))
    functions.insert(dice.randrange(6), INJECTED[name])
    verdict = prove(chain(functions), torch.randn(3, 4))["rows"]
    assert verdict is not None
    assert (verdict.kind, verdict.op) == ("mixes", name)
