"""
The choice of the next token in Triton: `decoding.choose` for logits in bfloat16, without sorting.

The 65,536 values of bfloat16 are in the order of 16-bit integers (`ordered`), their keys.

    best    programs share a row's logits: the largest, and the largest of each group of ids
    pick    a program has a row. At least top_k logits are as large as the top_k-th largest of the
            groups' largest, so the groups below it are left out. In what is left, a few groups at a
            time, the top_k-th largest key is searched by quartering; then comes the probability of
            the top_k, of equal ones the lowest ids, and then the token that a random number means,
            in the order of ids

Dimensions: B rows, V ids.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from decoding import Choice
from kernels.decode import begin, launch

CHUNK, WARPS = 2048, 4  # ids of a program of `best`, and its warps
PICK_WARPS = 16  # of a program of `pick`
GROUP = 16  # ids of which the largest is kept
GROUPS = 256  # that `pick` looks at together
NONE = tl.constexpr(2147483647)  # larger than any id
BAD = tl.constexpr(1 << 62)  # in place of a largest key: a logit is not finite


@triton.jit
def ordered(x):
    """An integer in 0..65535 that grows with the bfloat16 x; both zeros have the same."""
    bits = (x.to(tl.float32) + 0.0).to(tl.int32, bitcast=True) >> 16
    return tl.where(bits < 0, bits ^ 0x7FFF, bits) + 32768


@triton.jit
def value(key):
    """The float32 that `ordered` made the key of."""
    bits = key - 32768
    bits = tl.where(bits < 0, bits ^ 0x7FFF, bits) << 16
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def best_kernel(logits, stride, top, largest, V, GROUP: tl.constexpr, CHUNK: tl.constexpr,
                EARLY: tl.constexpr):
    """top (B, chunks): the largest key in the upper half, and in the lower one NONE minus the first
    id that has it; largest (B, chunks * CHUNK / GROUP): of each group. Where one is not finite (or
    as large as only two of the numbers' exponents are), top is BAD."""
    begin(EARLY)
    b, c = tl.program_id(0), tl.program_id(1)
    groups: tl.constexpr = CHUNK // GROUP
    j = c * CHUNK + tl.arange(0, CHUNK)
    exists = j < V
    key = ordered(tl.load(logits + b.to(tl.int64) * stride + j, exists, 0.0))
    bad = exists & ((key >> 8 == 0) | (key >> 8 == 255))
    key = tl.where(exists, key, 0)
    packed = (key.to(tl.int64) << 32) + NONE - j
    at = b * tl.num_programs(1) + c
    tl.store(top + at, tl.max(tl.where(bad, BAD, packed), 0))
    tl.store(largest + at * groups + tl.arange(0, groups),
             tl.max(tl.reshape(key, (groups, GROUP)), 1))


@triton.jit
def candidates(logits, groups, n, i0, V, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Ids of n groups from the i0-th on, in their order, and their keys; 0, which no logit has,
    where there are none."""
    i = i0 + tl.arange(0, GROUPS)
    j = tl.load(groups + i, i < n, 0)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    exists = (i < n)[:, None] & (j < V)
    key = tl.where(exists, ordered(tl.load(logits + j, exists, 0.0)), 0)
    flat: tl.constexpr = GROUPS * GROUP
    return tl.reshape(j, (flat,)), tl.reshape(key, (flat,))


@triton.jit
def counts(key, low, step):
    """How many keys are at least low + step, low + 2 step and low + 3 step, in 21 bits each: three
    sums over a program in one."""
    each = (key >= low + step).to(tl.int64)
    each += (key >= low + 2 * step).to(tl.int64) << 21
    each += (key >= low + 3 * step).to(tl.int64) << 42
    return tl.sum(each, 0)


@triton.jit
def quarter(counted, k, low, high, step):
    """The quarter of low..high that the k-th largest key is in."""
    n = tl.full((), 0, tl.int32)
    for i in tl.static_range(3):
        n += ((counted >> 21 * i & 0x1FFFFF) >= k).to(tl.int32)
    return low + n * step, tl.where(n == 3, high, low + (n + 1) * step - 1)


@triton.jit
def kth_largest(key, k, high):
    """The k-th largest of keys up to `high`, by quartering; 0 if there are not so many."""
    low = tl.min(tl.where(key > 0, key, high), 0)
    while low < high:
        step = (high - low) // 4 + 1
        low, high = quarter(counts(key, low, step), k, low, high, step)
    return tl.where(tl.sum((key >= low).to(tl.int32), 0) >= k, low, 0)


@triton.jit
def kth_candidate(logits, groups, n, V, k, low, high, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """The k-th largest key in n groups, by quartering of low..high."""
    while low < high:
        step = (high - low) // 4 + 1
        counted = tl.full((), 0, tl.int64)
        for i0 in tl.range(0, n, GROUPS):
            j, key = candidates(logits, groups, n, i0, V, GROUP, GROUPS)
            counted += counts(key, low, step)
        low, high = quarter(counted, k, low, high, step)
    return low


@triton.jit
def stay(key, least, ties, seen):
    """Which of some candidates are above `least`, or among the first `ties` that equal it, of which
    `seen` came before; and how many equal it by now."""
    equal = (key == least).to(tl.int32)
    kept = (key > least) | ((equal > 0) & (seen + tl.cumsum(equal, 0) <= ties))
    return kept, seen + tl.sum(equal, 0)


@triton.jit
def pick_kernel(logits, stride, top, largest, groups, u, count, ids, B, V, n_chunks, n_groups,
                temperature, top_k, GREEDY: tl.constexpr, TOP_K: tl.constexpr, GROUP: tl.constexpr,
                GROUPS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
                EARLY: tl.constexpr):
    """A row's id by its number u, with GREEDY the first of the likeliest; -1 if a top is BAD."""
    begin(EARLY)
    b, c = tl.program_id(0), tl.arange(0, CHUNKS)
    best = tl.max(tl.load(top + b * n_chunks + c, c < n_chunks, 0), 0)
    chosen = NONE - (best & NONE).to(tl.int32)
    if not GREEDY:
        logits += b.to(tl.int64) * stride
        groups += b * n_groups
        number = tl.load(u + tl.load(count) * B + b)
        highest_key, i = (best >> 32).to(tl.int32) & 65535, tl.arange(0, BLOCK)
        of_group = tl.load(largest + b * n_groups + i, i < n_groups, -1)
        least = tl.full((), 0, tl.int32)
        if TOP_K:
            least = kth_largest(of_group, top_k, highest_key)
        some = of_group >= least
        tl.store(groups + tl.cumsum(some.to(tl.int32), 0) - 1, i, some)
        n = tl.sum(some.to(tl.int32), 0)
        tl.debug_barrier()  # all threads have written
        if TOP_K:
            least = kth_candidate(logits, groups, n, V, top_k, least, highest_key, GROUP, GROUPS)
        ties = tl.full((), 0, tl.int32) + top_k
        for i0 in tl.range(0, n, GROUPS):
            j, key = candidates(logits, groups, n, i0, V, GROUP, GROUPS)
            ties -= tl.sum((key > least).to(tl.int32), 0)
        highest, seen = value(highest_key), tl.full((), 0, tl.int32)
        total = tl.full((), 0.0, tl.float32)
        for i0 in tl.range(0, n, GROUPS):
            j, key = candidates(logits, groups, n, i0, V, GROUP, GROUPS)
            kept, seen = stay(key, least, ties, seen)
            p = tl.exp((value(key) - highest) / temperature)
            total += tl.sum(tl.where(kept, p, 0.0), 0)
        target, seen = number * total, seen * 0
        chosen, last = tl.full((), NONE, tl.int32), tl.full((), 0, tl.int32)
        before = tl.full((), 0.0, tl.float32)
        for i0 in tl.range(0, n, GROUPS):
            j, key = candidates(logits, groups, n, i0, V, GROUP, GROUPS)
            kept, seen = stay(key, least, ties, seen)
            p = tl.where(kept, tl.exp((value(key) - highest) / temperature), 0.0)
            passed = before + tl.cumsum(p, 0) > target
            chosen = tl.minimum(chosen, tl.min(tl.where(kept & passed, j, NONE), 0))
            last = tl.maximum(last, tl.max(tl.where(kept, j, 0), 0))
            before += tl.sum(p, 0)
        chosen = tl.minimum(chosen, last)  # sums in another order may differ in the last digit
    tl.store(ids + b, tl.where(best == BAD, -1, chosen))


def choose(choice: Choice, logits: Tensor, count: Tensor, out: Tensor):
    """What calling the choice does, by kernels, for bfloat16 logits (B, V)."""
    logits, greedy = logits[:, :choice.n_ids], choice.temperature < 1e-6
    (B, V), device, top_k = logits.shape, logits.device, choice.top_k
    n_chunks = triton.cdiv(V, CHUNK)
    n_groups = n_chunks * CHUNK // GROUP
    top = torch.empty(B, n_chunks, dtype=torch.long, device=device)
    largest, groups = torch.empty(2, B, n_groups, dtype=torch.int32, device=device)
    row = logits, logits.stride(0), top, largest
    best_kernel[B, n_chunks](*row, V, GROUP=GROUP, CHUNK=CHUNK, num_warps=WARPS, **launch())
    pick_kernel[B,](*row, groups, choice.u, count, out, B, V, n_chunks, n_groups,
                    1.0 if greedy else choice.temperature, min(top_k or V, V), GREEDY=greedy,
                    TOP_K=bool(top_k), GROUP=GROUP, GROUPS=GROUPS,
                    CHUNKS=triton.next_power_of_2(n_chunks), BLOCK=triton.next_power_of_2(n_groups),
                    num_warps=PICK_WARPS, **launch())
