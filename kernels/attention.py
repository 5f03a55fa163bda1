"""
Attention of some positions of a row on a token-order cache, forward and backward, in Triton.

Query t of a row reads the keys `start[t] <= j < stop[t]` and, if there is one, the sink: a key and
value that every query reads (the dummy). `start` and `stop` must not decrease along t, which
causality, documents and strided groups all obey; a kernel then finds the keys of a query block,
and the queries of a key block, from the ends of an interval, and no mask is ever stored. Nothing
depends on the data on the host's side, so all of it may be captured in a CUDA graph. Tiles are
read whole: what lies in k and v beyond the intervals must be finite (zeros in a new cache).

Dimensions: B rows, Tq queries, S keys, H query heads, Hkv key-value heads, G = H / Hkv, d head
size, split in two products of D0 + D1 columns (96 = 64 + 32; padding to 128 would cost a third
more). The query heads that share a key-value head are packed, so that one tile of keys serves
them all: packed row r = t * P + g with P = G rounded up to a power of two, R = Tq * P. A program
owns BLOCK_M packed rows or BLOCK_N keys of one (b, key-value head). Tiles move through tensor
descriptors (Hopper's copy engine; it fills with zeros and drops what lies outside, so padded and
missing rows are harmless zeros) over 5 dimensions: q, out, dq (B, Tq, Hkv, G, d) and the cache
(B, S, Hkv, 1, d). Scores are in base 2 inside, s * scale * log2(e), as exp2 is the hardware's own;
lse2 (B, Hkv, R) is the base-2 logarithm of a row's sum, -inf for a row that reads nothing (its
output is 0).
"""

import os
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.known import head_fits, of_size, split_head
from kernels.norms import Gain

try:
    from kernels import group
except ImportError:  # a Triton without Gluon, or with another one
    group = None

LOG2E = 1.4426950408889634
# that share the keys in decoding: about three for each of 132 multiprocessors; of 64 rows of 3
# heads, two for each head
DECODE_PROGRAMS = 384

# (BLOCK_M, BLOCK_N, warps, stages[, registers]) by kernel and head size; an entry serves the sizes
# up to its own. "group": fewer queries than keys, so most tiles touch an edge of the mask and every
# tile is masked. "full": long interiors, so three loops (EDGES), the middle one without a mask.
# The programs are small enough for two or three on a multiprocessor: loops are short here, and
# one program's loads and softmax hide behind another's products.
CONFIGS = {
    ("forward", "group"): {96: (64, 64, 4, 3), 128: (64, 64, 4, 2)},
    ("forward", "full"): {64: (128, 128, 8, 2), 96: (128, 64, 8, 2, 128), 128: (128, 64, 8, 2)},
    ("forward", "decode"): {64: (16, 128, 4, 3), 128: (16, 64, 4, 3)},
    ("rows", "group"): {96: (32, 64, 1, 1), 128: (32, 64, 2, 1)},
    ("dq", "group"): {96: (64, 64, 4, 3), 128: (64, 64, 4, 2)},
    ("dq", "full"): {128: (64, 64, 4, 2)},
    ("dkv", "group"): {64: (64, 64, 4, 2), 96: (32, 64, 4, 2, 168), 128: (32, 64, 4, 2)},
    ("dkv", "full"): {64: (64, 128, 8, 2), 96: (64, 64, 4, 2), 128: (64, 128, 8, 2)},
}


def config(kernel: str, kind: str, d: int) -> dict:
    """Constants of a kernel, and its launch options, for head size d."""
    block_m, block_n, warps, stages, *registers = of_size(CONFIGS[kernel, kind], d)
    d0, d1 = split_head(d)
    return dict(D0=d0, D1=d1, BLOCK_M=block_m, BLOCK_N=block_n, EDGES=kind == "full",
                num_warps=warps, num_stages=stages, maxnreg=registers[0] if registers else None)


# ---- pieces: a tile of d columns is a pair of tiles of D0 and D1 columns ----------------------


@triton.jit
def load(x0, x1, b, i, head, ROWS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    """ROWS packed rows of one head from position i on, as a pair."""
    a = x0.load([b, i, head, 0, 0]).reshape(ROWS, D0)
    c = a  # a stand-in that nobody reads where D1 = 0
    if D1 > 0:
        c = x1.load([b, i, head, 0, D0]).reshape(ROWS, D1)
    return a, c


@triton.jit
def load_rows(base, offsets, mask, D0: tl.constexpr, D1: tl.constexpr):
    """The same through pointers, for operands that stay: of a reshaped tile Triton would make
    registers, of these shared memory, which leaves room for more programs."""
    at, mask = base + offsets[:, None], mask[:, None]
    a = tl.load(at + tl.arange(0, D0)[None, :], mask, 0.0)
    c = a
    if D1 > 0:
        c = tl.load(at + D0 + tl.arange(0, D1)[None, :], mask, 0.0)
    return a, c


@triton.jit
def store(x0, x1, b, i, head, a, c, D0: tl.constexpr, D1: tl.constexpr):
    x0.store([b, i, head, 0, 0], a.to(x0.dtype).reshape(x0.block_shape))
    if D1 > 0:
        x1.store([b, i, head, 0, D0], c.to(x1.dtype).reshape(x1.block_shape))


@triton.jit
def add(x0, x1, b, i, head, a, c, D0: tl.constexpr, D1: tl.constexpr):
    """Add to what is there, in the copy engine. No other program adds to these rows, so the bits
    do not depend on any order."""
    x0.atomic_add([b, i, head, 0, 0], a.to(x0.dtype).reshape(x0.block_shape))
    if D1 > 0:
        x1.atomic_add([b, i, head, 0, D0], c.to(x1.dtype).reshape(x1.block_shape))


@triton.jit
def zeros_pair(N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    return tl.zeros((N, D0), tl.float32), tl.zeros((N, D1 if D1 > 0 else 16), tl.float32)


@triton.jit
def dot_t(a, b, D1: tl.constexpr):
    """a @ b^T over all d columns."""
    s = tl.dot(a[0], tl.trans(b[0]))
    if D1 > 0:
        s = tl.dot(a[1], tl.trans(b[1]), s)
    return s


@triton.jit
def dot_add(p, b, acc0, acc1, D1: tl.constexpr):
    """acc + p @ b; p stays in registers, as the left operand."""
    p = p.to(b[0].dtype)
    acc0 = tl.dot(p, b[0], acc0)
    if D1 > 0:
        acc1 = tl.dot(p, b[1], acc1)
    return acc0, acc1


@triton.jit
def load_sink(ptr, D0: tl.constexpr, D1: tl.constexpr):
    x0 = tl.load(ptr + tl.arange(0, D0)).to(tl.float32)[None, :]
    x1 = x0
    if D1 > 0:
        x1 = tl.load(ptr + D0 + tl.arange(0, D1)).to(tl.float32)[None, :]
    return x0, x1


@triton.jit
def row_dot(a, b, D1: tl.constexpr):
    """Row sums of a * b in float32."""
    s = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    if D1 > 0:
        s += tl.sum(a[1].to(tl.float32) * b[1].to(tl.float32), 1)
    return s


@triton.jit
def add_to_row(ptr, before, weight, x, D0: tl.constexpr, D1: tl.constexpr):
    """Store what was before (1, d) and the sum over rows of weight * x."""
    tl.store(ptr + tl.arange(0, D0)[None, :],
             before[0] + tl.sum(weight[:, None] * x[0].to(tl.float32), 0, keep_dims=True))
    if D1 > 0:
        tl.store(ptr + D0 + tl.arange(0, D1)[None, :],
                 before[1] + tl.sum(weight[:, None] * x[1].to(tl.float32), 0, keep_dims=True))


@triton.jit
def visible(start, stop, j):
    return (start <= j) & (j < stop)


@triton.jit
def query_block(start, stop, b, t0, Tq, P: tl.constexpr, BLOCK_M: tl.constexpr):
    """Intervals of the packed rows from position t0 on, and the block's key bounds.

    lo <= the block's keys < hi, and all of its rows read the keys left <= j < right. Rows past
    the end repeat the last position; their queries are zeros and their results are dropped.
    """
    start += b * Tq
    stop += b * Tq
    last = tl.minimum(t0 + BLOCK_M // P, Tq) - 1
    t = tl.minimum(t0 + tl.arange(0, BLOCK_M) // P, last)
    return (tl.load(start + t), tl.load(stop + t), tl.load(start + t0), tl.load(start + last),
            tl.load(stop + t0), tl.load(stop + last))


@triton.jit
def query_rows(b, t0, head, Tq, Hkv, G: tl.constexpr, P: tl.constexpr, d: tl.constexpr,
               BLOCK_M: tl.constexpr):
    """Offsets of packed rows in a contiguous (B, Tq, H, d), and which of them exist."""
    r = tl.arange(0, BLOCK_M)
    t, g = t0 + r // P, r % P
    return ((b * Tq + t).to(tl.int64) * Hkv * G + head * G + g) * d, (t < Tq) & (g < G)


@triton.jit
def span(part: tl.constexpr, lo, left, right, hi, BLOCK: tl.constexpr, EDGES: tl.constexpr):
    """The part of lo .. hi in blocks: 0 up to where no block needs a mask, 1 those, 2 the rest
    (without EDGES all)."""
    first, end = lo, hi
    if EDGES:
        a = lo + tl.cdiv(tl.maximum(left - lo, 0), BLOCK) * BLOCK
        z = a + tl.maximum(tl.minimum(right, hi) - a, 0) // BLOCK * BLOCK
        if part == 0:
            end = tl.minimum(a, hi)
        elif part == 1:
            first, end = a, z
        else:
            first = z
    return first, end


# ---- forward ----------------------------------------------------------------------------------


@triton.jit
def forward_kernel(q, k0, k1, v0, v1, out0, out1, lse2, start, stop, sink_k, sink_v, scale2,
                   Tq, Hkv, G: tl.constexpr, P: tl.constexpr, SPLITS: tl.constexpr,
                   D0: tl.constexpr, D1: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, EDGES: tl.constexpr):
    """out and lse2 of a block of packed rows, by online softmax over its keys (or a share)."""
    d: tl.constexpr = D0 + D1
    b, head = tl.program_id(0) // Hkv, tl.program_id(0) % Hkv
    # the last blocks have the most keys under a causal mask: they start first
    t0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * (BLOCK_M // P)
    begin, end, lo, left, right, hi = query_block(start, stop, b, t0, Tq, P, BLOCK_M)
    split = tl.program_id(2)
    if SPLITS > 1:  # this program's share of the keys, in whole blocks
        share = tl.cdiv(tl.cdiv(hi - lo, BLOCK_N), SPLITS) * BLOCK_N
        lo += split * share
        hi = tl.minimum(hi, lo + share)
    rows, exists = query_rows(b, t0, head, Tq, Hkv, G, P, d, BLOCK_M)
    q = load_rows(q, rows, exists, D0, D1)

    # a finite lower bound in place of -inf: exp2(-inf - m) is 0 for a row without keys, never NaN
    m = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc0, acc1 = zeros_pair(BLOCK_M, D0, D1)
    s_sink = m
    if sink_k is not None:  # the online softmax starts from the sink, in the first split
        s_sink = row_dot(q, load_sink(sink_k + head * d, D0, D1), D1) * scale2
        s_sink = tl.where(split == 0, s_sink, -1e30)
        m = s_sink
        total = tl.where(s_sink > -1e30, 1.0, total)
    for part in tl.static_range(0 if EDGES else 2, 3):
        first, last = span(part, lo, left, right, hi, BLOCK_N, EDGES)
        for j0 in tl.range(first, last, BLOCK_N):
            k = load(k0, k1, b, j0, head, BLOCK_N, D0, D1)
            v = load(v0, v1, b, j0, head, BLOCK_N, D0, D1)
            s = dot_t(q, k, D1)
            if part != 1:
                j = j0 + tl.arange(0, BLOCK_N)[None, :]
                # a split ends before the row's interval does
                s = tl.where(visible(begin[:, None], tl.minimum(end, hi)[:, None], j), s,
                             float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1) * scale2)
            p = tl.exp2(s * scale2 - m_new[:, None])
            shrink = tl.exp2(m - m_new)
            total = total * shrink + tl.sum(p, 1)
            acc0, acc1 = dot_add(p, v, acc0 * shrink[:, None], acc1 * shrink[:, None], D1)
            m = m_new
    if sink_k is not None:
        # its value joins here, not before the loop: accumulators that start from a broadcast row
        # make ptxas serialize all matrix products (its message C7515)
        weight = tl.where(s_sink > -1e30, tl.exp2(s_sink - m), 0.0)[:, None]
        v_sink = load_sink(sink_v + head * d, D0, D1)
        acc0 += weight * v_sink[0]
        if D1 > 0:
            acc1 += weight * v_sink[1]
    safe = tl.where(total > 0, total, 1.0)
    inverse = (1.0 / safe)[:, None]
    b += split * (tl.num_programs(0) // Hkv)  # splits are stacked along the rows of the batch
    store(out0, out1, b, t0, head, acc0 * inverse, acc1 * inverse, D0, D1)
    r = t0 * P + tl.arange(0, BLOCK_M)
    tl.store(lse2 + (b * Hkv + head) * Tq * P + r,
             tl.where(total > 0, m + tl.log2(safe), float("-inf")), r < Tq * P)


@triton.jit
def merge_kernel(part, part_lse2, out, lse2, B, Tq, H, Hkv, G: tl.constexpr, P: tl.constexpr,
                 SPLITS: tl.constexpr, d: tl.constexpr, D: tl.constexpr):
    """Add up the splits of one query and head by their weights."""
    b, t, h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = ((b * Tq + t) * H + h) * d
    lse_row = ((b * Hkv + h // G) * Tq + t) * P + h % G
    n, c = tl.arange(0, SPLITS), tl.arange(0, D)
    x = tl.load(part_lse2 + n * (B * Hkv * Tq * P) + lse_row)
    m = tl.maximum(tl.max(x, 0), -1e30)
    w = tl.exp2(x - m)
    total = tl.sum(w, 0)
    safe = tl.where(total > 0, total, 1.0)
    y = tl.load(part + n[:, None] * (B * Tq * H * d) + row + c[None, :], (c < d)[None, :], 0.0)
    y = tl.sum(y * w[:, None], 0) / safe
    tl.store(out + row + c, y.to(out.dtype.element_ty), c < d)
    tl.store(lse2 + lse_row, tl.where(total > 0, m + tl.log2(safe), float("-inf")))


# ---- backward ---------------------------------------------------------------------------------


@triton.jit
def rows_of(q, out, do, lse2, dsink, sink_k, sink_v, scale, scale2, b, block, head, Tq, Hkv,
            sink_rows, G: tl.constexpr, P: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
            BLOCK_M: tl.constexpr):
    """Of a block's packed rows q, do, lse2 and delta = rowsum(do * out); and ds of the sink, which
    is one more column. The block's part of the sink's gradients is added to a row of its own: no
    atomics, same bits every time. All is asked for before anything is computed."""
    d: tl.constexpr = D0 + D1
    rows, exists = query_rows(b, block * (BLOCK_M // P), head, Tq, Hkv, G, P, d, BLOCK_M)
    do = load_rows(do, rows, exists, D0, D1)
    out = load_rows(out, rows, exists, D0, D1)
    q = load_rows(q, rows, exists, D0, D1)
    r = block * BLOCK_M + tl.arange(0, BLOCK_M)
    lse = tl.load(lse2 + (b * Hkv + head) * Tq * P + r, r < Tq * P, 0.0)
    if sink_k is not None:
        sink_k, sink_v = load_sink(sink_k + head * d, D0, D1), load_sink(sink_v + head * d, D0, D1)
        dsink_k = dsink + ((b * tl.num_programs(1) + block) * Hkv + head) * d
        dsink_v = dsink_k + sink_rows * Hkv * d
        dk, dv = load_sink(dsink_k, D0, D1), load_sink(dsink_v, D0, D1)
    delta = row_dot(do, out, D1)
    ds = delta
    if sink_k is not None:
        p = tl.exp2(row_dot(q, sink_k, D1) * scale2 - lse)
        ds = p * (row_dot(do, sink_v, D1) - delta)
        add_to_row(dsink_k, dk, ds * scale, q, D0, D1)
        add_to_row(dsink_v, dv, p, do, D0, D1)
    return q, do, lse, delta, ds


@triton.jit
def rows_kernel(q, out, do, lse2, numbers, dsink, sink_k, sink_v, scale, scale2, Tq, Hkv, stride,
                sink_rows, G: tl.constexpr, P: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
                BLOCK_M: tl.constexpr):
    """lse2, delta and the sink's ds in rows of `numbers` (3 B Hkv, stride), in turn."""
    b, head, block = tl.program_id(0) // Hkv, tl.program_id(0) % Hkv, tl.program_id(1)
    _, _, lse, delta, ds = rows_of(q, out, do, lse2, dsink, sink_k, sink_v, scale, scale2, b,
                                   block, head, Tq, Hkv, sink_rows, G, P, D0, D1, BLOCK_M)
    r = block * BLOCK_M + tl.arange(0, BLOCK_M)
    numbers += 3 * tl.program_id(0) * stride + r
    tl.store(numbers, lse, r < Tq * P)
    tl.store(numbers + stride, delta, r < Tq * P)
    tl.store(numbers + 2 * stride, ds, r < Tq * P)


@triton.jit
def dq_kernel(q, out, do, k0, k1, v0, v1, dq0, dq1, lse2, delta, dsink,
              start, stop, sink_k, sink_v, scale, scale2, Tq, Hkv, sink_rows, G: tl.constexpr,
              P: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK_M: tl.constexpr,
              BLOCK_N: tl.constexpr, EDGES: tl.constexpr):
    """dq of a block of packed rows; on the way delta = rowsum(do * out), which the next kernel
    needs too, and the block's part of the sink's gradients."""
    d: tl.constexpr = D0 + D1
    b, head = tl.program_id(0) // Hkv, tl.program_id(0) % Hkv
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    t0 = block * (BLOCK_M // P)
    begin, end, lo, left, right, hi = query_block(start, stop, b, t0, Tq, P, BLOCK_M)
    q, do, lse, row_delta, ds_sink = rows_of(q, out, do, lse2, dsink, sink_k, sink_v, scale,
                                             scale2, b, block, head, Tq, Hkv, sink_rows, G, P, D0,
                                             D1, BLOCK_M)
    r = t0 * P + tl.arange(0, BLOCK_M)
    tl.store(delta + (b * Hkv + head) * Tq * P + r, row_delta, r < Tq * P)
    acc0, acc1 = zeros_pair(BLOCK_M, D0, D1)
    for part in tl.static_range(0 if EDGES else 2, 3):
        first, last = span(part, lo, left, right, hi, BLOCK_N, EDGES)
        for j0 in tl.range(first, last, BLOCK_N):
            k = load(k0, k1, b, j0, head, BLOCK_N, D0, D1)
            v = load(v0, v1, b, j0, head, BLOCK_N, D0, D1)
            p = tl.exp2(dot_t(q, k, D1) * scale2 - lse[:, None])
            if part != 1:
                j = j0 + tl.arange(0, BLOCK_N)[None, :]
                p = tl.where(visible(begin[:, None], end[:, None], j), p, 0.0)
            ds = p * (dot_t(do, v, D1) - row_delta[:, None])
            acc0, acc1 = dot_add(ds, k, acc0, acc1, D1)
    if sink_k is not None:
        k_sink = load_sink(sink_k + head * d, D0, D1)
        acc0 += ds_sink[:, None] * k_sink[0]
        if D1 > 0:
            acc1 += ds_sink[:, None] * k_sink[1]
    store(dq0, dq1, b, t0, head, acc0 * scale, acc1 * scale, D0, D1)


@triton.jit
def dkv_kernel(q0, q1, keys, values, do0, do1, dk0, dk1, dv0, dv1, lse2, delta, start, stop,
               scale, scale2, Tq, S, Hkv, stride_b, stride_s, stride_h, P: tl.constexpr,
               CHUNK: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK_M: tl.constexpr,
               BLOCK_N: tl.constexpr, EDGES: tl.constexpr):
    """dk += and dv += for a block of keys, over the queries that can read one of them."""
    b, head = tl.program_id(0) // Hkv, tl.program_id(0) % Hkv
    j0 = tl.program_id(1) * BLOCK_N  # under a causal mask the first keys have the most queries
    at = j0 + tl.arange(0, BLOCK_N)
    j = at[:, None]
    rows = b.to(tl.int64) * stride_b + head * stride_h + at * stride_s
    k = load_rows(keys, rows, at < S, D0, D1)  # on their way while queries are counted
    v = load_rows(values, rows, at < S, D0, D1)
    start += b * Tq
    stop += b * Tq
    # start and stop never decrease, so counting finds the ends: queries lo <= t < hi read one of
    # these keys, left <= t < right all of them
    lo, left, right, hi = 0, 0, 0, 0
    for i0 in range(0, Tq, CHUNK):
        i = i0 + tl.arange(0, CHUNK)
        begin = tl.load(start + i, i < Tq, 2147483647)
        end = tl.load(stop + i, i < Tq, 2147483647)
        lo += tl.sum((end <= j0).to(tl.int32), 0)
        left += tl.sum((end < j0 + BLOCK_N).to(tl.int32), 0)
        right += tl.sum((begin <= j0).to(tl.int32), 0)
        hi += tl.sum((begin < j0 + BLOCK_N).to(tl.int32), 0)
    if lo < hi:
        T: tl.constexpr = BLOCK_M // P
        lse2 += (b * Hkv + head) * Tq * P
        delta += (b * Hkv + head) * Tq * P
        dk_acc0, dk_acc1 = zeros_pair(BLOCK_N, D0, D1)
        dv_acc0, dv_acc1 = zeros_pair(BLOCK_N, D0, D1)
        for part in tl.static_range(0 if EDGES else 2, 3):
            first, last = span(part, lo, left, right, hi, T, EDGES)
            for t0 in tl.range(first, last, T):
                q = load(q0, q1, b, t0, head, BLOCK_M, D0, D1)
                do = load(do0, do1, b, t0, head, BLOCK_M, D0, D1)
                r = t0 * P + tl.arange(0, BLOCK_M)
                # scores transposed, (keys, rows): the left operand of two products as they are
                p = tl.exp2(dot_t(k, q, D1) * scale2 - tl.load(lse2 + r, r < Tq * P, 0.0)[None, :])
                if part != 1:
                    # one look-up per position, not per packed row; none is visible past the end
                    t = t0 + tl.arange(0, T)
                    begin = tl.load(start + t, t < Tq, 0)[:, None].broadcast_to(T, P)
                    end = tl.load(stop + t, t < Tq, 0)[:, None].broadcast_to(T, P)
                    p = tl.where(visible(begin.reshape(1, BLOCK_M), end.reshape(1, BLOCK_M), j),
                                 p, 0.0)
                dv_acc0, dv_acc1 = dot_add(p, do, dv_acc0, dv_acc1, D1)
                ds = p * (dot_t(v, do, D1) - tl.load(delta + r, r < Tq * P, 0.0)[None, :])
                dk_acc0, dk_acc1 = dot_add(ds, q, dk_acc0, dk_acc1, D1)
        add(dv0, dv1, b, j0, head, dv_acc0, dv_acc1, D0, D1)
        add(dk0, dk1, b, j0, head, dk_acc0 * scale, dk_acc1 * scale, D0, D1)


# ---- host side --------------------------------------------------------------------------------


def check(q: Tensor, k: Tensor, start: Tensor, stop: Tensor, *caches: Tensor):
    """Name what a kernel would silently read wrongly."""
    (B, Tq, H, d), (_, S, Hkv, _) = q.shape, k.shape
    for x in caches:
        if x.shape != (B, S, Hkv, d) or x.stride(3) != 1 or H % Hkv:
            raise ValueError(f"key, value or gradient {tuple(x.shape)}, strides {x.stride()}: with "
                             f"queries {tuple(q.shape)} and keys {tuple(k.shape)} it does not fit")
    if not head_fits(d):
        raise ValueError(f"head size {d}: 16, 32, 64, 128, or a sum of two of them, is needed")
    for x in (start, stop):
        if x.dtype != torch.int32 or x.shape != (B, Tq) or not x.is_contiguous():
            raise ValueError(f"start and stop: contiguous int32 ({B}, {Tq}) are needed")


def tiles(rows: int, Hkv: int, c: dict, *tensors: Tensor) -> list[TensorDescriptor | None]:
    """Descriptor pairs of tiles of `rows` packed rows, for q-like or (Hkv = 0) cache tensors."""
    pairs = []
    for tensor in tensors:
        x = tensor.unflatten(2, (Hkv, -1)) if Hkv else tensor.unsqueeze(3)
        P = triton.next_power_of_2(x.size(3))
        pairs += [TensorDescriptor.from_tensor(x, [1, rows // P, 1, P, n]) if n else None
                  for n in (c["D0"], c["D1"])]
    return pairs


def kind_of(q: Tensor, k: Tensor) -> str:
    return "group" if q.size(1) < k.size(1) else "full"


@cache
def has_gluon() -> bool:
    """Is this a Hopper GPU, and a version of Triton that group.py was tried with?"""
    return (group is not None and triton.__version__.startswith(("3.6.", "3.7.", "3.8."))
            and os.environ.get("TRITON_INTERPRET") != "1" and torch.cuda.is_available()
            and torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0))


def by_hand(kind: str, q: Tensor, k: Tensor, *others: Tensor) -> bool:
    """Do the kernels of group.py serve these?"""
    return (kind == "group" and has_gluon() and q.dtype in (torch.bfloat16, torch.float16)
            and all(x.dtype == q.dtype for x in (k, *others)) and q.size(3) <= 128
            and q.size(2) <= 32 * k.size(2))


def takes_projected(q: Tensor, k: Tensor, gain: Gain) -> bool:
    """Do the kernels norm and rotate queries (B, Tq, H, d) on their way?"""
    return by_hand(kind_of(q, k), q, k) and gain.has_rows(group.programs(q, k))


def attention_forward(q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor,
                      sink_k: Tensor | None = None, sink_v: Tensor | None = None,
                      kind: str | None = None, splits: int = 1,
                      norm: tuple[Tensor, ...] | None = None,
                      keep: bool = False) -> tuple[Tensor, ...]:
    """out (B, Tq, H, d) and lse2 (B, Hkv, R); `splits` programs share the keys of a query block.

    A norm, where `takes_projected`: its gain, and cos and sin (B, Tq, d / 2), by which q is normed
    and rotated first; `keep`: it is the third result."""
    check(q, k, start, stop, k, v)
    (B, Tq, H, d), Hkv = q.shape, k.size(2)
    P, kind = triton.next_power_of_2(H // Hkv), kind or kind_of(q, k)
    q = q.contiguous()
    sink = [x if x is None else x.contiguous() for x in (sink_k, sink_v)]
    if by_hand(kind, q, k, v):
        return group.forward(q, k, v, start, stop, *sink, norm, keep)
    c = config("forward", kind, d)
    out, lse2 = torch.empty_like(q), q.new_empty(B, Hkv, Tq * P, dtype=torch.float32)
    part, part_lse2 = out, lse2
    if splits > 1:
        part = q.new_empty(splits * B, Tq, H, d, dtype=torch.float32)
        part_lse2 = q.new_empty(splits * B, Hkv, Tq * P, dtype=torch.float32)
    forward_kernel[B * Hkv, triton.cdiv(Tq * P, c["BLOCK_M"]), splits](
        q, *tiles(c["BLOCK_N"], 0, c, k, v), *tiles(c["BLOCK_M"], Hkv, c, part), part_lse2,
        start, stop, *sink, d ** -0.5 * LOG2E, Tq, Hkv, G=H // Hkv, P=P, SPLITS=splits, **c)
    if splits > 1:
        merge_kernel[B, Tq, H](part, part_lse2, out, lse2, B, Tq, H, Hkv, G=H // Hkv, P=P,
                               SPLITS=splits, d=d, D=triton.next_power_of_2(d), num_warps=2)
    return out, lse2


def sink_rows(q: Tensor, k: Tensor) -> int:
    """Rows of the sink's gradient sums that are enough for any number of queries up to S."""
    (B, S, Hkv, _), H = k.shape, q.size(2)
    P = triton.next_power_of_2(H // Hkv)
    kernels = ("dq", "rows") if has_gluon() else ("dq",)
    smallest = min(c[0] for (kernel, _), sizes in CONFIGS.items() if kernel in kernels
                   for c in sizes.values())
    return B * triton.cdiv(S * P, smallest)


def attention_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse2: Tensor,
                       start: Tensor, stop: Tensor, sink_k: Tensor | None, sink_v: Tensor | None,
                       dk_acc: Tensor, dv_acc: Tensor, dsink: Tensor | None = None,
                       norm: tuple[Tensor, ...] | None = None, x: Tensor | None = None,
                       dgain: Tensor | None = None) -> Tensor:
    """dq; with the norm that has made q of x, dx, and the gain's gradient is added to the rows of
    dgain (`group.programs` or more, d). dk and dv are added to dk_acc and dv_acc (B, S, Hkv, d),
    float32 or bfloat16: a running gradient of the cache, or zeros. The sink's is added to the rows
    of dsink (2, `sink_rows`, Hkv, d), float32, whose sum over the rows it is."""
    check(q, k, start, stop, k, v, dk_acc, dv_acc)
    (B, Tq, H, d), (_, S, Hkv, _) = q.shape, k.shape
    P = triton.next_power_of_2(H // Hkv)
    do, q = do.contiguous(), q.contiguous()
    kind = kind_of(q, k)
    hand = by_hand(kind, q, k, v, dk_acc, dv_acc)
    c = config("rows" if hand else "dq", kind, d)
    blocks = triton.cdiv(Tq * P, c["BLOCK_M"])
    sink = [x if x is None else x.contiguous() for x in (sink_k, sink_v)]
    rows = 0 if dsink is None else dsink.size(1)
    if sink_k is not None and rows < B * blocks:
        raise ValueError(f"dsink: {B * blocks} rows are needed, there are {rows}")
    scales = d ** -0.5, d ** -0.5 * LOG2E
    if hand:
        # rows begin where the copy engine may begin to read, too
        numbers = lse2.new_empty(3 * B * Hkv, triton.cdiv(Tq * P, 4) * 4)
        rows_kernel[B * Hkv, blocks](
            q, out, do, lse2, numbers, dsink, *sink, *scales, Tq, Hkv, numbers.size(1), rows,
            G=H // Hkv, P=P, D0=c["D0"], D1=c["D1"], BLOCK_M=c["BLOCK_M"],
            num_warps=c["num_warps"])
        return group.backward(do, q, k, v, numbers, start, stop, sink[0], dk_acc, dv_acc, norm,
                              x if x is None else x.contiguous(), dgain)
    dq, delta = torch.empty_like(q), torch.empty_like(lse2)
    dq_kernel[B * Hkv, blocks](
        q, out, do, *tiles(c["BLOCK_N"], 0, c, k, v), *tiles(c["BLOCK_M"], Hkv, c, dq), lse2,
        delta, dsink, start, stop, *sink, *scales, Tq, Hkv, rows, G=H // Hkv, P=P, **c)
    c = config("dkv", kind, d)
    dkv_kernel[B * Hkv, triton.cdiv(S, c["BLOCK_N"])](
        *tiles(c["BLOCK_M"], Hkv, c, q), k, v, *tiles(c["BLOCK_M"], Hkv, c, do),
        *tiles(c["BLOCK_N"], 0, c, dk_acc, dv_acc), lse2, delta, start, stop, *scales, Tq, S,
        Hkv, *k.stride()[:3], P=P, CHUNK=min(1024, triton.next_power_of_2(Tq)), **c)
    return dq


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, start, stop, sink_k, sink_v):
        out, lse2 = attention_forward(q, k, v, start, stop, sink_k, sink_v)
        ctx.save_for_backward(q, k, v, out, lse2, start, stop, sink_k, sink_v)
        return out

    @staticmethod
    def backward(ctx, do):
        """dq, dk, dv and the sink's."""
        q, k, v, out, lse2, start, stop, sink_k, sink_v = ctx.saved_tensors
        dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (k, v))
        dsink, d_sink = None, (None, None)
        if sink_k is not None:
            dsink = torch.zeros(2, sink_rows(q, k), *sink_k.shape, device=q.device)
        dq = attention_backward(do, q, k, v, out, lse2, start, stop, sink_k, sink_v, dk, dv, dsink)
        if sink_k is not None:
            d_sink = dsink.sum(1).to(sink_k.dtype).unbind()
        return dq, dk, dv, None, None, *d_sink


def attention(q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor,
              sink_k: Tensor | None = None, sink_v: Tensor | None = None) -> Tensor:
    """Attention of q (B, Tq, H, d) on k, v (B, S, Hkv, d), differentiable; see the file's head."""
    return Attention.apply(q, k, v, start, stop, sink_k, sink_v)


def splits_of(heads: int, S: int, programs: int = DECODE_PROGRAMS) -> int:
    """Programs that share the S keys of one of so many key-value heads, `programs` in all, by the
    shapes alone: what each reads, the device decides. Never more than one for 128 keys."""
    return min(triton.next_power_of_2(triton.cdiv(programs, heads)),
               triton.next_power_of_2(triton.cdiv(S, 128)), 64)


def decode_forward(q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor,
                   sink_k: Tensor | None = None,
                   sink_v: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """out and lse2 for a few queries and no gradients: programs share the keys (flash-decoding)."""
    B, (S, Hkv) = q.size(0), k.shape[1:3]
    return attention_forward(q, k, v, start, stop, sink_k, sink_v, "decode",
                             splits_of(B * Hkv, S))
