"""
The decoder: Qwen3 blocks and the plain (vanilla) key-value path.

Everything that WhiteMatter adds is in pool.py, which says for `Decoder` what a layer attends to
(`attend`) and what a finished token adds to the cache (`store`).

Dimensions: B rows, T tokens, S cached tokens, L layers, D width, H query heads,
Hkv key-value heads, d head size, C cached channels (L here, k in WhiteMatter).
`h[l]` is the state that enters layer l, `h[L]` the residual stream after the last block.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from attention import Cache, Rows, attend, is_fast, norm_kernels

SYSTEMS = ("whitematter", "vanilla", "nofeedback", "lckv", "feedback", "fusedkv", "fusedkv_lite",
           "recurrent")
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
    n_channels: int = 16  # k, in 1..n_layer; only whitematter has a choice
    router: str = "dynamic"
    router_stride: int = 2  # p: the router reads every p-th source, counted down from the last
    top_output: bool = False  # is the final output h[L] one of the pool's sources too?
    dummy: bool = True  # without it, the first token of a document attends to nothing
    lckv_w: int = 4  # w, layers of lckv that keep their own keys and values
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
        check(1 <= self.n_channels <= self.n_layer or self.kv != "whitematter",
              f"n_channels={self.n_channels}: 1 to n_layer={self.n_layer} are possible")
        check(self.n_channels == self.n_layer or self.kv != "nofeedback",
              f"n_channels={self.n_channels}: nofeedback needs n_layer={self.n_layer} of them")
        check(0 <= self.lckv_w <= self.n_layer - 2 or self.kv != "lckv",
              f"lckv_w={self.lckv_w}: 0 to n_layer-2={self.n_layer - 2} are possible")
        check(self.n_layer > 1 or not self.kv.startswith("fusedkv"),
              f"n_layer={self.n_layer}: {self.kv} needs at least 2")
        check(not self.top_output or self.kv == "whitematter",
              f"top_output={self.top_output}: only whitematter has a choice")
        check(self.dummy or self.kv in ("whitematter", "nofeedback"),
              f"dummy={self.dummy}: only whitematter and nofeedback have a choice")
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


def norm_rotate(x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """QK-norm and RoPE of (..., T, heads, d)."""
    return rotate(rms_norm(x, gain), cos, sin)


def add_norm(x: Tensor, y: Tensor, gain: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The residual stream x + y, its norm, and x + y for other readers than the next block."""
    if is_fast(x):
        return norm_kernels.add_norm(x, y, gain)
    x = x + y
    return x, rms_norm(x, gain), x


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def split_heads(x: Tensor, n_head: int, q_norm: Tensor, k_norm: Tensor | None, cos: Tensor,
                sin: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(B, T, (H [+ 2 Hkv]) d) -> normed, rotated queries and keys, and values, by head."""
    if is_fast(x):
        return norm_kernels.split_heads(x, n_head, q_norm, k_norm, cos, sin)
    x = x.unflatten(-1, (-1, q_norm.numel()))
    if k_norm is None:
        return norm_rotate(x, q_norm, cos, sin), None, None
    n_kv_head = (x.size(-2) - n_head) // 2
    q, k, v = x.split((n_head, n_kv_head, n_kv_head), dim=-2)
    return norm_rotate(q, q_norm, cos, sin), norm_rotate(k, k_norm, cos, sin), v.contiguous()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split RoPE: x (..., T, heads, d), tables (B, T, d/2)."""
    cos, sin = (t.to(x.dtype).unsqueeze(-2) for t in (cos, sin))
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def linear(x: Tensor, *weights: Tensor) -> Tensor:
    """x @ w^T: x (..., D), w (E, D) -> (..., E); or a batch, x (k, N, D), w (k, E, D).

    Several weights count as one, laid one below the other.
    """
    if hasattr(weights[0], "compute"):
        return _MixedLinear.apply(x, *weights)
    w = weights[0] if len(weights) == 1 else torch.cat(weights)
    return product(x, w)


def product(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w) if w.dim() == 2 else torch.bmm(x, w.mT)


class _MixedLinear(torch.autograd.Function):
    """The product with `w.compute`, a copy of w in low precision, made once per step.

    The weight's gradient is added to w.grad in w's own precision inside the product, as 16 group
    steps add to each of them: no cast, no sum of its own. Small steps wait for each other.
    """

    @staticmethod
    def forward(ctx, x, *weights):
        ctx.save_for_backward(x)
        ctx.weights = weights
        return product(x, one_below_the_other([w.compute for w in weights]))

    @staticmethod
    def backward(ctx, dy):
        (x,), weights = ctx.saved_tensors, ctx.weights
        if weights[0].dim() == 2:
            add_gradient(weights, dy.flatten(0, -2), x.flatten(0, -2))
        else:
            add_product(weights[0].grad, dy.mT, x)
        return dy @ one_below_the_other([w.compute for w in weights]), *(None for _ in weights)


FEW_ROWS = 2048  # the products of fewer take less time than to add them to a weight's gradient


def add_gradient(weights: tuple[Tensor, ...], dy: Tensor, x: Tensor):
    """Add dy^T @ x, of dy (N, E) and x (N, D), to the gradients of the weights, which together are
    (E, D): as soon as there are FEW_ROWS, or with `add_partial_gradients`."""
    parts = getattr(weights[0], "waiting", None)  # a piece of a weight has none
    if parts is None or len(x) >= FEW_ROWS:
        return add_together(weights, [(dy, x)])
    parts.append((dy, x))
    weights[0].together = weights
    if sum(len(x) for _, x in parts) >= FEW_ROWS:
        add_together(weights, parts)


def add_together(weights: tuple[Tensor, ...], parts: list[tuple[Tensor, Tensor]]):
    dy, x = (rows[0] if len(rows) == 1 else torch.cat(rows) for rows in zip(*parts))
    parts.clear()
    add_product(one_below_the_other([w.grad for w in weights]), dy.mT, x)


def one_below_the_other(parts: list[Tensor]) -> Tensor:
    """A view of matrices (E_i, D) that follow each other in memory as one (sum E_i, D)."""
    first, end = parts[0], 0
    if len(parts) == 1:
        return first
    for part in parts:
        if part.data_ptr() != first.data_ptr() + end * first.element_size():
            raise RuntimeError("weights that are used as one must be neighbours in memory")
        end += part.numel()
    return first.as_strided((end // first.size(1), first.size(1)), (first.size(1), 1))


def add_product(total: Tensor, a: Tensor, b: Tensor):
    """total += a @ b, summed in total's precision; matrices or batches of them."""
    add, into = (torch.addmm, total) if a.dim() == 2 else (torch.baddbmm, total)
    if a.dtype == total.dtype:
        add(into, a, b, out=total)
    elif total.is_cuda:
        add(into, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a.to(total.dtype) @ b.to(total.dtype)


def set_compute_copies(model: nn.Module, dtype: torch.dtype):
    """Make, or renew after an optimizer step, the copies that `linear` computes with.

    Every parameter with such a copy needs a .grad to add to. Some gradients are collected on the
    side: call `add_partial_gradients` after each backward pass.
    """
    named = {id(getattr(module, name, None)) for module in model.modules()
             for name in getattr(module, "matrices", ())}
    with_copy = [p for p in model.parameters() if id(p) in named]
    if not hasattr(with_copy[0], "compute"):
        flat = torch.empty(sum(p.numel() for p in with_copy), dtype=dtype,
                           device=with_copy[0].device)
        for p, piece in zip(with_copy, flat.split([p.numel() for p in with_copy])):
            p.compute, p.waiting = piece.view_as(p), []
        add_partials(model)
    torch._foreach_copy_([p.compute for p in with_copy], [p.detach() for p in with_copy])


def add_partials(model: Decoder, always: bool = False):
    """Give the gains rows of float32 for their gradients, where the kernels use them."""
    if norm_kernels is None or not (model.norm.is_cuda or always):
        return
    for module in model.modules():
        for name in getattr(module, "gains", ()):
            gain = getattr(module, name, None)
            if gain is not None:
                rows = norm_kernels.partial_rows(name, model.config)
                gain.partial = gain.new_zeros(*rows, *gain.shape, dtype=torch.float32)


@torch.no_grad()
def add_partial_gradients(model: Decoder):
    """Move what has been collected on the side into the gradients: the kernels' rows for the gains,
    and products of few rows."""
    for p in model.parameters():
        if getattr(p, "waiting", None):
            add_together(p.together, p.waiting)
    for gain in [p for p in model.parameters() if hasattr(p, "partial")]:
        gain.grad += gain.partial.flatten(0, -gain.dim() - 1).sum(0)
        gain.partial.zero_()


def compute_dtype(w: Tensor) -> torch.dtype:
    return getattr(w, "compute", w).dtype


class Block(nn.Module):
    """A Qwen3 decoder block. Only systems that project a layer's own state have k_proj, v_proj."""

    matrices = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    gains = ("attn_norm", "q_norm", "k_norm", "mlp_norm")

    def __init__(self, c: ModelConfig, own_kv: bool):
        super().__init__()
        self.own_kv = own_kv
        self.n_head, self.head_dim = c.n_head, c.head_dim
        D, E = c.n_embd, c.n_kv_head * c.head_dim
        self.attn_norm = nn.Parameter(torch.ones(D))
        self.q_norm = nn.Parameter(torch.ones(c.head_dim))
        self.k_norm = nn.Parameter(torch.ones(c.head_dim)) if own_kv else None
        self.q_proj = nn.Parameter(torch.empty(c.n_head * c.head_dim, D))
        if own_kv:  # right behind q_proj: `project` uses the three as one
            self.k_proj = nn.Parameter(torch.empty(E, D))
            self.v_proj = nn.Parameter(torch.empty(E, D))
        self.o_proj = nn.Parameter(torch.empty(D, c.n_head * c.head_dim))
        self.mlp_norm = nn.Parameter(torch.ones(D))
        self.gate_proj = nn.Parameter(torch.empty(c.n_hidden, D))
        self.up_proj = nn.Parameter(torch.empty(c.n_hidden, D))
        self.down_proj = nn.Parameter(torch.empty(D, c.n_hidden))

    def project(self, a: Tensor, cos: Tensor, sin: Tensor):
        """Normed state (B, T, D) -> queries (B, T, H, d) and, if own, keys, values (.., Hkv, d)."""
        weights = (self.q_proj, self.k_proj, self.v_proj) if self.own_kv else (self.q_proj,)
        return split_heads(linear(a, *weights), self.n_head, self.q_norm, self.k_norm, cos, sin)

    def mlp(self, a: Tensor) -> Tensor:
        """SwiGLU of the normed state (B, T, D)."""
        return linear(swiglu(linear(a, self.gate_proj, self.up_proj)), self.down_proj)


class Decoder(nn.Module):
    """A Qwen3 language model with tied embedding and head; as it stands, `kv="vanilla"`."""

    reads_itself = True  # does a query see the key of its own token?
    iterates = False  # does a channel need states that are not known yet (solvers.py)?
    own_kv = True  # do the blocks project keys and values themselves?
    has_dummy = False  # position 0 belongs to a dummy, documents start at 1
    sources = slice(0, -1)  # the states h[0..L] that iterated channels are made of
    matrices = ("embed",)

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.n_embd))
        self.blocks = nn.ModuleList(Block(config, self.has_kv(layer))
                                    for layer in range(config.n_layer))
        self.norm = nn.Parameter(torch.ones(config.n_embd))
        self.n_channels = config.n_layer
        self.iterated = (0, config.n_layer)  # the layers that every pass of a solver runs again

    def has_kv(self, layer: int) -> bool:
        """Does this block project keys and values itself?"""
        return self.own_kv

    def init_weights(self):
        """N(0, 0.02) for every matrix, gains at 1."""
        matrices = [self.embed, *(p for p in self.blocks.parameters() if p.dim() == 2)]
        for p in matrices:
            nn.init.normal_(p, std=0.02)

    def n_params(self) -> int:
        """Parameters without the embedding, which is also the head (the paper's count)."""
        return sum(p.numel() for p in self.parameters()) - self.embed.numel()

    def embed_tokens(self, idx: Tensor) -> Tensor:
        """(B, T) -> (B, T, D), in the precision that the blocks compute with."""
        return F.embedding(idx, self.embed).to(compute_dtype(self.embed))

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
        return Rows(columns, start.int(), (index + self.reads_itself).int(), cos, sin)

    def rows(self, idx: Tensor, doc: Tensor | None = None) -> Rows:
        """Rows for whole token rows idx (B, T): positions restart in every document."""
        index = torch.arange(idx.size(1), device=idx.device).expand_as(idx)
        return self.place(slice(None), index, self.document_starts(idx, doc))

    def new_cache(self, B: int, S: int, like: Tensor) -> Cache:
        """An empty cache of C channels for S tokens, on `like`'s device and in the precision that
        is computed with: `like`'s, or autocast's."""
        shape = (self.n_channels, B, S, self.config.n_kv_head, self.config.head_dim)
        kind, dtype = like.device.type, like.dtype
        if kind != "meta" and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        return Cache(like.new_zeros(shape, dtype=dtype), like.new_zeros(shape, dtype=dtype))

    def attend(self, layer: int, q: Tensor, h: list[Tensor], kv: list, rows: Rows,
               cache: Cache | None) -> Tensor:
        """What `layer` reads: attention of its queries, given the states that enter the layers up
        to this one, and the keys and values that their blocks have projected.

        Whole rows are complete in themselves and leave copies in the cache, if there is one;
        single tokens (decoding, no gradients) attend to what the cache holds.
        """
        k, v = kv[-1]
        if cache is not None:
            with torch.no_grad():
                cache.put(rows.columns, k, v, channel=layer)
        return attend(q, k, v, rows) if rows.complete else cache.attend(q, layer, rows)

    def store(self, h: list[Tensor], rows: Rows, cache: Cache):
        """Add finished tokens to the cache, given their states h[0..L] (systems that iterate)."""
        cache.put(rows.columns, *self.pool(h, rows))

    def refill(self, h: list[Tensor], rows: Rows, cache: Cache):
        """Fill the iterated channels from the states that the passes of a solver start from."""
        self.store(h, rows, cache)

    def states(self, x: Tensor, rows: Rows, cache: Cache | None = None, first: int = 0,
               end: int | None = None) -> list[Tensor]:
        """States(X; P) of section 3.3: embeddings (B, T, D) -> h[0..L], L + 1 x (B, T, D).

        Or a part of the stack: h[first] -> h[first..end].
        """
        end = len(self.blocks) if end is None else end
        h, kv = [x], []  # each of them begins with layer `first`
        if first < end:
            a = rms_norm(x, self.blocks[first].attn_norm)
        for layer in range(first, end):
            block = self.blocks[layer]
            q, *own = block.project(a, rows.cos, rows.sin)
            kv.append(own)
            attended = self.attend(layer, q, h, kv, rows, cache).flatten(-2)  # (B, T, H d)
            x, a, _ = add_norm(x, linear(attended, block.o_proj), block.mlp_norm)
            if layer + 1 < end:  # with the norm that the next block begins with
                x, a, state = add_norm(x, block.mlp(a), self.blocks[layer + 1].attn_norm)
            else:
                x = state = x + block.mlp(a)
            h.append(state)
        return h

    def logits(self, h: Tensor) -> Tensor:
        """Final states h[L] (..., D) -> logits (..., vocabulary)."""
        return F.linear(rms_norm(h, self.norm), getattr(self.embed, "compute", self.embed))

    def loss(self, h: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats of h[L] (..., D); targets of -1 do not count."""
        a = rms_norm(h, self.norm).flatten(0, -2)
        return _CrossEntropy.apply(a, self.embed, targets.flatten(), torch.is_grad_enabled())


class _CrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of the logits a @ w^T, a (N, D), w (V, D), without ever holding them all.

    The gradient, if it is asked for, is computed along the way, while a chunk's logits are there.
    """

    CHUNK = 4096  # tokens; their logits in bfloat16 are 0.4 GB for 50,304 ids

    @staticmethod
    def forward(ctx, a, w, targets, recording):
        """The loss; `recording`: is autograd on? The caller says so, as in here it never is."""
        w_ = getattr(w, "compute", w).detach()
        count = (targets != -1).sum().clamp(min=1)
        total = torch.zeros((), dtype=upcast(a[:0]).dtype, device=a.device)
        needed = recording and any(ctx.needs_input_grad)
        da = torch.empty_like(a) if needed else None
        dw = torch.zeros_like(w, dtype=total.dtype) if needed else None
        for i in range(0, len(a), _CrossEntropy.CHUNK):
            chunk = slice(i, i + _CrossEntropy.CHUNK)
            a_ = a[chunk].to(w_.dtype)
            logits = a_ @ w_.mT
            if not needed:
                total += cross_entropy(logits, targets[chunk])
                continue
            nll, dlogits = cross_entropy_and_gradient(logits, targets[chunk], count)
            total += nll
            da[chunk] = dlogits @ w_
            add_product(dw, dlogits.mT, a_)
        ctx.save_for_backward(da, dw)
        return total / count

    @staticmethod
    def backward(ctx, d):
        da, dw = ctx.saved_tensors
        return da * d.to(da.dtype), dw * d, None, None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the losses of logits (n, V); targets of -1 do not count."""
    return F.cross_entropy(upcast(logits), targets, ignore_index=-1, reduction="sum")


def cross_entropy_and_gradient(logits: Tensor, targets: Tensor, count: Tensor):
    """Sum of the losses of logits (n, V), and the gradient of that sum / count, like logits."""
    x = upcast(logits)
    counts = (targets != -1)[:, None]
    logp = x - x.logsumexp(-1, keepdim=True)
    hit = targets[:, None] == torch.arange(x.size(-1), device=x.device)
    nll = -torch.where(hit, logp, 0).sum()
    return nll, (torch.where(counts, logp.exp() - hit.to(x.dtype), 0) / count).to(logits.dtype)


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
    """Rename the keys of a Hugging Face Qwen3 state dict to ours; the tied head is dropped.

    Raises ValueError for what such a model, with a tied head, does not have.
    """
    out = {}
    for name, tensor in state.items():
        for pattern, ours in QWEN3_NAMES:
            if re.fullmatch(pattern, name):
                out[re.sub(pattern, ours, name)] = tensor
                break
        else:
            if name != "lm_head.weight":
                raise ValueError(f"{name}: not a parameter of a dense Qwen3 model")
            if not torch.equal(tensor, state["model.embed_tokens.weight"]):
                raise ValueError(f"{name}: not the embedding, but only a tied head is possible")
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
