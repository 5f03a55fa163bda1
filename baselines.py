"""
The systems that the paper compares with, as other wirings of the same decoder.

An entry is a token's key and value in one channel of the cache.

A `plan` says of every system which states of a token feed each cached channel, and which channels
each layer reads. From it follows whether a solver is needed: a layer that reads a channel made of
deeper states than the one it gets has to wait for them. Then each system is a few lines:

    nofeedback     the pool, but channel l mixes the states up to layer l only: one pass
    lckv           the middle layers read the keys and values of the last of them (Wu and Tu, 2024)
    feedback       all layers read one memory, a static mixture of all states (Fan et al., 2020)
    fusedkv        upper layers read mixtures of two lower layers' entries (Lin et al., 2026)
    fusedkv_lite   upper layers read the middle layer's keys and the bottom layer's values
    recurrent      a layer reads what past tokens' same layer put out (Oncescu et al., 2026)

Vanilla and WhiteMatter, static routing included, are in model.py and pool.py; `build` makes any.

Dimensions: B rows, T tokens, S cached tokens, L layers, D width, H query heads, Hkv key-value
heads, G = H / Hkv, d head size, E = Hkv d, C channels, p router stride. h[0..L] as in model.py.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from attention import Cache, Rows, in_blocks
from configurator import UserError
from model import Decoder, ModelConfig, RMSNorm, rms_norm, rotary_tables, rotate
from pool import Branch, WhiteMatter, initial_sources

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
    own: tuple[int, ...] | None  # states behind the token's own entry; None: it is not read


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
        """Does a layer read, of past tokens, states deeper than the one that enters it?"""
        return any(self.deepest(layer) > layer for layer in range(len(self.layers)))

    @property
    def iterated(self) -> tuple[int, int]:
        """The layers first..end-1 that a solver runs again in every pass: from the lowest that
        reads something deeper to the layer that the deepest such state enters; all, if none does.
        """
        L = len(self.layers)
        waiting = [layer for layer in range(L) if self.deepest(layer) > layer]
        if not waiting:
            return 0, L
        return waiting[0], min(L, 1 + max(self.deepest(layer) for layer in waiting))


def lckv_sources(c: ModelConfig) -> list[int]:
    """a(l): the layer whose keys and values each layer reads; w // 2 layers at the bottom and the
    rest of the w at the top read their own."""
    last = c.n_layer - 1 - (c.lckv_w - c.lckv_w // 2)  # of those in the middle, which share its
    return [last if c.lckv_w // 2 <= layer < last else layer for layer in range(c.n_layer)]


def plan(c: ModelConfig) -> Plan:
    """The connection plan of a system. Raises UserError for one that has none."""
    L = c.n_layer
    single = [Channel((layer,), (1.0,)) for layer in range(L)]
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
        channels = [single[s] for s in stored]
        layers = [Layer((stored.index(s),), (stored.index(s),), (s,) if s == layer else None)
                  for layer, s in enumerate(reads)]
    elif c.kv == "feedback":
        channels = [Channel(tuple(range(L + 1)), (1 / (L + 1),) * (L + 1), "softmax")]
        layers = [Layer((0,), (0,), None)] * L
    elif c.kv.startswith("fusedkv"):
        n = L // 2 - 1
        channels = single[:n + 1]
        fused = Layer((0, n), (0, n), (0, n))
        if c.kv == "fusedkv_lite":
            fused = Layer((n,), (0,), (0, n))
        layers = [*same[:n + 1], *[fused] * (L - n - 1)]
    elif c.kv == "recurrent":
        channels, layers = [Channel((layer + 1,), (1.0,)) for layer in range(L)], same
    elif c.kv == "vanilla":
        channels, layers = single, same
    else:
        raise UserError(f"kv={c.kv}: no plan (baselines.plan) says what its layers read")
    return Plan(tuple(channels), tuple(layers), False)


# ---- models


def projects(p: Plan, layer: int) -> bool:
    """Does this block project keys and values of its own?"""
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

    def source(self, h: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """The state h[l] (B, T, D) as a source of keys and of values: normed, with their gains."""
        unit = rms_norm(h)
        return tuple((unit * branch.pre_norm[layer]).to(h.dtype)
                     for branch in (self.kv_pool.key, self.kv_pool.value))

    def channel(self, sources: list[tuple[Tensor, Tensor]], cos: Tensor,
                sin: Tensor) -> tuple[Tensor, Tensor]:
        """Sources 0..l -> channel l: keys and values (B, T, Hkv, d)."""
        pool, (keys, values) = self.kv_pool, zip(*sources)
        k = mix_up_to(pool.key, torch.stack(keys, 2)).unflatten(-1, pool.heads)
        v = mix_up_to(pool.value, torch.stack(values, 2)).unflatten(-1, pool.heads)
        return rotate(rms_norm(k, pool.key_norm[len(keys) - 1]), cos, sin), v

    def dummy_channel(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values (Hkv, d) of channel l of the dummy, which mixes its copies 0..l."""
        x = self.kv_pool.dummy.expand(1, 1, -1)
        tables = rotary_tables(torch.zeros(1, 1, dtype=torch.long, device=x.device),
                               self.config.head_dim)
        k, v = self.channel([self.source(x, i) for i in range(layer + 1)], *tables)
        return k[0, 0], v[0, 0]

    def new_cache(self, B: int, S: int, like: Tensor) -> Cache:
        cache = Decoder.new_cache(self, B, S, like)
        if self.has_dummy:
            dummy = [self.dummy_channel(layer) for layer in range(self.n_channels)]
            cache.sink = tuple(torch.stack(x) for x in zip(*dummy))
        return cache

    def attend(self, layer: int, q: Tensor, h: list[Tensor], own: list, rows: Rows,
               cache: Cache | None) -> Tensor:
        """`Decoder.attend`, of a channel that mixes the states that entered the layers so far."""
        own[layer] = self.source(h[layer], layer)  # later layers mix it, too
        k, v = self.channel(own, rows.cos, rows.sin)
        sink = self.dummy_channel(layer) if self.has_dummy and rows.complete else None
        return self.write_and_attend(layer, q, k, v, rows, cache, sink)


def mix_up_to(branch: Branch, h: Tensor) -> Tensor:
    """Channel l of a branch (B, T, E), of its normed sources 0..l (B, T, l + 1, D)."""
    n, L = h.size(2), branch.bias.size(1)
    layer = n - 1
    alpha = branch.bias[layer, :n].to(h.dtype).expand(*h.shape[:2], -1)
    if branch.router is not None:
        inputs = h[:, :, layer % branch.stride::branch.stride].flatten(2)
        rows, columns = slice(layer * L, layer * L + n), slice(-inputs.size(-1), None)
        alpha = alpha + F.linear(inputs, branch.router.weight[rows, columns])
    mixed = torch.einsum("btl,btld->btd", alpha.to(h.dtype), h)
    return F.linear(rms_norm(mixed, branch.post_norm[layer], eps=1e-4), branch.proj[layer])


# ---- LCKV


class LCKV(Planned):
    """w layers at both ends are vanilla; those between read the last of them (Wu and Tu, 2024).

    A condensed layer does not read its own token, whose keys and values are not there yet. The
    layer that projects them is vanilla: it writes them on the way up, and reads itself.
    """

    sources = slice(-2, -1)  # of the states in the iterated slice: what enters its last layer

    def attend(self, layer: int, q: Tensor, h: list[Tensor], own: list, rows: Rows,
               cache: Cache | None) -> Tensor:
        """`Decoder.attend`; a condensed layer, which projects nothing, reads the past tokens' keys
        and values of the layer that all of these read."""
        channel = self.plan.layers[layer].keys[0]
        if own[-1] is None:
            return cache.attend(q, channel, rows.past())
        return self.write_and_attend(channel, q, *own[-1], rows, cache)

    def refill(self, h: list[Tensor], rows: Rows, cache: Cache):
        first, end = self.iterated
        block = self.blocks[end - 1]
        k, v = block.keys_values(block.attn_norm(h[-2]), rows)
        cache.put(rows.columns, k[None], v[None], self.plan.layers[first].keys[0])

    def store(self, h: list[Tensor], rows: Rows, cache: Cache):
        """Nothing: `attend` has written it."""


# ---- Feedback Transformer


class Memory(nn.Module):
    """What all layers read of a token: one key and value of a static mixture of all its states."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        E = c.n_kv_head * c.head_dim
        self.head_dim = c.head_dim
        self.weights = nn.Parameter(torch.zeros(c.n_layer + 1))
        self.k_norm = RMSNorm(c.head_dim)
        self.k_proj = nn.Linear(c.n_embd, E, bias=False)
        self.v_proj = nn.Linear(c.n_embd, E, bias=False)

    def forward(self, h: list[Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
        """h[0..L] -> keys and values (1, B, T, Hkv, d)."""
        weights = self.weights.softmax(0).to(h[0].dtype)
        m = torch.einsum("l,btld->btd", weights, torch.stack(h, 2))
        k, v = (proj(m).unflatten(-1, (-1, self.head_dim)) for proj in (self.k_proj, self.v_proj))
        return rotate(self.k_norm(k), rows.cos, rows.sin)[None], v[None]


class Feedback(Planned):
    """All layers read one memory of past tokens, embedding and final output included."""

    reads_itself = False
    sources = slice(None)

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.memory = Memory(config)

    def init_weights(self):
        super().init_weights()
        for proj in (self.memory.k_proj, self.memory.v_proj):
            nn.init.normal_(proj.weight, std=0.02)

    def pool(self, h: list[Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
        return self.memory(h, rows)

    def attend(self, layer: int, q: Tensor, h: list[Tensor], own: list, rows: Rows,
               cache: Cache) -> Tensor:
        return cache.attend(q, 0, rows)


# ---- FusedKV


class FusedKVLite(Planned):
    """The upper half of the layers reads the middle layer's keys and the bottom layer's values."""

    def attend(self, layer: int, q: Tensor, h: list[Tensor], own: list, rows: Rows,
               cache: Cache | None) -> Tensor:
        if own[-1] is not None:
            return super().attend(layer, q, h, own, rows, cache)
        middle = self.n_channels - 1
        bottom_and_middle = [own[j] if rows.complete else (cache.k[j], cache.v[j])
                             for j in (0, middle)]
        return self.attention(q, *self.fuse(layer, *bottom_and_middle), rows)

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
        return tuple((w[0] * x + w[1] * y).to(x.dtype)
                     for w, x, y in zip((pairs, self.fuse_value[i]), bottom, middle))


# ---- Recurrent Transformer


class Recurrent(Planned):
    """A layer reads its own outputs at past tokens, and its input at the token itself.

    Both go through the layer's own norm and projections. Entries of past tokens are in the cache;
    a token's own one is handed to the attention beside it.
    """

    reads_itself = False  # in the cache
    sources = slice(1, None)

    def store(self, h: list[Tensor], rows: Rows, cache: Cache):
        for j, (block, x) in enumerate(zip(self.blocks, h[1:])):
            k, v = block.keys_values(block.attn_norm(x), rows)
            cache.put(rows.columns, k[None], v[None], j)

    def attend(self, layer: int, q: Tensor, h: list[Tensor], own: list, rows: Rows,
               cache: Cache) -> Tensor:
        return in_blocks(attend_with_own, rows, q.size(2) // cache.k[layer].size(2),
                         cache.k[layer], cache.v[layer], q, *own[-1])


def attend_with_own(rows: Rows, first: int, keep: bool, k: Tensor, v: Tensor, q: Tensor,
                    own_k: Tensor, own_v: Tensor) -> Tensor:
    """`attention.attend_block` of q (B, T, H, d) on k, v (B, S, Hkv, d) and, each query, on one
    more entry of its own, own_k, own_v (B, T, Hkv, d)."""
    q = q.unflatten(2, (k.size(2), -1))  # (B, T, Hkv, G, d)
    own = torch.einsum("btngd,btnd->bngt", q, own_k)[..., None]
    scores = torch.einsum("btngd,bsnd->bngts", q, k)
    mask = rows.mask(first, q.size(1), k.size(1), 1, False, q.dtype, keep)[:, None]
    p = (torch.cat((scores + mask, own), -1) * q.size(-1) ** -0.5).softmax(-1).to(v.dtype)
    out = torch.einsum("bngts,bsnd->btngd", p[..., :-1], v)
    out = out + torch.einsum("bngt,btnd->btngd", p[..., -1], own_v)
    return out.flatten(2, 3)


SYSTEMS = {"vanilla": Decoder, "whitematter": WhiteMatter, "nofeedback": NoFeedback, "lckv": LCKV,
           "feedback": Feedback, "fusedkv": FusedKV, "fusedkv_lite": FusedKVLite,
           "recurrent": Recurrent}


def build(config: ModelConfig) -> Decoder:
    """The model of `config`, freshly initialised."""
    with torch.random.fork_rng(devices=[]):  # what nn.Linear draws for itself does not count
        model = SYSTEMS[config.kv](config)
    model.init_weights()
    return model
