"""
The decoder: Qwen3 blocks and the plain (vanilla) key-value path.

Everything that WhiteMatter adds is in pool.py, which says for `Decoder` what a layer attends to
(`attend`) and what a finished token adds to the cache (`pool`). All is plain PyTorch, which
autograd differentiates; what makes it fast on a GPU is in kernels/, and nothing here knows of it.

Dimensions: B rows, T tokens, S cached tokens, L layers, D width, H query heads,
Hkv key-value heads, d head size, C cached channels (L here, k in WhiteMatter).
`h[l]` is the state that enters layer l, `h[L]` the residual stream after the last block.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attention import Cache, Rows, Sink, attend

SYSTEMS = ("whitematter", "vanilla", "nofeedback", "lckv", "feedback", "fusedkv", "fusedkv_lite",
           "recurrent")
# have no choice of channels, sources and dummy
NO_POOL = ("vanilla", "lckv", "feedback", "fusedkv", "fusedkv_lite", "recurrent")
ROUTERS = ("dynamic", "static")
SCHEDULES = {"lckv": (1, 7, 2)}  # n_groups, n_nograd, n_grad of Wu and Tu (2024); else the paper's
CHUNK = 4096  # tokens whose logits are there at a time; 0.8 GB in float32 for 50,304 ids


@dataclass
class ModelConfig:
    """Sizes of a model and the schedule that it is trained with; the defaults are the paper's, but
    for GPT-2's vocabulary.

    Raises ValueError, with the numbers, for shapes that cannot work.
    """

    vocab_size: int = 50304
    eos_id: int | None = None  # closes a document; None: a row is one document
    n_layer: int = 16
    n_embd: int = 512
    n_head: int = 6
    n_kv_head: int = 3
    head_dim: int = 96
    n_hidden: int = 1536
    kv: str = "whitematter"  # the system: where a layer's keys and values come from
    n_channels: int = 16  # k, in 1..n_layer; only whitematter has a choice
    router: str = "dynamic"
    router_stride: int = 2  # p: the router reads every p-th source, counted down from the last
    top_output: bool = False  # is the final output h[L] one of the pool's sources too?
    dummy: bool = True  # without it, the first token of a document attends to nothing
    lckv_w: int = 4  # w, layers of lckv that keep their own keys and values
    n_groups: int | None = None  # g of the cyclic schedule; 1 is Jacobi; None: the system's own
    n_nograd: int | None = None  # passes without gradients, which come first
    n_grad: int | None = None  # passes with them

    def __post_init__(self):
        for name, own in zip(("n_groups", "n_nograd", "n_grad"), SCHEDULES.get(self.kv, (8, 1, 2))):
            if getattr(self, name) is None:
                setattr(self, name, own)

        def check(ok: bool, message: str):
            if not ok:
                raise ValueError(message)

        for name in ("vocab_size", "n_layer", "n_embd", "n_head", "n_kv_head", "head_dim",
                     "n_hidden", "router_stride", "n_groups", "n_grad"):
            value = getattr(self, name)
            check(value >= 1, f"{name}={value}: at least 1 is needed")
        check(self.n_nograd >= 0, f"n_nograd={self.n_nograd}: at least 0 is needed")
        check(self.kv in SYSTEMS, f"kv={self.kv!r}: choose one of {', '.join(SYSTEMS)}")
        check(self.router in ROUTERS, f"router={self.router!r}: choose one of {', '.join(ROUTERS)}")
        check(self.n_head % self.n_kv_head == 0,
              f"n_head={self.n_head} is no multiple of n_kv_head={self.n_kv_head}")
        check(self.head_dim % 2 == 0, f"head_dim={self.head_dim}: RoPE needs an even number, "
              f"such as {self.head_dim + 1}")
        check(1 <= self.n_channels <= self.n_layer or self.kv in (*NO_POOL, "nofeedback"),
              f"n_channels={self.n_channels}: 1 to n_layer={self.n_layer} are possible")
        check(self.n_channels == self.n_layer or self.kv != "nofeedback",
              f"n_channels={self.n_channels}: nofeedback needs n_layer={self.n_layer} of them")
        check(0 <= self.lckv_w <= self.n_layer - 2 or self.kv != "lckv",
              f"lckv_w={self.lckv_w}: 0 to n_layer-2={self.n_layer - 2} are possible")
        check(self.n_layer > 1 or not self.kv.startswith("fusedkv"),
              f"n_layer={self.n_layer}: {self.kv} needs at least 2")
        check(not self.top_output or self.kv not in (*NO_POOL, "nofeedback"),
              f"top_output={self.top_output}: only whitematter has a choice")
        check(self.dummy or self.kv not in NO_POOL,
              f"dummy={self.dummy}: only whitematter and nofeedback have a choice")
        check(self.eos_id is None or 0 <= self.eos_id < self.vocab_size,
              f"eos_id={self.eos_id}: it must lie in 0..vocab_size-1={self.vocab_size - 1}")


def upcast(x: Tensor) -> Tensor:
    """float32 for half precisions; float32 and float64 stay."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def rms_norm(x: Tensor, gain: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain over the last dimension, computed in at least float32."""
    y = upcast(x)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if gain is None else y * gain).to(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with a gain of its own."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight)


def rotary_tables(pos: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin (..., head_dim / 2) of integer positions (...), always computed in float32."""
    freq = 1.0 / 1e6 ** (torch.arange(0, head_dim, 2, device=pos.device).float() / head_dim)
    angle = pos.float()[..., None] * freq
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split RoPE: x (..., T, heads, d), tables (B, T, d/2)."""
    cos, sin = (t.to(x.dtype).unsqueeze(-2) for t in (cos, sin))
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Block(nn.Module):
    """A Qwen3 decoder block. Only systems that project a layer's own state have k_proj, v_proj."""

    def __init__(self, c: ModelConfig, has_kv: bool):
        super().__init__()
        D, d = c.n_embd, c.head_dim
        self.has_kv, self.head_dim = has_kv, d
        self.attn_norm = RMSNorm(D)
        self.q_norm = RMSNorm(d)
        self.q_proj = nn.Linear(D, c.n_head * d, bias=False)
        if has_kv:
            self.k_norm = RMSNorm(d)
            self.k_proj = nn.Linear(D, c.n_kv_head * d, bias=False)
            self.v_proj = nn.Linear(D, c.n_kv_head * d, bias=False)
        self.o_proj = nn.Linear(c.n_head * d, D, bias=False)
        self.mlp_norm = RMSNorm(D)
        self.gate_proj = nn.Linear(D, c.n_hidden, bias=False)
        self.up_proj = nn.Linear(D, c.n_hidden, bias=False)
        self.down_proj = nn.Linear(c.n_hidden, D, bias=False)

    def queries(self, a: Tensor, rows: Rows) -> Tensor:
        """Normed states (B, T, D) -> queries (B, T, H, d), normed by head and rotated."""
        q = self.q_proj(a).unflatten(-1, (-1, self.head_dim))
        return rotate(self.q_norm(q), rows.cos, rows.sin)

    def keys_values(self, a: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Normed states (B, T, D) -> keys, normed and rotated, and values, both (B, T, Hkv, d)."""
        k = self.k_proj(a).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(a).unflatten(-1, (-1, self.head_dim))
        return rotate(self.k_norm(k), rows.cos, rows.sin), v

    def mlp(self, a: Tensor) -> Tensor:
        """SwiGLU of normed states (B, T, D)."""
        return self.down_proj(F.silu(self.gate_proj(a)) * self.up_proj(a))


class Decoder(nn.Module):
    """A Qwen3 language model with tied embedding and head; as it stands, `kv="vanilla"`.

    It has no `forward`: h = solvers.solve(model, idx).final, then `logits(h)` or `loss(h, y)`. Nor
    has Block: `states` runs its parts, as what a layer attends to is the system's own (`attend`).
    """

    reads_itself = True  # does a query see the key of its own token?
    iterates = False  # does a channel need states that are not known yet (solvers.py)?
    has_dummy = False  # is position 0 a dummy's, so that documents start at 1?
    sources = slice(0, -1)  # of the states that a pass returns: those that channels are made of
    attention = staticmethod(attend)  # on keys and values at hand (on a cache: Cache.attend)

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, self.has_kv(layer))
                                    for layer in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd)
        self.n_channels = config.n_layer
        self.iterated = (0, config.n_layer)  # first, end: a solver repeats layers first..end-1
        self.n_top = 0  # of these, so many at the top feed no channel and run in the last pass only

    def has_kv(self, layer: int) -> bool:
        """Does this block project keys and values itself?"""
        return True

    def init_weights(self):
        """N(0, 0.02) for the embedding and every matrix of the blocks; gains are 1 already, and a
        bias that you add to a layer begins at 0."""
        for module in (self.embed, *self.blocks.modules()):
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    def n_params(self) -> int:
        """Parameters without the embedding, which is also the head (the paper's count)."""
        return sum(p.numel() for p in self.parameters()) - self.embed.weight.numel()

    # ---- where tokens stand

    def document_starts(self, idx: Tensor, doc: Tensor | None = None) -> Tensor:
        """Column (B, T) at which each token's document begins in its row.

        Documents come from `doc`, ids (B, T) that are constant on contiguous runs, or else from
        the EOS tokens in `idx`: an EOS belongs to the document that it closes.
        """
        column = torch.arange(idx.size(1), device=idx.device).expand_as(idx)
        first = torch.zeros_like(idx, dtype=torch.bool)
        if doc is not None:
            first[:, 1:] = doc[:, 1:] != doc[:, :-1]
        elif self.config.eos_id is not None:
            first[:, 1:] = idx[:, :-1] == self.config.eos_id
        return torch.where(first, column, 0).cummax(dim=1).values

    def place(self, columns: slice | Tensor, index: Tensor, start: Tensor) -> Rows:
        """Rows for tokens at columns `index` (B, T) of documents that begin at `start` (B, T);
        `columns`: the same as a cache takes them, slice(None) for whole rows."""
        cos, sin = rotary_tables(index - start + self.has_dummy, self.config.head_dim)
        return Rows(columns, start.int(), (index + self.reads_itself).int(), cos, sin)

    def rows(self, idx: Tensor, doc: Tensor | None = None) -> Rows:
        """Rows for whole token rows idx (B, T): positions restart in every document."""
        index = torch.arange(idx.size(1), device=idx.device).expand_as(idx)
        return self.place(slice(None), index, self.document_starts(idx, doc))

    # ---- up the stack

    def embed_tokens(self, idx: Tensor) -> Tensor:
        """(B, T) -> (B, T, D)."""
        return self.embed(idx)

    def states(self, x: Tensor, rows: Rows, cache: Cache | None = None, first: int = 0,
               end: int | None = None) -> list[Tensor]:
        """States(X; P) of section 3.3: embeddings (B, T, D) -> h[0..L], L + 1 x (B, T, D).

        Or a part of the stack: h[first] -> h[first..end].
        """
        h, own = [x], []  # what enters each layer, and the keys and values that its block projects
        for layer in range(first, len(self.blocks) if end is None else end):
            block = self.blocks[layer]
            a = block.attn_norm(x)
            q = block.queries(a, rows)  # (B, T, H, d)
            own.append(block.keys_values(a, rows) if block.has_kv else None)
            attended = self.attend(layer, q, h, own, rows, cache)  # (B, T, H, d)
            x = x + block.o_proj(attended.flatten(-2))
            x = x + block.mlp(block.mlp_norm(x))
            h.append(x)
        return h

    def attend(self, layer: int, q: Tensor, h: list[Tensor], own: list, rows: Rows,
               cache: Cache | None) -> Tensor:
        """What `layer` reads, (B, T, H, d). q: its queries; h: the states that enter the layers up
        to this one; own: what each of these has projected, (k, v) or None (a system may leave
        something else there for later layers).
        """
        return self.write_and_attend(layer, q, *own[-1], rows, cache)

    def write_and_attend(self, channel: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows,
                         cache: Cache | None, sink: Sink | None = None) -> Tensor:
        """Attention on a channel of which k, v (B, T, Hkv, d) are these tokens' own.

        Whole rows are complete in themselves and leave copies in the cache, if there is one; a
        group of a solver, or a new token, is written to the cache and reads it.
        """
        if not rows.complete:
            cache.put(rows.columns, k[None], v[None], channel)
            return cache.attend(q, channel, rows)
        if cache is not None:
            with torch.no_grad():
                cache.put(rows.columns, k[None], v[None], channel)
        return self.attention(q, k, v, rows, sink)

    # ---- the cache

    def new_cache(self, B: int, S: int, like: Tensor) -> Cache:
        """An empty cache of C channels for S tokens, on `like`'s device and in the precision that
        is computed with: `like`'s, or autocast's."""
        kind, dtype = like.device.type, like.dtype
        if kind != "meta" and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        shape = self.n_channels, B, S, self.config.n_kv_head, self.config.head_dim
        k, v = (like.new_zeros(shape, dtype=dtype).unbind() for _ in range(2))
        return Cache(list(k), list(v))

    def pool(self, h: list[Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
        """P = Pool(H): h[0..L] of finished tokens -> channels (C, B, T, Hkv, d). Only systems that
        iterate have one (pool.py, baselines.py)."""
        raise NotImplementedError

    def store(self, h: list[Tensor], rows: Rows, cache: Cache):
        """Add finished tokens to the cache, given their states h[0..L] (systems that iterate)."""
        cache.put(rows.columns, *self.pool(h, rows))

    def refill(self, h: list[Tensor], rows: Rows, cache: Cache):
        """Fill the iterated channels from the states that the passes of a solver start from."""
        self.store(h, rows, cache)

    # ---- head and loss

    def logits(self, h: Tensor) -> Tensor:
        """Final states h[L] (..., D) -> logits (..., vocabulary)."""
        return F.linear(self.norm(h), self.embed.weight)

    def loss(self, h: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats of h[L] (..., D); targets of -1 do not count.

        The logits of a chunk of tokens are made again in the backward pass, so that those of all
        tokens are never there at once.
        """
        h, targets = h.flatten(0, -2), targets.flatten()
        nats = self.nats if len(h) <= CHUNK else partial(checkpoint, self.nats, use_reentrant=False)
        total = sum(map(nats, h.split(CHUNK), targets.split(CHUNK)))
        return total / (targets != -1).sum().clamp(min=1)

    def nats(self, h: Tensor, targets: Tensor) -> Tensor:
        """Sum of the cross-entropies of h[L] (n, D)."""
        return F.cross_entropy(upcast(self.logits(h)), targets, ignore_index=-1, reduction="sum")
