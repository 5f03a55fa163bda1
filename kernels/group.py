"""
Attention of a group's queries on whole rows, forward and backward, for Hopper GPUs, in Gluon,
Triton's lower level. What it computes is that of attention.py, which see for the dimensions and for
the packing of rows; other GPUs and other shapes take its kernels.

A group has few queries for its keys, so all programs of a layer are there at once and the longest
one sets the time: what counts is how long a block of keys takes a single program. Here that is 128
keys, where Triton's own pipelining has room for 64, as each tile is asked for as soon as the one in
its place has been read; the mask costs nothing but at its edges; and what dk and dv are added to is
there before they are. At documents of 1,000 tokens (one H200, us a layer and group step): forward
28.5 for 37.6 by Triton's kernels, backward 82.6 for 98.1, 7 of a micro-step's 138 ms; since then dk
and dv run beside dq, 79 both, after attention.py's `rows_kernel`, 8.

`x0` and `x1` of attention.py, a tile of d columns in two of D0 and D1, become a tuple here, of one
where D1 = 0.
"""

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.known import of_size, split_head
from kernels.norms import EPS

LOG2E = 1.4426950408889634
WARPS = 4
ALIGNED = gl.constexpr(4)  # of so many float32, 16 bytes, begins what the copy engine takes
ROWS = 64  # packed rows of a program of forward and dq; keys of one of dk and dv
NOTHING = None, None, None  # in place of a norm
# at a time, by head size: keys in forward and dq; packed rows in dk and dv; its registers
KEYS = {96: 128, 128: 64}
QUERIES = {96: (32, 168), 128: (32, None)}


# ---- pieces -----------------------------------------------------------------------------------


@gluon.jit
def pair(x0, x1):
    x = (x0,)
    if x1 is not None:
        x = x + (x1,)
    return x


@gluon.constexpr_function
def accumulator(columns):
    """Layout of 64 rows by so many columns in the registers of four warps."""
    return gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, columns, 16])


@gluon.jit
def room(x, n: gl.constexpr):
    """Shared memory for n tiles of the kind that descriptors x bring."""
    tiles = ()
    for c in gl.static_range(len(x)):
        tiles = tiles + (
            gl.allocate_shared_memory(x[c].dtype, [n] + x[c].block_shape, x[c].layout),)
    return tiles


@gluon.jit
def of(tiles, i):
    """The i-th of n tiles."""
    one = ()
    for c in gl.static_range(len(tiles)):
        one = one + (tiles[c].index(i),)
    return one


@gluon.jit
def flat(tile):
    return tile.reshape((tile.shape[1] * tile.shape[3], tile.shape[4]))


@gluon.jit
def barriers(n: gl.constexpr):
    """n barriers, each of which opens when what was asked for has come."""
    bars = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(bars.index(i), count=1)
    return bars


@gluon.jit
def fetch(x, tile, bar, b, i, head):
    """Ask for the rows from position i on of one head, and have a barrier wait for them."""
    size: gl.constexpr = x[0].block_type.nbytes + (x[1].block_type.nbytes if len(x) > 1 else 0)
    mbarrier.expect(bar, size)
    bring(x, tile, bar, b, i, head)


@gluon.jit
def bring(x, tile, bar, b, i, head):
    for c in gl.static_range(len(x)):
        tma.async_copy_global_to_shared(x[c], [b, i, head, 0, c * x[0].block_shape[4]], bar,
                                        tile[c])


@gluon.jit
def send(x, tile, b, i, head):
    """Write a tile to memory."""
    fence_async_shared()
    for c in gl.static_range(len(x)):
        tma.async_copy_shared_to_global(x[c], [b, i, head, 0, c * x[0].block_shape[4]], tile[c])


@gluon.jit
def scores(a, b, M: gl.constexpr, N: gl.constexpr):
    """Begin a @ b^T of two tiles, (M, N)."""
    s = zero(M, N)
    for c in gl.static_range(len(a)):
        s = warpgroup_mma(flat(a[c]), flat(b[c]).permute((1, 0)), s, use_acc=c > 0, is_async=True)
    return s


@gluon.jit
def zero(M: gl.constexpr, COLUMNS: gl.constexpr):
    return gl.zeros((M, COLUMNS), gl.float32, accumulator(COLUMNS))


@gluon.jit
def zeros(x, M: gl.constexpr):
    """Sums for tiles of the kind that descriptors x bring, M rows."""
    acc = ()
    for c in gl.static_range(len(x)):
        acc = acc + (zero(M, x[c].block_shape[4]),)
    return acc


@gluon.jit
def begin_add(acc, p, tile):
    """Begin acc + p @ tile; p (64, N) stays in registers."""
    p, out = p.to(tile[0].dtype), ()
    for c in gl.static_range(len(acc)):
        left = gl.convert_layout(p, gl.DotOperandLayout(0, acc[c].type.layout, 2))
        out = out + (warpgroup_mma(left, flat(tile[c]), acc[c], is_async=True),)
    return out


@gluon.jit
def finish(acc):
    """Wait for all products."""
    done = warpgroup_mma_wait(0, acc)
    if len(acc) == 1:
        done = (done,)
    return done


@gluon.jit
def column(x, like):
    """One number for each row of `like`, ready to be broadcast over its columns."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))[:, None]


@gluon.jit
def query_block(start, stop, b, t0, Tq, P: gl.constexpr, M: gl.constexpr, layout: gl.constexpr):
    """`attention.query_block`: the intervals of the packed rows from position t0 on, (M, 1), and of
    the block: lo <= its keys < hi, of which all rows read left <= j < right."""
    start += b * Tq
    stop += b * Tq
    last = gl.minimum(t0 + M // P, Tq) - 1
    lo, hi = gl.load(start + t0), gl.load(stop + last)
    t = gl.minimum(t0 + gl.arange(0, M, layout) // P, last)
    return (gl.load(start + t)[:, None], gl.load(stop + t)[:, None], lo, gl.load(start + last),
            gl.load(stop + t0), hi)


@gluon.jit
def halves(x):
    """(M, 2 N) as two of N columns, in the same threads."""
    return x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()


@gluon.jit
def beside(a, b):
    return gl.join(a, b).permute((0, 2, 1)).reshape((a.shape[0], 2 * a.shape[1]))


@gluon.jit
def split_columns(tiles, W: gl.constexpr):
    """Tiles side by side, of up to 8 W columns each, as tiles of W columns."""
    for _ in gl.static_range(3):
        out = ()
        for c in gl.static_range(len(tiles)):
            out = out + (halves(tiles[c]) if tiles[c].shape[1] > W else (tiles[c],))
        tiles = out
    same = ()
    for c in gl.static_range(len(tiles)):
        same = same + (gl.convert_layout(tiles[c], accumulator(W)),)
    return same


@gluon.jit
def join_columns(tiles):
    """Tiles side by side, 1, 2, 4 or 8, as one."""
    for _ in gl.static_range(3):
        if len(tiles) > 1:
            out = ()
            for c in gl.static_range(len(tiles) // 2):
                out = out + (beside(tiles[2 * c], tiles[2 * c + 1]),)
            tiles = out
    return gl.convert_layout(tiles[0], accumulator(tiles[0].shape[1]))


@gluon.jit
def visible(begin, end, j):
    """begin <= j < end, by one comparison."""
    return (j - begin).to(gl.uint32) < (gl.maximum(end, begin) - begin).to(gl.uint32)


# ---- norm and rotation of queries -------------------------------------------------------------


@gluon.jit
def unit_rows(tile, eps, W: gl.constexpr):
    """A tile's rows by their rms, in tiles of W columns, and 1 / rms."""
    x = ()
    for c in gl.static_range(len(tile)):
        x = x + (flat(tile[c]).load(accumulator(tile[c].shape[4])).to(gl.float32),)
    x, unit = split_columns(x, W), ()
    squares = gl.sum(x[0] * x[0], 1)
    for c in gl.static_range(1, len(x)):
        squares += gl.sum(x[c] * x[c], 1)
    r = gl.rsqrt(squares / (len(x) * W) + eps)[:, None]
    for c in gl.static_range(len(x)):
        unit = unit + (x[c] * r,)
    return unit, r


@gluon.jit
def turn_of(gain, cos, sin, b, t0, Tq, i, P: gl.constexpr, M: gl.constexpr, W: gl.constexpr,
            HALF: gl.constexpr):
    """Of the i-th W columns of either half: its gain, the other's, cosines and sines (M, W)."""
    c = i * W + gl.arange(0, W, gl.SliceLayout(0, accumulator(W)))
    t = t0 + gl.arange(0, M, gl.SliceLayout(1, accumulator(W)))[:, None] // P
    at = (b * Tq + t) * HALF + c[None, :]
    return (gl.load(gain + c)[None, :].to(gl.float32),
            gl.load(gain + HALF + c)[None, :].to(gl.float32),
            gl.load(cos + at, t < Tq, 0.0), gl.load(sin + at, t < Tq, 0.0))


@gluon.jit
def norm_rotate(tile, gain, cos, sin, eps, b, t0, Tq, P: gl.constexpr, M: gl.constexpr,
                W: gl.constexpr):
    """Norm and rotate a tile's rows, in shared memory."""
    x, _ = unit_rows(tile, eps, W)
    n: gl.constexpr = len(x) // 2
    first, second = (), ()
    for i in gl.static_range(n):
        ga, gb, c, s = turn_of(gain, cos, sin, b, t0, Tq, i, P, M, W, n * W)
        a, b_ = x[i] * ga, x[n + i] * gb
        first, second = first + (a * c - b_ * s,), second + (b_ * c + a * s,)
    keep(tile, as_tiles(first + second, tile[0].shape[4] // W))
    fence_async_shared()


@gluon.jit
def norm_rotate_gradient(d, tile, gain, cos, sin, eps, b, t0, Tq, P: gl.constexpr,
                         M: gl.constexpr, W: gl.constexpr):
    """The gradients of a tile's rows from those of the rotated ones, and each row's part of the
    gain's."""
    x, r = unit_rows(tile, eps, W)
    d = split_columns(d, W)
    n: gl.constexpr = len(x) // 2
    first, second, dga, dgb, out = (), (), (), (), ()
    along = gl.zeros_like(r)
    for i in gl.static_range(n):
        ga, gb, c, s = turn_of(gain, cos, sin, b, t0, Tq, i, P, M, W, n * W)
        da, db = d[i] * c + d[n + i] * s, d[n + i] * c - d[i] * s
        dga, dgb = dga + (da * x[i],), dgb + (db * x[n + i],)
        da, db = da * ga, db * gb
        along += gl.sum(da * x[i] + db * x[n + i], 1)[:, None]
        first, second = first + (da,), second + (db,)
    d, along = first + second, along / (2 * n * W)
    for i in gl.static_range(2 * n):
        out = out + (r * (d[i] - x[i] * along),)
    at: gl.constexpr = tile[0].shape[4] // W
    return as_tiles(out, at), as_tiles(dga + dgb, at)


@gluon.jit
def as_tiles(x, n: gl.constexpr):
    """n tiles side by side, and what is left of them likewise."""
    tiles = (join_columns(x[:n]),)
    if len(x) > n:
        tiles = tiles + (join_columns(x[n:]),)
    return tiles


# ---- forward ----------------------------------------------------------------------------------


@gluon.jit
def sink_of(sink, D0: gl.constexpr, D1: gl.constexpr):
    """Its columns, as a pair, in the layouts of accumulators."""
    x = (sink_columns(sink, 0, D0),)
    if D1 > 0:
        x = x + (sink_columns(sink, D0, D1),)
    return x


@gluon.jit
def sink_columns(sink, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
    c = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, accumulator(COLUMNS)))
    return gl.load(sink + c)[None, :]


@gluon.jit
def with_sink(m, total, acc, q, k, v, scale2):
    """The softmax so far and one more key."""
    x = gl.zeros_like(total)
    for c in gl.static_range(len(q)):
        x += gl.convert_layout(dot_sink(q[c], k[c]), x.type.layout)
    x *= scale2
    m_new = gl.maximum(m, x)
    old, new = gl.exp2(m - m_new), gl.exp2(x - m_new)
    return m_new, total * old + new, plus_sink(times_column(acc, old), new, v)


@gluon.jit
def dot_sink(q, sink):
    return gl.sum(flat(q).load(accumulator(sink.shape[1])).to(gl.float32) * sink.to(gl.float32), 1)


@gluon.jit
def plus_sink(acc, x, sink):
    """Sums plus a number of each row times the sink."""
    out = ()
    for c in gl.static_range(len(acc)):
        out = out + (acc[c] + column(x, acc[c]) * sink[c].to(gl.float32),)
    return out


@gluon.jit
def times_column(acc, x):
    out = ()
    for c in gl.static_range(len(acc)):
        out = out + (acc[c] * column(x, acc[c]),)
    return out


@gluon.jit
def times(acc, x):
    out = ()
    for c in gl.static_range(len(acc)):
        out = out + (acc[c] * x,)
    return out


@gluon.jit
def keep(tile, acc):
    """Put sums into a tile of shared memory."""
    for c in gl.static_range(len(acc)):
        flat(tile[c]).store(acc[c].to(tile[c].dtype))


@gluon.jit
def forward_kernel(q0, q1, k0, k1, v0, v1, out0, out1, kept0, kept1, lse2, start, stop, sink_k,
                   sink_v, gain, cos, sin, eps, scale2, Tq, Hkv, P: gl.constexpr, D0: gl.constexpr,
                   D1: gl.constexpr, M: gl.constexpr, N: gl.constexpr, W: gl.constexpr):
    """out and lse2 of a block of packed rows; with a gain, q is normed and rotated first, and
    kept."""
    q, keys, values, out = pair(q0, q1), pair(k0, k1), pair(v0, v1), pair(out0, out1)
    d: gl.constexpr = D0 + D1
    R: gl.constexpr = gl.SliceLayout(1, accumulator(N))
    b, head = gl.program_id(0) // Hkv, gl.program_id(0) % Hkv
    t0 = (gl.num_programs(1) - 1 - gl.program_id(1)) * (M // P)  # the most keys first
    q_tile, k_tiles, v_tiles, bars = room(q, 1), room(keys, 2), room(values, 2), barriers(5)
    q_tile = of(q_tile, 0)
    fetch(q, q_tile, bars.index(4), b, t0, head)
    begin, end, lo, left, right, hi = query_block(start, stop, b, t0, Tq, P, M, R)
    n = gl.cdiv(hi - lo, N)
    for i in gl.static_range(2):
        if i < n:
            fetch(keys, of(k_tiles, i), bars.index(i), b, lo + i * N, head)
            fetch(values, of(v_tiles, i), bars.index(2 + i), b, lo + i * N, head)
    if sink_k is not None:  # read in the end, asked for now
        k_sink, v_sink = sink_of(sink_k + head * d, D0, D1), sink_of(sink_v + head * d, D0, D1)
    # a finite lower bound in place of -inf: exp2(-inf - m) is 0 for a row without keys, never NaN
    m, total = gl.full((M,), -1e30, gl.float32, R), gl.zeros((M,), gl.float32, R)
    acc = zeros(values, M)
    mbarrier.wait(bars.index(4), 0)
    if gain is not None:
        norm_rotate(q_tile, gain, cos, sin, eps, b, t0, Tq, P, M, W)
    if kept0 is not None:
        send(pair(kept0, kept1), q_tile, b, t0, head)
    for i in range(n):
        at, phase, j0 = i % 2, i // 2 & 1, lo + i * N
        k, v = of(k_tiles, at), of(v_tiles, at)
        mbarrier.wait(bars.index(at), phase)
        s = warpgroup_mma_wait(0, [scores(q_tile, k, M, N)])
        if i + 2 < n:
            fetch(keys, k, bars.index(at), b, j0 + 2 * N, head)
        if (j0 < left) | (j0 + N > right):
            j = j0 + gl.arange(0, N, gl.SliceLayout(0, accumulator(N)))[None, :]
            s = gl.where(visible(begin, end, j), s, float("-inf"))
        m_new = gl.maximum(m, gl.max(s, 1) * scale2)
        p = gl.exp2(s * scale2 - m_new[:, None])
        shrink = gl.exp2(m - m_new)
        total = total * shrink + gl.sum(p, 1)
        m = m_new
        acc = times_column(acc, shrink)
        mbarrier.wait(bars.index(2 + at), phase)
        acc = finish(begin_add(acc, p, v))
        if i + 2 < n:
            fetch(values, v, bars.index(2 + at), b, j0 + 2 * N, head)
    if sink_k is not None:
        m, total, acc = with_sink(m, total, acc, q_tile, k_sink, v_sink, scale2)
    safe = gl.where(total > 0, total, 1.0)
    tma.store_wait(0)
    keep(q_tile, times_column(acc, 1.0 / safe))
    send(out, q_tile, b, t0, head)
    r = t0 * P + gl.arange(0, M, R)
    gl.store(lse2 + gl.program_id(0) * Tq * P + r,
             gl.where(total > 0, m + gl.log2(safe), float("-inf")), r < Tq * P)
    tma.store_wait(0)


# ---- backward ---------------------------------------------------------------------------------


@gluon.jit
def add_to_row(row, x):
    """Add the sums over the rows of tiles that stand side by side to a row of memory."""
    for i in gl.static_range(len(x)):
        c = i * x[0].shape[1] + gl.arange(0, x[i].shape[1], gl.SliceLayout(0, x[i].type.layout))
        gl.store(row + c, gl.load(row + c) + gl.sum(x[i], 0))


@gluon.jit
def dq_kernel(q0, q1, x0, x1, do0, do1, k0, k1, v0, v1, dq0, dq1, numbers, start, stop, sink_k,
              gain, cos, sin, dgain, eps, scale, scale2, Tq, Hkv, stride, gain_stride,
              P: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, M: gl.constexpr,
              N: gl.constexpr, W: gl.constexpr):
    """dq of a block of packed rows, or with a gain that of x, which q was before its norm, and the
    block's part of the gain's gradient, in a row of its own."""
    q, do, keys, values = pair(q0, q1), pair(do0, do1), pair(k0, k1), pair(v0, v1)
    d: gl.constexpr = D0 + D1
    R: gl.constexpr = gl.SliceLayout(1, accumulator(N))
    b, head = gl.program_id(0) // Hkv, gl.program_id(0) % Hkv
    block = gl.num_programs(1) - 1 - gl.program_id(1)
    t0 = block * (M // P)
    q_tile, do_tile, k_tiles, v_tile = room(q, 1), room(do, 1), room(keys, 2), room(values, 1)
    q_tile, do_tile, v_tile, bars = of(q_tile, 0), of(do_tile, 0), of(v_tile, 0), barriers(6)
    fetch(q, q_tile, bars.index(3), b, t0, head)
    fetch(do, do_tile, bars.index(4), b, t0, head)
    x_tile = q_tile
    if gain is not None:
        x = pair(x0, x1)
        x_tile = of(room(x, 1), 0)
        fetch(x, x_tile, bars.index(5), b, t0, head)
    begin, end, lo, left, right, hi = query_block(start, stop, b, t0, Tq, P, M, R)
    n = gl.cdiv(hi - lo, N)
    for i in gl.static_range(2):
        if i < n:
            fetch(keys, of(k_tiles, i), bars.index(i), b, lo + i * N, head)
    if n > 0:
        fetch(values, v_tile, bars.index(2), b, lo, head)
    r = t0 * P + gl.arange(0, M, R)
    numbers += 3 * gl.program_id(0) * stride + r
    lse = gl.load(numbers, r < Tq * P, 0.0)[:, None]
    delta = gl.load(numbers + stride, r < Tq * P, 0.0)[:, None]
    ds_sink = gl.load(numbers + 2 * stride, r < Tq * P, 0.0)
    acc = zeros(keys, M)
    mbarrier.wait(bars.index(3), 0)
    mbarrier.wait(bars.index(4), 0)
    for i in range(n):
        at, j0 = i % 2, lo + i * N
        k = of(k_tiles, at)
        mbarrier.wait(bars.index(at), i // 2 & 1)
        s = scores(q_tile, k, M, N)
        mbarrier.wait(bars.index(2), i & 1)
        dp = scores(do_tile, v_tile, M, N)
        s = warpgroup_mma_wait(len(do_tile), [s])
        p = gl.exp2(s * scale2 - lse)
        if (j0 < left) | (j0 + N > right):
            j = j0 + gl.arange(0, N, gl.SliceLayout(0, accumulator(N)))[None, :]
            p = gl.where(visible(begin, end, j), p, 0.0)
        dp = warpgroup_mma_wait(0, [dp])
        if i + 1 < n:
            fetch(values, v_tile, bars.index(2), b, j0 + N, head)
        acc = finish(begin_add(acc, p * (dp - delta), k))
        if i + 2 < n:
            fetch(keys, k, bars.index(at), b, j0 + 2 * N, head)
    if sink_k is not None:
        acc = plus_sink(acc, ds_sink, sink_of(sink_k + head * d, D0, D1))
    acc = times(acc, scale)
    if gain is not None:
        mbarrier.wait(bars.index(5), 0)
        acc, of_gain = norm_rotate_gradient(acc, x_tile, gain, cos, sin, eps, b, t0, Tq, P, M, W)
        row = gl.program_id(0) * gl.num_programs(1) + block
        add_to_row(dgain + row * gain_stride, of_gain)
    keep(q_tile, acc)
    send(pair(dq0, dq1), q_tile, b, t0, head)
    tma.store_wait(0)


@gluon.constexpr_function
def alike(n):
    """Layout of n numbers which all warps have."""
    return gl.BlockedLayout([n // 32], [32], [WARPS], [0])


@gluon.jit
def queries_of(start, stop, j0, Tq, N: gl.constexpr, CHUNK: gl.constexpr):
    """Queries lo <= t < hi read one of the keys j0 .. j0 + N - 1, left <= t < right all of them:
    start and stop never decrease, so counting finds the ends. Every warp counts on its own."""
    layout: gl.constexpr = alike(CHUNK)
    lo, left, right, hi = 0, 0, 0, 0
    for i0 in range(0, Tq, CHUNK):
        i = i0 + gl.arange(0, CHUNK, layout)
        begin = gl.load(start + i, i < Tq, 2147483647)
        end = gl.load(stop + i, i < Tq, 2147483647)
        lo += gl.sum((end <= j0).to(gl.int32), 0)
        left += gl.sum((end < j0 + N).to(gl.int32), 0)
        right += gl.sum((begin <= j0).to(gl.int32), 0)
        hi += gl.sum((begin < j0 + N).to(gl.int32), 0)
    return lo, left, right, hi


@gluon.jit
def fetch_queries(q, do, numbers, q_tile, do_tile, its, bar, b, t, head, P: gl.constexpr,
                  M: gl.constexpr, d: gl.constexpr):
    """Ask for packed rows of q and do, and for their lse2 and delta."""
    mbarrier.expect(bar, 4 * M * d + 8 * M)  # bytes: two tiles of half precision, two of numbers
    bring(q, q_tile, bar, b, t, head)
    tma.async_copy_global_to_shared(numbers, [3 * gl.program_id(0), t * P], bar, its)
    bring(do, do_tile, bar, b, t, head)


@gluon.jit
def add_to(tile, acc):
    """acc and what is in a tile of shared memory, there."""
    for c in gl.static_range(len(acc)):
        before = flat(tile[c]).load(acc[c].type.layout)
        flat(tile[c]).store((acc[c] + before).to(tile[c].dtype))


@gluon.jit
def dkv_kernel(q0, q1, do0, do1, k0, k1, v0, v1, dk0, dk1, dv0, dv1, numbers, start, stop,
               scale, scale2, Tq, Hkv, P: gl.constexpr, d: gl.constexpr, CHUNK: gl.constexpr,
               M: gl.constexpr, N: gl.constexpr):
    """dk += and dv += for a block of keys, over the queries that can read one of them, M packed
    rows at a time. Scores are transposed, (keys, rows)."""
    q, do, keys, values = pair(q0, q1), pair(do0, do1), pair(k0, k1), pair(v0, v1)
    dk, dv = pair(dk0, dk1), pair(dv0, dv1)
    T: gl.constexpr = M // P
    L: gl.constexpr = accumulator(M)
    C: gl.constexpr = gl.SliceLayout(0, L)
    b, head = gl.program_id(0) // Hkv, gl.program_id(0) % Hkv
    j0 = gl.program_id(1) * N  # under a causal mask the first keys have the most queries
    k_tile, v_tile, q_tiles, do_tiles = room(keys, 1), room(values, 1), room(q, 2), room(do, 2)
    dk_tile, dv_tile = room(dk, 1), room(dv, 1)
    k_tile, v_tile, dk_tile, dv_tile = of(k_tile, 0), of(v_tile, 0), of(dk_tile, 0), of(dv_tile, 0)
    its = gl.allocate_shared_memory(gl.float32, [2] + numbers.block_shape, numbers.layout)
    bars = barriers(4)
    start += b * Tq
    stop += b * Tq
    lo, left, right, hi = queries_of(start, stop, j0, Tq, N, CHUNK)
    lo = lo * P // ALIGNED * ALIGNED // P  # where the copy engine may begin with lse2 and delta
    if lo < hi:
        n = gl.cdiv(hi - lo, T)
        mbarrier.expect(bars.index(2), 4 * N * d)  # bytes: two tiles of half precision
        bring(keys, k_tile, bars.index(2), b, j0, head)
        bring(values, v_tile, bars.index(2), b, j0, head)
        for i in gl.static_range(2):
            if i < n:
                fetch_queries(q, do, numbers, of(q_tiles, i), of(do_tiles, i), its.index(i),
                              bars.index(i), b, lo + i * T, head, P, M, d)
        mbarrier.expect(bars.index(3), 4 * N * d)
        bring(dk, dk_tile, bars.index(3), b, j0, head)
        bring(dv, dv_tile, bars.index(3), b, j0, head)
        j = j0 + gl.arange(0, N, gl.SliceLayout(1, L))[:, None]
        dk_acc, dv_acc = zeros(keys, N), zeros(values, N)
        mbarrier.wait(bars.index(2), 0)
        for i in range(n):
            at, t0 = i % 2, lo + i * T
            q_tile, do_tile = of(q_tiles, at), of(do_tiles, at)
            mbarrier.wait(bars.index(at), i // 2 & 1)
            s = scores(k_tile, q_tile, N, M)
            dp = scores(v_tile, do_tile, N, M)
            s = warpgroup_mma_wait(len(do_tile), [s])
            p = gl.exp2(s * scale2 - its.index(at).slice(0, 1).load(L))
            if (t0 < left) | (t0 + T > right):
                t = t0 + gl.arange(0, M, C) // P
                begin = gl.load(start + t, t < Tq, 0)[None, :]
                end = gl.load(stop + t, t < Tq, 0)[None, :]
                p = gl.where(visible(begin, end, j), p, 0.0)
            dv_sum = begin_add(dv_acc, p, do_tile)
            dp = warpgroup_mma_wait(len(dv_acc), [dp])
            dk_sum = begin_add(dk_acc, p * (dp - its.index(at).slice(1, 1).load(L)), q_tile)
            dv_acc, dk_acc = finish(dv_sum), finish(dk_sum)
            if i + 2 < n:
                fetch_queries(q, do, numbers, q_tile, do_tile, its.index(at), bars.index(at), b,
                              t0 + 2 * T, head, P, M, d)
        mbarrier.wait(bars.index(3), 0)
        add_to(dk_tile, times(dk_acc, scale))
        add_to(dv_tile, dv_acc)
        send(dk, dk_tile, b, j0, head)
        send(dv, dv_tile, b, j0, head)
        tma.store_wait(0)


# ---- host side --------------------------------------------------------------------------------


def tiles(rows: int, Hkv: int, *tensors: Tensor) -> list[TensorDescriptor | None]:
    """`attention.tiles`: pairs of descriptors of `rows` packed rows, of q-like tensors or (Hkv = 0)
    of a cache's."""
    pairs = []
    for tensor in tensors:
        if tensor is None:
            pairs += [None, None]
            continue
        x = tensor.unflatten(2, (Hkv, -1)) if Hkv else tensor.unsqueeze(3)
        P = triton.next_power_of_2(x.size(3))
        dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
        for n in split_head(x.size(4)):
            block = [1, rows // P, 1, P, n]
            pairs.append(TensorDescriptor.from_tensor(
                x, block, gl.NVMMASharedLayout.get_default_for(block, dtype)) if n else None)
    return pairs


def forward(q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor, sink_k: Tensor | None,
            sink_v: Tensor | None, norm: tuple[Tensor, ...] | None = None,
            keep: bool = False) -> tuple[Tensor, ...]:
    """`attention.attention_forward`; q and the sink are contiguous. With a norm (its gain, and
    cos and sin (B, Tq, d / 2)), q is normed and rotated first; `keep`: and the third result."""
    (B, Tq, H, d), Hkv = q.shape, k.size(2)
    P, N, (D0, D1) = triton.next_power_of_2(H // Hkv), of_size(KEYS, d), split_head(d)
    out, lse2 = torch.empty_like(q), q.new_empty(B, Hkv, Tq * P, dtype=torch.float32)
    kept = torch.empty_like(q) if keep else None
    forward_kernel[B * Hkv, triton.cdiv(Tq * P, ROWS)](
        *tiles(ROWS, Hkv, q), *tiles(N, 0, k, v), *tiles(ROWS, Hkv, out, kept), lse2, start, stop,
        sink_k, sink_v, *(norm or NOTHING), EPS, d ** -0.5 * LOG2E, Tq, Hkv, P=P, D0=D0, D1=D1,
        M=ROWS, N=N, W=(D1 or D0) // 2, num_warps=WARPS)
    return (out, lse2, kept) if keep else (out, lse2)


def backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, numbers: Tensor, start: Tensor,
             stop: Tensor, sink_k: Tensor | None, dk: Tensor, dv: Tensor,
             norm: tuple[Tensor, ...] | None, x: Tensor | None, dgain: Tensor | None) -> Tensor:
    """`attention.attention_backward` after its `rows_kernel`; do, q, x and the sink are contiguous.

    dq's programs have less to do towards the end, and those of dk and dv begin there."""
    (B, Tq, H, d), (_, S, Hkv, _) = q.shape, k.shape
    P, N, (D0, D1) = triton.next_power_of_2(H // Hkv), of_size(KEYS, d), split_head(d)
    dq, M, registers = torch.empty_like(q), *of_size(QUERIES, d)
    scales = d ** -0.5, d ** -0.5 * LOG2E
    here, there = torch.cuda.current_stream(), beside_stream(q.device)
    there.wait_stream(here)
    dq_kernel[B * Hkv, triton.cdiv(Tq * P, ROWS)](
        *tiles(ROWS, Hkv, q, x, do), *tiles(N, 0, k, v), *tiles(ROWS, Hkv, dq), numbers, start,
        stop, sink_k, *(norm or NOTHING), dgain, EPS, *scales, Tq, Hkv, numbers.size(1),
        0 if dgain is None else dgain.stride(0), P=P, D0=D0, D1=D1, M=ROWS, N=N,
        W=(D1 or D0) // 2, num_warps=WARPS)
    with torch.cuda.stream(there):
        dkv_kernel[B * Hkv, triton.cdiv(S, ROWS)](
            *tiles(M, Hkv, q, do), *tiles(ROWS, 0, k, v, dk, dv),
            TensorDescriptor.from_tensor(numbers[:, :Tq * P], [2, M],
                                         gl.NVMMASharedLayout(0, 32, 2)),
            start, stop, *scales, Tq, Hkv, P=P, d=d,
            CHUNK=min(1024, max(32, triton.next_power_of_2(Tq))), M=M, N=ROWS, num_warps=WARPS,
            maxnreg=registers)
    here.wait_stream(there)
    return dq


@cache
def beside_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def programs(q: Tensor, k: Tensor) -> int:
    """Of dq's kernel."""
    (B, Tq, H, _), Hkv = q.shape, k.size(2)
    return B * Hkv * triton.cdiv(Tq * triton.next_power_of_2(H // Hkv), ROWS)
