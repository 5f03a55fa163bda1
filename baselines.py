"""
The systems that the paper compares with, as other wirings of the same decoder.

A `plan` says of every system which states of a token feed each cached channel, and which channels
each layer reads. From it follows whether a solver is needed: a layer that reads a channel made of
deeper states than the one it gets has to wait for them. Then each system is a few lines:

    nofeedback     the pool, but channel l mixes the states up to layer l only: one pass
    lckv           the middle layers read the keys and values of the last of them (Wu and Tu, 2024)
    feedback       all layers read one memory, a static mixture of all states (Fan et al., 2020)
    fusedkv        upper layers read mixtures of two lower layers' entries (Lin et al., 2026)
    fusedkv_lite   upper layers read the middle layer's keys and the bottom layer's values
    recurrent      a layer reads what past tokens' same layer put out (Oncescu et al., 2026)

Vanilla and WhiteMatter, static routing included, are in model.py and pool.py.

Dimensions: B rows, T tokens, S cached tokens, L layers, D width, H query heads, Hkv key-value
heads, G = H / Hkv, d head size, E = Hkv d, C channels, p router stride. h[0..L] as in model.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
from torch import Tensor

import attention
from attention import Cache, Rows, is_fast
from configurator import UserError
from model import Block, Decoder, ModelConfig, compute_dtype, linear, norm_rotate, rms_norm
from model import rotary_tables as rotary
from pool import Branch, WhiteMatter, initial_sources, scale

LOG2E = 1.4426950408889634

# ---- plans


@dataclass(frozen=True)
class Channel:
    """What a token leaves in one channel of the cache."""

    sources: tuple[int, ...]  # the states h[s] that feed it, s in 0..L
    weights: tuple[float, ...]  # theirs at the start of training
    mixing: str = "none"  # none: one source as it is; else router, static or softmax


@dataclass(frozen=True)
class Layer:
    """What a layer attends to."""

    keys: tuple[int, ...]  # channels; several are mixed with weights of the layer's own
    values: tuple[int, ...]
    own: tuple[int, ...] | None  # states that feed the entry of the token itself; None: not read


@dataclass(frozen=True)
class Plan:
    """The connections of a system, as plain data."""

    channels: tuple[Channel, ...]  # of the cache
    layers: tuple[Layer, ...]
    dummy: bool  # does every query read the dummy, too?

    def deepest(self, layer: int) -> int:
        """The deepest state that feeds what a layer reads of past tokens."""
        read = self.layers[layer]
        return max(max(self.channels[j].sources) for j in (*read.keys, *read.values))

    @property
    def iterates(self) -> bool:
        """Does a layer read of past tokens what the layers up to it do not know yet?"""
        return any(self.deepest(layer) > layer for layer in range(len(self.layers)))

    @property
    def iterated(self) -> tuple[int, int]:
        """The layers first..end-1 that a solver runs again in every pass: from the lowest that
        reads something deeper to the layer that the deepest such state enters; or all."""
        L = len(self.layers)
        waiting = [layer for layer in range(L) if self.deepest(layer) > layer]
        if not waiting:
            return 0, L
        return waiting[0], min(L, 1 + max(self.deepest(layer) for layer in waiting))


def lckv_sources(c: ModelConfig) -> list[int]:
    """a(l): the layer whose keys and values each layer reads; w // 2 layers at the bottom and the
    rest of the w at the top read their own."""
    last = c.n_layer - 1 - (c.lckv_w - c.lckv_w // 2)  # of the condensed ones
    return [last if c.lckv_w // 2 <= layer < last else layer for layer in range(c.n_layer)]


def plan(c: ModelConfig) -> Plan:
    """The connection plan of a system."""
    L = c.n_layer
    own = [Channel((layer,), (1.0,)) for layer in range(L)]
    same = [Layer((layer,), (layer,), (layer,)) for layer in range(L)]
    if c.kv in ("whitematter", "nofeedback"):
        mixing = "router" if c.router == "dynamic" else "static"
        start = 0.25 * initial_sources(c.n_channels, L + c.top_output, c.top_output)
        if c.kv == "nofeedback":
            start = 0.25 * torch.eye(L)
        n = [layer + 1 if c.kv == "nofeedback" else L + c.top_output for layer in range(L)]
        channels = [Channel(tuple(range(n[j])), tuple(start[j, :n[j]].tolist()), mixing)
                    for j in range(c.n_channels)]
        layers = [Layer((layer % c.n_channels,), (layer % c.n_channels,), None)
                  for layer in range(L)]
        return Plan(tuple(channels), tuple(layers), c.dummy)
    if c.kv == "lckv":
        reads = lckv_sources(c)
        stored = sorted(set(reads))
        channels = [own[s] for s in stored]
        layers = [Layer((stored.index(s),), (stored.index(s),), (s,) if s == layer else None)
                  for layer, s in enumerate(reads)]
    elif c.kv == "feedback":
        channels = [Channel(tuple(range(L + 1)), (1 / (L + 1),) * (L + 1), "softmax")]
        layers = [Layer((0,), (0,), None)] * L
    elif c.kv.startswith("fusedkv"):
        n = L // 2 - 1
        channels = own[:n + 1]
        fused = Layer((0, n), (0, n), (0, n))
        if c.kv == "fusedkv_lite":
            fused = Layer((n,), (0,), (0, n))
        layers = [*same[:n + 1], *[fused] * (L - n - 1)]
    elif c.kv == "recurrent":
        channels, layers = [Channel((layer + 1,), (1.0,)) for layer in range(L)], same
    else:
        channels, layers = own, same
    return Plan(tuple(channels), tuple(layers), False)


def named(name: str, n_layer: int) -> dict:
    """The settings of a system of n_layer layers by its short name, such as k16, static1 or lckv4;
    LCKV's with its published schedule. Raises ValueError for a name that is no system's."""
    kind, number = re.fullmatch("(.*?)([0-9]*)", name).groups()
    if number and kind == "k":
        return dict(kv="whitematter", router="dynamic", n_channels=int(number))
    if number and kind == "static":
        return dict(kv="whitematter", router="static", n_channels=int(number))
    if number and kind == "lckv":
        return dict(kv="lckv", lckv_w=int(number), n_groups=1, n_nograd=7, n_grad=2)
    if name == "vanilla" or name in SYSTEMS and name != "lckv":
        return dict(kv=name, n_channels=n_layer)
    raise ValueError("no system; choose vanilla, k16 (or another number of channels), static16, "
                     "lckv4 (or another w), nofeedback, feedback, recurrent, fusedkv, fusedkv_lite")


def named_configs(systems: str, sizes):
    """Copies of a config, ModelConfig or any with its names, by the short names of systems with
    commas between. Raises UserError for a name that is no system's, or settings that do not fit."""
    configs = {}
    for name in systems.split(","):
        try:
            configs[name] = replace(sizes, **named(name, sizes.n_layer))
        except ValueError as error:
            raise UserError(f"systems={systems}, {name}: {error}") from None
    return configs


# ---- models


def projects(p: Plan, layer: int) -> bool:
    """Has this block keys and values of its own?"""
    return p.layers[layer].own == (layer,)


class Planned(Decoder):
    """A decoder whose cache and schedule follow from the plan of its config."""

    def __init__(self, config: ModelConfig):
        self.plan = plan(config)
        super().__init__(config)
        self.n_channels = len(self.plan.channels)
        self.iterates, self.iterated = self.plan.iterates, self.plan.iterated

    def has_kv(self, layer: int) -> bool:
        return projects(self.plan, layer)


def keys_values(block: Block, h: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Keys and values (B, T, Hkv, d) of states (B, T, D) by a block's own norm and projections."""
    kv = linear(rms_norm(h, block.attn_norm), block.k_proj, block.v_proj)
    k, v = kv.unflatten(-1, (-1, block.head_dim)).chunk(2, dim=-2)
    return norm_rotate(k, block.k_norm, rows.cos, rows.sin), v


# ---- no feedback


class NoFeedback(WhiteMatter):
    """WhiteMatter whose channel l mixes sources 0..l alone, so that one pass is all.

    The router of channel l counts every p-th source down from l; its inputs are aligned at the
    end, so that the last slot is source l and slots that would lie below 0 are zeros.
    """

    iterates = False

    def init_weights(self):
        super().init_weights()
        for branch in (self.kv_pool.key, self.kv_pool.value):
            with torch.no_grad():
                branch.bias.copy_(0.25 * torch.eye(self.n_channels))

    def normed(self, x: Tensor, source: int) -> tuple[Tensor, Tensor]:
        """A source (B, T, D) as the keys' and as the values' branch see it."""
        unit, pool = rms_norm(x, None), self.kv_pool
        return scale(unit, pool.key.pre_norm[source]), scale(unit, pool.value.pre_norm[source])

    def channel(self, sources: list[tuple[Tensor, Tensor]], cos: Tensor, sin: Tensor):
        """Normed sources 0..l -> channel l: keys and values (B, T, Hkv, d)."""
        pool, layer = self.kv_pool, len(sources) - 1
        k, v = (mix_up_to(branch, list(normed)).unflatten(-1, pool.heads)
                for branch, normed in zip((pool.key, pool.value), zip(*sources)))
        return norm_rotate(k, pool.key_norm[layer], cos, sin), v

    def dummy_channel(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values (Hkv, d) of channel l of the dummy, which mixes its copies 0..l."""
        pool = self.kv_pool
        x = pool.dummy.to(compute_dtype(pool.key.proj)).expand(1, 1, -1)
        tables = rotary(torch.zeros(1, 1, dtype=torch.long, device=x.device), pool.heads[1])
        k, v = self.channel([self.normed(x, s) for s in range(layer + 1)], *tables)
        return k[0, 0], v[0, 0]

    def new_cache(self, B: int, S: int, like: Tensor) -> Cache:
        empty, sink = Decoder.new_cache(self, B, S, like), None
        if self.has_dummy:
            dummy = [self.dummy_channel(layer) for layer in range(self.n_channels)]
            sink = tuple(torch.stack(x) for x in zip(*dummy))
        return Cache(empty.k, empty.v, sink)

    def attend(self, layer: int, q: Tensor, h: list[Tensor], kv: list, rows: Rows,
               cache: Cache | None) -> Tensor:
        """`Decoder.attend`, of a channel that mixes the states that entered the layers so far."""
        kv[layer] = self.normed(h[layer], layer)  # later layers mix it, too
        k, v = self.channel(kv, rows.cos, rows.sin)
        if cache is not None:
            with torch.no_grad():
                cache.put(rows.columns, k, v, channel=layer)
        if not rows.complete:
            return cache.attend(q, layer, rows)
        sink = self.dummy_channel(layer) if self.has_dummy else None
        return attention.attend(q, k, v, rows, sink)


def mix_up_to(branch: Branch, sources: list[Tensor]) -> Tensor:
    """Channel l of a branch (B, T, E), of its normed sources 0..l, (B, T, D) each."""
    n, L = len(sources), branch.bias.size(1)
    layer, x = n - 1, torch.stack(sources, 2)
    alpha = branch.bias[layer, :n].to(x.dtype).expand(*x.shape[:2], -1)
    if branch.router is not None:
        inputs = torch.cat(sources[layer % branch.stride::branch.stride], -1)
        rows, columns = slice(layer * L, layer * L + n), slice(-inputs.size(-1), None)
        alpha = alpha + linear(inputs, piece(branch.router, (rows, columns)))
    mixed = torch.einsum("btl,btld->btd", alpha, x)
    mixed = rms_norm(mixed, branch.post_norm[layer], eps=1e-4)
    return linear(mixed, piece(branch.proj, layer))


def piece(w: nn.Parameter, where) -> Tensor:
    """A piece of a weight, for `linear`: with its piece of the copy in low precision, if any."""
    if not hasattr(w, "compute"):
        return w[where]
    part = w.detach()[where]
    part.compute = w.compute[where]
    part.grad = None if w.grad is None else w.grad[where]
    return part


# ---- LCKV


class LCKV(Planned):
    """w layers at both ends are vanilla; those between read the last of them (Wu and Tu, 2024).

    A condensed layer does not read its own token, whose keys and values are not there yet. The
    layer that projects them is vanilla: it writes them on the way up, and reads itself.
    """

    sources = slice(-2, -1)  # of the states in the iterated slice: what enters its last layer

    def attend(self, layer: int, q: Tensor, h: list[Tensor], kv: list, rows: Rows,
               cache: Cache | None) -> Tensor:
        """`Decoder.attend`; a condensed layer, which projects nothing, reads the past tokens' keys
        and values of the layer that all of these read."""
        channel, (k, v) = self.plan.layers[layer].keys[0], kv[-1]
        if k is None:
            return cache.attend(q, channel, rows.past())
        if not rows.complete:  # a part of an iterated row, or a new token
            cache.put(rows.columns, k, v, channel)
            return cache.attend(q, channel, rows)
        if cache is not None:
            with torch.no_grad():
                cache.put(rows.columns, k, v, channel)
        return attention.attend(q, k, v, rows)

    def refill(self, h: list[Tensor], rows: Rows, cache: Cache):
        first, end = self.iterated
        k, v = keys_values(self.blocks[end - 1], h[-2], rows)
        cache.put(rows.columns, k, v, self.plan.layers[first].keys[0])

    def store(self, h: list[Tensor], rows: Rows, cache: Cache):
        """Nothing: `attend` has written it."""


# ---- Feedback Transformer


class Memory(nn.Module):
    """What all layers read of a token: one key and value of a static mixture of all its states."""

    matrices = ("k_proj", "v_proj")

    def __init__(self, c: ModelConfig):
        super().__init__()
        E = c.n_kv_head * c.head_dim
        self.weights = nn.Parameter(torch.empty(c.n_layer + 1))
        self.k_norm = nn.Parameter(torch.ones(c.head_dim))
        self.k_proj = nn.Parameter(torch.empty(E, c.n_embd))
        self.v_proj = nn.Parameter(torch.empty(E, c.n_embd))

    def init_weights(self):
        nn.init.zeros_(self.weights)
        for p in (self.k_proj, self.v_proj):
            nn.init.normal_(p, std=0.02)

    def forward(self, h: list[Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
        """h[0..L] -> keys and values (1, B, T, Hkv, d)."""
        weights = self.weights.softmax(0).to(h[0].dtype)
        m = torch.einsum("l,btld->btd", weights, torch.stack(h, 2))
        kv = linear(m, self.k_proj, self.v_proj).unflatten(-1, (-1, self.k_norm.numel()))
        k, v = kv.chunk(2, dim=-2)
        return norm_rotate(k, self.k_norm, rows.cos, rows.sin)[None], v[None]


class Feedback(Planned):
    """All layers read one memory of past tokens, embedding and final output included."""

    reads_itself = False
    sources = slice(None)

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.memory = Memory(config)

    def init_weights(self):
        super().init_weights()
        self.memory.init_weights()

    def pool(self, h: list[Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
        return self.memory(h, rows)

    def attend(self, layer: int, q: Tensor, h: list[Tensor], kv: list, rows: Rows,
               cache: Cache) -> Tensor:
        return cache.attend(q, 0, rows)


# ---- FusedKV


class FusedKVLite(Planned):
    """The upper half of the layers reads the middle layer's keys and the bottom layer's values."""

    def attend(self, layer: int, q: Tensor, h: list[Tensor], kv: list, rows: Rows,
               cache: Cache | None) -> Tensor:
        if self.has_kv(layer):
            return super().attend(layer, q, h, kv, rows, cache)
        middle = self.n_channels - 1
        bottom_and_middle = [kv[j] if rows.complete else (cache.k[j], cache.v[j])
                             for j in (0, middle)]
        return attention.attend(q, *self.fuse(layer, *bottom_and_middle), rows)

    def fuse(self, layer: int, bottom: tuple, middle: tuple) -> tuple[Tensor, Tensor]:
        """Keys and values (B, S, Hkv, d) that an upper layer reads, of those of two others."""
        return middle[0], bottom[1]


class FusedKV(FusedKVLite):
    """The upper half reads mixtures of the bottom and the middle layer's keys and values.

    Each upper layer has a weight for every feature of either. Two features that RoPE turns
    together share a key's weight, so that scores depend on relative positions alone.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        n, heads, d = config.n_layer - self.n_channels, config.n_kv_head, config.head_dim
        self.fuse_key = nn.Parameter(torch.empty(n, 2, heads, d // 2))  # 2: bottom, middle
        self.fuse_value = nn.Parameter(torch.empty(n, 2, heads, d))

    @torch.no_grad()
    def init_weights(self):
        """N(0, 1), read as a chain: a layer draws a weight for what the layer below it reads, and
        one for the middle layer's keys (the bottom layer's values). The parameters are the weights
        of bottom and middle that this comes to."""
        super().init_weights()
        for w, fresh in ((self.fuse_key, 1), (self.fuse_value, 0)):
            nn.init.normal_(w)
            for below, here in zip(w, w[1:]):
                before, new = here.clone()
                here.copy_(before * below)
                here[fresh] += new

    def fuse(self, layer: int, bottom: tuple, middle: tuple) -> tuple[Tensor, Tensor]:
        i = layer - self.n_channels
        pairs = torch.cat((self.fuse_key[i],) * 2, -1)  # (2, Hkv, d)
        return tuple(mix_two(*w, x, y)
                     for w, x, y in zip((pairs, self.fuse_value[i]), bottom, middle))


def mix_two(v: Tensor, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """v x + w y by feature: v, w (Hkv, d), x, y (B, S, Hkv, d)."""
    return (v * x + w * y).to(x.dtype)


# ---- Recurrent Transformer


class Recurrent(Planned):
    """A layer reads its own outputs at past tokens, and its input at the token itself.

    Both go through the layer's own norm and projections. Entries of past tokens are in the cache;
    a token's own one is handed to the attention beside it.
    """

    reads_itself = False  # in the cache
    sources = slice(1, None)

    def store(self, h: list[Tensor], rows: Rows, cache: Cache):
        entries = [keys_values(block, x, rows) for block, x in zip(self.blocks, h[1:])]
        cache.put(rows.columns, *(torch.stack(x) for x in zip(*entries)))

    def attend(self, layer: int, q: Tensor, h: list[Tensor], kv: list, rows: Rows,
               cache: Cache) -> Tensor:
        k, v = kv[-1]
        if not torch.is_grad_enabled():
            few = q.size(1) <= attention.FEW
            return with_own(q, k, v, cache.k[layer], cache.v[layer], rows, few)[0]
        out, cache.link = _ReadWithOwn.apply(cache.link, q, k, v, cache.tape, layer, rows)
        return out


def with_own(q: Tensor, own_k: Tensor, own_v: Tensor, k: Tensor, v: Tensor, rows: Rows,
             few: bool = False):
    """Attention of q (B, T, H, d) on k, v (B, S, Hkv, d) and, each query, on one more entry of its
    own (B, T, Hkv, d). Returns (B, T, H, d) and, from the kernels, lse2 (else None). With
    `few`, by the kernels of decoding."""
    B, T, H, d = q.shape
    Hkv = k.size(2)
    if is_fast(q):
        return with_own_fast(q, own_k, own_v, k, v, rows, few)
    q = q.unflatten(2, (Hkv, -1))  # (B, T, Hkv, G, d)
    own = torch.einsum("btngd,btnd->bngt", q, own_k)[..., None]
    scores = torch.einsum("btngd,bsnd->bngts", q, k)
    mask = rows.mask(k.size(1), 1, False, q.dtype)[:, None]  # (B, 1, 1, T, S)
    p = torch.cat((scores * d ** -0.5 + mask, own * d ** -0.5), -1).softmax(-1)
    out = torch.einsum("bngts,bsnd->btngd", p[..., :-1], v)
    out = out + torch.einsum("bngt,btnd->btngd", p[..., -1], own_v)
    return out.flatten(2, 3), None


def with_own_fast(q: Tensor, own_k: Tensor, own_v: Tensor, k: Tensor, v: Tensor, rows: Rows,
                  few: bool):
    """By the kernels: the own entry is merged into the sum of the others; also returns the base-2
    logarithm of the whole sum, as `attention.kernels` lay it out."""
    forward = attention.kernels.decode_forward if few else attention.kernels.attention_forward
    out, lse2 = forward(q, k, v, rows.start, rows.stop)
    return merge_own(q, own_k, own_v, out, lse2)


def own_scores(q: Tensor, own_k: Tensor) -> Tensor:
    """Base-2 scores (B, T, Hkv, G) of queries (B, T, Hkv, G, d) on keys (B, T, Hkv, d), float32."""
    score = (q.float() * own_k.float().unsqueeze(3)).sum(-1)
    return score * (q.size(-1) ** -0.5 * LOG2E)


def merge_own(q: Tensor, own_k: Tensor, own_v: Tensor, out: Tensor, lse2: Tensor):
    """Attention `out` (B, T, H, d) on others, whose sums have the logarithms lse2 (B, Hkv, T * P),
    P >= G, with the own entries merged into both."""
    (B, T, H, d), Hkv = q.shape, own_k.size(2)
    G = H // Hkv
    score = own_scores(q.view(B, T, Hkv, G, d), own_k).transpose(1, 2)  # (B, Hkv, T, G)
    past = lse2.view(B, Hkv, T, -1)
    total = torch.logaddexp2(past[..., :G], score)
    share = torch.exp2(score - total).transpose(1, 2).unsqueeze(-1)
    out = out.view(B, T, Hkv, G, d).float()
    out = out + share * (own_v.float().unsqueeze(3) - out)
    total = torch.cat((total, past[..., G:]), -1)
    return out.to(q.dtype).view(B, T, H, d), total.view_as(lse2)


class _ReadWithOwn(torch.autograd.Function):
    """`Cache.attend`, with an entry (B, T, Hkv, d) of its own for each query."""

    @staticmethod
    def forward(ctx, link, q, own_k, own_v, tape, channel, rows):
        ctx.set_materialize_grads(False)
        ctx.tape, ctx.channel, ctx.rows = tape, channel, rows
        ctx.n, tape.untouched = len(tape.undo), False
        out, lse2 = with_own(q, own_k, own_v, tape.k[channel], tape.v[channel], rows)
        ctx.save_for_backward(q, own_k, own_v, out if lse2 is not None else None, lse2)
        return out, link.clone()

    @staticmethod
    def backward(ctx, d_out, d_link):
        """dq and the own key's and value's; those of the cache are added to the tape's."""
        if d_out is None:  # nobody read it
            return d_link, *(None,) * 6
        tape, j, rows = ctx.tape, ctx.channel, ctx.rows
        tape.rewind(ctx.n)
        q, own_k, own_v, out, lse2 = ctx.saved_tensors
        k, v, (dk, dv) = tape.k[j], tape.v[j], (total[j] for total in tape.gradient())
        if lse2 is not None:
            grads = with_own_backward(d_out, q, own_k, own_v, k, v, rows, out, lse2, dk, dv)
            return d_link, *grads, *(None,) * 3
        # once more, with gradients
        inputs = [t.detach().requires_grad_() for t in (q, own_k, own_v, k, v)]
        with torch.enable_grad():
            again, _ = with_own(*inputs, rows)
        *grads, dk_, dv_ = torch.autograd.grad(again, inputs, d_out)
        dk += dk_
        dv += dv_
        return d_link, *grads, *(None,) * 3


def with_own_backward(do: Tensor, q: Tensor, own_k: Tensor, own_v: Tensor, k: Tensor, v: Tensor,
                      rows: Rows, out: Tensor, lse2: Tensor, dk: Tensor, dv: Tensor):
    """Gradients of q and the own entries; those of k and v are added to dk and dv.

    With the output and the sum of all entries, the others' part is that of any attention.
    """
    dq = attention.kernels.attention_backward(do, q, k, v, out, lse2, rows.start, rows.stop, None,
                                              None, dk, dv)
    return own_gradients(do, q, own_k, own_v, out, lse2, dq)


def own_gradients(do: Tensor, q: Tensor, own_k: Tensor, own_v: Tensor, out: Tensor, lse2: Tensor,
                  dq: Tensor):
    """dq with the own entries' part, and their gradients; out and lse2 are of all entries."""
    (B, T, H, d), Hkv = q.shape, own_k.size(2)
    do_, q_, out_, dq = (x.reshape(B, T, Hkv, -1, d).float() for x in (do, q, out, dq))
    k_, v_ = (x.float().unsqueeze(3) for x in (own_k, own_v))
    total = lse2.view(B, Hkv, T, -1)[..., :H // Hkv].transpose(1, 2)
    p = torch.exp2(own_scores(q_, own_k) - total).unsqueeze(-1)  # (B, T, Hkv, G, 1)
    ds = p * (do_ * (v_ - out_)).sum(-1, keepdim=True) * d ** -0.5
    return ((dq + ds * k_).to(q.dtype).view(B, T, H, d), (ds * q_).sum(3).to(own_k.dtype),
            (p * do_).sum(3).to(own_v.dtype))



SYSTEMS = {"nofeedback": NoFeedback, "lckv": LCKV, "feedback": Feedback, "fusedkv": FusedKV,
           "fusedkv_lite": FusedKVLite, "recurrent": Recurrent}
