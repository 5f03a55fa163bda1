"""
One token per row, without gradients: five kernels a layer and few around them, in Triton.

    place       the token's embedding, angles and interval of keys; the rows move on by one
    product     the norm; queries and, where a layer has its own, keys and values are projected
    attention   QK-norm and RoPE; programs share the keys of a row, the last one that is done adds
                up their parts; a layer's own keys and values go to the cache
    product     y @ w^T, added to the residual stream
    product     the norm before the MLP, gate and up, SwiGLU
    product     down, added to the residual stream
    head        the last norm and the logits

`Steps` is `decoding.step`: the same computation with the same weights, where time is not work but
launches and the latency of memory. Nothing waits for the host, no shape depends on how far the
rows are: all of it may be captured in a CUDA graph.

A kernel is launched while the one before it still runs (programmatic dependent launch, from Hopper
on), reads what does not depend on it, its weights, and then waits for its end.

Dimensions: B rows, D width, K inner and E outer features of a product, H query heads, Hkv
key-value heads, G = H / Hkv, d head size (its halves are rotated), S columns of the cache. Rows are
padded to the 16 that a matrix unit takes. The pieces of attention are those of attention.py.
"""

import os
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention import Rows
from kernels import attention as kernels
from kernels.attention import LOG2E, dot_add, dot_t, load_sink, row_dot, visible, zeros_pair
from kernels.known import split_head
from kernels.norms import EPS
from kernels.tape import TapeCache
from model import Block, Decoder, rotary_tables

# More rows and wider layers, in features, are left to model.states and cuBLAS: 16 rows of x have to
# fit in a multiprocessor.
MAX_ROWS, MAX_WIDTH = 64, 4096
PART = 16  # rows that go up the stack together, at most
RING = 3  # parts that attend at a time
PRODUCT = (8, 128, 4)  # features of a program, inner features of a warp at a time, warps
# by padded rows: (features of a program, inner features at a time, warps, stages)
HEAD = {16: (128, 64, 4, 5), 32: (128, 64, 4, 5), 64: (128, 64, 4, 4)}
ATTENTION = (64, 4, 3)  # keys at a time, warps, stages
PROGRAMS = 192  # of the parts that attend at a time, at least


@triton.jit
def begin(EARLY: tl.constexpr):
    """Wait for the end of the kernel before; nothing that it wrote may be read earlier, and nothing
    written. Only then the next one comes, so that no more than one waits and takes up room."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def can_be_early() -> bool:
    """Does the device know how (compute capability 9.0 on)?"""
    return os.environ.get("TRITON_INTERPRET") != "1" and torch.cuda.get_device_capability() >= (9,)


def launch(early: bool = True) -> dict:
    """Constant and launch option of a kernel that waits, as `begin` does; not `early` where a
    stream begins or several join."""
    early = early and can_be_early()
    return dict(EARLY=early, launch_pdl=early)


# ---- before and after the stack ---------------------------------------------------------------


@triton.jit
def place_kernel(ids, index, start, count, embed, cos_table, sin_table, x, cos, sin, columns,
                 first, stop, eos, FIRST: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
                 BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, EARLY: tl.constexpr):
    """Of one row: all that the stack needs of its token (0 for -1, a mark of bad logits); then
    index, start and count move on."""
    begin(EARLY)
    b = tl.program_id(0)
    token = tl.maximum(tl.load(ids + b), 0)
    i, s = tl.load(index + b), tl.load(start + b)
    c, m = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_H)
    tl.store(x + b * D + c, tl.load(embed + token * D + c, c < D), c < D)
    at = (i - s + FIRST) * HALF + m
    tl.store(cos + b * HALF + m, tl.load(cos_table + at, m < HALF), m < HALF)
    tl.store(sin + b * HALF + m, tl.load(sin_table + at, m < HALF), m < HALF)
    tl.store(columns + b, i)
    tl.store(first + b, s.to(tl.int32))
    tl.store(stop + b, i.to(tl.int32))
    tl.store(index + b, i + 1)
    tl.store(start + b, tl.where(token == eos, i + 1, s))
    if b == 0:
        tl.store(count, tl.load(count) + 1)


# ---- products ---------------------------------------------------------------------------------


@triton.jit
def row_tiles(x, i, exists, K: tl.constexpr, WARPS: tl.constexpr, BLOCK_K: tl.constexpr,
              policy: tl.constexpr):
    """Rows i of x, all K columns, as tiles (WARPS, rows, BLOCK_K)."""
    warps, columns = tl.arange(0, WARPS)[:, None, None], tl.arange(0, BLOCK_K)[None, None, :]
    parts = ()
    for k0 in tl.static_range(0, K, WARPS * BLOCK_K):
        k = k0 + warps * BLOCK_K + columns
        mask = exists[None, :, None]
        if k0 + WARPS * BLOCK_K > K:
            mask = mask & (k < K)
        parts = parts + (tl.load(x + i.to(tl.int64)[None, :, None] * K + k, mask, 0.0,
                                 eviction_policy=policy),)
    return parts


@triton.jit
def product_kernel(x, w, residual, out, B, E, eps, K: tl.constexpr, NORM: tl.constexpr,
                   GATED: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
                   WARPS: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr):
    """[residual +] [norm of] x @ w^T; GATED: of w (2 E, K), silu(first half) * second half. Warps
    share the inner features, so that a program's weights fit in registers."""
    e, n = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), tl.arange(0, ROWS)
    # weights first: they are there before the kernel before ends. Other parts of the rows will need
    # them soon: let them outlast keys and values in the second cache
    gate = row_tiles(w, e, e < E, K, WARPS, BLOCK_K, "evict_last")
    up = gate
    if GATED:
        up = row_tiles(w, E + e, e < E, K, WARPS, BLOCK_K, "evict_last")
    begin(EARLY)
    at, mask = n.to(tl.int64)[:, None] * E + e[None, :], (n < B)[:, None] & (e < E)[None, :]
    y = tl.zeros((ROWS, BLOCK_E), tl.float32)
    if residual is not None:  # now, so that nothing waits for it in the end
        y = tl.load(residual + at, mask, 0.0).to(tl.float32)
    rows = row_tiles(x, n, n < B, K, WARPS, BLOCK_K, "")
    acc = tl.zeros((WARPS, ROWS, BLOCK_E), tl.float32)
    acc_up, squares = acc, tl.zeros((WARPS, ROWS), tl.float32)
    for i in tl.static_range(len(rows)):
        if NORM:
            wide = rows[i].to(tl.float32)
            squares += tl.sum(wide * wide, 2)
        acc = tl.dot(rows[i], tl.permute(gate[i], (0, 2, 1)), acc)
        if GATED:
            acc_up = tl.dot(rows[i], tl.permute(up[i], (0, 2, 1)), acc_up)
    z, r = tl.sum(acc, 0), 1.0
    if NORM:  # the norm's factor is one for a row: it may as well come last
        r = tl.rsqrt(tl.sum(squares, 0) / K + eps)[:, None]
        z *= r
    if GATED:
        z = z / (1.0 + tl.exp2(-1.4426950408889634 * z)) * (tl.sum(acc_up, 0) * r)
    tl.store(out + at, (y + z).to(out.dtype.element_ty), mask)


@triton.jit
def head_kernel(x, w, out, B, E, eps, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
                BLOCK_K: tl.constexpr, EARLY: tl.constexpr):
    """Logits: norm of x @ w^T. So many weights come from memory, a few at a time."""
    begin(EARLY)
    e, n = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), tl.arange(0, ROWS)
    acc, squares = tl.zeros((ROWS, BLOCK_E), tl.float32), tl.zeros((ROWS,), tl.float32)
    for k0 in tl.range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        a = tl.load(x + n[:, None] * K + k[None, :], (n < B)[:, None] & (k < K)[None, :], 0.0)
        b = tl.load(w + e.to(tl.int64)[:, None] * K + k[None, :],
                    (e < E)[:, None] & (k < K)[None, :], 0.0)
        wide = a.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        acc = tl.dot(a, tl.trans(b), acc)
    y = (acc * tl.rsqrt(squares / K + eps)[:, None]).to(out.dtype.element_ty)
    # infinities become NaN, which is seen at the top
    y = tl.where(tl.abs(y.to(tl.float32)) < float("inf"), y, float("nan"))
    tl.store(out + n.to(tl.int64)[:, None] * E + e[None, :], y, (n < B)[:, None] & (e < E)[None, :])


# ---- attention --------------------------------------------------------------------------------


@triton.jit
def turned_columns(x, offsets, exists, gain, cos, sin, FIRST: tl.constexpr, N: tl.constexpr,
                   d: tl.constexpr):
    """Columns FIRST..FIRST+N-1 of rows times the gain and rotated, and sums of their squares."""
    c = FIRST + tl.arange(0, N)
    other, angle = (c + d // 2) % d, c % (d // 2)
    at, mask = x + offsets[:, None], exists[:, None]
    a = tl.load(at + c[None, :], mask, 0.0).to(tl.float32)
    b = tl.load(at + other[None, :], mask, 0.0).to(tl.float32)
    a_gain, b_gain = tl.load(gain + c).to(tl.float32), tl.load(gain + other).to(tl.float32)
    a_factor = a_gain * tl.load(cos + angle)
    b_factor = tl.where(c < d // 2, -b_gain, b_gain) * tl.load(sin + angle)
    return a * a_factor[None, :] + b * b_factor[None, :], tl.sum(a * a, 1)


@triton.jit
def turned(x, offsets, exists, gain, cos, sin, eps, dtype: tl.constexpr, D0: tl.constexpr,
           D1: tl.constexpr):
    """QK-norm and RoPE of rows, as a pair; the norm's factor is one for a row and comes last."""
    a, squares = turned_columns(x, offsets, exists, gain, cos, sin, 0, D0, D0 + D1)
    c = a
    if D1 > 0:
        c, more = turned_columns(x, offsets, exists, gain, cos, sin, D0, D1, D0 + D1)
        squares += more
    r = tl.rsqrt(squares / (D0 + D1) + eps)[:, None]
    return (a * r).to(dtype), (c * r).to(dtype)


@triton.jit
def one_more(m, total, acc0, acc1, s, value, D1: tl.constexpr):
    """The running softmax with one more key, of scores s."""
    m_new = tl.maximum(m, s)
    shrink, weight = tl.exp2(m - m_new), tl.exp2(s - m_new)
    acc0 = acc0 * shrink[:, None] + weight[:, None] * value[0].to(tl.float32)
    if D1 > 0:
        acc1 = acc1 * shrink[:, None] + weight[:, None] * value[1].to(tl.float32)
    return m_new, total * shrink + weight, acc0, acc1


@triton.jit
def own_key(qkv, i, Hkv, gain, cos, sin, eps, dtype: tl.constexpr, D0: tl.constexpr,
            D1: tl.constexpr):
    """Key and value of heads i and i + Hkv, as projected, each a pair of a single row."""
    one = tl.arange(0, 1) + i
    k = turned(qkv, one * (D0 + D1), one >= 0, gain, cos, sin, eps, dtype, D0, D1)
    return k, kernels.load_rows(qkv, (one + Hkv) * (D0 + D1), one >= 0, D0, D1)


@triton.jit
def attention_kernel(qkv, q_gain, k_gain, cos, sin, columns, keys, values, k0, k1, v0, v1, part,
                     part_lse2, done, out, start, stop, sink_k, sink_v, scale2, eps, H, Hkv,
                     stride_b, stride_s, stride_h, G: tl.constexpr, SPLITS: tl.constexpr,
                     D0: tl.constexpr, D1: tl.constexpr, BLOCK_D: tl.constexpr,
                     BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr):
    """A share of the keys of one row and key-value head; BLOCK_M >= G packed queries. Without a
    k_gain, the layer has no keys of its own."""
    d: tl.constexpr = D0 + D1
    dtype: tl.constexpr = keys.dtype.element_ty
    b, head, split = tl.program_id(0) // Hkv, tl.program_id(0) % Hkv, tl.program_id(1)
    # before the wait, as the product between `place` and this kernel has waited for `place`
    lo, end = tl.load(start + b), tl.load(stop + b)
    share = tl.cdiv(tl.cdiv(end - lo, BLOCK_N), SPLITS) * BLOCK_N  # in whole blocks
    lo += split * share
    hi = tl.minimum(end, lo + share)
    if sink_k is not None:  # never changes
        k_sink, v_sink = load_sink(sink_k + head * d, D0, D1), load_sink(sink_v + head * d, D0, D1)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    g = tl.arange(0, BLOCK_M)
    row = b * (H + 2 * Hkv if k_gain is not None else H)  # of qkv, in heads
    cos += b * (d // 2)
    sin += b * (d // 2)
    query = turned(qkv, (row + head * G + g) * d, g < G, q_gain, cos, sin, eps, dtype, D0, D1)

    # a finite lower bound in place of -inf: exp2(-inf - m) is 0 for a row without keys, never NaN
    m = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc0, acc1 = zeros_pair(BLOCK_M, D0, D1)
    if split == 0:  # keys that are not in the cache
        if sink_k is not None:
            s = row_dot(query, k_sink, D1) * scale2
            m, total, acc0, acc1 = one_more(m, total, acc0, acc1, s, v_sink, D1)
        if k_gain is not None:
            k, v = own_key(qkv, row + H + head, Hkv, k_gain, cos, sin, eps, dtype, D0, D1)
            s = row_dot(query, k, D1) * scale2
            m, total, acc0, acc1 = one_more(m, total, acc0, acc1, s, v, D1)
            slot = b.to(tl.int64) * stride_b + tl.load(columns + b) * stride_s + head * stride_h
            slot += tl.arange(0, 1)
            store_rows(keys, slot, slot >= 0, k[0], k[1], D0, D1)
            store_rows(values, slot, slot >= 0, v[0], v[1], D0, D1)
    # from here on a sum for each key of a block, so that warps add up theirs once, in the end
    total = tl.where(tl.arange(0, BLOCK_N)[None, :] == 0, total[:, None], 0.0)
    for j0 in tl.range(lo, hi, BLOCK_N):
        k = kernels.load(k0, k1, b, j0, head, BLOCK_N, D0, D1)
        v = kernels.load(v0, v1, b, j0, head, BLOCK_N, D0, D1)
        j = j0 + tl.arange(0, BLOCK_N)[None, :]
        s = tl.where(visible(lo, hi, j), dot_t(query, k, D1), float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale2)
        p = tl.exp2(s * scale2 - m_new[:, None])
        shrink = tl.exp2(m - m_new)
        total = total * shrink[:, None] + p
        acc0, acc1 = dot_add(p, v, acc0 * shrink[:, None], acc1 * shrink[:, None], D1)
        m = m_new
    total = tl.sum(total, 1)
    if EARLY:  # not before, as the next kernel would take up room beside other parts' programs
        tl.extra.cuda.gdc_launch_dependents()
    safe = tl.where(total > 0, total, 1.0)
    acc0 /= safe[:, None]
    acc1 /= safe[:, None]
    lse2 = tl.where(total > 0, m + tl.log2(safe), float("-inf"))
    hand_over(acc0, acc1, lse2, g, part, part_lse2, done, out, G, SPLITS, D0, D1, BLOCK_D)


@triton.jit
def hand_over(acc0, acc1, lse2, g, part, part_lse2, done, out, G: tl.constexpr,
              SPLITS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK_D: tl.constexpr):
    """What queries g < G read of a share, to `out` if it is the only one; else beside the others,
    which the last program to come adds up."""
    d: tl.constexpr = D0 + D1
    head = tl.program_id(0)
    rows, stride = head * G + g, tl.num_programs(0) * G
    if SPLITS == 1:
        store_rows(out, rows * d, g < G, acc0, acc1, D0, D1)
    else:
        first = tl.program_id(1) * stride
        store_rows(part + first * d, rows * d, g < G, acc0, acc1, D0, D1)
        tl.store(part_lse2 + first + rows, lse2, g < G)
        tl.debug_barrier()  # all threads of the program have written
        if tl.atomic_add(done + head, 1, sem="acq_rel") == SPLITS - 1:
            merge(part, part_lse2, out, stride, G, SPLITS, d, BLOCK_D)
            tl.store(done + head, 0)  # for the next step


@triton.jit
def store_rows(base, offsets, exists, a, b, D0: tl.constexpr, D1: tl.constexpr):
    at, mask = base + offsets[:, None], exists[:, None]
    tl.store(at + tl.arange(0, D0)[None, :], a.to(base.dtype.element_ty), mask)
    if D1 > 0:
        tl.store(at + D0 + tl.arange(0, D1)[None, :], b.to(base.dtype.element_ty), mask)


@triton.jit
def merge(part, part_lse2, out, stride, G: tl.constexpr, SPLITS: tl.constexpr, d: tl.constexpr,
          BLOCK: tl.constexpr):
    """Add up the shares of G queries by their weights. Past the first cache, which may hold what
    stood there before."""
    GP: tl.constexpr = triton.next_power_of_2(G)
    n, g, c = tl.arange(0, SPLITS)[:, None], tl.arange(0, GP)[None, :], tl.arange(0, BLOCK)
    at = n * stride + tl.program_id(0) * G + g  # (SPLITS, GP)
    some = (n >= 0) & (g < G)
    x = tl.load(part_lse2 + at, some, 0.0, cache_modifier=".cg")
    y = tl.load(part + at[:, :, None] * d + c[None, None, :],
                some[:, :, None] & (c < d)[None, None, :], 0.0, cache_modifier=".cg")
    w = tl.exp2(x - tl.maximum(tl.max(x, 0), -1e30)[None, :])
    total = tl.sum(w, 0)
    y = tl.sum(y * w[:, :, None], 0) / tl.where(total > 0, total, 1.0)[:, None]
    g = tl.arange(0, GP)[:, None]
    tl.store(out + (tl.program_id(0) * G + g) * d + c[None, :], y.to(out.dtype.element_ty),
             (g < G) & (c < d)[None, :])


# ---- host side --------------------------------------------------------------------------------


def product(x: Tensor, w: Tensor, residual: Tensor | None = None, normed: bool = False,
            gated: bool = False, out: Tensor | None = None, early: bool = True) -> Tensor:
    """x (B, K) @ w (E, K)^T -> (B, E), B <= 16. With `normed`, of the RMSNorm of x, whose gain is
    in w; `gated`, w (2 E, K) gives silu(gate) * up."""
    (B, K), E = x.shape, w.size(0) // (2 if gated else 1)
    block_e, most, warps = PRODUCT
    warps *= 1 if K <= 2048 else 2  # for all columns of x to fit in registers
    block_k = min(most, max(16, triton.next_power_of_2(triton.cdiv(K, warps))))
    out = x.new_empty(B, E) if out is None else out
    product_kernel[triton.cdiv(E, block_e),](
        x, w, residual, out, B, E, EPS, K=K, NORM=normed, GATED=gated, ROWS=16, BLOCK_E=block_e,
        WARPS=warps, BLOCK_K=block_k, num_warps=warps, **launch(early))
    return out


def head(x: Tensor, w: Tensor, early: bool = True) -> Tensor:
    """RMSNorm of x (B, K), whose gain is in w (E, K), @ w^T -> (B, E), B <= 64, with NaN for
    infinities."""
    (B, K), E = x.shape, len(w)
    rows = max(16, triton.next_power_of_2(B))
    block_e, block_k, warps, stages = HEAD[rows]
    out = x.new_empty(B, E)
    head_kernel[triton.cdiv(E, block_e),](x, w, out, B, E, EPS, K=K, ROWS=rows, BLOCK_E=block_e,
                                          BLOCK_K=block_k, num_warps=warps, num_stages=stages,
                                          **launch(early))
    return out


class Scratch:
    """What the programs of `attention` hand each other; `splits` share the keys of a row."""

    def __init__(self, cache: Tensor, B: int, H: int, splits: int):
        Hkv, d = cache.shape[-2:]
        self.splits = splits
        self.part = cache.new_empty(splits, B, H, d, dtype=torch.float32)
        self.lse2 = cache.new_empty(splits, B, H, dtype=torch.float32)
        self.done = cache.new_zeros(B * Hkv, dtype=torch.int32)


def attention(qkv: Tensor, layer: "Layer", k: Tensor, v: Tensor, rows: Rows, sink,
              scratch: Scratch) -> Tensor:
    """Queries as projected, qkv (B, H d), on k, v (B, S, Hkv, d) and the sink (Hkv, d) each, if any
    -> (B, H d). With the token's own keys and values behind them, qkv (B, (H + 2 Hkv) d), on these
    too, which go to the rows' columns of k and v."""
    (B, _, Hkv, d), own = k.shape, layer.k_norm is not None
    H = qkv.size(1) // d - 2 * Hkv * own
    kernels.check(qkv[:, None, :H * d].unflatten(-1, (H, d)), k, rows.start, rows.stop, k, v)
    d0, d1 = split_head(d)
    c = dict(D0=d0, D1=d1, BLOCK_D=triton.next_power_of_2(d))
    block_n, warps, stages = ATTENTION
    sink_k, sink_v = (None, None) if sink is None else (s.contiguous() for s in sink)
    out = qkv.new_empty(B, H * d)
    attention_kernel[B * Hkv, scratch.splits](
        qkv, layer.q_norm, layer.k_norm, rows.cos, rows.sin, rows.columns, k, v,
        *kernels.tiles(block_n, 0, c, k, v), scratch.part, scratch.lse2, scratch.done, out,
        rows.start, rows.stop, sink_k, sink_v, d ** -0.5 * LOG2E, EPS, H, Hkv, *k.stride()[:3],
        G=H // Hkv, SPLITS=scratch.splits, BLOCK_M=max(16, triton.next_power_of_2(H // Hkv)),
        BLOCK_N=block_n, **c, num_warps=warps, num_stages=stages, **launch())
    return out


class Layer(NamedTuple):
    """A block's weights for one token per row; the gains of the norms before them are in them."""

    qkv: Tensor  # (E, D), of queries and, where it projects them itself, keys and values
    q_norm: Tensor
    k_norm: Tensor | None
    o: Tensor
    gate_up: Tensor
    down: Tensor


def folded(dtype: torch.dtype, gain: Tensor, *weights: Tensor) -> Tensor:
    """Matrices (E_i, D) below each other, times the gain (D,)."""
    return (torch.cat([w.detach() for w in weights]) * gain.detach()).to(dtype)


def layer_of(block: Block, dtype: torch.dtype) -> Layer:
    own = (block.k_proj.weight, block.v_proj.weight) if block.has_kv else ()
    return Layer(folded(dtype, block.attn_norm.weight, block.q_proj.weight, *own),
                 block.q_norm.weight, block.k_norm.weight if own else None, block.o_proj.copy,
                 folded(dtype, block.mlp_norm.weight, block.gate_proj.weight,
                        block.up_proj.weight),
                 block.down_proj.copy)


def serve(model: Decoder, rows: int) -> bool:
    """Are these kernels for steps of so many rows of a twin (kernels/twin.py)?"""
    c = model.config
    return (model.decodes and rows <= MAX_ROWS
            and max(c.n_embd, c.n_head * c.head_dim, c.n_hidden) <= MAX_WIDTH)


class Part(NamedTuple):
    """Rows that go up the stack together, on a stream of their own."""

    at: slice
    rows: Rows
    scratch: Scratch
    stream: torch.cuda.Stream | None  # None: the caller's


class Steps:
    """Steps of B rows on a cache of fixed size.

    Attention keeps the memory busy and little else, products the rest: so parts of the rows go up
    the stack side by side, and while some attend, others multiply. They take turns at attention, as
    those that attended all at once would multiply all at once. What goes to the cache after a step
    is computed as soon as its states are there, beside the blocks above and the choice of the next
    token: `finish` waits for it.
    """

    def __init__(self, model: Decoder, cache: TapeCache):
        """The cache (C, B, S, Hkv, d) is that of the model."""
        c, (_, B, S, Hkv, d) = model.config, cache.k_all.shape
        self.model, self.cache = model, cache
        like, new = cache.k_all, cache.k_all.new_empty
        self.tables = rotary_tables(torch.arange(S + 1, device=like.device), d)
        self.h = new(len(model.blocks) + 1, B, c.n_embd)
        self.rows = Rows(new(B, 1, dtype=torch.long), *(new(B, 1, dtype=torch.int32)
                                                        for _ in range(2)),
                         *(new(B, 1, d // 2, dtype=torch.float32) for _ in range(2)))
        self.layers = [layer_of(block, like.dtype) for block in model.blocks]
        self.head = folded(like.dtype, model.norm.weight, model.embed.weight)
        self.side = torch.cuda.Stream() if like.is_cuda else None
        self.parts, r = [], self.rows
        size = triton.cdiv(B, triton.cdiv(B, PART))
        for first in range(0, B, size):
            n = min(size, B - first)
            at = slice(first, first + n)
            rows = Rows(*(t[at] for t in (r.columns, r.start, r.stop, r.cos, r.sin)))
            # so many programs that the parts whose turn it is fill the device
            splits = kernels.splits_of(min(B, RING * n) * Hkv, S, PROGRAMS)
            scratch = Scratch(like, n, c.n_head, splits)
            stream = torch.cuda.Stream() if first and like.is_cuda else None
            self.parts.append(Part(at, rows, scratch, stream))

    def __call__(self, ids: Tensor, index: Tensor, start: Tensor, count: Tensor) -> Tensor:
        """`decoding.step` of tokens ids (B,) at columns index of documents that begin at start;
        returns h[L] (B, D). Then index, start and count (1,) are those of the next tokens. All
        are contiguous."""
        model, rows, c = self.model, self.rows, self.model.config
        place_kernel[len(ids),](
            ids, index, start, count, model.embed_copy, *self.tables, self.h, rows.cos, rows.sin,
            rows.columns, rows.start, rows.stop, -1 if c.eos_id is None else c.eos_id,
            FIRST=int(model.has_dummy), D=c.n_embd, HALF=c.head_dim // 2,
            BLOCK_D=triton.next_power_of_2(c.n_embd),
            BLOCK_H=triton.next_power_of_2(c.head_dim // 2), **launch())
        turns, pooled = [], len(self.layers) - model.n_top  # h[pooled] is the last that is stored
        for part in self.parts:
            fork(part.stream)
        for i in range(len(self.layers)):
            for part in self.parts:
                with torch.cuda.stream(part.stream):
                    self.up(i, part, turns)
            if model.iterates and i + 1 == pooled:
                for part in self.parts:
                    with torch.cuda.stream(part.stream):
                        fork(self.side)
                with torch.cuda.stream(self.side):
                    model.store([x[:, None] for x in self.h[:pooled + 1]], rows, self.cache)
        for part in self.parts:
            join(part.stream)
        return self.h[-1]

    def finish(self):
        """The step is complete, and another may come."""
        if self.model.iterates:
            join(self.side)

    def up(self, i: int, part: Part, turns: list[torch.cuda.Event]):
        """Rows of a part through layer i; turns: the ends of all parts' attention so far."""
        layer, j, x = self.layers[i], i % self.model.n_channels, self.h[i][part.at]
        y = product(x, layer.qkv, normed=True, early=i > 0 or len(self.parts) == 1)
        if len(turns) >= RING:
            torch.cuda.current_stream().wait_event(turns[-RING])
        y = attention(y, layer, self.cache.k[j][part.at], self.cache.v[j][part.at], part.rows,
                      self.cache.sinks[j], part.scratch)
        if len(self.parts) > RING and y.is_cuda:
            turns.append(torch.cuda.current_stream().record_event())
        x = product(y, layer.o, residual=x)
        y = product(x, layer.gate_up, normed=True, gated=True)
        product(y, layer.down, residual=x, out=self.h[i + 1][part.at])

    def logits(self, h: Tensor) -> Tensor:
        """`Decoder.logits` of final states h (B, D), with NaN for infinities."""
        return head(h, self.head, early=len(self.parts) == 1)


def fork(stream: torch.cuda.Stream | None):
    """Have a stream wait for the current one."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())


def join(stream: torch.cuda.Stream | None):
    """Have the current stream wait for another."""
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
