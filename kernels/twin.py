"""
A fast twin of a model: the same parameters and the same methods, other ways to compute.

`twin` copies the tree of modules, not the parameters, and puts what is faster in place of what it
stands for: products with weights in low precision (linear.py), attention on a tape (tape.py), sums
together with the norms that follow them (norms.py), the pool (pool.py), the loss (loss.py). What
it does not know stays as it is and runs in plain PyTorch, under autocast. The model that it was
made of is the reference, and is not changed.
"""

import copy
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from attention import Rows
from baselines import NoFeedback, Recurrent
from decoding import Choice, Steps
from kernels import decode, norms
from kernels import loss as head
from kernels.choose import choose
from kernels.compiled import rms_norm
from kernels.known import hooked
from kernels.linear import Linear, Waiting, linear
from kernels.norms import Gain, Gains, Projected, add_norm, split_heads
from kernels.pool import Folded, fold, fold_up_to
from kernels.swiglu import swiglu
from kernels.tape import TapeCache, attend
from model import Decoder, RMSNorm
from pool import WhiteMatter


class Twin:
    """Methods of a Decoder, by kernels; each is used where the model's own is the one that it
    stands for."""

    attention = staticmethod(attend)

    def embed_tokens(self, idx: Tensor) -> Tensor:
        return F.embedding(idx, self.embed.weight).to(self.dtype)

    def empty(self, B: int, S: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Room for keys and values, (C, B, S, Hkv, d) each."""
        shape = self.n_channels, B, S, self.config.n_kv_head, self.config.head_dim
        return tuple(like.new_zeros(shape, dtype=self.dtype) for _ in range(2))

    def new_cache(self, B: int, S: int, like: Tensor) -> TapeCache:
        """`Decoder.new_cache`, on a tape; the dummy's channels are the model's own."""
        sink = super().new_cache(1, 1, like).sink if isinstance(self, WhiteMatter) else None
        return TapeCache(*self.empty(B, S, like), sink)

    def logits(self, h: Tensor) -> Tensor:
        return F.linear(rms_norm(h, self.norm.weight), self.embed_copy)

    def steps(self, cache: TapeCache):
        """Steps of decoding on a cache of fixed size."""
        rows = cache.k_all.size(1)
        return decode.Steps(self, cache) if decode.serve(self, rows) else Steps(self, cache, None)

    def faster(self, choice):
        """The same choice of tokens by kernels, if these serve it."""
        serves = isinstance(choice, Choice) and choice.top_p == 1 and self.dtype == torch.bfloat16
        return partial(choose, choice) if serves and self.chooses else choice

    def loss(self, h: Tensor, targets: Tensor) -> Tensor:
        a = rms_norm(h, self.norm.weight).flatten(0, -2)
        return head.loss(a, self.embed.weight, self.embed_copy, targets.flatten())

    @torch.no_grad()
    def collect(self):
        """Move what was added up on the side into the gradients: the kernels' rows for the gains,
        and products that wait."""
        self.waiting.flush()
        for gains in self.gains:
            gains.collect()

    def renew(self):
        """Have the copies follow the weights."""
        torch._foreach_copy_(self.copies, self.copied)


def states(self, x: Tensor, rows: Rows, cache: TapeCache | None = None, first: int = 0,
           end: int | None = None) -> list[Tensor]:
    """`Decoder.states`, where each sum joins the norm that follows it, and products of one input
    are one."""
    end = len(self.blocks) if end is None else end
    h, own = [x], []
    if first < end:
        x, a, h[0] = add_norm(x, None, self.blocks[first].attn_norm.gain)
    for layer in range(first, end):
        block, H = self.blocks[layer], self.config.n_head
        parts, k_gain = (block.q_proj,), None
        if block.has_kv:
            parts, k_gain = (block.q_proj, block.k_proj, block.v_proj), block.k_norm.gain
        x_heads = linear(a, *parts)
        if self.reads_projected:
            q = Projected(x_heads.unflatten(-1, (H, -1)), block.q_norm.gain)
        else:
            q, k, v = split_heads(x_heads, H, block.q_norm.gain, k_gain, rows.cos, rows.sin)
        own.append((k, v) if block.has_kv else None)
        attended = self.attend(layer, q, h, own, rows, cache).flatten(-2)  # (B, T, H d)
        x, a, _ = add_norm(x, linear(attended, block.o_proj), block.mlp_norm.gain)
        y = linear(swiglu(linear(a, block.gate_proj, block.up_proj)), block.down_proj)
        if layer + 1 < end:  # with the norm that the next block begins with
            x, a, state = add_norm(x, y, self.blocks[layer + 1].attn_norm.gain)
        else:
            x = state = x + y
        h.append(state)
    return h


def through(dummy: Tensor, folded: Folded, key_norm: Tensor) -> tuple[Tensor, Tensor]:
    """The dummy (D,) through a pool: keys and values (k, Hkv, d) of position 0, where nothing is
    rotated; key_norm (k, d)."""
    source = dummy.to(folded.gain.dtype).expand(1, 1, -1)
    keys, values = folded.channels([source] * folded.gain.size(1))[:, :, 0, 0].unflatten(
        -1, (-1, key_norm.size(-1)))
    return rms_norm(keys, key_norm[:, None]), values


class TwinPool:
    """WhiteMatter's cache, whose pool is folded once for many writes."""

    def new_cache(self, B: int, S: int, like: Tensor) -> TapeCache:
        """`WhiteMatter.new_cache`, on a tape."""
        pool = self.kv_pool
        folded = Folded(fold(pool.key, pool.value), pool.key.stride, self.dtype)
        sink = through(pool.dummy, folded, pool.key_norm) if self.has_dummy else None
        return TapeCache(*self.empty(B, S, like), sink, folded)

    def store(self, h: list[Tensor], rows: Rows, cache: TapeCache):
        projected = cache.folded.channels(h[self.sources])
        cache.put_projected(rows, projected, self.key_gain)


class TwinNoFeedback:
    """No feedback's channels of whole rows, each by the pool's kernels."""

    def attend(self, layer: int, q: Tensor, h: list[Tensor], own: list, rows: Rows,
               cache: TapeCache | None) -> Tensor:
        """`NoFeedback.attend`; for single tokens the weights are not worth folding."""
        if not rows.complete:
            return super().attend(layer, q, h, own, rows, cache)
        pool, (Hkv, d) = self.kv_pool, self.kv_pool.heads
        folded = Folded(fold_up_to(pool.key, pool.value, layer), pool.key.stride, self.dtype)
        before = [h[0].detach()] * (folded.gain.size(1) - len(h))  # which have no gain
        keys, values = folded.channels(before + h)[:, 0]
        k, *_ = split_heads(keys, Hkv, Gain(pool.key_norm[layer]), None, rows.cos, rows.sin)
        v = values.unflatten(-1, (Hkv, d))
        sink = None
        if self.has_dummy:
            key_norm = pool.key_norm[layer:layer + 1]
            sink = [x[0] for x in through(pool.dummy, folded, key_norm)]
        return self.write_and_attend(layer, q, k, v, rows, cache, sink)


class TwinRecurrent:
    """The Recurrent Transformer's attention, with the token's own entry merged in."""

    def attend(self, layer: int, q: Tensor, h: list[Tensor], own: list, rows: Rows,
               cache: TapeCache) -> Tensor:
        return cache.attend(q, layer, rows, *own[-1])


class TwinNorm(nn.Module):
    """Stands in for an RMSNorm, whose gain it shares."""

    def __init__(self, norm: RMSNorm):
        super().__init__()
        self.weight, self.gain = norm.weight, Gain(norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight)


def stand_in(module: nn.Module) -> nn.Module:
    """A copy of the tree of modules that shares all parameters, with other layers and norms."""
    if type(module) is nn.Linear and module.bias is None and not hooked(module):
        return Linear(module)
    if type(module) is RMSNorm and not hooked(module):
        return TwinNorm(module)
    other = copy.copy(module)
    other._modules = {name: child and stand_in(child) for name, child in module._modules.items()}
    return other


def twin(model: Decoder, dtype: torch.dtype, training: bool, unknown: set[str]) -> Decoder:
    """The twin, which computes in dtype; parts that are unknown (kernels/known.py) stay plain. It
    keeps copies of the weights: `renew` after an optimizer step; and it adds up gradients on the
    side: `collect` after a backward pass."""
    bases, methods = [Twin, type(model)], {}
    fused = "block" not in unknown
    if fused:
        methods["states"] = states
    if isinstance(model, WhiteMatter) and model.iterates and "pool" not in unknown:
        bases.insert(0, TwinPool)
    if isinstance(model, NoFeedback) and "no feedback" not in unknown:
        bases.insert(0, TwinNoFeedback)
    if isinstance(model, Recurrent):
        bases.insert(0, TwinRecurrent)
    other = stand_in(model)
    other.__class__ = type("Fast" + type(model).__name__, tuple(bases), methods)
    other.dtype = dtype
    # then what has its queries is the cache alone
    other.reads_projected = TwinPool in bases and "decoding" not in unknown
    linears = [m for m in other.modules() if isinstance(m, Linear)]
    other.copied = [m.weight.detach() for m in (other.embed, *linears)]
    sizes = [w.numel() for w in other.copied]
    # side by side, so that those of one input are one matrix
    flat = other.copied[0].new_empty(sum(sizes), dtype=dtype)
    other.copies = [x.view_as(w) for x, w in zip(flat.split(sizes), other.copied)]
    other.renew()
    other.embed_copy, *rest = other.copies
    other.waiting = Waiting()
    for module, its in zip(linears, rest):
        module.copy, module.waiting = its, other.waiting
    other.gains, gains = [], {}
    for module in other.modules():
        if isinstance(module, TwinNorm):  # norms that share a weight share its rows
            module.gain = gains.setdefault(module.weight, module.gain)
    if training and fused and gains:
        other.gains.append(Gains(list(gains.values()), norms.PROGRAMS))
    if TwinPool in bases:
        other.key_gain = Gain(model.kv_pool.key_norm)
        if training:
            other.gains.append(Gains([other.key_gain], norms.STORE_PROGRAMS,
                                     model.config.n_kv_head))
    other.decodes, other.chooses = not unknown, "choice" not in unknown
    # parameters that are no nn.Linear's meet states in half precision
    other.plainly = not fused or isinstance(model, WhiteMatter) and TwinPool not in bases
    return other
