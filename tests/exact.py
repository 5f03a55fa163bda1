"""What the kernels' tests compare with."""

import torch
from interpreted import DEVICE

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


def case(B, S, g, q0, H, Hkv, d, own=0, sink=True, docs=True, dtype=torch.float32, C=2, seed=0):
    """Inputs of group q0 of g: every g-th position of documents, keys in channel 1 of a cache."""
    r = torch.Generator().manual_seed(seed + S + g + d)
    index = torch.arange(S).expand(B, S)
    first = torch.rand(B, S, generator=r) < (4 / S if docs else 0)
    start = torch.where(first, index, 0).cummax(1).values
    Tq = len(range(q0, S, g))
    start, stop = (x[:, q0::g].int().contiguous() for x in (start, index + own))
    cache = torch.randn(2, C, B, S, Hkv, d, generator=r)
    k, v = cache[0, C - 1], cache[1, C - 1]
    q, do = torch.randn(2, B, Tq, H, d, generator=r)
    sinks = list(torch.randn(2, Hkv, d, generator=r)) if sink else [None, None]
    def put(x):
        return x if x is None else x.to(DEVICE, x.dtype if x.dtype == torch.int32 else dtype)

    return [put(x) for x in (q, k, v, start, stop, *sinks)], put(do)


def close(ours, theirs, tol):
    assert ours.shape == theirs.shape and ours.isfinite().all()
    assert (ours.double() - theirs).norm() <= tol * theirs.norm() + 1e-30


def gradients(inputs, do):
    """Outputs and gradients of the float64 reference."""
    leaves = [x if x is None or x.dtype == torch.int32 else x.detach().double().requires_grad_()
              for x in inputs]
    out, _ = reference(*leaves)
    out.backward(do.double())
    return out.detach(), [x.grad for x in leaves if x is not None and x.dtype != torch.int32]


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
