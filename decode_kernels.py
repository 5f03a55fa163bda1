"""
One token per row, without gradients: five kernels a layer and few around them, in Triton.

    place       the token's embedding, angles and interval of keys; the rows move on by one
    heads       norm, projection, QK-norm and RoPE; a layer's own keys and values go to the cache
    attention   programs share the keys of a row; the last one that is done adds up their parts
    product     y @ w^T, added to the residual stream
    product     the norm before the MLP, gate and up, SwiGLU
    product     down, added to the residual stream
    product     the last norm and the head

`Steps` is `decoding.step`: the same computation with the same weights, where time is not work but
launches and the latency of memory. Nothing waits for the host, no shape depends on how far the
rows are: all of it may be captured in a CUDA graph.

Dimensions: B rows, D width, K inner and E outer features of a product, H query heads, Hkv
key-value heads, G = H / Hkv, F = H or H + 2 Hkv heads that are projected together, d head size
(its halves are rotated), S columns of the cache. Rows are padded to ROWS, at least the 16 that a
matrix unit takes. The pieces of attention are those of kernels.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

import kernels
from attention import Cache, Rows, is_fast
from kernels import LOG2E, dot_add, dot_t, load_sink, row_dot, visible, zeros_pair
from model import Block, Decoder, rotary_tables
from norm_kernels import norm_rotate, pair, store_halves

# More rows are left to model.states and cuBLAS. On an H100 (context 2048, greedy, k=16, one run) a
# token of 64 rows took 1,525 us by these kernels and 1,641 without.
MAX_ROWS = 64

# kernel, rows of a program: (its features, inner features at a time, and on their way, warps).
# Few rows and many programs: weights come from memory once and then from the cache.
CONFIGS = {
    "product": {16: (16, 128, 1024, 4)},
    "gated": {16: (16, 512, 1024, 4), 64: (16, 64, 512, 4)},
    "heads": {16: (None, 512, 512, 4)},
    "logits": {16: (128, 64, 256, 4), 64: (128, 64, 256, 4)},
}
ATTENTION = (64, 4, 3)  # keys at a time, warps, stages


# ---- before and after the stack ---------------------------------------------------------------


@triton.jit
def place_kernel(ids, index, start, count, embed, cos_table, sin_table, x, cos, sin, columns,
                 first, stop, B, eos, FIRST: tl.constexpr, ITSELF: tl.constexpr,
                 D: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr,
                 BLOCK_H: tl.constexpr):
    """Of one row: all that the stack needs of its token; then index, start and count move on."""
    b = tl.program_id(0)
    token = tl.load(ids + b)
    i, s = tl.load(index + b), tl.load(start + b)
    c, m = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_H)
    tl.store(x + b * D + c, tl.load(embed + token * D + c, c < D), c < D)
    at = (i - s + FIRST) * HALF + m
    tl.store(cos + b * HALF + m, tl.load(cos_table + at, m < HALF), m < HALF)
    tl.store(sin + b * HALF + m, tl.load(sin_table + at, m < HALF), m < HALF)
    tl.store(columns + b, i)
    tl.store(first + b, s.to(tl.int32))
    tl.store(stop + b, (i + ITSELF).to(tl.int32))
    tl.store(index + b, i + 1)
    tl.store(start + b, tl.where(token == eos, i + 1, s))
    if b == 0:
        tl.store(count, tl.load(count) + 1)


# ---- products ---------------------------------------------------------------------------------


@triton.jit
def input_tile(x, n, k, B, K, EVEN: tl.constexpr):
    """Rows n of x, columns k."""
    mask = (n < B)[:, None]
    if not EVEN:
        mask = mask & (k < K)[None, :]
    return tl.load(x + n[:, None] * K + k[None, :], mask, 0.0)


@triton.jit
def weight_tile(w, e, k, exists, K, EVEN: tl.constexpr):
    mask = exists[:, None]
    if not EVEN:
        mask = mask & (k < K)[None, :]
    return tl.load(w + e.to(tl.int64)[:, None] * K + k[None, :], mask, 0.0)


@triton.jit
def product_kernel(x, w, residual, out, B, E, eps, K: tl.constexpr, NORM: tl.constexpr,
                   GATED: tl.constexpr, RESIDUAL: tl.constexpr, CHECK: tl.constexpr,
                   ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
                   EVEN: tl.constexpr):
    """[residual +] [norm of] x @ w^T; GATED: of w (2 E, K), silu(first half) * second half."""
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros((ROWS, BLOCK_E), tl.float32)
    up = acc
    squares = tl.zeros((ROWS,), tl.float32)
    for k0 in tl.range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        a = input_tile(x, n, k, B, K, EVEN)
        if NORM:
            wide = a.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
        acc = tl.dot(a, tl.trans(weight_tile(w, e, k, e < E, K, EVEN)), acc)
        if GATED:
            up = tl.dot(a, tl.trans(weight_tile(w, E + e, k, e < E, K, EVEN)), up)
    if NORM:  # the norm's factor is one for a row: it may as well come last
        r = tl.rsqrt(squares / K + eps)[:, None]
        acc *= r
        up *= r
    if GATED:
        acc = acc / (1.0 + tl.exp2(-1.4426950408889634 * acc)) * up
    at, mask = n.to(tl.int64)[:, None] * E + e[None, :], (n < B)[:, None] & (e < E)[None, :]
    if RESIDUAL:
        acc += tl.load(residual + at, mask, 0.0).to(tl.float32)
    y = acc.to(out.dtype.element_ty)
    if CHECK:  # infinities become NaN, which is seen at the top
        y = tl.where(tl.abs(y.to(tl.float32)) < float("inf"), y, float("nan"))
    tl.store(out + at, y, mask)


@triton.jit
def heads_kernel(x, w, q_gain, k_gain, cos, sin, columns, q, keys, values, B, S, eps,
                 K: tl.constexpr, H: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr,
                 BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
                 EVEN: tl.constexpr):
    """One head of some rows: a query's goes to q (B, H, d), a key's or value's to the rows' columns
    of the cache (B, S, Hkv, d)."""
    d: tl.constexpr = 2 * HALF
    f = tl.program_id(0)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    m = tl.arange(0, BLOCK)
    first, second = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for k0 in tl.range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        a = input_tile(x, n, k, B, K, EVEN)
        wide = a.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        first = tl.dot(a, tl.trans(weight_tile(w, f * d + m, k, m < HALF, K, EVEN)), first)
        second = tl.dot(a, tl.trans(weight_tile(w, f * d + HALF + m, k, m < HALF, K, EVEN)),
                        second)
    r = tl.rsqrt(squares / K + eps)[:, None]
    first *= r
    second *= r
    exists = (n < B)[:, None] & (m < HALF)[None, :]
    angle = n[:, None] * HALF + m[None, :]
    c, s = tl.load(cos + angle, exists, 0.0), tl.load(sin + angle, exists, 0.0)
    if f < H:
        ga, gb = pair(q_gain, HALF, BLOCK)
        first, second = norm_rotate(first, second, ga, gb, c, s, eps, HALF)
        store_halves(q, (n * H + f) * d, n < B, first, second, HALF, BLOCK)
    elif KV > 0:
        slot = n.to(tl.int64) * S + tl.load(columns + n, n < B, 0)
        if f < H + KV:
            ga, gb = pair(k_gain, HALF, BLOCK)
            first, second = norm_rotate(first, second, ga, gb, c, s, eps, HALF)
            store_halves(keys, (slot * KV + f - H) * d, n < B, first, second, HALF, BLOCK)
        else:
            store_halves(values, (slot * KV + f - H - KV) * d, n < B, first, second, HALF, BLOCK)


# ---- attention --------------------------------------------------------------------------------


@triton.jit
def attention_kernel(q, k0, k1, v0, v1, part, part_lse2, done, out, start, stop, sink_k, sink_v,
                     scale2, Hkv, G: tl.constexpr, SINK: tl.constexpr, SPLITS: tl.constexpr,
                     D0: tl.constexpr, D1: tl.constexpr, BLOCK_D: tl.constexpr,
                     BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A share of the keys of one row and key-value head; BLOCK_M >= G packed queries."""
    d: tl.constexpr = D0 + D1
    b, head, split = tl.program_id(0) // Hkv, tl.program_id(0) % Hkv, tl.program_id(1)
    lo, end = tl.load(start + b), tl.load(stop + b)
    share = tl.cdiv(tl.cdiv(end - lo, BLOCK_N), SPLITS) * BLOCK_N  # in whole blocks
    lo += split * share
    hi = tl.minimum(end, lo + share)
    g = tl.arange(0, BLOCK_M)
    rows = (tl.program_id(0) * G + g) * d  # of q and out: head * G + g within row b
    query = kernels.load_rows(q, rows, g < G, D0, D1)

    # a finite lower bound in place of -inf: exp2(-inf - m) is 0 for a row without keys, never NaN
    m = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc0, acc1 = zeros_pair(BLOCK_M, D0, D1)
    for j0 in tl.range(lo, hi, BLOCK_N):
        k = kernels.load(k0, k1, b, j0, head, BLOCK_N, D0, D1)
        v = kernels.load(v0, v1, b, j0, head, BLOCK_N, D0, D1)
        j = j0 + tl.arange(0, BLOCK_N)[None, :]
        s = tl.where(visible(lo, hi, j), dot_t(query, k, D1), float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale2)
        p = tl.exp2(s * scale2 - m_new[:, None])
        shrink = tl.exp2(m - m_new)
        total = total * shrink + tl.sum(p, 1)
        acc0, acc1 = dot_add(p, v, acc0 * shrink[:, None], acc1 * shrink[:, None], D1)
        m = m_new
    if SINK:  # noqa: SIM102  (without one, its pointers are None)
        if split == 0:
            s = row_dot(query, load_sink(sink_k + head * d, D0, D1), D1) * scale2
            m_new = tl.maximum(m, s)
            shrink, weight = tl.exp2(m - m_new)[:, None], tl.exp2(s - m_new)[:, None]
            v_sink = load_sink(sink_v + head * d, D0, D1)
            total = total * tl.exp2(m - m_new) + tl.exp2(s - m_new)
            acc0 = acc0 * shrink + weight * v_sink[0]
            if D1 > 0:
                acc1 = acc1 * shrink + weight * v_sink[1]
            m = m_new
    safe = tl.where(total > 0, total, 1.0)
    acc0 /= safe[:, None]
    acc1 /= safe[:, None]
    if SPLITS == 1:
        store_rows(out, rows, g < G, acc0, acc1, D0, D1)
    else:
        stride = tl.num_programs(0) * G
        store_rows(part + split * stride * d, rows, g < G, acc0, acc1, D0, D1)
        tl.store(part_lse2 + split * stride + tl.program_id(0) * G + g,
                 tl.where(total > 0, m + tl.log2(safe), float("-inf")), g < G)
        tl.debug_barrier()  # all threads of the program have written
        if tl.atomic_add(done + tl.program_id(0), 1, sem="acq_rel") == SPLITS - 1:
            merge(part, part_lse2, out, stride, G, SPLITS, d, BLOCK_D)
            tl.store(done + tl.program_id(0), 0)  # for the next step


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
    n, c = tl.arange(0, SPLITS), tl.arange(0, BLOCK)
    for g in tl.static_range(G):
        row = tl.program_id(0) * G + g
        x = tl.load(part_lse2 + n * stride + row, cache_modifier=".cg")
        w = tl.exp2(x - tl.maximum(tl.max(x, 0), -1e30))
        total = tl.sum(w, 0)
        y = tl.load(part + (n * stride + row)[:, None] * d + c[None, :], (c < d)[None, :], 0.0,
                    cache_modifier=".cg")
        y = tl.sum(y * w[:, None], 0) / tl.where(total > 0, total, 1.0)
        tl.store(out + row * d + c, y.to(out.dtype.element_ty), c < d)


# ---- host side --------------------------------------------------------------------------------


def options(kind: str, B: int, K: int) -> tuple[int | None, int, dict]:
    """Features of a program, programs along the rows, and constants and launch options."""
    table = CONFIGS[kind]
    rows = min((n for n in table if n >= B), default=max(table))
    block_e, most, flight, warps = table[rows]
    block_k = max(64, min(most, K & -K))  # the largest power of two that divides K, if it can be
    return block_e, triton.cdiv(B, rows), dict(
        ROWS=rows, BLOCK_K=block_k, EVEN=K % block_k == 0, num_warps=warps,
        num_stages=1 + min(8, triton.cdiv(min(flight, K), block_k)))


def product(x: Tensor, w: Tensor, residual: Tensor | None = None, normed: bool = False,
            gated: bool = False, kind: str | None = None, eps: float = 1e-6) -> Tensor:
    """x (B, K) @ w (E, K)^T -> (B, E). With `normed`, of the RMSNorm of x, whose gain is in w;
    `gated`, w (2 E, K) gives silu(gate) * up."""
    (B, K), E = x.shape, w.size(0) // (2 if gated else 1)
    block_e, row_blocks, constants = options(kind or ("gated" if gated else "product"), B, K)
    out = x.new_empty(B, E)
    product_kernel[triton.cdiv(E, block_e), row_blocks](
        x, w, residual, out, B, E, eps, K=K, NORM=normed, GATED=gated,
        RESIDUAL=residual is not None, CHECK=kind == "logits", BLOCK_E=block_e, **constants)
    return out


def heads(x: Tensor, w: Tensor, q_gain: Tensor, k_gain: Tensor | None, rows: Rows, keys: Tensor,
          values: Tensor, eps: float = 1e-6) -> Tensor:
    """Queries (B, H, d) of the norm of x (B, K), whose gain is in w; where w (F d, K) projects keys
    and values too, these are written to the rows' columns of keys and values (B, S, Hkv, d)."""
    (B, K), (_, S, Hkv, d) = x.shape, keys.shape
    F = w.size(0) // d
    KV = 0 if k_gain is None else Hkv
    q = x.new_empty(B, F - 2 * KV, d)
    _, row_blocks, constants = options("heads", B, K)
    heads_kernel[F, row_blocks](
        x, w, q_gain, k_gain, rows.cos, rows.sin, rows.columns, q, keys, values, B, S, eps,
        K=K, H=F - 2 * KV, KV=KV, HALF=d // 2, BLOCK=max(16, triton.next_power_of_2(d // 2)),
        **constants)
    return q


class Scratch:
    """What the programs of `attention` hand each other, for B rows and a cache of S columns."""

    def __init__(self, cache: Tensor, B: int, H: int, S: int):
        Hkv, d = cache.shape[-2:]
        self.splits = kernels.splits_of(B * Hkv, S)
        self.part = cache.new_empty(self.splits, B, H, d, dtype=torch.float32)
        self.lse2 = cache.new_empty(self.splits, B, H, dtype=torch.float32)
        self.done = cache.new_zeros(B * Hkv, dtype=torch.int32)


def attention(q: Tensor, k: Tensor, v: Tensor, rows: Rows, sink, scratch: Scratch) -> Tensor:
    """q (B, H, d) on k, v (B, S, Hkv, d) and the sink (Hkv, d) each, if any -> (B, H d)."""
    (B, H, d), Hkv = q.shape, k.size(2)
    kernels.check(q[:, None], k, rows.start, rows.stop, k, v)
    d0 = 1 << (d.bit_length() - 1)
    c = dict(D0=d0, D1=d - d0, BLOCK_D=triton.next_power_of_2(d))
    block_n, warps, stages = ATTENTION
    sink_k, sink_v = (None, None) if sink is None else (s.contiguous() for s in sink)
    out = torch.empty_like(q)
    attention_kernel[B * Hkv, scratch.splits](
        q, *kernels.tiles(block_n, 0, c, k, v), scratch.part, scratch.lse2, scratch.done, out,
        rows.start, rows.stop, sink_k, sink_v, d ** -0.5 * LOG2E, Hkv, G=H // Hkv,
        SINK=sink is not None, SPLITS=scratch.splits,
        BLOCK_M=max(16, triton.next_power_of_2(H // Hkv)), BLOCK_N=block_n, **c,
        num_warps=warps, num_stages=stages)
    return out.view(B, H * d)


class Layer(NamedTuple):
    """A block's weights for one token per row; the gains of the norms before them are in them."""

    heads: Tensor  # (F d, D), of queries and, where it projects them itself, keys and values
    q_norm: Tensor
    k_norm: Tensor | None
    o: Tensor
    gate_up: Tensor
    down: Tensor


def folded(gain: Tensor, *weights: Tensor) -> Tensor:
    """Matrices (E_i, D) below each other, times the gain (D,), as precise as their copies."""
    return (torch.cat([w.detach() for w in weights]) * gain.detach()).to(weights[0].compute.dtype)


def layer_of(block: Block) -> Layer:
    own = (block.k_proj, block.v_proj) if block.own_kv else ()
    return Layer(folded(block.attn_norm, block.q_proj, *own), block.q_norm, block.k_norm,
                 block.o_proj.compute, folded(block.mlp_norm, block.gate_proj, block.up_proj),
                 block.down_proj.compute)


def serve(model: Decoder, h: Tensor) -> bool:
    """Are these kernels for a step of states h (B, D): few rows, on a GPU, weights with copies?"""
    return (model.config.kv in ("vanilla", "whitematter") and is_fast(h) and len(h) <= MAX_ROWS
            and hasattr(model.embed, "compute"))


class Steps:
    """Steps of B rows on a cache of fixed size."""

    def __init__(self, model: Decoder, cache: Cache):
        """The cache (C, B, S, Hkv, d) is that of the model."""
        c, (_, B, S, _, d) = model.config, cache.k.shape
        self.model, self.cache = model, cache
        like = cache.k
        self.tables = rotary_tables(torch.arange(S + 1, device=like.device), d)
        new = like.new_empty
        self.x = new(B, c.n_embd)
        self.rows = Rows(new(B, 1, dtype=torch.long), *(new(B, 1, dtype=torch.int32)
                                                        for _ in range(2)),
                         *(new(B, 1, d // 2, dtype=torch.float32) for _ in range(2)))
        self.scratch = Scratch(like, B, c.n_head, S)
        self.layers = [layer_of(block) for block in model.blocks]
        self.head = folded(model.norm, model.embed)

    def __call__(self, ids: Tensor, index: Tensor, start: Tensor, count: Tensor) -> Tensor:
        """`decoding.step` of tokens ids (B,) at columns index of documents that begin at start;
        returns h[L] (B, D). Then index, start and count (1,) are those of the next tokens. All
        are contiguous."""
        model, rows, c = self.model, self.rows, self.model.config
        embed = model.embed.compute
        place_kernel[len(ids),](
            ids, index, start, count, embed, *self.tables, self.x, rows.cos, rows.sin,
            rows.columns, rows.start, rows.stop, len(ids), -1 if c.eos_id is None else c.eos_id,
            FIRST=int(model.has_dummy), ITSELF=int(model.reads_itself), D=c.n_embd,
            HALF=c.head_dim // 2, BLOCK_D=triton.next_power_of_2(c.n_embd),
            BLOCK_H=triton.next_power_of_2(c.head_dim // 2))
        h = self.states()
        if model.iterates:
            model.store(h, rows, self.cache)
        return h[-1][:, 0]

    def states(self) -> list[Tensor]:
        """`Decoder.states` of the tokens that were placed, h[0..L] (B, 1, D)."""
        rows, x, h = self.rows, self.x, [self.x[:, None]]
        for i, layer in enumerate(self.layers):
            j = i % self.model.n_channels
            k, v = self.cache.k[j], self.cache.v[j]
            q = heads(x, layer.heads, layer.q_norm, layer.k_norm, rows, k, v)
            y = attention(q, k, v, rows, self.cache.sinks[j], self.scratch)
            x = product(y, layer.o, residual=x)
            y = product(x, layer.gate_up, normed=True, gated=True)
            x = product(y, layer.down, residual=x)
            h.append(x[:, None])
        return h

    def logits(self, h: Tensor) -> Tensor:
        """`Decoder.logits` of final states h (B, D), with NaN for infinities."""
        return product(h, self.head, normed=True, kind="logits")
