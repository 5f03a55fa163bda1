"""What the kernels' tests compare with."""

import torch

from model import rms_norm, rotate

LOG2E = 1.4426950408889634


def reference(q, k, v, start, stop, sink_k=None, sink_v=None):
    """Softmax over a float64 score matrix; rows that read nothing give 0. Returns out, lse2."""
    G = q.size(2) // k.size(2)
    k, v = k.repeat_interleave(G, 2), v.repeat_interleave(G, 2)
    s = torch.einsum("bthd,bshd->bths", q, k) / q.size(-1) ** 0.5
    j = torch.arange(k.size(1), device=q.device)
    mask = (start[..., None] <= j) & (j < stop[..., None])
    s = s.masked_fill(~mask[:, :, None], -torch.inf)
    if sink_k is not None:
        sink_k, sink_v = sink_k.repeat_interleave(G, 0), sink_v.repeat_interleave(G, 0)
        s = torch.cat((s, (q * sink_k).sum(-1, keepdim=True) / q.size(-1) ** 0.5), -1)
    lse = s.logsumexp(-1)
    p = (s - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    out = torch.einsum("bths,bshd->bthd", p[..., : k.size(1)], v)
    if sink_k is not None:
        out = out + p[..., -1:] * sink_v
    return out, lse * LOG2E


def norm_rotate(x, gain, cos, sin):
    """QK-norm and RoPE of (..., T, heads, d)."""
    return rotate(rms_norm(x, gain), cos, sin)


def split_heads(x, n_head, q_gain, k_gain, cos, sin):
    """(B, T, (H [+ 2 Hkv]) d) -> normed, rotated queries and keys, and values, by head."""
    x = x.unflatten(-1, (-1, q_gain.numel()))
    if k_gain is None:
        return norm_rotate(x, q_gain, cos, sin), None, None
    n_kv = (x.size(-2) - n_head) // 2
    q, k, v = x.split((n_head, n_kv, n_kv), dim=-2)
    return norm_rotate(q, q_gain, cos, sin), norm_rotate(k, k_gain, cos, sin), v
