"""
What lies between matrix products and attention, as small functions for torch.compile: each becomes
one or two kernels, and all layers and groups share them.
"""

import functools
import os

import torch
from torch import Tensor

import model
from kernels.attention import LOG2E


def compiled(function):
    """The function compiled, once it is first called; where Triton is interpreted, as it is."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return function
    return functools.wraps(function)(torch.compile(function, dynamic=False))


rms_norm = compiled(model.rms_norm)


# ---- an entry of each query's own beside the cache (the Recurrent Transformer) ------------------


def own_scores(q: Tensor, own_k: Tensor) -> Tensor:
    """Base-2 scores (B, T, Hkv, G) of queries (B, T, Hkv, G, d) on keys (B, T, Hkv, d), float32."""
    score = (q.float() * own_k.float().unsqueeze(3)).sum(-1)
    return score * (q.size(-1) ** -0.5 * LOG2E)


@compiled
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


@compiled
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
