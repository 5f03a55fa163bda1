"""
The choice of the next token in Triton: `decoding.choose` for logits in bfloat16, without sorting.

The 65,536 values of bfloat16 are in the order of 16-bit integers (`ordered`). So the top_k-th
largest logit of a row is found by counting twice, first by the upper eight bits of all, then by
the lower eight of those whose upper ones are its own. Then every chunk of a row adds up the
probabilities of what is not below it, and one program a row finds the token that a random number
means, in the order of ids.

Dimensions: B rows, V ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK, WARPS = 4096, 8  # ids of a program
BINS = 256


@triton.jit
def ordered(x):
    """An integer in 0..65535 that grows with the bfloat16 x."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True) >> 16
    return tl.where(bits < 0, bits ^ 0x7FFF, bits) + 32768


@triton.jit
def value(key):
    """The float32 that `ordered` made the key of."""
    bits = key - 32768
    bits = tl.where(bits < 0, bits ^ 0x7FFF, bits) << 16
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def chunk(logits, stride, c, V, CHUNK: tl.constexpr):
    """Ids of chunk c of this program's row, which of them exist, and the keys of their logits."""
    j = c * CHUNK + tl.arange(0, CHUNK)
    row = logits + tl.program_id(0).to(tl.int64) * stride
    return j, j < V, ordered(tl.load(row + j, j < V, 0.0))


@triton.jit
def cut(counts, k, BINS: tl.constexpr):
    """The bin in which the k-th largest lies, and what is left of k within it."""
    n = tl.load(counts + BINS - 1 - tl.arange(0, BINS))
    above = tl.cumsum(n, 0) < k
    return BINS - 1 - tl.sum(above.to(tl.int32), 0), k - tl.sum(tl.where(above, n, 0), 0)


@triton.jit
def count_kernel(logits, stride, counts, top, V, top_k, ROUND: tl.constexpr, BINS: tl.constexpr,
                 CHUNK: tl.constexpr):
    """Round 0: all by their upper bits, and the largest key of the row; 1: by the lower ones."""
    b = tl.program_id(0)
    counts += b * 2 * BINS
    _, exists, key = chunk(logits, stride, tl.program_id(1), V, CHUNK)
    if ROUND == 0:
        tl.atomic_max(top + b, tl.max(tl.where(exists, key, 0), 0))
        n = tl.histogram(key >> 8, BINS, mask=exists)
    else:
        upper, _ = cut(counts, top_k, BINS)
        n = tl.histogram(key & 255, BINS, mask=exists & (key >> 8 == upper))
    tl.atomic_add(counts + ROUND * BINS + tl.arange(0, BINS), n, n > 0)


@triton.jit
def least_key(counts, top, top_k, GREEDY: tl.constexpr, TOP_K: tl.constexpr, BINS: tl.constexpr):
    """What is below this key is never chosen."""
    if GREEDY:
        return top
    elif TOP_K:
        upper, rest = cut(counts, top_k, BINS)
        lower, _ = cut(counts + BINS, rest, BINS)
        return upper * 256 + lower
    else:
        return tl.full((), 0, tl.int32)


@triton.jit
def mass_kernel(logits, stride, counts, top, mass, V, temperature, top_k, GREEDY: tl.constexpr,
                TOP_K: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """The probability of a chunk's ids, but for a factor of the row."""
    b, c = tl.program_id(0), tl.program_id(1)
    highest = tl.load(top + b)
    least = least_key(counts + b * 2 * BINS, highest, top_k, GREEDY, TOP_K, BINS)
    _, exists, key = chunk(logits, stride, c, V, CHUNK)
    p = tl.exp((value(key) - value(highest)) / temperature)
    p = tl.where(exists & (key >= least), p, 0.0)
    tl.store(mass + b * tl.num_programs(1) + c, tl.sum(p, 0))


@triton.jit
def draw_kernel(logits, stride, counts, top, mass, u, count, ids, B, V, n_chunks, temperature,
                top_k, GREEDY: tl.constexpr, TOP_K: tl.constexpr, BINS: tl.constexpr,
                CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """A row's id by its number u, with GREEDY the first of the likeliest; -1 where a logit is not
    finite (or as large as only two of the numbers' exponents are)."""
    b, i = tl.program_id(0), tl.arange(0, CHUNKS)
    counts += b * 2 * BINS
    highest = tl.load(top + b)
    least = least_key(counts, highest, top_k, GREEDY, TOP_K, BINS)
    m = tl.load(mass + b * n_chunks + i, i < n_chunks, 0.0)
    total = tl.cumsum(m, 0)
    target = tl.full((), 0.0, tl.float32)
    if not GREEDY:
        target = tl.load(u + tl.load(count) * B + b) * tl.max(total, 0)
    # sums in another order may differ in the last digit: never beyond the last that may be chosen
    c = tl.sum(((total <= target) & (i < n_chunks)).to(tl.int32), 0)
    c = tl.minimum(c, tl.max(tl.where(m > 0, i, 0), 0))
    before = tl.sum(tl.where(i < c, m, 0.0), 0)
    j, exists, key = chunk(logits, stride, c, V, CHUNK)
    kept = exists & (key >= least)
    p = tl.where(kept, tl.exp((value(key) - value(highest)) / temperature), 0.0)
    passed = (before + tl.cumsum(p, 0) <= target) & exists
    chosen = c * CHUNK + tl.sum(passed.to(tl.int32), 0)
    chosen = tl.minimum(chosen, tl.max(tl.where(kept, j, 0), 0))
    bad = tl.load(counts) + tl.load(counts + BINS - 1)
    tl.store(ids + b, tl.where(bad > 0, -1, chosen))


def choose(logits: Tensor, u: Tensor, count: Tensor, temperature: float,
           top_k: int | None = None) -> Tensor:
    """`decoding.choose` of bfloat16 logits (B, V), by row `count` (1,) of the numbers u (n, B)."""
    (B, V), greedy = logits.shape, temperature < 1e-6
    if greedy:
        temperature, top_k = 1.0, None
    k, n_chunks = min(top_k or V, V), triton.cdiv(V, CHUNK)
    # after one another, so that one fill makes all zero: counts of both rounds; largest keys
    zeros = torch.zeros(B * (2 * BINS + 1), dtype=torch.int32, device=logits.device)
    counts, top = zeros, zeros[B * 2 * BINS:]
    mass = torch.empty(B, n_chunks, device=logits.device)
    ids = torch.empty(B, dtype=torch.long, device=logits.device)
    row, options = (logits, logits.stride(0), counts, top), dict(CHUNK=CHUNK, num_warps=WARPS)
    for i in range(2 if top_k else 1):
        count_kernel[B, n_chunks](*row, V, k, ROUND=i, BINS=BINS, **options)
    options |= dict(GREEDY=greedy, TOP_K=bool(top_k), BINS=BINS)
    mass_kernel[B, n_chunks](*row, mass, V, temperature, k, **options)
    draw_kernel[B,](*row, mass, u, count, ids, B, V, n_chunks, temperature, k,
                    CHUNKS=triton.next_power_of_2(n_chunks), **options)
    return ids
