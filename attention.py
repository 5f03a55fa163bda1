"""
How queries read keys and values: where tokens stand (Rows), one attention function, and the Cache.

Dimensions: B rows, T queries, S cached tokens, C cached channels (L for vanilla, k in
WhiteMatter), H query heads, Hkv key-value heads, G = H / Hkv, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

try:  # the fast path; Triton comes with PyTorch's CUDA builds
    from kernels import attention as kernels
    from kernels import norms as norm_kernels
except ImportError:
    kernels = norm_kernels = None

FEW = 8  # so few queries of a row are decoding: then programs share the keys
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

    def past(self) -> Rows:
        """The same queries without their own tokens, where they read these; made once."""
        if "past" not in self._masks:
            self._masks["past"] = Rows(self.columns, self.start, self.stop - 1, self.cos, self.sin)
        return self._masks["past"]

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
        decoding = q.size(1) <= FEW and not torch.is_grad_enabled()
        kernel = kernels.decode_attention if decoding else kernels.attention
        return kernel(q, k, v, rows.start, rows.stop, *(sink or ()))
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

    def __init__(self, k: Tensor, v: Tensor, sink: Sink | None = None, weights=None):
        self.k, self.v, self.sink = k, v, sink  # sink: the dummy's channels, (C, Hkv, d) each
        self.weights = weights  # of the model that fills it, made ready for many writes
        self.sinks = (list(zip(*(s.detach().unbind() for s in sink))) if sink
                      else [None] * len(k))
        self.tape = _Tape(k, v, sink)
        # threads all operations on the tape, so that autograd reverses them in order; the sink's
        # gradient is complete when it gets back to its beginning
        self.link = Collect.apply(self.tape.sink_gradient, k, *(sink or ())).requires_grad_()

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

    def put_projected(self, rows: Rows, projected: Tensor, gain: Tensor):
        """Write (2, C, B, T, Hkv d) keys and values as projected: the keys are normed with gains
        (C, d) and rotated on their way. Where `is_fast`."""
        if torch.is_grad_enabled():
            self.link = _WriteProjected.apply(self.link, projected, gain, self.tape, rows)
        else:
            norm_kernels.store(projected, gain, rows.cos, rows.sin, rows.columns, self.k, self.v)

    def attend(self, q: Tensor, channel: int, rows: Rows) -> Tensor:
        """Attention of q (B, T, H, d) on a channel, and on the dummy if there is one."""
        if not torch.is_grad_enabled():
            return attend(q, self.k[channel], self.v[channel], rows, self.sinks[channel])
        out, self.link = _Read.apply(self.link, q, self.tape, channel, rows, self.sinks[channel])
        return out


class Collect(torch.autograd.Function):
    """Hands tensors the gradients that others add up on the side, and asks for them last of all.

    Those others take the (empty) result as an input, and give it on or nothing back for it.
    """

    @staticmethod
    def forward(ctx, gradients: Callable, like, *tensors):
        ctx.gradients = gradients
        return like.new_empty(0)

    @staticmethod
    def backward(ctx, _):
        return None, None, *ctx.gradients()


def assign(keys: Tensor, values: Tensor, where: tuple, k: Tensor, v: Tensor):
    """Not the tape's own method, which would hold the tape, in a circle, until Python looks."""
    keys[where], values[where] = k, v


class _Tape:
    """What writes and reads remember of a cache: its storage and the running gradient of it."""

    def __init__(self, k: Tensor, v: Tensor, sink: Sink | None):
        self.k, self.v, self.dk, self.dv = k, v, None, None
        self.sink, self.dsink = sink, None
        self.undo = []  # how to put back what each write so far overwrote
        self.untouched = True  # nothing was read yet: what is overwritten need not be kept
        # the last write to each of g strided groups: to undo the next one, it is done again
        self.n_groups, self.latest = 0, {}

    def write(self, where: tuple, write: Callable) -> int:
        """Returns the number of writes so far, which names the state of the cache after it."""
        channel, _, columns = where
        g, q = 0, None
        if channel == slice(None) and isinstance(columns, slice) and columns.stop is None:
            g, q = columns.step or 1, columns.start or 0
            g = g if 0 <= q < g else 0
        if g != self.n_groups:  # another partition of the row
            self.n_groups, self.latest = g, {}
        undo = None
        if not self.untouched:
            undo = self.latest.get(q) or partial(
                assign, self.k, self.v, where, self.k[where].clone(), self.v[where].clone())
        self.undo.append(undo)
        if g:
            self.latest[q] = write
        write()
        return len(self.undo)

    def rewind(self, n: int):
        """Back to the state after n writes."""
        if len(self.undo) < n:
            raise RuntimeError("a cache can be backpropagated through once: solve again")
        while len(self.undo) > n:
            undo = self.undo.pop()
            if undo is not None:
                undo()

    def gradient(self) -> tuple[Tensor, Tensor]:
        """dk, dv: a running sum like the cache and, as autograd's own sums, in its precision."""
        if self.dk is None:
            self.dk, self.dv = torch.zeros_like(self.k), torch.zeros_like(self.v)
        return self.dk, self.dv

    def sink_sums(self, rows: int = 1) -> Tensor:
        """Running sums (C, 2, rows, Hkv, d) of the gradients of the dummy's keys and values."""
        if self.dsink is None:
            (C, Hkv, d), like = self.sink[0].shape, self.sink[0]
            dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
            self.dsink = torch.zeros(C, 2, rows, Hkv, d, dtype=dtype, device=like.device)
        return self.dsink

    def sink_gradient(self) -> tuple[Tensor, ...]:
        if self.sink is None:
            return ()
        return self.sink_sums().sum(2).to(self.sink[0].dtype).unbind(1)


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx, link, k, v, tape, where):
        write = partial(assign, tape.k, tape.v, where, k.detach(), v.detach())
        ctx.tape, ctx.where, ctx.n = tape, where, tape.write(where, write)
        return link.clone()

    @staticmethod
    def backward(ctx, d_link):
        ctx.tape.rewind(ctx.n - 1)
        grads = []
        for total in ctx.tape.gradient():
            grads.append(total[ctx.where].clone())
            total[ctx.where] = 0
        return d_link, *grads, None, None


class _WriteProjected(torch.autograd.Function):
    @staticmethod
    def forward(ctx, link, projected, gain, tape, rows):
        ctx.how = gain, rows.cos, rows.sin, rows.columns
        ctx.save_for_backward(projected)
        write = partial(norm_kernels.store, projected.detach(), *ctx.how, tape.k, tape.v)
        ctx.tape, ctx.n = tape, tape.write((slice(None), slice(None), rows.columns), write)
        return link.clone()

    @staticmethod
    def backward(ctx, d_link):
        ctx.tape.rewind(ctx.n - 1)
        grads = norm_kernels.take(*ctx.saved_tensors, *ctx.how, *ctx.tape.gradient())
        return d_link, *grads, None, None


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, link, q, tape, channel, rows, sink):
        """`attend`, and a new link."""
        ctx.set_materialize_grads(False)
        ctx.tape, ctx.channel, ctx.rows, ctx.sink = tape, channel, rows, sink
        ctx.n, tape.untouched = len(tape.undo), False
        k, v, lse = tape.k[channel], tape.v[channel], None
        if is_fast(q):
            out, lse = kernels.attention_forward(q, k, v, rows.start, rows.stop, *(sink or ()))
        else:
            out = attend(q, k, v, rows, sink)
        ctx.save_for_backward(q, out if lse is not None else None, lse)
        return out, link.clone()

    @staticmethod
    def backward(ctx, d_out, d_link):
        """dq; the gradients of keys, values and sink are added to the tape's."""
        tape, j, rows = ctx.tape, ctx.channel, ctx.rows
        if d_out is None:  # nobody read it: the last block, in a pass before the last
            return d_link, *(None,) * 5
        tape.rewind(ctx.n)
        k, v, (dk, dv) = tape.k[j], tape.v[j], (total[j] for total in tape.gradient())
        q, out, lse = ctx.saved_tensors
        if lse is not None:
            dsink = None
            if ctx.sink is not None:
                n_rows = kernels.sink_rows(*k.shape[:2], q.size(2), k.size(2))
                dsink = tape.sink_sums(n_rows)[j]
            dq = kernels.attention_backward(d_out, q, k, v, out, lse, rows.start, rows.stop,
                                            *(ctx.sink or (None, None)), dk, dv, dsink)
            return d_link, dq, *(None,) * 4
        # once more, with gradients
        inputs = [t.detach().requires_grad_() for t in (q, k, v, *(ctx.sink or ()))]
        with torch.enable_grad():
            out = attend(*inputs[:3], rows, tuple(inputs[3:]) or None)
        dq, *d_kv = torch.autograd.grad(out, inputs, d_out)
        dk += d_kv[0]
        dv += d_kv[1]
        for i, d in enumerate(d_kv[2:]):
            tape.sink_sums()[j, i] += d
        return d_link, dq, *(None,) * 4
