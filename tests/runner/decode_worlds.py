"""A batch of decodes with its sampling parameters, to compare operations of decode graphs with those of a step and each other."""

from __future__ import annotations

import numpy as np
import torch

from rung.counters import Counters
from rung.runner.block_table import BlockTable
from rung.runner.inputs import InputBuffers
from rung.runner.ops import StepOps
from rung.runner.ops.decode_base import MAX_STOP_IDS, DecodeState, RowSampling
from rung.runner.slots import RequestSlots
from rung.runner.transfer import HostToDevice

SLOTS, LENGTH, BLOCK_SIZE, VOCAB, HISTORY = 13, 40, 4, 5000, 8


class DecodeWorld:
    """The tensors of a runner without its model, at fixed addresses."""

    def __init__(self, ops: StepOps, device: torch.device | str = "cpu") -> None:
        device = torch.device(device)
        transfer = HostToDevice(device, Counters())
        self.ops = ops
        self.slots = RequestSlots(SLOTS, LENGTH, transfer, ops)
        self.buffers = InputBuffers.allocate(SLOTS, SLOTS, device)
        self.table = BlockTable(SLOTS, LENGTH // BLOCK_SIZE, SLOTS, BLOCK_SIZE, transfer, ops)
        self.state = DecodeState.allocate(HISTORY, SLOTS, device)
        self.sampling = RowSampling(
            temperature=torch.zeros(SLOTS, device=device),
            seed=torch.zeros(SLOTS, dtype=torch.int64, device=device),
            stop_ids=torch.full((SLOTS, MAX_STOP_IDS), -1, dtype=torch.int64, device=device),
        )
        self.logits = torch.zeros(SLOTS, VOCAB, device=device)
        names = ("input_ids", "positions", "query_start_loc", "seq_lens", "idx_mapping")
        of_slots = ("num_computed_tokens", "prefill_len", "total_len", "all_token_ids", "last_sampled_tokens")
        self.tensors = {name: getattr(self.buffers, name) for name in names}
        self.tensors |= {name: getattr(self.slots, name) for name in of_slots}
        self.tensors |= {"table": self.table.table, "num_blocks": self.table.num_blocks, "batch_table": self.table.batch}
        self.tensors |= {"slot_mapping": self.table.slot_mapping, "logits": self.logits}
        self.tensors |= {name: getattr(self.sampling, name) for name in ("temperature", "seed", "stop_ids")}
        self.tensors |= {name: getattr(self.state, name) for name in ("enabled", "step", "history")}

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, values in tensors.items():
            self.tensors[name].copy_(values)

    def step(self, rows: int) -> None:
        """Inputs and sampling of one decode graph."""
        self.ops.decode.inputs(self.slots, self.table, self.buffers, rows)
        self.ops.decode.sample(self.logits[:rows], self.slots, self.buffers, self.sampling, self.state)

    def differences(self, oracle: DecodeWorld) -> list[str]:
        """The names of the tensors that are not equal."""
        pairs = {name: (values.cpu(), oracle.tensors[name].cpu()) for name, values in self.tensors.items()}
        return [name for name, (mine, theirs) in pairs.items() if not torch.allclose(mine, theirs, rtol=0, atol=0, equal_nan=True)]


def draw(rng: np.random.Generator) -> tuple[dict[str, torch.Tensor], int]:
    """The contents before a step and its number of rows: decodes, last tokens of prefills, rows without a slot, padding."""
    count = int(rng.integers(1, SLOTS + 1))
    idx_mapping = np.full(SLOTS, -1)
    idx_mapping[:count] = rng.permutation(SLOTS)[:count]
    idx_mapping[:count][rng.random(count) < 0.2] = -1
    computed = rng.integers(1, LENGTH, SLOTS)
    logits = rng.standard_normal((SLOTS, VOCAB)).astype(np.float32)
    stop_ids = np.full((SLOTS, MAX_STOP_IDS), -1)
    stop_ids[:, :2] = rng.integers(0, VOCAB, (SLOTS, 2))
    stop_ids[rng.random(SLOTS) < 0.5, 3] = logits[0].argmax()
    logits[rng.random(SLOTS) < 0.3] = logits[0]  # these rows stop, when greedy
    failing = rng.random(SLOTS)
    logits[failing < 0.1, rng.integers(0, VOCAB)] = np.nan
    logits[failing > 0.9] = -np.inf
    numbers = {
        "idx_mapping": idx_mapping,
        "query_start_loc": np.minimum(np.arange(SLOTS + 1), count),
        "num_computed_tokens": computed,
        "prefill_len": np.clip(computed + rng.integers(-3, 4, SLOTS), 1, LENGTH),
        "total_len": np.where(rng.random(SLOTS) < 0.2, LENGTH, computed + 1),
        "all_token_ids": rng.integers(0, VOCAB, (SLOTS, LENGTH)),
        "last_sampled_tokens": rng.integers(0, VOCAB, (SLOTS, 1)),
        "table": rng.integers(1, 1000, (SLOTS, LENGTH // BLOCK_SIZE)),
        "num_blocks": rng.integers(0, LENGTH // BLOCK_SIZE + 1, SLOTS),
        "temperature": np.where(rng.random(SLOTS) < 0.5, 0, rng.random(SLOTS) + 0.1),
        "seed": rng.integers(-(2**63), 2**63 - 1, SLOTS),
        "stop_ids": stop_ids,
        "logits": logits,
        "enabled": rng.random(1) < 0.8,
        "step": rng.integers(-1, 20, 1),
        "history": rng.integers(0, VOCAB, (HISTORY, SLOTS)),
        # What an earlier step left behind
        "input_ids": rng.integers(0, VOCAB, SLOTS),
        "positions": rng.integers(0, LENGTH, SLOTS),
        "seq_lens": rng.integers(0, LENGTH, SLOTS),
        "batch_table": rng.integers(1, 1000, (SLOTS, LENGTH // BLOCK_SIZE)),
        "slot_mapping": rng.integers(0, 1000, SLOTS),
    }
    return {name: torch.from_numpy(np.asarray(values)) for name, values in numbers.items()}, int(rng.integers(count, SLOTS + 1))
