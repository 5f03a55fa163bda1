"""
The cross-layer KV pool (section 3.1): a finished token's L states become k cached channels.

Dimensions: B rows, T tokens, L source layers, D width, k channels, E = Hkv * d features of a
key or value, p router stride, L' = ceil(L / p) router inputs.
"""

import torch
import torch.nn as nn
from torch import Tensor

from attention import Cache, Rows
from model import Decoder, ModelConfig, rms_norm, rotary_tables, rotate


def initial_sources(n_channels: int, n_sources: int, top_output: bool = False) -> Tensor:
    """0/1 matrix (k, S): which of S sources the router's bias selects at the start (section 3.1).

    k = 1 "top": the last source. 1 < k < L "cyclic": source l feeds channel l mod k.
    k = L "shifted identity": channel j takes the next source, min(j + 1, S - 1).
    `top_output`: the final output is a source, too, so that S = L + 1; else S = L.
    """
    k, S = n_channels, n_sources
    start = torch.zeros(k, S)
    if k == 1:
        start[0, S - 1] = 1
    elif k < S - top_output:
        start[torch.arange(S) % k, torch.arange(S)] = 1
    else:
        start[torch.arange(k), (torch.arange(k) + 1).clamp(max=S - 1)] = 1
    return start


class Branch(nn.Module):
    """Steps 1 and 2 of section 3.1 for the keys or for the values: mix, norm, project."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        k, D, E = c.n_channels, c.n_embd, c.n_kv_head * c.head_dim
        L = c.n_layer + c.top_output
        self.stride, self.top_output = c.router_stride, c.top_output
        self.inputs = slice((L - 1) % c.router_stride, None, c.router_stride)
        n_inputs = len(range(L)[self.inputs])  # L'
        self.pre_norm = nn.Parameter(torch.ones(L, D))
        self.router = None
        if c.router == "dynamic":
            self.router = nn.Linear(n_inputs * D, k * L, bias=False)
        self.bias = nn.Parameter(torch.empty(k, L))
        self.post_norm = nn.Parameter(torch.ones(k, D))
        self.proj = nn.Parameter(torch.empty(k, E, D))

    def init_weights(self):
        if self.router is not None:
            nn.init.zeros_(self.router.weight)
        with torch.no_grad():
            self.bias.copy_(0.25 * initial_sources(*self.bias.shape, self.top_output))
        nn.init.normal_(self.proj, std=0.02)

    def weights(self, h: Tensor) -> Tensor:
        """Normed sources (B, T, L, D) -> signed mixing weights alpha (B, T, k, L)."""
        if self.router is None:
            return self.bias.to(h.dtype).expand(*h.shape[:2], -1, -1)
        xi = h[:, :, self.inputs].flatten(2)  # (B, T, L' D), sources in increasing order
        return self.router(xi).unflatten(-1, self.bias.shape) + self.bias

    def forward(self, unit: Tensor) -> Tensor:
        """Sources of unit RMS (B, T, L, D) -> projected channels (k, B, T, E)."""
        h = (unit * self.pre_norm).to(unit.dtype)
        mixed = torch.einsum("btkl,btld->btkd", self.weights(h).to(h.dtype), h)
        mixed = rms_norm(mixed, self.post_norm, eps=1e-4)
        return torch.einsum("btkd,ked->kbte", mixed, self.proj)


class Pool(nn.Module):
    """Pool(H): the states of each token, on its own, become k keys and k values."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.heads = (c.n_kv_head, c.head_dim)
        self.n_sources = c.n_layer + c.top_output
        self.key, self.value = Branch(c), Branch(c)
        self.key_norm = nn.Parameter(torch.ones(c.n_channels, c.head_dim))
        self.dummy = nn.Parameter(torch.empty(c.n_embd)) if c.dummy else None

    def init_weights(self):
        """Router weight 0, selected biases 0.25, projections and the dummy N(0, 0.02)."""
        self.key.init_weights()
        self.value.init_weights()
        if self.dummy is not None:
            nn.init.normal_(self.dummy, std=0.02)

    def forward(self, h: list[Tensor], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """L states (B, T, D) -> rotated, normed keys and raw values, both (k, B, T, Hkv, d)."""
        unit = rms_norm(torch.stack(h, 2))  # one statistic per source, for both branches
        k = self.key(unit).unflatten(-1, self.heads)
        v = self.value(unit).unflatten(-1, self.heads)
        return rotate(rms_norm(k, self.key_norm[:, None, None, None]), cos, sin), v


class WhiteMatter(Decoder):
    """The decoder whose layers read the pool: layer l attends to channel l mod k (step 3)."""

    reads_itself = False
    iterates = True

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.kv_pool = Pool(config)
        self.n_channels = config.n_channels
        self.has_dummy = config.dummy
        self.sources = slice(0, self.kv_pool.n_sources)
        # h[L] feeds no channel, unless a subclass's `pool` reads it
        self.n_top = int(not config.top_output and type(self).pool is WhiteMatter.pool)

    def has_kv(self, layer: int) -> bool:
        return False  # the pool projects them

    def init_weights(self):
        super().init_weights()
        self.kv_pool.init_weights()

    def pool(self, h: list[Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
        """h[0..L], as `states` returns them (but for h[L], where n_top says that no channel needs
        it) -> channels (k, B, T, Hkv, d)."""
        return self.kv_pool(h[self.sources], rows.cos, rows.sin)

    def new_cache(self, B: int, S: int, like: Tensor) -> Cache:
        """A cache whose sink, which every query reads, is the dummy's channels."""
        cache = super().new_cache(B, S, like)
        if self.has_dummy:
            cache.sink = self.dummy_channels()
        return cache

    def dummy_channels(self) -> tuple[Tensor, Tensor]:
        """Keys and values (k, Hkv, d) of the dummy, one vector as all states, at position 0."""
        h = self.kv_pool.dummy.expand(1, 1, -1)
        at = torch.zeros(1, 1, dtype=torch.int, device=h.device)
        rows = Rows(slice(None), at, at, *rotary_tables(at, self.config.head_dim))
        k, v = self.pool([h] * (self.config.n_layer + 1), rows)
        return k[:, 0, 0], v[:, 0, 0]

    def attend(self, layer: int, q: Tensor, h: list[Tensor], own: list, rows: Rows,
               cache: Cache) -> Tensor:
        return cache.attend(q, layer % self.n_channels, rows)

