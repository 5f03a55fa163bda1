"""
The cache of training as a tape: one copy of all keys and values, however often they are written.

A cyclic pass of g groups writes g times to a cache that every later step reads, and autograd
needs what each read has seen. In place of a copy for each write, the cache remembers what a write
overwrote, and the backward pass, which meets writes and reads in reverse order, puts it back. The
gradient of the cache is one running sum in the same layout: reads add to it, a write takes its own
part out. So a backward pass uses a cache up.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from attention import Cache, Rows, Sink
from kernels import attention as triton_attention
from kernels.compiled import merge_own, own_gradients
from kernels.norms import Gain, Projected, store, take

FEW = 8  # so few queries of a row are decoding: then programs share the keys


def attend(q: Tensor, k: Tensor, v: Tensor, rows: Rows, sink: Sink | None = None) -> Tensor:
    """`attention.attend` by the kernels."""
    if not torch.is_grad_enabled():
        return read(q, k, v, rows, sink)[0]
    return triton_attention.attention(q, k, v, rows.start, rows.stop, *(sink or ()))


def read(q: Tensor, k: Tensor, v: Tensor, rows: Rows, sink: Sink | None,
         *own: Tensor) -> tuple[Tensor, Tensor]:
    """`attend` without gradients, and the base-2 logarithms of the sums. `own`: one more key and
    value (B, T, Hkv, d) for each query, which are merged into the sum of the others."""
    few = q.size(1) <= FEW
    forward = triton_attention.decode_forward if few else triton_attention.attention_forward
    sums = forward(q, k, v, rows.start, rows.stop, *(sink or ()))
    return merge_own(q, *own, *sums) if own else sums


def norm_of(gain: Gain | None, rows: Rows) -> tuple[Tensor, ...] | None:
    return gain and (gain.weight, rows.cos, rows.sin)


class TapeCache(Cache):
    """`attention.Cache` in one piece of memory, k_all and v_all (C, B, S, Hkv, d)."""

    def __init__(self, k: Tensor, v: Tensor, sink: Sink | None = None, folded=None):
        """folded: the pool's weights, made ready for many writes (kernels/pool.py)."""
        super().__init__(list(k.unbind()), list(v.unbind()), sink)
        self.k_all, self.v_all, self.folded = k, v, folded
        self.sinks = (list(zip(*(s.detach().unbind() for s in sink))) if sink
                      else [None] * len(k))
        self.tape = Tape(k, v, sink)
        # threads all operations on the tape, so that autograd reverses them in order; the sink's
        # gradient is complete when it gets back to its beginning
        self.link = Collect.apply(self.tape.sink_gradient, k, *(sink or ())).requires_grad_()

    def put(self, columns: slice | Tensor, k: Tensor, v: Tensor, first: int = 0):
        """`Cache.put`; remembered while gradients are recorded."""
        channels = slice(None) if len(k) == len(self.k) else slice(first, first + len(k))
        where = channels, slice(None), columns
        if isinstance(columns, Tensor):
            rows = torch.arange(len(columns), device=columns.device)[:, None]
            where = channels, rows, columns
        if torch.is_grad_enabled():
            self.link = Write.apply(self.link, k, v, self.tape, where)
        else:
            self.k_all[where], self.v_all[where] = k, v

    def put_projected(self, rows: Rows, projected: Tensor, gain: Gain):
        """Write (2, C, B, T, Hkv d) keys and values as projected: the keys are normed with gains
        (C, d) and rotated on their way."""
        if torch.is_grad_enabled():
            self.link = WriteProjected.apply(self.link, projected, gain.weight, gain, self.tape,
                                             rows)
        else:
            store(projected, gain, rows.cos, rows.sin, rows.columns, self.k_all, self.v_all)

    def attend(self, q: Tensor | Projected, channel: int, rows: Rows, *own: Tensor) -> Tensor:
        """`Cache.attend`; with `own`, each query reads one more entry (B, T, Hkv, d) of its own."""
        k, v, sink, gain = self.k[channel], self.v[channel], self.sinks[channel], None
        if isinstance(q, Projected):
            if q.x.size(1) > FEW and triton_attention.takes_projected(q.x, k, q.gain):
                q, gain = q.x, q.gain
            else:
                q = q.rotated(rows.cos, rows.sin)
        if torch.is_grad_enabled():
            out, self.link = Read.apply(self.link, q, gain and gain.weight, gain, self.tape,
                                        channel, rows, sink, *own)
            return out
        if gain:
            return triton_attention.attention_forward(
                q, k, v, rows.start, rows.stop, *(sink or ()), norm=norm_of(gain, rows))[0]
        return read(q, k, v, rows, sink, *own)[0]

    def first(self, n: int) -> "TapeCache":
        return TapeCache(self.k_all[:, :, :n], self.v_all[:, :, :n], self.sink, self.folded)

    def fork(self) -> "TapeCache":
        """A new tape on the same memory."""
        return TapeCache(self.k_all, self.v_all, self.sink, self.folded)


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


class Tape:
    """What writes and reads remember of a cache: its storage and the running gradient of it."""

    def __init__(self, k: Tensor, v: Tensor, sink: Sink | None):
        self.k, self.v, self.dk, self.dv = k, v, None, None
        self.sink, self.dsink = sink, None
        self.undo = []  # how to put back what each write so far overwrote
        self.untouched = True  # nothing was read yet: what is overwritten need not be kept
        # the last write to each of g strided groups: to undo the next one, it is done again
        self.n_groups, self.latest = 0, {}

    def write(self, where: tuple, write: Callable) -> tuple[int, bool]:
        """Returns the number of writes so far, which names the state of the cache after it; and
        whether it is known that nobody has written or read there before."""
        channel, _, columns = where
        g, q = 0, None
        if channel == slice(None) and isinstance(columns, slice) and columns.stop is None:
            g, q = columns.step or 1, columns.start or 0
            g = g if 0 <= q < g else 0
        if g != self.n_groups:  # another partition of the row
            self.n_groups, self.latest = g, {}
        undo, first = None, False
        if self.untouched:  # so far written to other groups alone?
            first = g > 0 and len(self.latest) == len(self.undo) and q not in self.latest
        else:
            undo = self.latest.get(q) or partial(
                assign, self.k, self.v, where, self.k[where].clone(), self.v[where].clone())
        self.undo.append(undo)
        if g:
            self.latest[q] = write
        write()
        return len(self.undo), first

    def rewind(self, n: int):
        """Back to the state after n writes."""
        if len(self.undo) < n:
            raise RuntimeError("a cache can be backpropagated through once: solve again")
        self.latest = {}  # what is written again (recompute.py) comes before these
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
            C, Hkv, d = self.sink[0].shape
            self.dsink = torch.zeros(C, 2, rows, Hkv, d, device=self.k.device)
        return self.dsink

    def sink_gradient(self) -> tuple[Tensor, ...]:
        if self.sink is None:
            return ()
        return self.sink_sums().sum(2).to(self.sink[0].dtype).unbind(1)


class Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx, link, k, v, tape, where):
        write = partial(assign, tape.k, tape.v, where, k.detach(), v.detach())
        ctx.tape, ctx.where, (ctx.n, _) = tape, where, tape.write(where, write)
        return link.clone()

    @staticmethod
    def backward(ctx, d_link):
        """The gradient of what was written, which is zero in the running sum afterwards."""
        ctx.tape.rewind(ctx.n - 1)
        grads = []
        for total in ctx.tape.gradient():
            grads.append(total[ctx.where].clone())
            total[ctx.where] = 0
        return d_link, *grads, None, None


class WriteProjected(torch.autograd.Function):
    @staticmethod
    def forward(ctx, link, projected, weight, gain, tape, rows):
        ctx.how = gain, rows.cos, rows.sin, rows.columns
        ctx.save_for_backward(projected)
        write = partial(store, projected.detach(), *ctx.how, tape.k, tape.v)
        where = slice(None), slice(None), rows.columns
        ctx.tape, (ctx.n, ctx.first) = tape, tape.write(where, write)
        return link.clone()

    @staticmethod
    def backward(ctx, d_link):
        """As `Write`, and of the gain."""
        ctx.tape.rewind(ctx.n - 1)
        grads = take(*ctx.saved_tensors, *ctx.how, *ctx.tape.gradient(), zeros=not ctx.first)
        return d_link, *grads, None, None, None


class Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, link, q, weight, gain, tape, channel, rows, sink, *own):
        """`TapeCache.attend`, and a new link; with a gain (and its weight) q is as projected."""
        ctx.set_materialize_grads(False)
        ctx.tape, ctx.channel, ctx.rows, ctx.sink, ctx.gain = tape, channel, rows, sink, gain
        ctx.n, tape.untouched = len(tape.undo), False
        k, v = tape.k[channel], tape.v[channel]
        if own:
            out, lse2, *normed = read(q, k, v, rows, None, *own)
        else:
            out, lse2, *normed = triton_attention.attention_forward(
                q, k, v, rows.start, rows.stop, *(sink or ()), norm=norm_of(gain, rows),
                keep=gain is not None)
        ctx.save_for_backward(q, out, lse2, *normed, *own)
        return out, link.clone()

    @staticmethod
    def backward(ctx, d_out, d_link):
        """dq, the gain's and the own entries'; the gradients of keys, values and sink are added to
        the tape's. With the output and the sum of all entries, the others' part is that of any
        attention."""
        tape, j, rows, gain = ctx.tape, ctx.channel, ctx.rows, ctx.gain
        if d_out is None:  # nobody read it: the last block, in a pass before the last
            return d_link, *(None,) * (len(ctx.needs_input_grad) - 1)
        tape.rewind(ctx.n)
        q, out, lse2, *own = ctx.saved_tensors
        k, v, (dk, dv) = tape.k[j], tape.v[j], (total[j] for total in tape.gradient())
        x = partial = None
        if gain:
            x, q, own = q, *own, ()
            partial = gain.rows(triton_attention.group.programs(q, k))
        dsink = ctx.sink and tape.sink_sums(triton_attention.sink_rows(q, k))[j]
        dq = triton_attention.attention_backward(
            d_out, q, k, v, out, lse2, rows.start, rows.stop, *(ctx.sink or (None, None)), dk, dv,
            dsink, norm_of(gain, rows), x, partial)
        d_own = ()
        if own:
            dq, *d_own = own_gradients(d_out, q, *own, out, lse2, dq)
        d_gain = gain.total(partial) if gain else None
        return d_link, dq, d_gain, None, None, None, None, None, *d_own
