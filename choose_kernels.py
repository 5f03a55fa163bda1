"""
The choice of the next token in Triton: `decoding.choose` for logits in bfloat16, without sorting.

The 65,536 values of bfloat16 are in the order of 16-bit integers (`ordered`), their keys.

    best    programs share a row's logits: the largest, and the largest of each group of ids
    pick    a program has a row. At least top_k logits are as large as the top_k-th largest of the
            groups' largest, so the groups below it are left out. What is left, a few at a time, is
            counted by the upper eight bits of the keys, then by the lower eight where the upper
            ones are the top_k-th largest's own, which then is known; then comes the probability of
            all that is not below it, and then the token that a random number means, in the order
            of ids

Dimensions: B rows, V ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK, WARPS = 2048, 4  # ids of a program of `best`
GROUP = 32  # ids of which the largest is kept
GROUPS = 128  # that `pick` looks at together
BINS = tl.constexpr(256)
NONE = tl.constexpr(2147483647)  # larger than any id
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
def best_kernel(logits, stride, top, largest, V, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """top (B,): the row's largest key in the upper half, and in the lower one NONE minus the first
    id that has it; largest (B, chunks * CHUNK / GROUP): of each group. Where one is not finite (or
    as large as only two of the numbers' exponents are), top is BAD."""
    b, c = tl.program_id(0), tl.program_id(1)
    groups: tl.constexpr = CHUNK // GROUP
    j = c * CHUNK + tl.arange(0, CHUNK)
    exists = j < V
    key = ordered(tl.load(logits + b.to(tl.int64) * stride + j, exists, 0.0))
    bad = tl.max((exists & ((key >> 8 == 0) | (key >> 8 == 255))).to(tl.int32), 0)
    key = tl.where(exists, key, 0)
    best = tl.max(key, 0)
    first = tl.min(tl.where(key == best, j, NONE), 0)
    packed = (best.to(tl.int64) << 32) + NONE - first
    tl.atomic_max(top + b, tl.where(bad > 0, BAD, packed))
    at = (b * tl.num_programs(1) + c) * groups + tl.arange(0, groups)
    tl.store(largest + at, tl.max(tl.reshape(key, (groups, GROUP)), 1))


@triton.jit
def kth_largest(key, k):
    """Of keys, bit by bit; 0 if there are not so many."""
    found = tl.full((), 0, tl.int32)
    for bit in tl.static_range(16):
        trial = found | (32768 >> bit)
        found = tl.where(tl.sum((key >= trial).to(tl.int32), 0) >= k, trial, found)
    return found


@triton.jit
def cut(counts, k):
    """The bin in which the k-th largest lies, and what is left of k within it."""
    upwards = tl.cumsum(counts, 0, reverse=True)  # in this bin and above
    above = upwards < k
    return BINS - 1 - tl.sum(above.to(tl.int32), 0), k - tl.max(tl.where(above, upwards, 0), 0)


@triton.jit
def candidates(logits, groups, n, i0, V, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Ids of n groups from the i0-th on, in their order, which of them exist, and their keys."""
    i = i0 + tl.arange(0, GROUPS)
    j = tl.load(groups + i, i < n, 0)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    exists = (i < n)[:, None] & (j < V)
    key = ordered(tl.load(logits + j, exists, 0.0))
    flat: tl.constexpr = GROUPS * GROUP
    return tl.reshape(j, (flat,)), tl.reshape(exists, (flat,)), tl.reshape(key, (flat,))


@triton.jit
def pick_kernel(logits, stride, top, largest, groups, u, count, ids, B, V, n_groups, temperature,
                top_k, GREEDY: tl.constexpr, TOP_K: tl.constexpr, GROUP: tl.constexpr,
                GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """A row's id by its number u, with GREEDY the first of the likeliest; -1 if top is BAD."""
    b = tl.program_id(0)
    best = tl.load(top + b)
    chosen = NONE - (best & NONE).to(tl.int32)
    if not GREEDY:
        logits += b.to(tl.int64) * stride
        groups += b * n_groups
        i = tl.arange(0, BLOCK)
        of_group = tl.load(largest + b * n_groups + i, i < n_groups, -1)
        some = of_group >= 0
        if TOP_K:
            some = of_group >= kth_largest(of_group, top_k)
        tl.store(groups + tl.cumsum(some.to(tl.int32), 0) - 1, i, some)
        n = tl.sum(some.to(tl.int32), 0)
        tl.debug_barrier()  # all threads have written
        least = tl.full((), 0, tl.int32)
        if TOP_K:
            counts = tl.zeros((BINS,), tl.int32)
            for i0 in tl.range(0, n, GROUPS):
                j, exists, key = candidates(logits, groups, n, i0, V, GROUP, GROUPS)
                counts += tl.histogram(key >> 8, BINS, exists)
            upper, rest = cut(counts, top_k)
            counts = tl.zeros((BINS,), tl.int32)
            for i0 in tl.range(0, n, GROUPS):
                j, exists, key = candidates(logits, groups, n, i0, V, GROUP, GROUPS)
                counts += tl.histogram(key & 255, BINS, exists & (key >> 8 == upper))
            lower, rest = cut(counts, rest)
            least = upper * 256 + lower
        highest = value((best >> 32).to(tl.int32) & 65535)
        total = tl.full((), 0.0, tl.float32)
        for i0 in tl.range(0, n, GROUPS):
            j, exists, key = candidates(logits, groups, n, i0, V, GROUP, GROUPS)
            p = tl.exp((value(key) - highest) / temperature)
            total += tl.sum(tl.where(exists & (key >= least), p, 0.0), 0)
        target = tl.load(u + tl.load(count) * B + b) * total
        chosen, last = NONE + tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
        before = tl.full((), 0.0, tl.float32)
        for i0 in tl.range(0, n, GROUPS):
            j, exists, key = candidates(logits, groups, n, i0, V, GROUP, GROUPS)
            kept = exists & (key >= least)
            p = tl.where(kept, tl.exp((value(key) - highest) / temperature), 0.0)
            passed = before + tl.cumsum(p, 0) > target
            chosen = tl.minimum(chosen, tl.min(tl.where(kept & passed, j, NONE), 0))
            last = tl.maximum(last, tl.max(tl.where(kept, j, 0), 0))
            before += tl.sum(p, 0)
        chosen = tl.minimum(chosen, last)  # sums in another order may differ in the last digit
    tl.store(ids + b, tl.where(best == BAD, -1, chosen))


def choose(logits: Tensor, u: Tensor, count: Tensor, temperature: float,
           top_k: int | None = None) -> Tensor:
    """`decoding.choose` of bfloat16 logits (B, V), by row `count` (1,) of the numbers u (n, B)."""
    (B, V), greedy, device = logits.shape, temperature < 1e-6, logits.device
    n_chunks = triton.cdiv(V, CHUNK)
    n_groups = n_chunks * CHUNK // GROUP
    top = torch.zeros(B, dtype=torch.long, device=device)
    largest, groups = torch.empty(2, B, n_groups, dtype=torch.int32, device=device)
    ids = torch.empty(B, dtype=torch.long, device=device)
    row = logits, logits.stride(0), top, largest
    best_kernel[B, n_chunks](*row, V, GROUP=GROUP, CHUNK=CHUNK, num_warps=WARPS)
    pick_kernel[B,](*row, groups, u, count, ids, B, V, n_groups, 1.0 if greedy else temperature,
                    min(top_k or V, V), GREEDY=greedy, TOP_K=bool(top_k), GROUP=GROUP,
                    GROUPS=GROUPS, BLOCK=triton.next_power_of_2(n_groups), num_warps=8)
    return ids
