"""
The choice of the next token in Triton: `decoding.choose` for logits in bfloat16, without sorting.

The 65,536 values of bfloat16 are in the order of 16-bit integers (`ordered`), their keys. A row's
logits are shared by many programs, a chunk each:

    best        the largest of a chunk and of each of its groups of ids
    limit       the top_k-th largest of the groups' largest: at least top_k logits are no smaller
    count       of those, twice: by the upper eight bits of their keys, and by the lower eight where
                the upper ones are the top_k-th largest's own; that then is known
    mass        a chunk's probability, of what is not below it
    draw        the token that a random number means, in the order of ids

Greedy, `best` and `draw` are enough; without top_k, `mass` also.

Dimensions: B rows, V ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK, WARPS = 2048, 4  # ids of a program
GROUP = 32  # ids of which `limit` knows the largest
BINS = 256
BAD = tl.constexpr(1 << 62)  # in place of a largest key: a logit is not finite


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
def best_kernel(logits, stride, top, largest, V, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """top (B,): the row's largest key in the upper half, and in the lower one 2^31 - 1 minus the
    first id that has it; largest (B, chunks * CHUNK / GROUP): of each group. Where one is not
    finite (or as large as only two of the numbers' exponents are), top is BAD."""
    b, c = tl.program_id(0), tl.program_id(1)
    groups: tl.constexpr = CHUNK // GROUP
    j, exists, key = chunk(logits, stride, c, V, CHUNK)
    bad = tl.max((exists & ((key >> 8 == 0) | (key >> 8 == 255))).to(tl.int32), 0)
    key = tl.where(exists, key, 0)
    best = tl.max(key, 0)
    first = tl.min(tl.where(key == best, j, 2147483647), 0)
    packed = (best.to(tl.int64) << 32) + 2147483647 - first
    tl.atomic_max(top + b, tl.where(bad > 0, BAD, packed))
    at = (b * tl.num_programs(1) + c) * groups + tl.arange(0, groups)
    tl.store(largest + at, tl.max(tl.reshape(key, (groups, GROUP)), 1))


@triton.jit
def limit_kernel(largest, limit, n, top_k, BLOCK: tl.constexpr):
    """limit (B,): the top_k-th of n keys of the row, bit by bit, 0 if there are not so many."""
    i = tl.arange(0, BLOCK)
    key = tl.load(largest + tl.program_id(0) * n + i, i < n, 0)
    found = tl.full((), 0, tl.int32)
    for bit in tl.static_range(16):
        trial = found | (32768 >> bit)
        found = tl.where(tl.sum((key >= trial).to(tl.int32), 0) >= top_k, trial, found)
    tl.store(limit + tl.program_id(0), found)


@triton.jit
def cut(counts, k, BINS: tl.constexpr):
    """The bin in which the k-th largest lies, and what is left of k within it."""
    n = tl.load(counts + BINS - 1 - tl.arange(0, BINS))
    above = tl.cumsum(n, 0) < k
    return BINS - 1 - tl.sum(above.to(tl.int32), 0), k - tl.sum(tl.where(above, n, 0), 0)


@triton.jit
def count_kernel(logits, stride, counts, limit, V, top_k, ROUND: tl.constexpr, BINS: tl.constexpr,
                 CHUNK: tl.constexpr):
    """Of keys from the limit on, round 0: by their upper bits; 1: by the lower ones. These are few
    unless many are equal: each is an addition in memory."""
    b = tl.program_id(0)
    counts += b * 2 * BINS
    _, exists, key = chunk(logits, stride, tl.program_id(1), V, CHUNK)
    counted, bin = exists & (key >= tl.load(limit + b)), key >> 8
    if ROUND == 1:
        upper, _ = cut(counts, top_k, BINS)
        counted, bin = counted & (bin == upper), BINS + (key & 255)
    tl.atomic_add(counts + bin, 1, counted, sem="relaxed")


@triton.jit
def least_key(counts, top_k, TOP_K: tl.constexpr, BINS: tl.constexpr):
    """What is below this key is never chosen."""
    least = tl.full((), 0, tl.int32)
    if TOP_K:
        upper, rest = cut(counts, top_k, BINS)
        lower, _ = cut(counts + BINS, rest, BINS)
        least = upper * 256 + lower
    return least


@triton.jit
def weight(key, top, temperature):
    """The probability of a key, but for a factor of the row."""
    return tl.exp((value(key) - value((top >> 32).to(tl.int32) & 65535)) / temperature)


@triton.jit
def mass_kernel(logits, stride, counts, top, mass, V, temperature, top_k, TOP_K: tl.constexpr,
                BINS: tl.constexpr, CHUNK: tl.constexpr):
    b, c = tl.program_id(0), tl.program_id(1)
    least = least_key(counts + b * 2 * BINS, top_k, TOP_K, BINS)
    _, exists, key = chunk(logits, stride, c, V, CHUNK)
    p = tl.where(exists & (key >= least), weight(key, tl.load(top + b), temperature), 0.0)
    tl.store(mass + b * tl.num_programs(1) + c, tl.sum(p, 0))


@triton.jit
def draw_kernel(logits, stride, counts, top, mass, u, count, ids, B, V, n_chunks, temperature,
                top_k, GREEDY: tl.constexpr, TOP_K: tl.constexpr, BINS: tl.constexpr,
                CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """A row's id by its number u, with GREEDY the first of the likeliest; -1 if top is BAD."""
    b, i = tl.program_id(0), tl.arange(0, CHUNKS)
    best = tl.load(top + b)
    chosen = 2147483647 - (best & 2147483647).to(tl.int32)
    if not GREEDY:
        m = tl.load(mass + b * n_chunks + i, i < n_chunks, 0.0)
        total = tl.cumsum(m, 0)
        target = tl.load(u + tl.load(count) * B + b) * tl.max(total, 0)
        # sums in another order may differ in the last digit: never beyond the last possible one
        c = tl.sum(((total <= target) & (i < n_chunks)).to(tl.int32), 0)
        c = tl.minimum(c, tl.max(tl.where(m > 0, i, 0), 0))
        before = tl.sum(tl.where(i < c, m, 0.0), 0)
        j, exists, key = chunk(logits, stride, c, V, CHUNK)
        kept = exists & (key >= least_key(counts + b * 2 * BINS, top_k, TOP_K, BINS))
        p = tl.where(kept, weight(key, best, temperature), 0.0)
        passed = (before + tl.cumsum(p, 0) <= target) & exists
        chosen = c * CHUNK + tl.sum(passed.to(tl.int32), 0)
        chosen = tl.minimum(chosen, tl.max(tl.where(kept, j, 0), 0))
    tl.store(ids + b, tl.where(best == BAD, -1, chosen))


def choose(logits: Tensor, u: Tensor, count: Tensor, temperature: float,
           top_k: int | None = None) -> Tensor:
    """`decoding.choose` of bfloat16 logits (B, V), by row `count` (1,) of the numbers u (n, B)."""
    (B, V), greedy, device = logits.shape, temperature < 1e-6, logits.device
    if greedy:
        temperature, top_k = 1.0, None
    k, n_chunks = min(top_k or V, V), triton.cdiv(V, CHUNK)
    # one fill makes all zero: a row's largest key, and its counts of both rounds
    zeros = torch.zeros(B * (1 + BINS), dtype=torch.long, device=device)
    top, counts = zeros, zeros[B:].view(torch.int32)
    n_groups = n_chunks * CHUNK // GROUP
    largest = torch.empty(B, n_groups, dtype=torch.int32, device=device)
    mass = torch.empty(B, n_chunks, device=device)
    ids = torch.empty(B, dtype=torch.long, device=device)
    row, options = (logits, logits.stride(0)), dict(CHUNK=CHUNK, num_warps=WARPS)
    best_kernel[B, n_chunks](*row, top, largest, V, GROUP=GROUP, **options)
    options.update(BINS=BINS)
    if top_k:
        limit = torch.empty(B, dtype=torch.int32, device=device)
        limit_kernel[B,](largest, limit, n_groups, k, BLOCK=triton.next_power_of_2(n_groups),
                         num_warps=WARPS)
        for i in range(2):
            count_kernel[B, n_chunks](*row, counts, limit, V, k, ROUND=i, **options)
    options.update(TOP_K=bool(top_k))
    if not greedy:
        mass_kernel[B, n_chunks](*row, counts, top, mass, V, temperature, k, **options)
    draw_kernel[B,](*row, counts, top, mass, u, count, ids, B, V, n_chunks, temperature, k,
                    GREEDY=greedy, CHUNKS=triton.next_power_of_2(n_chunks), **options)
    return ids
