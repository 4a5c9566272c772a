"""How programs of one launch hand rows to each other, for `persistent_kernels.py`. Importing this file needs Triton.

"counter": rows are stored, then all programs await a counter in memory, whose sign flips with the last arrival, so it needs no reset.
"words": a word of 8 bytes has the values of two rows in one column and the number of the launch; who needs it reads it until the number is
right, and awaits nothing else. A wait that does not end traps.

Assembly stands where Triton's own loads and atomics would choose the layout of what is computed from them.
"""
# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

SPINS = 1 << 17  # some 50 ms

_AWAIT_ALL = tl.constexpr(f"""{{
    .reg .pred first, waiting, more; .reg .b32 thread, before, now, spins;
    barrier.sync 0;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @!first bra arrived;
    atom.add.release.gpu.global.u32 before, [$1], $2;
    mov.u32 spins, 0;
again:
    ld.acquire.gpu.global.u32 now, [$1];
    xor.b32 now, now, before;
    setp.ge.s32 waiting, now, 0;
    @!waiting bra arrived;
    add.u32 spins, spins, 1;
    setp.lt.u32 more, spins, {SPINS};
    @more bra again;
    trap;
arrived:
    barrier.sync 0;
    mov.u32 $0, 0;
}}""")
_PUT = tl.constexpr("{ .reg .pred there; setp.ne.b32 there, $3, 0; @there st.relaxed.gpu.global.b64 [$1], $2; mov.b32 $0, 0; }")
_PUT_16 = tl.constexpr("{ .reg .pred there; setp.ne.b32 there, $3, 0; @there st.global.b16 [$1], $2; mov.b32 $0, 0; }")


@triton.constexpr_function
def _looking(words, pause):
    """Assembly that reads so many words until the upper half of each is the number that is wanted, and sleeps for `pause` ns between looks;
    the lower halves are the results."""
    each = range(words)
    lines = [
        f".reg .pred there, more; .reg .b32 spins, {', '.join(f'number{i}' for i in each)};",
        f".reg .b64 {', '.join(f'word{i}' for i in each)};",
        "mov.u32 spins, 0;",
        "again:",
        *(f"ld.relaxed.gpu.global.b64 word{i}, [${words + i}];" for i in each),
        *(f"mov.b64 {{${i}, number{i}}}, word{i};" for i in each),
        f"setp.eq.u32 there, number0, ${2 * words};",
        *(f"setp.eq.and.u32 there, number{i}, ${2 * words + i}, there;" for i in each if i),
        "@there bra read;",
        "add.u32 spins, spins, 1;",
        f"setp.lt.u32 more, spins, {SPINS};",
        *([f"nanosleep.u32 {pause};"] if pause else []),
        "@more bra again;",
        "trap;",
        "read:",
    ]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def _loading(values):
    """Assembly that reads so many values of 16 bits past the L1 cache."""
    each = range(values)
    lines = [
        f".reg .b16 {', '.join(f'value{i}' for i in each)};",
        *(f"ld.relaxed.gpu.global.b16 value{i}, [${values + i}];" for i in each),
        *(f"cvt.u32.u16 ${i}, value{i};" for i in each),
    ]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def _operands(results, numbered):
    return ",".join(["=&r"] * results + ["l"] * results + (["r"] * results if numbered else []))


@triton.constexpr_function
def _at_once(elements, warps):
    """How many addresses a thread reads before it looks at the first."""
    return max(1, min(4, elements // (32 * warps)))


@triton.jit
def _once(lines, number, NUMBERED: tl.constexpr, AT_ONCE: tl.constexpr, PAUSE: tl.constexpr):
    """What lies at the addresses `lines`, int32. In a loop that runs once: beyond its end a value is moved to other threads, where Triton
    would have each of them read it again."""
    data = tl.zeros(lines.shape, tl.int32)
    left = tl.program_id(0) + 1
    while left > 0:
        if NUMBERED:
            data = tl.inline_asm_elementwise(
                _looking(AT_ONCE, PAUSE), _operands(AT_ONCE, True), [lines.to(tl.int64), number],
                dtype=tl.int32, is_pure=False, pack=AT_ONCE,
            )  # fmt: skip
        else:
            data = tl.inline_asm_elementwise(
                _loading(AT_ONCE), _operands(AT_ONCE, False), [lines.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=AT_ONCE
            )
        left = 0
    return data


@triton.jit
def read_rows(
    x, words, number, base, K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr,
    WORDS: tl.constexpr, WAIT: tl.constexpr, PAUSE: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Elements base to base + KP of the rows, [ROWS, KP], 0 beyond K; from x [ROWS, K], or awaited from words [pairs of rows, K]."""
    at = base + tl.arange(0, KP)[None, :]
    inside = tl.minimum(at, K - 1)
    if WORDS:
        PAIRS: tl.constexpr = (ROWS + 1) // 2
        lines = words + tl.arange(0, PAIRS)[:, None] * K + inside
        data = _once(lines, number, True, _at_once(PAIRS * KP, WARPS), PAUSE) if WAIT else (tl.load(lines) & 0xFFFFFFFF).to(tl.int32)
        values = (data & 0xFFFF).to(tl.int16).to(x.dtype.element_ty, bitcast=True)
        if ROWS > 1:
            high = ((data >> 16) & 0xFFFF).to(tl.int16).to(x.dtype.element_ty, bitcast=True)
            values = tl.reshape(tl.permute(tl.join(values, high), (0, 2, 1)), (ROWS, KP))
    else:
        lines = x + tl.arange(0, ROWS)[:, None] * K + inside
        if WAIT:
            values = _once(lines, number, False, _at_once(ROWS * KP, WARPS), 0).to(tl.int16).to(x.dtype.element_ty, bitcast=True)
        else:
            values = tl.load(lines)
    return tl.where(at < K, values, 0.0)


@triton.jit
def _put(values, lines, has_column, ASSEMBLY: tl.constexpr, OPERANDS: tl.constexpr, WAIT: tl.constexpr):
    """Store values [lines, columns]; all threads that have one do, which costs less than moving them to fewer."""
    if WAIT:
        there = tl.broadcast_to(has_column[None, :], lines.shape).to(tl.int32)
        tl.inline_asm_elementwise(ASSEMBLY, OPERANDS, [lines.to(tl.int64), values, there], dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.store(lines, values, mask=has_column[None, :])


@triton.jit
def write_rows(
    values, out, words, number, column, has_column, N: tl.constexpr, ROWS: tl.constexpr,
    PLAIN: tl.constexpr, WORDS: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Values [ROWS, columns] to words [pairs of rows, N], for who awaits them, and to out [ROWS, N]."""
    values = values.to(out.dtype.element_ty)
    lines = out + tl.arange(0, ROWS)[:, None] * N + column[None, :]
    if WORDS:
        PAIRS: tl.constexpr = (ROWS + 1) // 2
        data = values.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        if ROWS > 1:
            low, high = tl.split(tl.permute(tl.reshape(data, (PAIRS, 2, data.shape[1])), (0, 2, 1)))
            data = low | (high << 16)
        word = (number.to(tl.int64) << 32) | (data.to(tl.int64) & 0xFFFFFFFF)
        _put(word, words + tl.arange(0, PAIRS)[:, None] * N + column[None, :], has_column, _PUT, "=r,l,l,r", WAIT)
    if PLAIN:
        if WAIT:
            _put(values.to(tl.int16, bitcast=True), lines, has_column, _PUT_16, "=r,l,h,r", WAIT)
        else:
            _put(values, lines, has_column, _PUT_16, "", WAIT)


@triton.jit
def await_all(state, PROGRAMS: tl.constexpr):
    """Every program's stores before it are seen behind it. All arrivals together add 2 ** 31."""
    arrival = tl.where(tl.program_id(0) == 0, 2147483647 - (PROGRAMS - 2), 1)
    tl.inline_asm_elementwise(_AWAIT_ALL, "=r,l,r", [state.to(tl.int64), arrival], dtype=tl.int32, is_pure=False, pack=1)
