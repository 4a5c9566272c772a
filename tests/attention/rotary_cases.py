"""Projections to rotate and write, and what must come of them, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rung.attention import AttentionBackend, KVCache, Rotation

NAN = float("nan")
EPSILON = 1e-5
_BLOCKS, _BLOCK_SIZE = 5, 16


@dataclass(frozen=True, kw_only=True)
class Heads:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    rotary: int = 64  # elements of a head that are rotated
    offset: float | None = None  # of the norms' weights; None: no norms

    def __str__(self) -> str:
        norms = "" if self.offset is None else f" norms+{self.offset:g}"
        return f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_size}, {self.rotary} rotated{norms}"


HEADS = [
    Heads(),
    Heads(num_heads=9, num_kv_heads=3),  # no powers of two
    Heads(num_heads=1, num_kv_heads=1, head_size=128, rotary=128),
    Heads(head_size=80, rotary=80),
    Heads(head_size=96, rotary=32),  # a part of the head, and a rest that is no power of two
    Heads(num_heads=32, num_kv_heads=8, head_size=128, rotary=128, offset=0.0),
    Heads(num_heads=4, num_kv_heads=1, head_size=256, rotary=256, offset=1.0),
    Heads(head_size=80, rotary=40, offset=1.0),
]
SLOTS = {"padded": [0, 17, 33, 50, 79, -1, -1, -1], "hole": [3, -1, 64], "one": [5], "nobody": [-1, -1], "empty": []}


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Query, key and value are views of one projection, as in a model; padded rows hold NaN, and so does the cache."""

    query: torch.Tensor  # [num_tokens, num_heads, head_size]
    key: torch.Tensor  # [num_tokens, num_kv_heads, head_size]
    value: torch.Tensor
    rotation: Rotation
    slots: torch.Tensor  # int64 [num_tokens]
    rotated: torch.Tensor  # NaN before
    cache: KVCache

    def run(self, backend: AttentionBackend) -> None:
        backend.rotate_and_write(self.query, self.key, self.value, self.rotation, self.rotated, self.cache, self.slots)


def project(heads: Heads, slots: list[int], *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Projection:
    generator = torch.Generator().manual_seed(len(slots))
    count, size, half = len(slots), heads.head_size, heads.rotary // 2
    widths = [heads.num_heads * size, heads.num_kv_heads * size, heads.num_kv_heads * size]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    both = draw(count, sum(widths))
    angles = draw(count, half)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    for tensor in (both, table):
        tensor[torch.tensor(slots, dtype=torch.int64) < 0] = NAN
    query, key, value = both.to(dtype).to(device).split(widths, dim=-1)
    cos, sin = table.to(dtype).to(device).unsqueeze(1).chunk(2, dim=-1)
    weights = [None if heads.offset is None else (draw(size) / 4 + 1 - heads.offset).to(dtype).to(device) for _ in range(2)]
    store = torch.full((2, _BLOCKS, _BLOCK_SIZE, heads.num_kv_heads, size), NAN, dtype=dtype, device=device)
    return Projection(
        query=query.unflatten(-1, (heads.num_heads, size)),
        key=key.unflatten(-1, (heads.num_kv_heads, size)),
        value=value.unflatten(-1, (heads.num_kv_heads, size)),
        rotation=Rotation(cos=cos, sin=sin, query_weight=weights[0], key_weight=weights[1], epsilon=EPSILON, offset=heads.offset or 0.0),
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
        rotated=torch.full((count, heads.num_heads, size), NAN, dtype=dtype, device=device),
        cache=KVCache(store[0], store[1]),
    )


def _turned(x: torch.Tensor, weight: torch.Tensor | None, rotation: Rotation) -> torch.Tensor:
    """Every pair as a complex number, in float64."""
    wide = x.double()
    if weight is not None:
        wide = wide / (wide.square().mean(-1, keepdim=True) + rotation.epsilon).sqrt() * (weight.double() + rotation.offset)
    half = rotation.cos.shape[-1]
    pairs = torch.complex(wide[..., :half], wide[..., half : 2 * half]) * torch.complex(rotation.cos.double(), rotation.sin.double())
    return torch.cat((pairs.real, pairs.imag, wide[..., 2 * half :]), dim=-1)


def check(projection: Projection, tolerance: float) -> None:
    """After a run: rows with a slot within `tolerance` of float64, values bit for bit, all other rows zero, all other slots untouched."""
    real = projection.slots >= 0
    slots, rotation = projection.slots[real], projection.rotation
    turned = _turned(projection.query, rotation.query_weight, rotation)[real]
    torch.testing.assert_close(projection.rotated[real].double(), turned, rtol=tolerance, atol=tolerance)
    assert bool((projection.rotated[~real] == 0).all())
    keys, values = projection.cache.key.flatten(0, 1), projection.cache.value.flatten(0, 1)
    wanted = _turned(projection.key, rotation.key_weight, rotation)[real]
    torch.testing.assert_close(keys[slots].double(), wanted, rtol=tolerance, atol=tolerance)
    assert torch.equal(values[slots], projection.value[real])
    others = torch.ones(keys.shape[0], dtype=torch.bool, device=keys.device)
    others[slots] = False
    assert bool(keys[others].isnan().all())
    assert bool(values[others].isnan().all())
