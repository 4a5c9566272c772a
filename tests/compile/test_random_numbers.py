"""Random numbers in compiled code: those of eager mode under the same seed, from the caller's generator."""

from __future__ import annotations

import copy

import torch
from torch import nn

import rung


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(x.shape[0], 4) + torch.randn_like(x) + torch.randint(0, 5, (x.shape[0], 1))
        return self.drop(x) + noise + torch.bernoulli(torch.full_like(x, 0.5))


def test_dropout_and_random_ops_equal_eager_mode_under_one_seed() -> None:
    module, eager = Noisy().train(), copy.deepcopy(Noisy()).train()
    rung.wrap(module, dynamic={"x": {0: "rows"}})
    with torch.no_grad():
        state = torch.get_rng_state()
        module(torch.ones(2, 4))
        torch.set_rng_state(state)
        for rows in (3, 1):
            x = torch.randn(rows, 4)
            torch.manual_seed(7)
            actual, after = module(x), torch.rand(1)
            torch.manual_seed(7)
            assert torch.equal(actual, eager(x))
            assert torch.equal(after, torch.rand(1))  # the generator has moved as far
        assert not torch.equal(module(x), module(x))


def test_a_compile_leaves_the_generator_where_the_call_would() -> None:
    module, x = Noisy().train(), torch.ones(2, 4)
    wrapped = rung.wrap(copy.deepcopy(module), dynamic={"x": {0: "rows"}})
    with torch.no_grad():
        torch.manual_seed(3)
        first = wrapped(x)
        torch.manual_seed(3)
        assert torch.equal(first, module(x))
