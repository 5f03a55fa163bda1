"""
The pool's mixing (section 3.1, steps 1 and 2) in few passes over memory, with gradients, in Triton.

    u_l = h_l / rms(h_l)                          statistics and router inputs: one pass over h
    alpha_b = W_b x + bias_b, x = every p-th u_l  one matrix product for keys (b = 0), values (1)
    m_j = sum_l alpha_bjl (u_l * gain_bl)         one pass over h for both branches,
    c_bj = m_j / rms(m_j)                         which writes the channels, ready to be projected

`Folded` multiplies the pre-mix gain into the router's weight and the post-mix gain into the
projection, once for all evaluations of a cache, whose gradients it adds up in float32 before
autograd takes them back through the fold. Only in the mix, where it depends on (l, d), does the
pre-mix gain stay.

Backward, with G = U U^T the (L, L) products of the gained sources U and X = dC U^T, per token and
branch. A norm's gradient is dm = s dC - t m with s = 1 / rms(m) and t_j = s_j^3 <dC_j, m_j> / D, so

    d alpha = s X - t alpha G,     t_j = s_j^3 (alpha_j . X_j) / D         (weights_kernel)
    dU = (alpha s)^T dC - M U,     M = alpha^T t alpha, (L, L)             (states_kernel)

take no pass of their own for m. Between the two lies the router's matrix product for dx. The
norm of the sources needs <du_l, u_l>: its part from the mix is sum_bj alpha d alpha, as dU is
homogeneous, and what dx adds is a row sum (`radial`). All sums run in a fixed order.

Dimensions: N tokens, L sources, D width, k channels, p stride, L' router inputs. The states come
as L tensors (N, D), or views of a stacked one: nothing is copied together. Tiles are (L, D) or
(k, D) of one token, L and k padded to LP and KP, powers of two of at least 16, for tl.dot.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.known import pool_fits
from kernels.products import add_product, matmul
from kernels.tape import Collect

# kernel: (tokens of a program, elements of its (LP, BLOCK_D) tile, warps, stages). "states" has its
# number of programs in place of tokens: one round of them on 132 multiprocessors, as each adds up
# the gains' gradients over its share of the tokens. The small products do not divide among warps,
# so "weights" has one and many programs.
CONFIGS = {
    "unit": (4, None, 4, 1),
    "mix": (2, 8192, 4, 2),
    "weights": (1, 1024, 1, 3),
    "radial": (4, None, 4, 1),
    "states": (528, 1024, 2, 3),
}
MULTIPROCESSORS = 132  # of a Hopper GPU
MULTIPLE = 8  # a channel of no feedback gets so many sources, or twice as many, ...


# ---- pieces -----------------------------------------------------------------------------------


@triton.jit
def distance(h, src, L: tl.constexpr):
    """Elements from source 0 to source src (a number or a vector); so far apart lie the tensors.

    They are aligned to 16 bytes, and as a product the result shows that to the compiler.
    """
    blocks = (src * 0).to(tl.int64)
    for i in tl.static_range(1, L):
        blocks = tl.where(src == i, (h[i].to(tl.int64) - h[0].to(tl.int64)) >> 4, blocks)
    return blocks * (128 // h[0].dtype.element_ty.primitive_bitwidth)


@triton.jit
def tile(base, rows, exists, d0, D, BLOCK_D: tl.constexpr):
    d = d0 + tl.arange(0, BLOCK_D)[None, :]
    return tl.load(base + rows[:, None] + d, exists[:, None] & (d < D), 0.0)


@triton.jit
def store(base, rows, exists, d0, D, x, BLOCK_D: tl.constexpr):
    d = d0 + tl.arange(0, BLOCK_D)[None, :]
    tl.store(base + rows[:, None] + d, x.to(base.dtype.element_ty), exists[:, None] & (d < D))


@triton.jit
def mixing_weights(alpha, n, stride, b, K: tl.constexpr, L: tl.constexpr, KP: tl.constexpr,
                   LP: tl.constexpr):
    """alpha of token n (KP, LP), zeros where padded, and offsets and mask for more like it."""
    j, src = tl.arange(0, KP)[:, None], tl.arange(0, LP)[None, :]
    at, mask = (b * K + j) * L + src, (j < K) & (src < L)
    return tl.load(alpha + n * stride + at, mask, 0.0), at, mask


@triton.jit
def channel_rows(n, N, D, b, K: tl.constexpr, KP: tl.constexpr):
    """Offsets of token n's k channels in (2, k, N, D), and which of the padded ones exist."""
    j = tl.arange(0, KP)
    return ((b * K + j).to(tl.int64) * N + n) * D, j < K


@triton.jit
def gain_tile(gain, b, d0, D, L: tl.constexpr, LP: tl.constexpr, BLOCK_D: tl.constexpr):
    src = tl.arange(0, LP)
    return tile(gain + b * L * D, src * D, src < L, d0, D, BLOCK_D).to(tl.float32)


@triton.jit
def gained(unit, gain, b, d0, D, dtype: tl.constexpr, L: tl.constexpr, LP: tl.constexpr,
           BLOCK_D: tl.constexpr):
    """A branch's sources (LP, BLOCK_D), ready for tl.dot."""
    return (unit * gain_tile(gain, b, d0, D, L, LP, BLOCK_D)).to(dtype)


# ---- forward ----------------------------------------------------------------------------------


@triton.jit
def unit_kernel(h, rstd, x, N, D, stride, FIRST: tl.constexpr, P: tl.constexpr,
                INPUTS: tl.constexpr, L: tl.constexpr, TOKENS: tl.constexpr,
                BLOCK_D: tl.constexpr):
    """Of TOKENS tokens of one source: 1 / rms, and their unit states where the router reads it."""
    src = tl.program_id(1)
    n = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    state = tile(h[0] + distance(h, src, L), n * stride, n < N, 0, D, BLOCK_D).to(tl.float32)
    r = tl.rsqrt(tl.sum(state * state, 1) / D + 1e-6)
    tl.store(rstd + n * L + src, r, n < N)
    if x is not None:  # noqa: SIM102  (there is a router)
        if (src >= FIRST) & ((src - FIRST) % P == 0):
            rows = (n * INPUTS + (src - FIRST) // P) * D
            store(x, rows, n < N, 0, D, state * r[:, None], BLOCK_D)


@triton.jit
def mix_kernel(h, rstd, gain, alpha, out, scale, N, D, stride, alpha_stride, K: tl.constexpr,
               L: tl.constexpr, KP: tl.constexpr, LP: tl.constexpr, TOKENS: tl.constexpr,
               BLOCK_D: tl.constexpr, WHOLE: tl.constexpr):
    """Normed channels of both branches and scale = 1 / rms of what was mixed (N, 2, k)."""
    src, j = tl.arange(0, LP), tl.arange(0, KP)
    source, exists = distance(h, src, L), src < L
    dtype: tl.constexpr = h[0].dtype.element_ty
    first = tl.program_id(0) * TOKENS
    for i in tl.range(first, tl.minimum(first + TOKENS, N)):
        n = tl.cast(i, tl.int64)
        r = tl.load(rstd + n * L + src, exists, 0.0)[:, None]
        rows = source + n * stride
        if WHOLE:  # the tile holds all columns: h is read once
            unit = tile(h[0], rows, exists, 0, D, BLOCK_D).to(tl.float32) * r
        for b in tl.static_range(2):
            a = mixing_weights(alpha, n, alpha_stride, b, K, L, KP, LP)[0]
            channels, some = channel_rows(n, N, D, b, K, KP)
            if WHOLE:
                u = gained(unit, gain, b, 0, D, dtype, L, LP, BLOCK_D)
                mixed = tl.dot(a, u)
                s = tl.rsqrt(tl.sum(mixed * mixed, 1) / D + 1e-4)
                store(out, channels, some, 0, D, mixed * s[:, None], BLOCK_D)
            else:  # once for the norm, once more, from the cache, for the channels
                total = tl.zeros((KP,), tl.float32)
                for d0 in tl.range(0, D, BLOCK_D):
                    unit = tile(h[0], rows, exists, d0, D, BLOCK_D).to(tl.float32) * r
                    u = gained(unit, gain, b, d0, D, dtype, L, LP, BLOCK_D)
                    mixed = tl.dot(a, u)
                    total += tl.sum(mixed * mixed, 1)
                s = tl.rsqrt(total / D + 1e-4)
                for d0 in tl.range(0, D, BLOCK_D):
                    unit = tile(h[0], rows, exists, d0, D, BLOCK_D).to(tl.float32) * r
                    u = gained(unit, gain, b, d0, D, dtype, L, LP, BLOCK_D)
                    store(out, channels, some, d0, D, tl.dot(a, u) * s[:, None], BLOCK_D)
            tl.store(scale + (n * 2 + b) * K + j, s, some)


# ---- backward ---------------------------------------------------------------------------------


@triton.jit
def products(unit, gain, dc, n, N, d0, D, b, x, g, K: tl.constexpr, L: tl.constexpr,
             KP: tl.constexpr, LP: tl.constexpr, BLOCK_D: tl.constexpr):
    """x + dC U^T and g + U U^T of one branch over BLOCK_D columns."""
    channels, some = channel_rows(n, N, D, b, K, KP)
    grad = tile(dc, channels, some, d0, D, BLOCK_D)
    u = gained(unit, gain, b, d0, D, grad.dtype, L, LP, BLOCK_D)
    ut = tl.trans(u)
    return tl.dot(grad, ut, x), tl.dot(u, ut, g)


@triton.jit
def weights_gradient(x, g, alpha, scale, dalpha, turn, n, alpha_stride, D, b, K: tl.constexpr,
                     L: tl.constexpr, KP: tl.constexpr, LP: tl.constexpr):
    """Store d alpha and t (turn); returns the branch's part of <du_l, u_l>."""
    a, at, mask = mixing_weights(alpha, n, alpha_stride, b, K, L, KP, LP)
    a = a.to(tl.float32)
    j = tl.arange(0, KP)
    s = tl.load(scale + (n * 2 + b) * K + j, j < K, 0.0)
    t = s * s * s * tl.sum(a * x, 1) / D
    da = s[:, None] * x - t[:, None] * tl.dot(a, g)
    tl.store(dalpha + n * 2 * K * L + at, da.to(dalpha.dtype.element_ty), mask)
    tl.store(turn + (n * 2 + b) * K + j, t, j < K)
    return tl.sum(a * da, 0)


@triton.jit
def weights_kernel(h, rstd, gain, alpha, scale, dc, dalpha, turn, radial, N, D, stride,
                   alpha_stride, K: tl.constexpr, L: tl.constexpr, KP: tl.constexpr,
                   LP: tl.constexpr, TOKENS: tl.constexpr, BLOCK_D: tl.constexpr):
    """d alpha of TOKENS tokens, and the numbers that states_kernel needs: turn and radial."""
    src = tl.arange(0, LP)
    source, exists = distance(h, src, L), src < L
    first = tl.program_id(0) * TOKENS
    for i in range(first, tl.minimum(first + TOKENS, N)):
        n = tl.cast(i, tl.int64)
        r = tl.load(rstd + n * L + src, exists, 0.0)[:, None]
        x0, x1 = tl.zeros((KP, LP), tl.float32), tl.zeros((KP, LP), tl.float32)
        g0, g1 = tl.zeros((LP, LP), tl.float32), tl.zeros((LP, LP), tl.float32)
        for d0 in tl.range(0, D, BLOCK_D):
            unit = tile(h[0], source + n * stride, exists, d0, D, BLOCK_D).to(tl.float32) * r
            x0, g0 = products(unit, gain, dc, n, N, d0, D, 0, x0, g0, K, L, KP, LP, BLOCK_D)
            x1, g1 = products(unit, gain, dc, n, N, d0, D, 1, x1, g1, K, L, KP, LP, BLOCK_D)
        both = weights_gradient(x0, g0, alpha, scale, dalpha, turn, n, alpha_stride, D, 0, K, L,
                                KP, LP)
        both += weights_gradient(x1, g1, alpha, scale, dalpha, turn, n, alpha_stride, D, 1, K, L,
                                 KP, LP)
        tl.store(radial + n * L + src, both, exists)


@triton.jit
def radial_kernel(h, rstd, dx, radial, N, D, stride, FIRST: tl.constexpr, P: tl.constexpr,
                  INPUTS: tl.constexpr, L: tl.constexpr, TOKENS: tl.constexpr,
                  BLOCK_D: tl.constexpr):
    """radial += <dx_l, u_l> of one router input."""
    src = FIRST + tl.program_id(1) * P
    n = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    state = tile(h[0] + distance(h, src, L), n * stride, n < N, 0, D, BLOCK_D).to(tl.float32)
    grad = tile(dx, (n * INPUTS + tl.program_id(1)) * D, n < N, 0, D, BLOCK_D).to(tl.float32)
    at = n * L + src
    more = tl.sum(state * grad, 1) * tl.load(rstd + at, n < N, 0.0)
    tl.store(radial + at, tl.load(radial + at, n < N, 0.0) + more, n < N)


@triton.jit
def of_branch(alpha, scale, turn, n, more, b, alpha_stride, K: tl.constexpr, L: tl.constexpr,
              KP: tl.constexpr, LP: tl.constexpr):
    """Weights (KP, LP), s and -t (KP, 1) of token n, zeros unless there are `more`."""
    j, src = tl.arange(0, KP)[:, None], tl.arange(0, LP)[None, :]
    some, at = (j < K) & more, (n * 2 + b) * K + j
    a = tl.load(alpha + n * alpha_stride + (b * K + j) * L + src, some & (src < L), 0.0)
    return a, tl.load(scale + at, some, 0.0), -tl.load(turn + at, some, 0.0)


@triton.jit
def of_token(h, rstd, radial, dx, alpha, scale, turn, source, n, more, d0, D, stride,
             alpha_stride, FIRST: tl.constexpr, P: tl.constexpr, INPUTS: tl.constexpr,
             K: tl.constexpr, L: tl.constexpr, KP: tl.constexpr, LP: tl.constexpr,
             BLOCK_D: tl.constexpr):
    """States, 1 / rms, radial, what comes from the router, and both branches of token n."""
    src = tl.arange(0, LP)
    exists = (src < L) & more
    x = tile(h[0], source + n * stride, exists, d0, D, BLOCK_D)
    from_router = tl.zeros((LP, BLOCK_D), x.dtype)
    if dx is not None:
        read = exists & (src >= FIRST) & ((src - FIRST) % P == 0)
        from_router = tile(dx, (n * INPUTS + (src - FIRST) // P) * D, read, d0, D, BLOCK_D)
    return (x, tl.load(rstd + n * L + src, exists, 0.0)[:, None],
            tl.load(radial + n * L + src, exists, 0.0), from_router,
            of_branch(alpha, scale, turn, n, more, 0, alpha_stride, K, L, KP, LP),
            of_branch(alpha, scale, turn, n, more, 1, alpha_stride, K, L, KP, LP))


@triton.jit
def gained_gradient(unit, g, branch, dc, n, N, d0, D, b, K: tl.constexpr, KP: tl.constexpr,
                    BLOCK_D: tl.constexpr):
    """dU of one branch over BLOCK_D columns."""
    a, s, minus_t = branch
    channels, some = channel_rows(n, N, D, b, K, KP)
    grad = tile(dc, channels, some, d0, D, BLOCK_D)
    minus_m = tl.dot(tl.trans((a * minus_t).to(grad.dtype)), a).to(grad.dtype)
    du = tl.dot(tl.trans((a * s).to(grad.dtype)), grad)
    return tl.dot(minus_m, (unit * g).to(grad.dtype), du)


@triton.jit
def states_kernel(h, rstd, gain, alpha, scale, turn, radial, dc, dx, dh, dgain, N, D, stride,
                  alpha_stride, FIRST: tl.constexpr, P: tl.constexpr, INPUTS: tl.constexpr,
                  K: tl.constexpr, L: tl.constexpr, KP: tl.constexpr, LP: tl.constexpr,
                  BLOCK_D: tl.constexpr, WHOLE: tl.constexpr):
    """dh (L, N, D), unless it is None, over BLOCK_D columns of this program's tokens, every
    num_programs(0)-th; the gains' gradients are added to its rows of dgain. All of a token but dc
    is asked for while the one before is worked on."""
    src, step = tl.arange(0, LP), tl.num_programs(0)
    d0 = tl.program_id(1) * BLOCK_D
    source, exists = distance(h, src, L), src < L
    g0 = gain_tile(gain, 0, d0, D, L, LP, BLOCK_D)
    g1 = gain_tile(gain, 1, d0, D, L, LP, BLOCK_D)
    dgain0, dgain1 = tl.zeros((LP, BLOCK_D), tl.float32), tl.zeros((LP, BLOCK_D), tl.float32)
    ahead = of_token(h, rstd, radial, dx, alpha, scale, turn, source,
                     tl.program_id(0).to(tl.int64), True, d0, D, stride, alpha_stride, FIRST, P,
                     INPUTS, K, L, KP, LP, BLOCK_D)
    for i in tl.range(tl.program_id(0), N, step):
        n = tl.cast(i, tl.int64)
        x, r, along, from_router, branch0, branch1 = ahead
        ahead = of_token(h, rstd, radial, dx, alpha, scale, turn, source, n + step, i + step < N,
                         d0, D, stride, alpha_stride, FIRST, P, INPUTS, K, L, KP, LP, BLOCK_D)
        unit = x.to(tl.float32) * r
        du0 = gained_gradient(unit, g0, branch0, dc, n, N, d0, D, 0, K, KP, BLOCK_D)
        dgain0 += unit * du0
        du1 = gained_gradient(unit, g1, branch1, dc, n, N, d0, D, 1, K, KP, BLOCK_D)
        dgain1 += unit * du1
        if dh is not None:
            du = g0 * du0 + g1 * du1
            if dx is not None:
                du += from_router.to(tl.float32)
                if WHOLE:  # otherwise radial_kernel was there before
                    along += tl.sum(from_router.to(tl.float32) * unit, 1)
            store(dh, (src.to(tl.int64) * N + n) * D, exists, d0, D,
                  r * (du - unit * (along / D)[:, None]), BLOCK_D)
    part = dgain + tl.program_id(0) * 2 * L * D
    dgain0 += tile(part, src * D, exists, d0, D, BLOCK_D)
    store(part, src * D, exists, d0, D, dgain0, BLOCK_D)
    dgain1 += tile(part + L * D, src * D, exists, d0, D, BLOCK_D)
    store(part + L * D, src * D, exists, d0, D, dgain1, BLOCK_D)


# ---- host side --------------------------------------------------------------------------------


class Shape(NamedTuple):
    """The constants of a call; a kernel takes those that it names."""

    L: int
    D: int
    K: int  # channels of a branch
    N: int
    P: int  # every P-th source, from FIRST on, is one of the router's INPUTS

    def of(self, kernel) -> tuple[dict, int]:
        """Constants of a kernel and its launch options; and its tokens (or programs)."""
        tokens, elements, warps, stages = CONFIGS[kernel.__name__.removesuffix("_kernel")]
        if kernel is mix_kernel:  # few tokens, as in decoding, are one for each multiprocessor
            tokens = min(tokens, triton.cdiv(self.N, MULTIPROCESSORS))
        LP, KP = (max(16, triton.next_power_of_2(n)) for n in (self.L, self.K))
        block = triton.next_power_of_2(self.D)
        if "LP" in kernel.arg_names:
            block = min(block, max(16, elements // LP))
        c = dict(L=self.L, K=self.K, LP=LP, KP=KP, P=self.P, FIRST=(self.L - 1) % self.P,
                 INPUTS=triton.cdiv(self.L, self.P), TOKENS=tokens, BLOCK_D=block,
                 WHOLE=block >= self.D)
        c = {name: c[name] for name in kernel.arg_names if name in c}
        return dict(c, num_warps=warps, num_stages=stages), tokens


def check(states: tuple[Tensor, ...], f: "Folded", s: Shape):
    """Name what a kernel would silently read wrongly."""
    like = states[0]
    if like.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"states of type {like.dtype}: bfloat16, float16 or float32 is needed")
    for x in states:
        if (x.shape != like.shape or x.dtype != like.dtype or x.stride(1) != 1
                or x.stride(0) != like.stride(0) or x.data_ptr() % 16):
            raise ValueError("states: equal shapes, types and strides, contiguous rows and 16-byte "
                             "alignment are needed")
    if not pool_fits(s.L, s.D):
        raise ValueError(f"{s.L} sources of width {s.D}: at most 32, and a multiple of 16 up to "
                         "2048, are possible")
    shapes = (2, s.L, s.D), (2, s.K, s.L)
    inputs = triton.cdiv(s.L, s.P)
    if (f.gain.shape, f.bias.shape) != shapes or (
            f.router is not None and f.router.shape != (2 * s.K * s.L, inputs * s.D)):
        raise ValueError(f"gain, bias {shapes} and router {2 * s.K * s.L, inputs * s.D} are needed")


def fold(key, value) -> tuple[Tensor, ...]:
    """Of two branches: gain (2, L, D), bias (2, k, L), proj (2 k, E, D) and, where there is one,
    router (2 k L, L' D), keys before values."""
    branches = (key, value)
    gain = torch.stack([b.pre_norm for b in branches])
    bias = torch.stack([b.bias for b in branches])
    proj = torch.cat([b.proj * b.post_norm[:, None] for b in branches])
    if key.router is None:
        return gain, bias, proj
    router = torch.cat([b.router.weight * b.pre_norm[b.inputs].flatten() for b in branches])
    return gain, bias, proj, router


def fold_up_to(key, value, layer: int) -> tuple[Tensor, ...]:
    """The same of channel `layer` alone and its sources 0..layer, for no feedback. Before them come
    others without a gain, up to a MULTIPLE, as each number of sources is compiled anew."""
    branches, n = (key, value), layer + 1
    more, rows = -n % MULTIPLE, slice(layer * key.bias.size(1), layer * key.bias.size(1) + n)
    gain = torch.stack([F.pad(b.pre_norm[:n], (0, 0, more, 0)) for b in branches])
    bias = torch.stack([F.pad(b.bias[layer:n, :n], (more, 0)) for b in branches])
    proj = torch.stack([b.proj[layer] * b.post_norm[layer] for b in branches])
    if key.router is None:
        return gain, bias, proj
    inputs = gain[:, (n + more - 1) % key.stride::key.stride].flatten(1)  # (2, L' D)
    weights = [b.router.weight[rows, -inputs.size(1):] for b in branches]
    return gain, bias, proj, torch.cat([
        F.pad(w, (inputs.size(1) - w.size(1), 0, more, 0)) * i for w, i in zip(weights, inputs)])


class Folded:
    """Both branches of a pool, ready for many evaluations on states of one dtype."""

    def __init__(self, weights: tuple[Tensor, ...], stride: int, dtype: torch.dtype):
        """weights: as `fold` returns them; stride: of the router's inputs."""
        self.stride = stride
        self.gain, self.bias, self.proj, *router = (w.detach().to(dtype) for w in weights)
        self.router = router[0] if router else None
        self.sums = None
        self.link = Collect.apply(self.gradients, self.gain, *weights)

    def add_up(self, rows: int) -> list[Tensor | None]:
        """Running sums of the gradients: gain (rows, 2, L, D), bias, proj, router (or None)."""
        if self.sums is None:
            zeros = partial(torch.zeros, dtype=torch.float32, device=self.gain.device)
            self.sums = [zeros(rows, *self.gain.shape), *(
                w if w is None else zeros(w.shape) for w in (self.bias, self.proj, self.router))]
        return self.sums

    def gradients(self) -> list[Tensor]:
        dgain, *sums = self.add_up(1)
        return [dgain.sum(0), *(x for x in sums if x is not None)]

    def channels(self, states: list[Tensor]) -> Tensor:
        """States, L of (B, T, D), through both branches: projected channels (2, k, B, T, E)."""
        rows = [h.reshape(-1, h.size(-1)) for h in states]
        if len({x.stride(0) for x in rows}) > 1:  # such as one column of many, and new tensors
            rows = [x.clone(memory_format=torch.contiguous_format) for x in rows]
        projected = Evaluate.apply(self.link, self, torch.is_grad_enabled(), *rows)
        return projected.view(2, -1, *states[0].shape[:-1], projected.size(-1))


class Evaluate(torch.autograd.Function):
    """Mix, norm and project; states (N, D) -> (2 k, N, E)."""

    @staticmethod
    def forward(ctx, link, folded, recording, *states):
        """The projected channels; through `link` the weights' gradients wait for all evaluations'.
        `recording`: is autograd on?"""
        h, f = states[0], folded
        s = Shape(len(states), h.size(1), f.bias.size(1), len(h), f.stride)
        check(states, f, s)
        read, router = s, f.router
        if s.L > 1 and not recording and all(x.data_ptr() == h.data_ptr() for x in states):
            # H(0), the embedding as every state: one norm, and one input of the router
            read = s._replace(L=1, P=1)
            router = router if router is None else router.unflatten(1, (-1, s.D)).sum(1)
        rstd = h.new_empty(s.N, read.L, dtype=torch.float32)
        scale = h.new_empty(s.N, 2, s.K, dtype=torch.float32)
        out = h.new_empty(2, s.K, s.N, s.D)  # the channels
        x = None if router is None else h.new_empty(s.N, router.size(1))
        c, tokens = read.of(unit_kernel)
        unit_kernel[triton.cdiv(s.N, tokens), read.L](
            states[:read.L], rstd, x, s.N, s.D, h.stride(0), **c)
        rstd = rstd.expand(-1, s.L).contiguous()
        alpha, alpha_stride = f.bias.flatten().to(h.dtype), 0
        if router is not None:
            alpha = torch.addmm(alpha, x, router.mT)
            alpha_stride = alpha.stride(0)
        c, tokens = s.of(mix_kernel)
        mix_kernel[triton.cdiv(s.N, tokens),](
            states, rstd, f.gain, alpha, out, scale, s.N, s.D, h.stride(0), alpha_stride, **c)
        ctx.folded, ctx.shape, ctx.strides = f, s, (h.stride(0), alpha_stride)
        ctx.save_for_backward(*states, out, x, alpha, rstd, scale)
        return matmul(out.flatten(0, 1), f.proj.mT, recording)

    @staticmethod
    def backward(ctx, dy):
        """The states' gradients, unless they are constants; the weights' are added up in `folded`.
        """
        f, s, constant = ctx.folded, ctx.shape, not any(ctx.needs_input_grad[3:])
        *states, out, x, alpha, rstd, scale = ctx.saved_tensors
        states = tuple(states)
        states_c, programs = s.of(states_kernel)
        blocks = triton.cdiv(s.D, states_c["BLOCK_D"])
        programs = max(1, programs // blocks)  # along the tokens, each with rows of its own
        dgain, dbias, dproj, drouter = f.add_up(programs)
        add_product(dproj, dy.mT, out.flatten(0, 1))
        dc = matmul(dy, f.proj, True).view_as(out)
        dalpha = out.new_empty(s.N, 2 * s.K * s.L)
        turn, radial = torch.empty_like(scale), torch.empty_like(rstd)
        c, tokens = s.of(weights_kernel)
        weights_kernel[triton.cdiv(s.N, tokens),](
            states, rstd, f.gain, alpha, scale, dc, dalpha, turn, radial, s.N, s.D, *ctx.strides,
            **c)
        dx = None if f.router is None or constant else matmul(dalpha, f.router, True)
        if dx is not None and not states_c["WHOLE"]:
            c, tokens = s.of(radial_kernel)
            radial_kernel[triton.cdiv(s.N, tokens), c["INPUTS"]](
                states, rstd, dx, radial, s.N, s.D, ctx.strides[0], **c)
        dh = None if constant else out.new_empty(s.L, s.N, s.D)
        states_kernel[min(programs, s.N), blocks](
            states, rstd, f.gain, alpha, scale, turn, radial, dc, dx, dh, dgain, s.N, s.D,
            *ctx.strides, **states_c)
        add_product(dbias.view(1, -1), dalpha.new_ones(1, s.N), dalpha)
        if drouter is not None:
            add_product(drouter, dalpha.mT, x)
        return None, None, None, *([None] * s.L if constant else dh)
