"""A recommender's ranking head, no language model: compiled once for every number of candidates, and replayed as graphs.

    python examples/wrap_mlp.py

The module runs in four modes. All must agree; what ran is read from the module's own counters.
"""

from __future__ import annotations

import torch
from torch import nn

import rung

USERS, ITEMS, WIDTH = 1000, 5000, 64


class Ranker(nn.Module):
    """Scores candidates: user and item embeddings, their product, and a small tower."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH)
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.tower = nn.Sequential(nn.Linear(3 * WIDTH, 128), nn.SiLU(), nn.LayerNorm(128), nn.Linear(128, 1))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        u, i = self.users(user), self.items(item)  # [rows, width] each
        scores: torch.Tensor = self.tower(torch.cat([u, i, u * i], dim=-1)).squeeze(-1).sigmoid()
        return scores  # [rows]


def build() -> Ranker:
    """With the same weights each time."""
    torch.manual_seed(0)
    return Ranker().eval().requires_grad_(False)


def inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, USERS, (rows,)), torch.randint(0, ITEMS, (rows,))


def wrap(mode: str) -> Ranker:
    if mode == "eager":
        return build()
    dynamic = {"user": {0: "rows"}, "item": {0: "rows"}}
    if mode == "compiled":
        return rung.wrap(build(), dynamic=dynamic)
    return rung.wrap(build(), dynamic=dynamic, graphs=mode, pad=("rows",), maximum=64, capture_sizes=(4, 16, 64))


def main() -> None:
    modules = {mode: wrap(mode) for mode in ("eager", "compiled", "piecewise", "full")}
    for rows in (3, 16, 50):
        arguments = inputs(rows)
        expected = modules["eager"](*arguments)
        for module in modules.values():
            torch.testing.assert_close(module(*arguments), expected)
        print(f"{rows} candidates: {', '.join(modules)} agree, best score {expected.max():.4f}")
    for mode, module in modules.items():
        if mode != "eager":
            print(f"{mode}: {module.rung.explain()}")
            print(f"  {dict(module.rung.counters)}")


if __name__ == "__main__":
    main()
