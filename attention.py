"""
How queries read keys and values: where tokens stand (Rows), one attention function, and the Cache.

Dimensions: B rows, T queries, S cached tokens, C cached channels (L for vanilla, k in
WhiteMatter), H query heads, Hkv key-value heads, G = H / Hkv, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

try:  # the fast path; Triton comes with PyTorch's CUDA builds
    import kernels
except ImportError:
    kernels = None

Sink = tuple[Tensor, Tensor]  # one more key and value (Hkv, d) that every query reads: the dummy


@dataclass
class Rows:
    """Where the queries of a batch stand: column in the cache, document, position.

    Query (b, i) attends to the cached tokens `start[b, i] <= j < stop[b, i]`: an interval is
    all that causality, the document mask and "a token does not read itself" ever need.
    """

    columns: slice | Tensor  # of the cache; a tensor (B, T) where every row has its own
    start: Tensor  # (B, T) int32, as is stop; neither decreases along a row
    stop: Tensor
    cos: Tensor  # (B, T, d/2) float32
    sin: Tensor
    _masks: dict = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Are these all tokens of their rows?"""
        return isinstance(self.columns, slice) and self.columns == slice(None)

    def at(self, columns: slice) -> Rows:
        return Rows(columns, *(t[:, columns].contiguous() for t in
                               (self.start, self.stop, self.cos, self.sin)))

    def split(self, g: int) -> list[Rows]:
        """The strided groups {i : i mod g = q}; groups beyond T are left out."""
        return [self.at(slice(q, None, g)) for q in range(min(g, self.start.size(1)))]

    def mask(self, n_keys: int, n_repeat: int, sink: bool, dtype: torch.dtype) -> Tensor:
        """(B, 1, T * n_repeat, [1 +] n_keys), 0 where a query reads and -inf where not.

        Built once; every layer uses it again.
        """
        key = (n_keys, n_repeat, sink, dtype)
        if key not in self._masks:
            j = torch.arange(n_keys, device=self.start.device)
            reads = (self.start[..., None] <= j) & (j < self.stop[..., None])
            reads = F.pad(reads, (1, 0), value=True) if sink else reads
            reads = reads.repeat_interleave(n_repeat, dim=1).unsqueeze(1)
            self._masks[key] = torch.zeros_like(reads, dtype=dtype).masked_fill(~reads, -torch.inf)
        return self._masks[key]


def is_fast(q: Tensor) -> bool:
    """Are there kernels for this: half precision on a CUDA device? If not, SDPA with a mask."""
    return kernels is not None and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


def attend(q: Tensor, k: Tensor, v: Tensor, rows: Rows, sink: Sink | None = None) -> Tensor:
    """Attention of q (B, T, H, d) on k, v (B, S, Hkv, d); returns (B, T, H, d).

    A query that may read nothing at all gets 0. Scale 1 / sqrt(d).
    """
    if is_fast(q):
        return kernels.attention(q, k, v, rows.start, rows.stop, *(sink or ()))
    B, T, H, d = q.shape
    Hkv, G = k.size(2), H // k.size(2)
    # the G query heads that share a key-value head become rows: one large product per key head
    q = q.view(B, T, Hkv, G, d).transpose(1, 2).reshape(B, Hkv, T * G, d)
    mask = rows.mask(k.size(1), G, sink is not None, q.dtype)
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # (B, Hkv, S, d)
    if sink is not None:
        k, v = (torch.cat((s[None, :, None].expand(B, -1, -1, -1), t), dim=2)
                for s, t in zip(sink, (k, v)))
    out = F.scaled_dot_product_attention(q, k, v, mask)  # (B, Hkv, T * G, d)
    return out.view(B, Hkv, T, G, d).transpose(1, 2).reshape(B, T, H, d)


class Cache:
    """Keys (normed and rotated) and values of all tokens, in token order: k, v (C, B, S, Hkv, d).

    `put` writes and `attend` reads; there is one copy of everything, also in training. While
    gradients are recorded the cache is a tape: it remembers what each write overwrote, and the
    backward pass, which meets writes and reads in reverse order, puts it back, so that a read
    finds what it read before. The gradient of the cache is one running sum in the same layout:
    reads add to it, a write takes its own part out. So a backward pass uses a cache up.
    """

    def __init__(self, k: Tensor, v: Tensor, sink: Sink | None = None):
        self.k, self.v, self.sink = k, v, sink  # sink: the dummy's channels, (C, Hkv, d) each
        # taken apart once: C separate selections would each backpropagate C channels of zeros
        self.sinks = list(zip(*(s.unbind() for s in sink))) if sink else [None] * len(k)
        self.tape = _Tape(k, v)
        # threads all operations on the tape, so that autograd reverses them in order
        self.link = k.new_empty(0, requires_grad=True)

    def put(self, columns: slice | Tensor, k: Tensor, v: Tensor,
            channel: int | slice = slice(None)):
        """Write k, v ([C,] B, T, Hkv, d) at `columns`, those of a `Rows`."""
        where = (channel, slice(None), columns)
        if isinstance(columns, Tensor):
            where = (channel, torch.arange(len(columns), device=columns.device)[:, None], columns)
        if torch.is_grad_enabled():
            self.link = _Write.apply(self.link, k, v, self.tape, where)
        else:
            self.k[where], self.v[where] = k, v

    def attend(self, q: Tensor, channel: int, rows: Rows) -> Tensor:
        """Attention of q (B, T, H, d) on a channel, and on the dummy if there is one."""
        sink = self.sinks[channel]
        if not torch.is_grad_enabled():
            return attend(q, self.k[channel], self.v[channel], rows, sink)
        out, self.link = _Read.apply(self.link, q, *(sink or (None, None)), self.tape, channel,
                                     rows)
        return out


class _Tape:
    """What writes and reads remember of a cache: its storage and the running gradient of it."""

    def __init__(self, k: Tensor, v: Tensor):
        self.k, self.v, self.dk, self.dv = k, v, None, None
        self.overwritten = []  # by each write so far, less those taken back
        # what was written last to each of g strided groups: it need not be copied to be kept
        self.n_groups, self.latest = 0, {}

    def write(self, where: tuple, k: Tensor, v: Tensor) -> int:
        """Returns the number of writes so far, which names the state of the cache after it."""
        channel, _, columns = where
        g, q = 0, None
        if channel == slice(None) and isinstance(columns, slice) and columns.stop is None:
            g, q = columns.step or 1, columns.start or 0
            g = g if 0 <= q < g else 0
        if g != self.n_groups:  # another partition of the row
            self.n_groups, self.latest = g, {}
        old = self.latest.get(q) or (self.k[where].clone(), self.v[where].clone())
        self.overwritten.append((where, old))
        if g:
            self.latest[q] = k.detach(), v.detach()
        self.k[where], self.v[where] = k, v
        return len(self.overwritten)

    def rewind(self, n: int):
        """Back to the state after n writes."""
        if len(self.overwritten) < n:
            raise RuntimeError("a cache can be backpropagated through once: solve again")
        while len(self.overwritten) > n:
            where, old = self.overwritten.pop()
            self.k[where], self.v[where] = old

    def gradient(self) -> tuple[Tensor, Tensor]:
        """dk, dv: a running sum like the cache and, as autograd's own sums, in its precision."""
        if self.dk is None:
            self.dk, self.dv = torch.zeros_like(self.k), torch.zeros_like(self.v)
        return self.dk, self.dv


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx, link, k, v, tape, where):
        ctx.tape, ctx.where, ctx.n = tape, where, tape.write(where, k, v)
        return link.clone()

    @staticmethod
    def backward(ctx, d_link):
        ctx.tape.rewind(ctx.n - 1)
        grads = []
        for total in ctx.tape.gradient():
            grads.append(total[ctx.where].clone())
            total[ctx.where] = 0
        return d_link, *grads, None, None


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, link, q, sink_k, sink_v, tape, channel, rows):
        ctx.set_materialize_grads(False)
        ctx.tape, ctx.channel, ctx.rows, ctx.n = tape, channel, rows, len(tape.overwritten)
        k, v, lse = tape.k[channel], tape.v[channel], None
        if is_fast(q):
            out, lse = kernels.attention_forward(q, k, v, rows.start, rows.stop, sink_k, sink_v)
        else:
            out = attend(q, k, v, rows, None if sink_k is None else (sink_k, sink_v))
        ctx.save_for_backward(q, sink_k, sink_v, out if lse is not None else None, lse)
        return out, link.clone()

    @staticmethod
    def backward(ctx, d_out, d_link):
        tape, j, rows = ctx.tape, ctx.channel, ctx.rows
        if d_out is None:  # nobody read it: the last block, in a pass before the last
            return d_link, *(None,) * 6
        tape.rewind(ctx.n)
        k, v, (dk, dv) = tape.k[j], tape.v[j], (total[j] for total in tape.gradient())
        q, sink_k, sink_v, out, lse = ctx.saved_tensors
        if lse is not None:
            dq, *d_sink = kernels.attention_backward(d_out, q, k, v, out, lse, rows.start,
                                                     rows.stop, sink_k, sink_v, dk, dv)
        else:  # once more, with gradients
            inputs = [q, k, v] + ([] if sink_k is None else [sink_k, sink_v])
            with torch.enable_grad():
                inputs = [t.detach().requires_grad_() for t in inputs]
                out = attend(*inputs[:3], rows, tuple(inputs[3:]) or None)
            dq, *d_kv, = torch.autograd.grad(out, inputs, d_out)
            dk += d_kv[0]
            dv += d_kv[1]
            d_sink = d_kv[2:] or (None, None)
        if sink_k is not None:
            d_sink = (d.to(sink_k.dtype) for d in d_sink)
        return d_link, dq, *d_sink, None, None, None
