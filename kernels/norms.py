"""
Norms together with what stands beside them, in Triton: one kernel forward, one backward each.

    add_norm      x + y, and its RMSNorm                     between the halves of a block
    split_heads   QK-norm and RoPE of queries (and keys)     after their projection
    store, take   the pool's keys normed, rotated and written into the cache, values beside them;
                  backward, the gradient there is taken out and, unless nobody will read
                  them, zeros are left

A gain's gradient is a sum over all tokens. Each of PROGRAMS programs keeps its part of it in a
row of its own, of `Gain.partial` (PROGRAMS, ...), to which all group steps of a micro-step add;
`Gains.collect` adds up the rows at the end. So there are no atomics, the bits are the same every
time, and no small kernel follows each norm. Without `partial`, autograd adds them up as usual.

Dimensions: N tokens, D width, H query heads, Hkv key-value heads, F = H or H + 2 Hkv heads that
are projected together, d head size (its halves are rotated), k channels.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 528  # that share a gain's gradient: four for each of a Hopper GPU's 132 multiprocessors
STORE_PROGRAMS = 32  # of each head and channel
EPS = 1e-6  # that of `model.rms_norm`
# kernel: (tokens, or vectors of d, at a time; warps)
CONFIGS = {"add_norm": (4, 4), "add_norm_backward": (8, 2), "heads": (16, 1),
           "heads_backward": (16, 4), "store": (32, 4), "take": (32, 4)}


def config(kernel: str, size: int) -> dict:
    """Constants of a kernel whose vectors have `size` columns, and its launch options."""
    rows, warps = CONFIGS[kernel]
    return dict(ROWS=rows, BLOCK=triton.next_power_of_2(size), num_warps=warps)


# ---- residual stream and norm -----------------------------------------------------------------


@triton.jit
def add_norm_kernel(x, y, gain, total, normed, rstd, N, eps, D: tl.constexpr, BLOCK: tl.constexpr,
                    ROWS: tl.constexpr):
    """total = x + y, unless that is x, normed = its norm, and rstd = 1 / rms for the way back; ROWS
    rows of D."""
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    at = n[:, None] * D + c[None, :]
    mask = (n < N)[:, None] & (c < D)[None, :]
    s = tl.load(x + at, mask, 0.0).to(tl.float32)
    if y is not None:  # rounded first, as what follows reads the rounded sum
        s = (s + tl.load(y + at, mask, 0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at, s, mask)
        s = s.to(tl.float32)
    r = tl.rsqrt(tl.sum(s * s, 1) / D + eps)
    g = tl.load(gain + c, c < D, 0.0).to(tl.float32)[None, :]
    tl.store(normed + at, (s * r[:, None] * g).to(normed.dtype.element_ty), mask)
    tl.store(rstd + n, r, n < N)


@triton.jit
def add_norm_backward_kernel(dnormed, dtotal, dstate, total, rstd, gain, out, partial, stride, N,
                             D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """out = the gradient of x, and of y; this program's part of the gain's joins its row."""
    c = tl.arange(0, BLOCK)
    g = tl.load(gain + c, c < D, 0.0).to(tl.float32)[None, :]
    dgain = tl.zeros((ROWS, BLOCK), tl.float32)
    for n0 in tl.range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS):
        n = tl.cast(n0, tl.int64) + tl.arange(0, ROWS)
        at = n[:, None] * D + c[None, :]
        mask = (n < N)[:, None] & (c < D)[None, :]
        r = tl.load(rstd + n, n < N, 0.0)[:, None]
        unit = tl.load(total + at, mask, 0.0).to(tl.float32) * r
        d = tl.load(dnormed + at, mask, 0.0).to(tl.float32)
        dgain += d * unit
        d *= g
        d = r * (d - unit * (tl.sum(d * unit, 1) / D)[:, None])
        if dtotal is not None:
            d += tl.load(dtotal + at, mask, 0.0).to(tl.float32)
        if dstate is not None:
            d += tl.load(dstate + at, mask, 0.0).to(tl.float32)
        tl.store(out + at, d.to(out.dtype.element_ty), mask)
    partial += tl.program_id(0) * stride + c
    tl.store(partial, tl.load(partial, c < D, 0.0) + tl.sum(dgain, 0), c < D)


class Gain:
    """The gain of a norm and, in training, the rows in which programs add up its gradient."""

    def __init__(self, weight: Tensor):
        self.weight = weight
        # (rows, ..., weight.numel()), of `Gains`; None: autograd adds up
        self.partial: Tensor = None

    def has_rows(self, n: int) -> bool:
        """Are there rows for n programs?"""
        return self.partial is None or n <= len(self.partial)

    def rows(self, *rows: int) -> Tensor:
        """`partial`, or zeros (*rows, weight.numel()) for one call alone."""
        if self.partial is not None:
            return self.partial
        return torch.zeros(*rows, self.weight.numel(), device=self.weight.device)

    def total(self, partial: Tensor) -> Tensor | None:
        """The gradient for autograd: None where `partial` is collected at the end."""
        if self.partial is not None:
            return None
        return partial.flatten(0, -2).sum(0).view_as(self.weight).to(self.weight.dtype)


class Gains:
    """Gains whose rows stand side by side: one kernel adds them all up (16 layers: 0.8 ms less a
    micro-step than one for each)."""

    def __init__(self, gains: list[Gain], *rows: int):
        """rows: leading shape of `partial`."""
        self.gains, self.sizes = gains, [gain.weight.numel() for gain in gains]
        self.partial = torch.zeros(*rows, sum(self.sizes), device=gains[0].weight.device)
        for gain, its in zip(gains, self.partial.split(self.sizes, -1)):
            gain.partial = its

    def collect(self):
        """Move what was added up to the weights' gradients."""
        grads, totals = [], []
        for gain, its in zip(self.gains, self.partial.flatten(0, -2).sum(0).split(self.sizes)):
            weight = gain.weight
            if weight.requires_grad:
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                grads.append(weight.grad)
                totals.append(its.view_as(weight))
        if grads:
            torch._foreach_add_(grads, totals)
        self.partial.zero_()


class AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, weight, gain):
        """x + y, its norm, and x + y again, all (..., D)."""
        D = x.size(-1)
        N = x.numel() // D
        x, y = x.contiguous(), y if y is None else y.contiguous()
        total, normed = x.detach() if y is None else torch.empty_like(x), torch.empty_like(x)
        rstd = x.new_empty(N, dtype=torch.float32)
        c = config("add_norm", D)
        add_norm_kernel[triton.cdiv(N, c["ROWS"]),](x, y, weight, total, normed, rstd, N, EPS, D=D,
                                                    **c)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, rstd)
        ctx.gain = gain
        return total, normed, total.detach()

    @staticmethod
    def backward(ctx, dtotal, dnormed, dstate):
        """The same gradient for x and y, and the gain's unless it is collected on the side."""
        if dnormed is None:  # in a pass before the last nobody reads the last block
            d = dtotal if dstate is None else dstate if dtotal is None else dtotal + dstate
            return d, d if ctx.needs_input_grad[1] else None, None, None
        (total, rstd), gain, D = ctx.saved_tensors, ctx.gain, dnormed.size(-1)
        out = torch.empty_like(total)
        partial = gain.rows(PROGRAMS)
        more = [None if d is None else d.contiguous() for d in (dtotal, dstate)]
        add_norm_backward_kernel[PROGRAMS,](
            dnormed.contiguous(), *more, total, rstd, gain.weight, out, partial, partial.stride(0),
            len(rstd), D=D, **config("add_norm_backward", D))
        return out, out if ctx.needs_input_grad[1] else None, gain.total(partial), None


def add_norm(x: Tensor, y: Tensor | None, gain: Gain) -> tuple[Tensor, ...]:
    """x + y (..., D), or x, its RMSNorm, and x + y once more for other readers of the state: their
    gradient then joins inside the backward kernel."""
    return AddNorm.apply(x, y, gain.weight, gain)


# ---- heads: norm and rotation -----------------------------------------------------------------


@triton.jit
def halves(base, rows, exists, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """The two halves of the vectors that begin at `rows`, in float32."""
    m = tl.arange(0, BLOCK)[None, :]
    at, mask = base + rows[:, None] + m, exists[:, None] & (m < HALF)
    return tl.load(at, mask, 0.0).to(tl.float32), tl.load(at + HALF, mask, 0.0).to(tl.float32)


@triton.jit
def store_halves(base, rows, exists, a, b, HALF: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.arange(0, BLOCK)[None, :]
    at, mask = base + rows[:, None] + m, exists[:, None] & (m < HALF)
    tl.store(at, a.to(base.dtype.element_ty), mask)
    tl.store(at + HALF, b.to(base.dtype.element_ty), mask)


@triton.jit
def pair(base, HALF: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.arange(0, BLOCK)
    return (tl.load(base + m, m < HALF, 0.0).to(tl.float32)[None, :],
            tl.load(base + HALF + m, m < HALF, 0.0).to(tl.float32)[None, :])


@triton.jit
def angles(cos, sin, n, exists, HALF: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.arange(0, BLOCK)[None, :]
    at, mask = n[:, None] * HALF + m, exists[:, None] & (m < HALF)
    return tl.load(cos + at, mask, 0.0), tl.load(sin + at, mask, 0.0)


@triton.jit
def norm_rotate(a, b, ga, gb, c, s, eps, HALF: tl.constexpr):
    r = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
    a, b = a * r * ga, b * r * gb
    return a * c - b * s, b * c + a * s


@triton.jit
def norm_rotate_gradient(a, b, ga, gb, c, s, da, db, eps, HALF: tl.constexpr):
    """d a, d b, and each token's part of the gain's gradient."""
    r = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
    a, b = a * r, b * r
    da, db = da * c + db * s, db * c - da * s
    dga, dgb = da * a, db * b
    da, db = da * ga, db * gb
    along = ((tl.sum(da * a, 1) + tl.sum(db * b, 1)) / (2 * HALF))[:, None]
    return r * (da - a * along), r * (db - b * along), dga, dgb


@triton.jit
def heads_kernel(x, q_gain, k_gain, cos, sin, q, k, v, N, eps, H: tl.constexpr, KV: tl.constexpr,
                 F: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """ROWS vectors of x (N, F, d): head f = i mod F of token n = i div F."""
    d: tl.constexpr = 2 * HALF
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n, f, exists = i // F, i % F, i < N * F
    a, b = halves(x, i * d, exists, HALF, BLOCK)
    c, s = angles(cos, sin, n, exists, HALF, BLOCK)
    ga, gb = pair(q_gain, HALF, BLOCK)
    if KV > 0:
        store_halves(v, (n * KV + f - H - KV) * d, exists & (f >= H + KV), a, b, HALF, BLOCK)
        ka, kb = pair(k_gain, HALF, BLOCK)
        is_q = (f < H)[:, None]
        ga, gb = tl.where(is_q, ga, ka), tl.where(is_q, gb, kb)
    a, b = norm_rotate(a, b, ga, gb, c, s, eps, HALF)
    store_halves(q, (n * H + f) * d, exists & (f < H), a, b, HALF, BLOCK)
    if KV > 0:
        is_k = exists & (f >= H) & (f < H + KV)
        store_halves(k, (n * KV + f - H) * d, is_k, a, b, HALF, BLOCK)


@triton.jit
def heads_backward_kernel(x, gain, cos, sin, dy, dx, partial, stride, N, eps, FIRST,
                          COUNT: tl.constexpr, F: tl.constexpr, HALF: tl.constexpr,
                          BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Of COUNT heads from FIRST on, which share a gain; dy (N, COUNT, d), x and dx (N, F, d)."""
    d: tl.constexpr = 2 * HALF
    ga, gb = pair(gain, HALF, BLOCK)
    sum_a, sum_b = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for i0 in tl.range(tl.program_id(0) * ROWS, N * COUNT, tl.num_programs(0) * ROWS):
        i = tl.cast(i0, tl.int64) + tl.arange(0, ROWS)
        n, exists = i // COUNT, i < N * COUNT
        at = (n * F + FIRST + i % COUNT) * d
        a, b = halves(x, at, exists, HALF, BLOCK)
        da, db = halves(dy, i * d, exists, HALF, BLOCK)
        c, s = angles(cos, sin, n, exists, HALF, BLOCK)
        da, db, dga, dgb = norm_rotate_gradient(a, b, ga, gb, c, s, da, db, eps, HALF)
        store_halves(dx, at, exists, da, db, HALF, BLOCK)
        sum_a += dga
        sum_b += dgb
    add_to_partial(partial + tl.program_id(0) * stride, sum_a, sum_b, HALF, BLOCK)


@triton.jit
def add_to_partial(row, sum_a, sum_b, HALF: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.arange(0, BLOCK)
    tl.store(row + m, tl.load(row + m, m < HALF, 0.0) + tl.sum(sum_a, 0), m < HALF)
    row += HALF
    tl.store(row + m, tl.load(row + m, m < HALF, 0.0) + tl.sum(sum_b, 0), m < HALF)


class SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, n_head, q_gain, k_gain, gains, cos, sin):
        """x (..., F d) -> queries (..., H, d), and keys and values (..., Hkv, d) or None."""
        *shape, width = x.shape
        d = q_gain.numel()
        F, N = width // d, x.numel() // width
        n_kv = (F - n_head) // 2
        x = x.contiguous()
        q = x.new_empty(*shape, n_head, d)
        k, v = (x.new_empty(*shape, n_kv, d) for _ in range(2)) if n_kv else (None, None)
        c = config("heads", d // 2)
        heads_kernel[triton.cdiv(N * F, c["ROWS"]),](x, q_gain, k_gain, cos, sin, q, k, v, N, EPS,
                                                     H=n_head, KV=n_kv, F=F, HALF=d // 2, **c)
        ctx.save_for_backward(x, cos, sin)
        ctx.gains = gains
        return q, k, v

    @staticmethod
    def backward(ctx, *dy):
        """dx, and the gains' unless they are collected on the side."""
        x, cos, sin = ctx.saved_tensors
        d = ctx.gains[0].weight.numel()
        dx, dgains, first = torch.empty_like(x), [], 0
        F, N = x.size(-1) // d, cos.numel() // (d // 2)
        c = config("heads_backward", d // 2)
        for gain, grad in zip(ctx.gains, dy):
            if gain is None:
                dgains.append(None)
                continue
            count = grad.size(-2)
            partial = gain.rows(PROGRAMS)
            programs = min(len(partial), triton.cdiv(N * count, c["ROWS"]))
            heads_backward_kernel[programs,](
                x, gain.weight, cos, sin, grad.contiguous(), dx, partial, partial.stride(0), N,
                EPS, first, COUNT=count, F=F, HALF=d // 2, **c)
            dgains.append(gain.total(partial))
            first += count
        if dy[2] is not None:
            dx.unflatten(-1, (F, d))[..., first:, :] = dy[2]
        return dx, None, *dgains, None, None, None


def split_heads(x: Tensor, n_head: int, q_gain: Gain, k_gain: Gain | None, cos: Tensor,
                sin: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(..., F d) -> queries (..., H, d), keys and values (..., Hkv, d), or None where F = H;
    queries and keys normed and rotated by cos, sin (..., d / 2) float32."""
    return SplitHeads.apply(x, n_head, q_gain.weight, k_gain and k_gain.weight, (q_gain, k_gain),
                            cos, sin)


@dataclass
class Projected:
    """Queries x (B, T, H, d) as projected, for whoever norms and rotates them on the way."""

    x: Tensor
    gain: Gain

    def rotated(self, cos: Tensor, sin: Tensor) -> Tensor:
        return split_heads(self.x.flatten(-2), self.x.size(-2), self.gain, None, cos, sin)[0]


# ---- the pool's channels, into the cache and out of its gradient -------------------------------


@triton.jit
def slots(columns, n, exists, first, step, T, j, f, stride_c, stride_b, stride_s, stride_h):
    """Where head f of token n = b T + t stands in channel j of the cache: at a column of its own,
    or at first + t step."""
    column = first + (n % T) * step
    if columns is not None:
        column = tl.load(columns + n, exists, 0).to(tl.int64)
    return j * stride_c + (n // T) * stride_b + column * stride_s + f * stride_h


@triton.jit
def store_kernel(x, gain, cos, sin, keys, values, columns, N, eps, T, first, step,
                 stride_c, stride_b, stride_s, stride_h, KV: tl.constexpr, HALF: tl.constexpr,
                 BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """One head of one channel of ROWS tokens; x (2, k, N, Hkv d)."""
    d: tl.constexpr = 2 * HALF
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    f, j, k = tl.program_id(1), tl.program_id(2).to(tl.int64), tl.num_programs(2)
    exists = n < N
    to = slots(columns, n, exists, first, step, T, j, f, stride_c, stride_b, stride_s, stride_h)
    a, b = halves(x, ((j * N + n) * KV + f) * d, exists, HALF, BLOCK)
    va, vb = halves(x, (((k + j) * N + n) * KV + f) * d, exists, HALF, BLOCK)
    c, s = angles(cos, sin, n, exists, HALF, BLOCK)
    ga, gb = pair(gain + j * d, HALF, BLOCK)
    a, b = norm_rotate(a, b, ga, gb, c, s, eps, HALF)
    store_halves(keys, to, exists, a, b, HALF, BLOCK)
    store_halves(values, to, exists, va, vb, HALF, BLOCK)


@triton.jit
def take_kernel(x, gain, cos, sin, dkeys, dvalues, columns, dx, partial, N, eps, T, first, step,
                stride_c, stride_b, stride_s, stride_h, ZEROS: tl.constexpr, KV: tl.constexpr,
                HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The gradient of store_kernel's x from that of the cache, and with ZEROS these in its place.
    """
    d: tl.constexpr = 2 * HALF
    f, j, k = tl.program_id(1), tl.program_id(2).to(tl.int64), tl.num_programs(2)
    ga, gb = pair(gain + j * d, HALF, BLOCK)
    sum_a, sum_b = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    none = tl.zeros((ROWS, BLOCK), tl.float32)
    for n0 in tl.range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS):
        n = tl.cast(n0, tl.int64) + tl.arange(0, ROWS)
        exists = n < N
        at = slots(columns, n, exists, first, step, T, j, f, stride_c, stride_b, stride_s,
                   stride_h)
        row = ((j * N + n) * KV + f) * d
        a, b = halves(x, row, exists, HALF, BLOCK)
        da, db = halves(dkeys, at, exists, HALF, BLOCK)
        va, vb = halves(dvalues, at, exists, HALF, BLOCK)
        c, s = angles(cos, sin, n, exists, HALF, BLOCK)
        da, db, dga, dgb = norm_rotate_gradient(a, b, ga, gb, c, s, da, db, eps, HALF)
        store_halves(dx, row, exists, da, db, HALF, BLOCK)
        store_halves(dx, row + k * N * KV * d, exists, va, vb, HALF, BLOCK)
        if ZEROS:
            store_halves(dkeys, at, exists, none, none, HALF, BLOCK)
            store_halves(dvalues, at, exists, none, none, HALF, BLOCK)
        sum_a += dga
        sum_b += dgb
    row = partial + ((tl.program_id(0) * KV + f) * k + j) * d
    add_to_partial(row, sum_a, sum_b, HALF, BLOCK)


def run(kernel, most: float, projected: Tensor, gain: Gain, cos: Tensor, sin: Tensor,
        columns: slice | Tensor, k: Tensor, v: Tensor, *results: Tensor, **more: bool):
    """`store` or `take` by its kernel, with at most so many programs for a head of a channel."""
    (_, C, B, T, _), (Hkv, d) = projected.shape, k.shape[3:]
    if isinstance(columns, Tensor):
        places, first, step = columns.contiguous(), 0, 1
    else:
        places, first, step = None, columns.start or 0, columns.step or 1
    options = config(kernel.__name__.removesuffix("_kernel"), d // 2)
    kernel[min(most, triton.cdiv(B * T, options["ROWS"])), Hkv, C](
        projected, gain.weight, cos, sin, k, v, places, *results, B * T, EPS, T, first, step,
        *k.stride()[:4], KV=Hkv, HALF=d // 2, **options, **more)


def store(projected: Tensor, gain: Gain, cos: Tensor, sin: Tensor, columns: slice | Tensor,
          k: Tensor, v: Tensor):
    """Write projected keys and values (2, k, B, T, Hkv d) to `columns` of k, v (k, B, S, Hkv, d),
    the keys normed with gains (k, d) and rotated by cos, sin (B, T, d / 2)."""
    run(store_kernel, math.inf, projected, gain, cos, sin, columns, k, v)


def take(projected: Tensor, gain: Gain, cos: Tensor, sin: Tensor, columns: slice | Tensor,
         dk: Tensor, dv: Tensor, zeros: bool = True) -> tuple[Tensor, Tensor | None]:
    """Gradients of `projected` and `gain` (None where its `partial` collects it) out of those of
    the cache, dk and dv, which are zero there afterwards, if `zeros`."""
    dx, partial = torch.empty_like(projected), gain.rows(STORE_PROGRAMS, dk.size(3))
    run(take_kernel, len(partial), projected, gain, cos, sin, columns, dk, dv, dx, partial,
        ZEROS=zeros)
    return dx, gain.total(partial)
