"""A try: several products of a decode layer in one Triton kernel. Importing this file needs Triton.

Four phases: 0 the product of o and the residual, 1 norm, gate and up and silu, 2 down and the residual, 3 norm and qkv of the next layer. A
launch takes the phases FIRST to LAST. Each program has the same share of each phase's columns and holds all of their weights in registers
before it awaits the rows. All programs must be resident at once: as many as fit on the device beside whatever else never ends before them.

Weights are read before the predecessor has ended, so no predecessor may write them: a captured graph of a model that does not change.
With WAIT false (one program, or one phase a launch; Triton's interpreter) nothing is awaited.
"""
# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from bench.persistent_exchange import await_all, read_rows, write_rows
from rung.passes.kernels.product_kernels import _fetch
from rung.passes.kernels.row_kernels import _activate


@triton.constexpr_function
def _block(n, programs):
    """Columns of a program, in its block: a power of two, of at least the four that a warp takes."""
    return max(4, triton.next_power_of_2(triton.cdiv(n, programs)))


@triton.constexpr_function
def _ways(k, block_n, warps):
    """Parts of k that go to warps of their own."""
    return min(max(1, 4 * warps // block_n), triton.next_power_of_2(k) // 64)


@triton.constexpr_function
def _parts(k, ways):
    """k as one power of two, or the sum of two where the steps divide both; the last may reach beyond k."""
    first = triton.next_power_of_2(k + 1) // 2
    rest = k - first
    if rest == 0:
        return first, 0
    if rest % (64 * ways) == 0 and rest & (rest - 1) == 0:
        return first, rest
    return 2 * first, 0


@triton.jit
def _columns(N: tl.constexpr, PROGRAMS: tl.constexpr):
    """This program's columns of N, and which of them exist."""
    SHARE: tl.constexpr = triton.cdiv(N, PROGRAMS)
    local = tl.arange(0, _block(N, PROGRAMS))
    column = tl.program_id(0) * SHARE + local
    return column, (local < SHARE) & (column < N)


@triton.jit
def _rows_of(local, N: tl.constexpr, HALVES: tl.constexpr, PROGRAMS: tl.constexpr):
    """The rows of a weight [HALVES * N, k] that have this program's columns, and which exist. Of two halves (gate and up) the rows of one
    column are neighbours."""
    SHARE: tl.constexpr = triton.cdiv(N, PROGRAMS)
    row = tl.program_id(0) * SHARE + local // HALVES
    return row + local % HALVES * N, (local // HALVES < SHARE) & (row < N)


@triton.jit
def _tile(
    weight, base, N: tl.constexpr, HALVES: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, WAYS: tl.constexpr, PROGRAMS: tl.constexpr
):  # fmt: skip
    """[1, steps, WAYS, rows, 64] of a weight, from column `base` to base + KP. A load of two dimensions lays a line of the cache over eight
    lanes, rows over lanes and warps, ways over warps and steps over registers."""
    BLOCK: tl.constexpr = _block(N, PROGRAMS) * HALVES
    STEPS: tl.constexpr = KP // (64 * WAYS)
    line = tl.arange(0, STEPS * WAYS * BLOCK)
    row, has_row = _rows_of(line % BLOCK, N, HALVES, PROGRAMS)
    at = (base + line // BLOCK * 64)[:, None] + tl.arange(0, 64)[None, :]
    tile = tl.load(weight + row[:, None] * K + at, mask=has_row[:, None] & (at < K), other=0.0)
    return tl.reshape(tile, (1, STEPS, WAYS, BLOCK, 64))


@triton.jit
def _hold(
    weight, norm_weight, N: tl.constexpr, HALVES: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr,
    PROGRAMS: tl.constexpr, WAIT: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """This program's rows of a weight in registers, in one or two tiles, and the norm's weight beside each."""
    WAYS: tl.constexpr = _ways(K, _block(N, PROGRAMS) * HALVES, WARPS)
    PARTS: tl.constexpr = _parts(K, WAYS)
    tile = _tile(weight, 0, N, HALVES, K, PARTS[0], WAYS, PROGRAMS)
    scale = read_rows(norm_weight, norm_weight, 0, 0, K, PARTS[0], 1, False, WAIT, 0, WARPS) if NORM else tile
    rest, scale_rest = tile, tile
    if PARTS[1]:
        rest = _tile(weight, PARTS[0], N, HALVES, K, PARTS[1], WAYS, PROGRAMS)
        if NORM:
            scale_rest = read_rows(norm_weight, norm_weight, 0, PARTS[0], K, PARTS[1], 1, False, WAIT, 0, WARPS)
    return tile, rest, scale, scale_rest


@triton.jit
def _multiply(tile, scale, values, NORM: tl.constexpr, ROWS: tl.constexpr):
    """The product of a tile and values [ROWS, k of the tile], not yet summed over ways and lanes: [ROWS, ways, rows of the weight, 64]."""
    if NORM:  # rounded here, where a thread has few values, and on their way to the threads that multiply they take half the room
        values = (values.to(tl.float32) * scale.to(tl.float32)).to(values.dtype)
    spread = tl.reshape(values, (ROWS, tile.shape[1], tile.shape[2], 1, 64)).to(tl.float32)
    return tl.sum(tile.to(tl.float32) * spread, axis=1)


@triton.jit
def _squares(values, ROWS: tl.constexpr):
    """The sum of the squares of each of values [ROWS, k]. In a loop that runs once: without it all values are moved to the threads that
    need the sum."""
    total = tl.zeros((ROWS,), tl.float32)
    left = tl.program_id(0) + 1
    while left > 0:
        total = tl.sum(values.to(tl.float32) * values.to(tl.float32), axis=1)
        left = 0
    return total


@triton.jit
def _product(
    x, words, number, held, epsilon, K: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
    WORDS: tl.constexpr, WAIT: tl.constexpr, PAUSE: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The rows, awaited where they come as words, times the held weights, rounded: float32 [ROWS, rows of the weight].

    The norm needs no pass of its own: x * norm_weight goes into the product, and 1 / rms scales the sum."""
    tile, rest, scale, scale_rest = held
    PARTS: tl.constexpr = _parts(K, tile.shape[2])
    values = read_rows(x, words, number, 0, K, PARTS[0], ROWS, WORDS, WAIT, PAUSE, WARPS)
    if PARTS[1]:
        more = read_rows(x, words, number, PARTS[0], K, PARTS[1], ROWS, WORDS, WAIT, PAUSE, WARPS)
        total = _multiply(rest, scale_rest, more, NORM, ROWS) + _multiply(tile, scale, values, NORM, ROWS)
    else:
        total = _multiply(tile, scale, values, NORM, ROWS)
    product = tl.sum(tl.sum(total, axis=3), axis=1)
    if NORM:
        squares = _squares(values, ROWS)
        if PARTS[1]:
            squares += _squares(more, ROWS)
        product *= tl.rsqrt(squares / K + epsilon)[:, None]
    return product.to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def layer_kernel(
    attended, residual, hidden, activated, out, qkv, o_weight, norm_weight, gate_up_weight, down_weight, next_norm_weight, qkv_weight,
    words, state, epsilon,
    ROWS: tl.constexpr, HIDDEN: tl.constexpr, QUERY: tl.constexpr, INNER: tl.constexpr, QKV: tl.constexpr, PROGRAMS: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, WORDS: tl.constexpr, AHEAD: tl.constexpr, WAIT: tl.constexpr, PAUSE: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """hidden = residual + attended @ o.T; activated = silu(gate) * up of the normed hidden; out = hidden + activated @ down.T; qkv of the
    normed out. Rows and weights contiguous, ROWS a power of two.

    Rows that stay within the launch go by `words` int64 [pairs of rows, 2 * HIDDEN + INNER] with WORDS, else through their tensors. `state`
    is int32 [PROGRAMS]; both are zero at first, and launches that share them run one after another. The weights of phase p are loaded
    before the rows of phase p - AHEAD are awaited, those of later phases sent to the L2 cache at once. Grid: (PROGRAMS)."""
    column, has_column = _columns(HIDDEN, PROGRAMS)
    inner, has_inner = _columns(INNER, PROGRAMS)
    joined, has_joined = _columns(QKV, PROGRAMS)
    activated_words = words + (ROWS + 1) // 2 * HIDDEN
    out_words = activated_words + (ROWS + 1) // 2 * INNER
    own = tl.arange(0, ROWS)[:, None] * HIDDEN + column[None, :]
    MLP: tl.constexpr = FIRST <= 1 and LAST >= 1
    DOWN: tl.constexpr = FIRST <= 2 and LAST >= 2
    AT_1: tl.constexpr = max(FIRST, 1 - AHEAD)  # the phase before which the weights of phase 1 are loaded
    AT_2: tl.constexpr = max(FIRST, 2 - AHEAD)
    AT_3: tl.constexpr = max(FIRST, 3 - AHEAD)

    if WAIT:
        tl.extra.cuda.gdc_launch_dependents()
    if FIRST == 0:
        held_o = _hold(o_weight, o_weight, HIDDEN, 1, QUERY, False, PROGRAMS, WAIT, WARPS)
    if MLP and AT_1 == FIRST:
        held_gate_up = _hold(gate_up_weight, norm_weight, INNER, 2, HIDDEN, True, PROGRAMS, WAIT, WARPS)
    if DOWN and AT_2 == FIRST:
        held_down = _hold(down_weight, down_weight, HIDDEN, 1, INNER, False, PROGRAMS, WAIT, WARPS)
    if LAST == 3 and AT_3 == FIRST:
        held_qkv = _hold(qkv_weight, next_norm_weight, QKV, 1, HIDDEN, True, PROGRAMS, WAIT, WARPS)
    if WAIT:
        if MLP and AT_1 > FIRST:
            gate_up, _ = _rows_of(tl.arange(0, 2 * _block(INNER, PROGRAMS)), INNER, 2, PROGRAMS)
            _fetch(gate_up_weight, gate_up, 2 * INNER, HIDDEN, HIDDEN, 0, triton.next_power_of_2(HIDDEN))
        if DOWN and AT_2 > FIRST:
            _fetch(down_weight, column, HIDDEN, INNER, INNER, 0, triton.next_power_of_2(INNER))
        if LAST == 3 and AT_3 > FIRST:
            _fetch(qkv_weight, joined, QKV, HIDDEN, HIDDEN, 0, triton.next_power_of_2(HIDDEN))
        tl.extra.cuda.gdc_wait()
    number = tl.zeros((), tl.int32)
    if WORDS:
        number = tl.load(state + tl.program_id(0), volatile=True) + 1

    if FIRST == 0:
        added = tl.load(residual + own, mask=has_column[None, :], other=0.0, cache_modifier=".cg").to(tl.float32)
        added += _product(attended, words, number, held_o, epsilon, QUERY, False, ROWS, False, WAIT, PAUSE, WARPS)
        added = added.to(hidden.dtype.element_ty).to(tl.float32)
        write_rows(added, hidden, words, number, column, has_column, HIDDEN, ROWS, LAST == 0 or not WORDS, WORDS and LAST > 0, WAIT)
    elif DOWN:
        added = tl.load(hidden + own, mask=has_column[None, :], other=0.0, cache_modifier=".cg").to(tl.float32)

    if MLP:
        if AT_1 == 1 and FIRST < 1:
            held_gate_up = _hold(gate_up_weight, norm_weight, INNER, 2, HIDDEN, True, PROGRAMS, WAIT, WARPS)
        if DOWN and AT_2 == 1 and FIRST < 1:
            held_down = _hold(down_weight, down_weight, HIDDEN, 1, INNER, False, PROGRAMS, WAIT, WARPS)
        if FIRST < 1 and WAIT and not WORDS:
            await_all(state, PROGRAMS)
        product = _product(hidden, words, number, held_gate_up, epsilon, HIDDEN, True, ROWS, WORDS and FIRST < 1, WAIT, PAUSE, WARPS)
        pairs = tl.reshape(product, (ROWS, inner.shape[0], 2))
        is_gate = tl.arange(0, 2)[None, None, :] == 0
        gate = tl.sum(tl.where(is_gate, pairs, 0.0), axis=2)  # tl.split would move them to other threads first
        up = tl.sum(tl.where(is_gate, 0.0, pairs), axis=2)
        values = _activate(gate, up, "silu")
        write_rows(
            values, activated, activated_words, number, inner, has_inner, INNER, ROWS, LAST == 1 or not WORDS, WORDS and LAST > 1, WAIT
        )

    if DOWN:
        if AT_2 == 2 and FIRST < 2:
            held_down = _hold(down_weight, down_weight, HIDDEN, 1, INNER, False, PROGRAMS, WAIT, WARPS)
        if LAST == 3 and AT_3 == 2 and FIRST < 2:
            held_qkv = _hold(qkv_weight, next_norm_weight, QKV, 1, HIDDEN, True, PROGRAMS, WAIT, WARPS)
        if FIRST < 2 and WAIT and not WORDS:
            await_all(state, PROGRAMS)
        added += _product(
            activated, activated_words, number, held_down, epsilon, INNER, False, ROWS, WORDS and FIRST < 2, WAIT, PAUSE, WARPS
        )
        write_rows(added, out, out_words, number, column, has_column, HIDDEN, ROWS, True, WORDS and LAST > 2, WAIT)

    if LAST == 3:
        if AT_3 == 3 and FIRST < 3:
            held_qkv = _hold(qkv_weight, next_norm_weight, QKV, 1, HIDDEN, True, PROGRAMS, WAIT, WARPS)
        if FIRST < 3 and WAIT and not WORDS:
            await_all(state, PROGRAMS)
        product = _product(out, out_words, number, held_qkv, epsilon, HIDDEN, True, ROWS, WORDS and FIRST < 3, WAIT, PAUSE, WARPS)
        write_rows(product, qkv, words, number, joined, has_joined, QKV, ROWS, True, False, WAIT)
    if WORDS:
        tl.store(state + tl.program_id(0), number)
