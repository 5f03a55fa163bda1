"""
How queries read keys and values: where tokens stand (Rows), one attention function, and the Cache.

Dimensions: B rows, T queries, S cached tokens, C cached channels (L for vanilla, k in
WhiteMatter), H query heads, Hkv key-value heads, G = H / Hkv, d head size.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

Sink = tuple[Tensor, Tensor]  # one more key and value (Hkv, d) that every query reads: the dummy
# at most so many pairs of a query and a key are looked at together, so that the memory for a long
# prompt grows with its length and not with the square of it
PAIRS = 2**26


@dataclass
class Rows:
    """What attention must know of the queries of a batch: where each stands in the cache, which
    of its columns it reads, and its rotation.

    Query (b, i) reads the columns `start[b, i] <= j < stop[b, i]`: an interval is all that
    causality, the document mask and "a token does not read itself" ever need.
    """

    columns: slice | Tensor  # of the cache; a tensor (B, T) where every row has its own
    start: Tensor  # (B, T) int32, as is stop; neither decreases along a row
    stop: Tensor
    cos: Tensor  # (B, T, d/2) float32
    sin: Tensor
    _kept: dict = field(default_factory=dict)  # masks and `past`, made once for all layers

    @property
    def complete(self) -> bool:
        """Whole rows, which have all their keys at hand? `columns` is slice(None) then; a solver's
        group, even if it is the only one, slice(0, None, 1), is none and reads the cache."""
        return isinstance(self.columns, slice) and self.columns == slice(None)

    def at(self, columns: slice) -> "Rows":
        return Rows(columns, *(t[:, columns].contiguous() for t in
                               (self.start, self.stop, self.cos, self.sin)))

    def split(self, g: int) -> "list[Rows]":
        """The strided groups {i : i mod g = q}; groups beyond T are left out."""
        return [self.at(slice(q, None, g)) for q in range(min(g, self.start.size(1)))]

    def past(self) -> "Rows":
        """The same queries, each reading up to the token before it (of a system that reads itself).
        """
        if "past" not in self._kept:
            self._kept["past"] = Rows(self.columns, self.start, self.stop - 1, self.cos, self.sin)
        return self._kept["past"]

    def mask(self, first: int, n: int, n_keys: int, n_repeat: int, sink: bool, dtype: torch.dtype,
             keep: bool) -> Tensor:
        """(B, 1, n * n_repeat, [1 +] n_keys) of the n queries from `first` on: 0 where one reads
        and -inf where not. If it is to be kept, every layer uses it again."""
        key = (first, n, n_keys, n_repeat, sink, dtype)
        if key in self._kept:
            return self._kept[key]
        queries = slice(first, first + n)
        j = torch.arange(n_keys, device=self.start.device)
        reads = (self.start[:, queries, None] <= j) & (j < self.stop[:, queries, None])
        reads = F.pad(reads, (1, 0), value=True) if sink else reads
        reads = reads.repeat_interleave(n_repeat, dim=1).unsqueeze(1)
        # not bool, which SDPA would convert in every layer; where all are -inf, it gives 0
        mask = torch.zeros_like(reads, dtype=dtype).masked_fill_(~reads, -torch.inf)
        if keep:
            self._kept[key] = mask
        return mask


def attend(q: Tensor, k: Tensor, v: Tensor, rows: Rows, sink: Sink | None = None) -> Tensor:
    """Attention of q (B, T, H, d) on k, v (B, S, Hkv, d); returns (B, T, H, d).

    A query that may read nothing at all gets 0. Scale 1 / sqrt(d). The attention itself is
    `attend_block`; `in_blocks` only cuts long prompts into blocks of queries.
    """
    return in_blocks(partial(attend_block, sink=sink), rows, q.size(2) // k.size(2), k, v, q)


def in_blocks(block: Callable, rows: Rows, n_repeat: int, k: Tensor, v: Tensor,
              *queries: Tensor) -> Tensor:
    """block(rows, first, keep, k, v, *queries) for as many queries (B, T, ...) at a time as make
    PAIRS, on the keys up to the last column that these can read."""
    (B, T), S = queries[0].shape[:2], k.size(1)
    # a mask serves all layers if autograd keeps it anyway, or if all groups' (S x S) are small
    keep = torch.is_grad_enabled() or B * S * S * n_repeat <= PAIRS
    size = max(1, PAIRS // (B * S * n_repeat))
    if size >= T:
        return block(rows, 0, keep, k, v, *queries)
    out = []
    for first in range(0, T, size):
        end = S
        if isinstance(rows.columns, slice):  # causal: no query reads beyond its own column
            last = min(first + size, T) - 1
            end = (rows.columns.start or 0) + last * (rows.columns.step or 1) + 1
        part = [x[:, first:first + size] for x in queries]
        out.append(block(rows, first, keep, k[:, :end], v[:, :end], *part))
    return torch.cat(out, 1)


def attend_block(rows: Rows, first: int, keep: bool, k: Tensor, v: Tensor, q: Tensor,
                 sink: Sink | None) -> Tensor:
    """`attend` of q, which are the queries first, first + 1, ... of the rows."""
    (B, T, H, d), Hkv = q.shape, k.size(2)
    G = H // Hkv
    # the G query heads that share a key-value head become rows: one large product per key head
    q = q.view(B, T, Hkv, G, d).transpose(1, 2).reshape(B, Hkv, T * G, d)
    mask = rows.mask(first, T, k.size(1), G, sink is not None, q.dtype, keep)
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # (B, Hkv, S, d)
    if sink is not None:
        k, v = (torch.cat((s[None, :, None].expand(B, -1, -1, -1), t), dim=2)
                for s, t in zip(sink, (k, v)))
    out = F.scaled_dot_product_attention(q, k, v, mask)  # (B, Hkv, T * G, d)
    return out.view(B, Hkv, T, G, d).transpose(1, 2).reshape(B, T, H, d)


class Cache:
    """Keys (normed and rotated) and values of all tokens, in token order: k and v are lists of C
    tensors (B, S, Hkv, d), `sink` the dummy's channels, (C, Hkv, d) each.

    `put` writes and `attend` reads. While gradients are recorded, a write makes new tensors, as
    the backward pass of earlier reads needs the old ones; otherwise it writes in place.
    """

    def __init__(self, k: list[Tensor], v: list[Tensor], sink: Sink | None = None):
        self.k, self.v, self.sink = k, v, sink

    def put(self, columns: slice | Tensor, k: Tensor, v: Tensor, first: int = 0):
        """Write k, v (c, B, T, Hkv, d) at `columns`, those of a `Rows`, of the c channels from
        `first` on."""
        for channels, new in ((self.k, k), (self.v, v)):
            for j, x in enumerate(new.unbind(), first):
                channels[j] = write(channels[j], columns, x)

    def attend(self, q: Tensor, channel: int, rows: Rows) -> Tensor:
        """Attention of q (B, T, H, d) on a channel, and on the dummy if there is one."""
        sink = None if self.sink is None else (self.sink[0][channel], self.sink[1][channel])
        return attend(q, self.k[channel], self.v[channel], rows, sink)

    def first(self, n: int) -> "Cache":
        """A view of the first n columns."""
        return self.of([x[:, :n] for x in self.k], [x[:, :n] for x in self.v])

    def fork(self) -> "Cache":
        """A cache that begins as this one; what it writes while gradients are recorded, this one
        does not see."""
        return self.of(list(self.k), list(self.v))

    def of(self, k: list[Tensor], v: list[Tensor]) -> "Cache":
        """The same cache with these channels."""
        other = copy.copy(self)
        other.k, other.v = k, v
        return other


def write(into: Tensor, columns: slice | Tensor, x: Tensor) -> Tensor:
    """`into` (B, S, ...) with x (B, T, ...) at the columns: a new tensor if autograd is on."""
    if isinstance(columns, Tensor):
        where = torch.arange(len(columns), device=columns.device)[:, None], columns
        return into.index_put(where, x) if torch.is_grad_enabled() else into.index_put_(where, x)
    if torch.is_grad_enabled():
        return into.slice_scatter(x, 1, columns.start, columns.stop, columns.step or 1)
    into[:, columns] = x
    return into
