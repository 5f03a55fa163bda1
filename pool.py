"""
The cross-layer KV pool (section 3.1): a finished token's L states become k cached channels.

Dimensions: B rows, T tokens, L source layers, D width, k channels, E = Hkv * d features of a
key or value, p router stride, L' = ceil(L / p) router inputs.
"""

from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from attention import Cache, Rows, is_fast
from model import (
    Decoder,
    ModelConfig,
    compute_dtype,
    linear,
    norm_rotate,
    rms_norm,
    rotary_tables,
)

try:  # the fast path; Triton comes with PyTorch's CUDA builds
    import pool_kernels
except ImportError:
    pool_kernels = None


def initial_sources(n_channels: int, n_sources: int) -> Tensor:
    """0/1 matrix (k, L): which sources the router's bias selects at the start (section 3.1).

    k = 1 "top": the last source. 1 < k < L "cyclic": source l feeds channel l mod k.
    k = L "shifted identity": channel j takes the next source, min(j + 1, L - 1).
    """
    k, L = n_channels, n_sources
    start = torch.zeros(k, L)
    if k == 1:
        start[0, L - 1] = 1
    elif k < L:
        start[torch.arange(L) % k, torch.arange(L)] = 1
    else:
        start[torch.arange(k), (torch.arange(k) + 1).clamp(max=L - 1)] = 1
    return start


def scale(x: Tensor, gain: Tensor) -> Tensor:
    return (x * gain).to(x.dtype)


class Branch(nn.Module):
    """Steps 1 and 2 of section 3.1 for the keys or for the values: mix, norm, project."""

    matrices = ("router", "proj")

    def __init__(self, c: ModelConfig):
        super().__init__()
        k, L, D, E = c.n_channels, c.n_layer, c.n_embd, c.n_kv_head * c.head_dim
        self.stride = c.router_stride
        self.inputs = slice((L - 1) % c.router_stride, None, c.router_stride)
        n_inputs = len(range(L)[self.inputs])  # L'
        self.pre_norm = nn.Parameter(torch.ones(L, D))
        self.router = None
        if c.router == "dynamic":
            self.router = nn.Parameter(torch.empty(k * L, n_inputs * D))
        self.bias = nn.Parameter(torch.empty(k, L))
        self.post_norm = nn.Parameter(torch.ones(k, D))
        self.proj = nn.Parameter(torch.empty(k, E, D))

    def init_weights(self):
        if self.router is not None:
            nn.init.zeros_(self.router)
        with torch.no_grad():
            self.bias.copy_(0.25 * initial_sources(*self.bias.shape))
        nn.init.normal_(self.proj, std=0.02)

    def weights(self, h: Tensor) -> Tensor:
        """Normed sources (B, T, L, D) -> signed mixing weights alpha (B, T, k, L)."""
        if self.router is None:
            return self.bias.to(h.dtype).expand(*h.shape[:2], -1, -1)
        xi = h[:, :, self.inputs].flatten(2)  # (B, T, L' D), sources in increasing order
        return linear(xi, self.router).unflatten(-1, self.bias.shape) + self.bias.to(h.dtype)

    def channels(self, unit: Tensor) -> Tensor:
        """Sources of unit RMS (B, T, L, D) -> projected channels (k, B, T, E)."""
        h = scale(unit, self.pre_norm)
        mixed = torch.einsum("btkl,btld->btkd", self.weights(h), h)
        mixed = rms_norm(mixed, self.post_norm, eps=1e-4)
        projected = linear(mixed.flatten(0, 1).transpose(0, 1), self.proj)  # (k, B T, E)
        return projected.unflatten(1, h.shape[:2])


class Pool(nn.Module):
    """Pool(H): the states of each token, on its own, become k keys and k values."""

    gains = ("key_norm",)

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.heads = (c.n_kv_head, c.head_dim)
        self.n_sources = c.n_layer
        self.key, self.value = Branch(c), Branch(c)
        self.key_norm = nn.Parameter(torch.ones(c.n_channels, c.head_dim))
        self.dummy = nn.Parameter(torch.empty(c.n_embd))

    def init_weights(self):
        """Router weight 0, selected biases 0.25, projections and the dummy N(0, 0.02)."""
        self.key.init_weights()
        self.value.init_weights()
        nn.init.normal_(self.dummy, std=0.02)

    def channels(self, h: list[Tensor], cos: Tensor, sin: Tensor,
                 folded=None) -> tuple[Tensor, Tensor]:
        """L states (B, T, D) -> rotated, normed keys and raw values, both (k, B, T, Hkv, d).

        `folded` are the weights as `pool_kernels` uses them, if it is to do the work.
        """
        if folded is not None:
            k, v = folded.channels(h).unflatten(-1, self.heads).unbind()
        else:
            unit = rms_norm(torch.stack(h, 2), None)  # one statistic per source, for both branches
            k = self.key.channels(unit).unflatten(-1, self.heads)
            v = self.value.channels(unit).unflatten(-1, self.heads)
        return norm_rotate(k, self.key_norm[:, None, None, None], cos, sin), v

    def dummy_channels(self, folded=None) -> tuple[Tensor, Tensor]:
        """Keys and values (k, Hkv, d) of the dummy: at position 0, its own state at all sources."""
        h = self.dummy.to(compute_dtype(self.key.proj)).expand(1, 1, -1)
        pos = torch.zeros(1, 1, dtype=torch.long, device=h.device)
        k, v = self.channels([h] * self.n_sources, *rotary_tables(pos, self.heads[1]), folded)
        return k[:, 0, 0], v[:, 0, 0]


class WhiteMatter(Decoder):
    """The decoder whose layers read the pool: layer l attends to channel l mod k (step 3)."""

    reads_itself = False
    iterates = True
    own_kv = False
    has_dummy = True

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.kv_pool = Pool(config)
        self.n_channels = config.n_channels

    def init_weights(self):
        super().init_weights()
        self.kv_pool.init_weights()

    def pool(self, h: list[Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
        """h[0..L], as `states` returns them -> channels (k, B, T, Hkv, d)."""
        return self.kv_pool.channels(h[:self.kv_pool.n_sources], rows.cos, rows.sin)

    def new_cache(self, B: int, S: int, like: Tensor) -> Cache:
        """It begins with the dummy, and keeps the pool's weights ready for many evaluations."""
        pool, empty = self.kv_pool, super().new_cache(B, S, like)
        folded = None
        if pool_kernels is not None and is_fast(like):
            folded = pool_kernels.Folded(pool.key, pool.value, like.dtype)
        return Cache(empty.k, empty.v, pool.dummy_channels(folded), folded)

    def attend(self, layer: int, q: Tensor, k: None, v: None, rows: Rows, cache: Cache) -> Tensor:
        return cache.attend(q, layer % self.n_channels, rows)

    def store(self, h: list[Tensor], rows: Rows, cache: Cache):
        if cache.weights is None:
            return super().store(h, rows, cache)
        sources = h[:self.kv_pool.n_sources]
        cache.put_projected(rows, cache.weights.channels(sources), self.kv_pool.key_norm)


def build(config: ModelConfig) -> Decoder:
    """The model of `config`, freshly initialised."""
    model = {"vanilla": Decoder, "whitematter": WhiteMatter}[config.kv](config)
    model.init_weights()
    return model
