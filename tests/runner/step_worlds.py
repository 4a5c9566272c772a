"""Everything that the step operations read and write, filled with random batches, to compare one implementation with another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rung.counters import Counters
from rung.runner.inputs import InputBuffers
from rung.runner.ops import StepOps, TorchStepOps
from rung.runner.slots import RequestSlots
from rung.runner.transfer import HostToDevice


@dataclass(frozen=True, kw_only=True)
class Sizes:
    slots: int = 13
    length: int = 40  # tokens of a request
    rows: int = 150  # of the input buffers; more than a program's
    block_size: int = 4

    @property
    def blocks(self) -> int:
        return -(-self.length // self.block_size)


SMALL, TINY, LARGE = Sizes(), Sizes(slots=1, rows=3, length=9), Sizes(slots=140, rows=300, length=600)


@dataclass(frozen=True, kw_only=True)
class RandomBatch:
    """The contents of a world before a step, and the padded extents that the step is given."""

    tensors: dict[str, torch.Tensor]
    num_rows: int
    num_requests: int  # padded

    @classmethod
    def draw(cls, rng: np.random.Generator, sizes: Sizes) -> RandomBatch:
        """Decodes, chunks of prefills, requests at their last token, requests without a slot, unused slots, and padding of every kind."""
        count = int(rng.integers(0, sizes.slots + 1))
        idx_mapping = np.full(sizes.slots, -1)
        idx_mapping[:count] = rng.permutation(sizes.slots)[:count]
        idx_mapping[:count][rng.random(count) < 0.15] = -1
        lens = np.where(rng.random(count) < 0.5, 1, rng.integers(1, sizes.rows // sizes.slots + 1, count))
        starts = np.full(sizes.slots + 1, lens.sum())
        starts[: count + 1] = [0, *lens.cumsum()]

        longest = int(lens.max(initial=1))
        computed = rng.integers(0, sizes.length - longest + 1, sizes.slots)
        # About the point that this step reaches, so that it falls short of the prefill, meets it, or lies past it.
        prefill = np.clip(computed + rng.integers(-longest, longest + 2, sizes.slots), 1, sizes.length)
        total = np.where(rng.random(sizes.slots) < 0.2, sizes.length, np.maximum(prefill, computed))
        vocab = 50000
        numbers = {
            "idx_mapping": idx_mapping,
            "query_start_loc": starts,
            "num_computed_tokens": computed,
            "prefill_len": prefill,
            "total_len": total,
            "all_token_ids": rng.integers(0, vocab, (sizes.slots, sizes.length)),
            "last_sampled_tokens": rng.integers(0, vocab, (sizes.slots, 1)),
            "table": rng.integers(1, 1000, (sizes.slots, sizes.blocks)),
            "num_blocks": rng.integers(0, sizes.blocks + 1, sizes.slots),
            "sampled": rng.integers(0, vocab, sizes.slots),
            # What an earlier step left behind
            "input_ids": rng.integers(0, vocab, sizes.rows),
            "positions": rng.integers(0, sizes.length, sizes.rows),
            "seq_lens": rng.integers(0, sizes.length, sizes.slots),
            "batch_table": rng.integers(1, 1000, (sizes.slots, sizes.blocks)),
            "slot_mapping": rng.integers(0, 1000, sizes.rows),
            "scattered": rng.integers(0, 1000, (sizes.slots, sizes.length)),
            "scatter_index": rng.permutation(sizes.slots * sizes.length)[: sizes.rows],
            "scatter_values": rng.integers(0, 1000, sizes.rows),
        }
        return cls(
            tensors={name: torch.from_numpy(np.asarray(values)) for name, values in numbers.items()},
            num_rows=int(rng.integers(lens.sum(), sizes.rows + 1)),
            num_requests=int(rng.integers(count, sizes.slots + 1)),
        )


class World:
    """The tensors of a runner without its model, at fixed addresses, and what one step of `ops` does to them."""

    def __init__(self, ops: StepOps, sizes: Sizes, device: torch.device | str = "cpu") -> None:
        device = torch.device(device)
        self.ops = ops
        self.sizes = sizes
        self.slots = RequestSlots(sizes.slots, sizes.length, HostToDevice(device, Counters()), ops)
        self.buffers = InputBuffers.allocate(sizes.rows, sizes.slots, device)
        by_slot = torch.zeros(sizes.slots, 1 + sizes.blocks, dtype=torch.int32, device=device)
        names = ("input_ids", "positions", "query_start_loc", "seq_lens", "idx_mapping")
        of_slots = ("num_computed_tokens", "prefill_len", "total_len", "all_token_ids", "last_sampled_tokens")
        self.tensors = {name: getattr(self.buffers, name) for name in names}
        self.tensors |= {name: getattr(self.slots, name) for name in of_slots}
        self.tensors |= {
            "table": by_slot[:, 1:],
            "num_blocks": by_slot[:, 0],
            "batch_table": torch.zeros(sizes.slots, sizes.blocks, dtype=torch.int32, device=device),
            "slot_mapping": torch.zeros(sizes.rows, dtype=torch.int64, device=device),
            "sampled": torch.zeros(sizes.slots, dtype=torch.int64, device=device),
            "scattered": torch.zeros(sizes.slots, sizes.length, dtype=torch.int32, device=device),
            "scatter_index": torch.zeros(sizes.rows, dtype=torch.int64, device=device),
            "scatter_values": torch.zeros(sizes.rows, dtype=torch.int32, device=device),
            "logits_indices": torch.zeros(sizes.slots, dtype=torch.int64, device=device),
            "num_sampled": torch.zeros(sizes.slots, dtype=torch.int32, device=device),
        }

    def load(self, batch: RandomBatch) -> None:
        for name, values in batch.tensors.items():
            self.tensors[name].copy_(values)

    def step(self, num_rows: int, num_requests: int) -> None:
        """Every operation once, in the order of a step."""
        t, ops = self.tensors, self.ops
        ops.scatter(t["scattered"], t["scatter_index"], t["scatter_values"])
        layout = (t["idx_mapping"], t["query_start_loc"])
        ops.positions_and_lengths(*layout, t["num_computed_tokens"], t["positions"], t["seq_lens"], num_rows)
        ops.prefill_ids(*layout, t["positions"], t["prefill_len"], t["all_token_ids"], t["input_ids"], num_rows)
        ops.last_sampled_ids(*layout, t["positions"], t["prefill_len"], t["last_sampled_tokens"], t["input_ids"], num_rows)
        ops.gather_block_table(t["idx_mapping"], t["table"], t["num_blocks"], t["batch_table"], num_requests)
        ops.slot_mapping(*layout, t["positions"], t["table"], self.sizes.block_size, t["slot_mapping"], num_rows)
        t["logits_indices"][:num_requests] = ops.logits_indices(t["query_start_loc"], num_requests)
        num_sampled = ops.num_sampled(t["idx_mapping"], t["seq_lens"], t["prefill_len"], num_requests)
        t["num_sampled"][:num_requests] = num_sampled
        ops.advance(self.slots, *layout, t["sampled"][:num_requests], num_sampled)

    def differences(self, oracle: World) -> list[str]:
        """The names of the tensors that are not equal."""
        return [name for name, values in self.tensors.items() if not torch.equal(values.cpu(), oracle.tensors[name].cpu())]


def differences(world: World, oracle: World, batch: RandomBatch) -> list[str]:
    """What differs after both have made one step from the same contents."""
    for one in (world, oracle):
        one.load(batch)
        one.step(batch.num_rows, batch.num_requests)
    return world.differences(oracle)


def torch_world(sizes: Sizes) -> World:
    return World(TorchStepOps(), sizes)
