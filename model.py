"""
The decoder: Qwen3 blocks, one attention function, and the plain (vanilla) key-value path.

Everything that WhiteMatter adds is in pool.py, which overrides two methods of `Decoder`:
`read` (which keys and values a layer attends to) and `pool` (what a finished token adds to
the cache).

Dimensions: B rows, T tokens, S cached tokens, L layers, D width, H query heads,
Hkv key-value heads, G = H / Hkv, d head size, C cached channels (L here, k in WhiteMatter).
`h[l]` is the state that enters layer l, `h[L]` the residual stream after the last block.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

SYSTEMS = ("whitematter", "vanilla")
ROUTERS = ("dynamic", "static")


@dataclass
class ModelConfig:
    """Sizes of a model and the schedule that it is trained with; the defaults are the paper's.

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
    n_channels: int = 16  # k, in 1..n_layer
    router: str = "dynamic"
    router_stride: int = 2  # p: the router reads every p-th source, counted down from the last
    n_groups: int = 8  # g of the cyclic schedule; 1 is Jacobi
    n_nograd: int = 1
    n_grad: int = 2

    def __post_init__(self):
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
        check(1 <= self.n_channels <= self.n_layer or self.kv == "vanilla",
              f"n_channels={self.n_channels}: 1 to n_layer={self.n_layer} are possible")
        check(self.eos_id is None or 0 <= self.eos_id < self.vocab_size,
              f"eos_id={self.eos_id}: it must lie in 0..vocab_size-1={self.vocab_size - 1}")


def upcast(x: Tensor) -> Tensor:
    """float32 for half precisions; float32 and float64 stay."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def rms_norm(x: Tensor, gain: Tensor | None, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain over the last dimension, computed in at least float32."""
    y = upcast(x)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if gain is None else y * gain).to(x.dtype)


def rotary_tables(pos: Tensor, head_dim: int, theta: float = 1e6) -> tuple[Tensor, Tensor]:
    """cos and sin (..., head_dim / 2) of integer positions (...), always computed in float32."""
    freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=pos.device).float() / head_dim)
    angle = pos.float()[..., None] * freq
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split RoPE: x (..., T, heads, d), tables (B, T, d/2)."""
    cos, sin = (t.to(x.dtype).unsqueeze(-2) for t in (cos, sin))
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@dataclass
class Rows:
    """Where the queries of a batch stand: column in the cache, document, position.

    Query (b, i) attends to the cached tokens `start[b, i] <= j < stop[b, i]`: an interval is
    all that causality, the document mask and "a token does not read itself" ever need.
    """

    columns: slice | Tensor  # of the cache; a tensor (B, T) where every row has its own
    start: Tensor  # (B, T)
    stop: Tensor  # (B, T)
    cos: Tensor  # (B, T, d/2) float32
    sin: Tensor
    _masks: dict = field(default_factory=dict)

    def split(self, g: int) -> list[Rows]:
        """The strided groups {i : i mod g = q}; groups beyond T are left out."""
        return [self.at(slice(q, None, g)) for q in range(min(g, self.start.size(1)))]

    def at(self, columns: slice) -> Rows:
        return Rows(columns, *(t[:, columns] for t in (self.start, self.stop, self.cos, self.sin)))

    def mask(self, n_keys: int, n_repeat: int, sink: bool) -> Tensor:
        """(B, 1, T * n_repeat, [1 +] n_keys) bool; built once, every layer uses it again."""
        key = (n_keys, n_repeat, sink)
        if key not in self._masks:
            j = torch.arange(n_keys, device=self.start.device)
            mask = (self.start[..., None] <= j) & (j < self.stop[..., None])
            mask = F.pad(mask, (1, 0), value=True) if sink else mask
            self._masks[key] = mask.repeat_interleave(n_repeat, dim=1).unsqueeze(1)
        return self._masks[key]


def attend(q: Tensor, k: Tensor, v: Tensor, rows: Rows,
           sink: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Attention of q (B, T, H, d) on cached k, v (B, S, Hkv, d); returns (B, T, H, d).

    `sink` is one more key and value (Hkv, d) that every query reads: the dummy. A query that
    may read nothing at all gets 0. Scale 1 / sqrt(d).
    """
    B, T, H, d = q.shape
    Hkv, G = k.size(2), H // k.size(2)
    # the G query heads that share a key-value head become rows: one large product per key head
    q = q.view(B, T, Hkv, G, d).transpose(1, 2).reshape(B, Hkv, T * G, d)
    mask = rows.mask(k.size(1), G, sink is not None)
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # (B, Hkv, S, d)
    if sink is not None:
        k, v = (torch.cat((s[None, :, None].expand(B, -1, -1, -1), t), dim=2)
                for s, t in zip(sink, (k, v)))
    out = F.scaled_dot_product_attention(q, k, v, mask)  # (B, Hkv, T * G, d)
    return out.view(B, Hkv, T, G, d).transpose(1, 2).reshape(B, T, H, d)


@dataclass
class Cache:
    """Keys (normed and rotated) and values of all tokens so far, in token order."""

    k: Tensor  # (C, B, S, Hkv, d)
    v: Tensor
    sink: tuple[Tensor, Tensor] | None = None  # the dummy's channels, (C, Hkv, d) each

    def __post_init__(self):
        # taken apart once: C separate selections would each backpropagate a whole cache of zeros
        self.channels = list(zip(self.k.unbind(), self.v.unbind()))
        self.sinks = list(zip(*(s.unbind() for s in self.sink))) if self.sink else None

    def put(self, columns: slice | Tensor, k: Tensor, v: Tensor,
            channel: int | slice = slice(None)) -> Cache:
        """Write k, v ([C,] B, T, Hkv, d) at `columns`; in place unless gradients are recorded."""
        if isinstance(columns, Tensor):
            where = (channel, torch.arange(len(columns), device=columns.device)[:, None], columns)
        else:
            where = (channel, slice(None), columns)
        if not torch.is_grad_enabled():
            self.k[where], self.v[where] = k, v
            return self
        # a layer that has read the old version keeps it for its backward pass: copy on write
        new_k, new_v = self.k.clone(), self.v.clone()
        new_k[where], new_v[where] = k, v
        return Cache(new_k, new_v, self.sink)


class Block(nn.Module):
    """A Qwen3 decoder block. Only systems that project a layer's own state have k_proj, v_proj."""

    def __init__(self, c: ModelConfig, own_kv: bool):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = c.n_head, c.n_kv_head, c.head_dim
        self.attn_norm = nn.Parameter(torch.ones(c.n_embd))
        self.q_proj = nn.Parameter(torch.empty(c.n_head * c.head_dim, c.n_embd))
        self.q_norm = nn.Parameter(torch.ones(c.head_dim))
        if own_kv:
            self.k_proj = nn.Parameter(torch.empty(c.n_kv_head * c.head_dim, c.n_embd))
            self.k_norm = nn.Parameter(torch.ones(c.head_dim))
            self.v_proj = nn.Parameter(torch.empty(c.n_kv_head * c.head_dim, c.n_embd))
        self.o_proj = nn.Parameter(torch.empty(c.n_embd, c.n_head * c.head_dim))
        self.mlp_norm = nn.Parameter(torch.ones(c.n_embd))
        self.gate_proj = nn.Parameter(torch.empty(c.n_hidden, c.n_embd))
        self.up_proj = nn.Parameter(torch.empty(c.n_hidden, c.n_embd))
        self.down_proj = nn.Parameter(torch.empty(c.n_embd, c.n_hidden))

    def queries(self, a: Tensor, rows: Rows) -> Tensor:
        """Normed input (B, T, D) -> normed, rotated queries (B, T, H, d)."""
        q = F.linear(a, self.q_proj).unflatten(-1, (self.n_head, self.head_dim))
        return rotate(rms_norm(q, self.q_norm), rows.cos, rows.sin)

    def keys_values(self, a: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Normed input (B, T, D) -> normed, rotated keys and raw values (B, T, Hkv, d)."""
        k = F.linear(a, self.k_proj).unflatten(-1, (self.n_kv_head, self.head_dim))
        v = F.linear(a, self.v_proj).unflatten(-1, (self.n_kv_head, self.head_dim))
        return rotate(rms_norm(k, self.k_norm), rows.cos, rows.sin), v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual stream and attention output (B, T, H, d) -> the next state (B, T, D)."""
        x = x + F.linear(attended.flatten(-2), self.o_proj)
        a = rms_norm(x, self.mlp_norm)
        return x + F.linear(F.silu(F.linear(a, self.gate_proj)) * F.linear(a, self.up_proj),
                            self.down_proj)


class Decoder(nn.Module):
    """A Qwen3 language model with tied embedding and head; as it stands, `kv="vanilla"`."""

    reads_itself = True  # does a query see the key of its own token?
    iterates = False  # does a channel need states that are not known yet (solvers.py)?
    own_kv = True  # do the blocks project keys and values themselves?
    has_dummy = False  # position 0 belongs to a dummy, documents start at 1

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.n_embd))
        self.blocks = nn.ModuleList(Block(config, self.own_kv) for _ in range(config.n_layer))
        self.norm = nn.Parameter(torch.ones(config.n_embd))
        self.n_channels = config.n_layer

    def init_weights(self):
        """N(0, 0.02) for every matrix, gains at 1."""
        matrices = [self.embed, *(p for p in self.blocks.parameters() if p.dim() == 2)]
        for p in matrices:
            nn.init.normal_(p, std=0.02)

    def n_params(self) -> int:
        """Parameters without the embedding, which is also the head (the paper's count)."""
        return sum(p.numel() for p in self.parameters()) - self.embed.numel()

    def embed_tokens(self, idx: Tensor) -> Tensor:
        return F.embedding(idx, self.embed)  # (B, T) -> (B, T, D)

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
        """Rows for tokens at columns `index` (B, T) of documents that begin at `start` (B, T)."""
        cos, sin = rotary_tables(index - start + self.has_dummy, self.config.head_dim)
        return Rows(columns, start, index + self.reads_itself, cos, sin)

    def rows(self, idx: Tensor, doc: Tensor | None = None) -> Rows:
        """Rows for whole token rows idx (B, T): positions restart in every document."""
        index = torch.arange(idx.size(1), device=idx.device).expand_as(idx)
        return self.place(slice(None), index, self.document_starts(idx, doc))

    def new_cache(self, B: int, S: int, like: Tensor) -> Cache:
        """An empty cache of C channels for S tokens, of `like`'s dtype and device."""
        shape = (self.n_channels, B, S, self.config.n_kv_head, self.config.head_dim)
        return Cache(like.new_zeros(shape), like.new_zeros(shape))

    def read(self, layer: int, a: Tensor, rows: Rows, cache: Cache | None):
        """Keys and values (B, S, Hkv, d) that `layer` attends to, and a sink or None.

        a (B, T, D) is the layer's normed input. Whole rows are complete in themselves and leave
        copies in the cache; single tokens, without gradients, attend to what the cache holds.
        """
        k, v = self.blocks[layer].keys_values(a, rows)
        if cache is not None:
            with torch.no_grad():
                cache.put(rows.columns, k, v, channel=layer)
            if rows.columns != slice(None):
                k, v = cache.channels[layer]
        return k, v, None

    def states(self, x: Tensor, rows: Rows, cache: Cache | None = None) -> list[Tensor]:
        """States(X; P) of section 3.3: embeddings (B, T, D) -> h[0..L], L + 1 x (B, T, D)."""
        h = [x]
        for layer, block in enumerate(self.blocks):
            a = rms_norm(x, block.attn_norm)
            k, v, sink = self.read(layer, a, rows, cache)
            x = block.finish(x, attend(block.queries(a, rows), k, v, rows, sink))
            h.append(x)
        return h

    def logits(self, h: Tensor) -> Tensor:
        """Final states h[L] (..., D) -> logits (..., vocabulary)."""
        return F.linear(rms_norm(h, self.norm), self.embed)

    def loss(self, h: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats of h[L] (..., D); targets of -1 do not count."""
        total = F.cross_entropy(upcast(self.logits(h)).flatten(0, -2), targets.flatten(),
                                ignore_index=-1, reduction="sum")
        return total / (targets != -1).sum().clamp(min=1)


# Hugging Face's Qwen3 names on the left, ours on the right
QWEN3_NAMES = (
    (r"model\.embed_tokens\.weight", "embed"),
    (r"model\.norm\.weight", "norm"),
    (r"model\.layers\.(\d+)\.self_attn\.(\w+)\.weight", r"blocks.\1.\2"),
    (r"model\.layers\.(\d+)\.mlp\.(\w+)\.weight", r"blocks.\1.\2"),
    (r"model\.layers\.(\d+)\.input_layernorm\.weight", r"blocks.\1.attn_norm"),
    (r"model\.layers\.(\d+)\.post_attention_layernorm\.weight", r"blocks.\1.mlp_norm"),
)


def from_qwen3(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the keys of a Hugging Face Qwen3 state dict to ours; the tied head is dropped."""
    out = {}
    for name, tensor in state.items():
        for pattern, ours in QWEN3_NAMES:
            if re.fullmatch(pattern, name):
                out[re.sub(pattern, ours, name)] = tensor
                break
        else:
            if name != "lm_head.weight":
                raise ValueError(f"{name}: not a parameter of a dense Qwen3 model")
    return out


def to_qwen3(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the keys of a vanilla state dict of ours to Hugging Face's Qwen3, head included."""
    out = {}
    for name, tensor in state.items():
        if name in ("embed", "norm"):
            theirs = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight"}[name]
        else:
            _, layer, part = name.split(".")
            group = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}.get(
                part, ("mlp." if part in ("gate_proj", "up_proj", "down_proj") else "self_attn.")
                + part)
            theirs = f"model.layers.{layer}.{group}.weight"
        out[theirs] = tensor
    out["lm_head.weight"] = state["embed"]
    return out
