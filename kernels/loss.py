"""
Cross-entropy of the logits a @ w^T without ever holding them all; the gradient, if it is asked for,
is computed along the way, while a chunk's logits are there, so that nothing is computed twice.

A program takes a row of logits: it reads them for the sum, and once more to write the gradient in
their place, 327 us a chunk on an H200. Compiled kernels, which passed over the whole chunk for each
and wrote beside it, took 488.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.products import add_product, matmul
from model import upcast

CHUNK = 4096  # tokens; their logits in bfloat16 are 0.4 GB for 50,304 ids
BLOCK, WARPS = 4096, 4  # logits at a time


@triton.jit
def cross_entropy_kernel(logits, targets, count, nll, V: tl.constexpr, GRADIENT: tl.constexpr,
                         BLOCK: tl.constexpr):
    """nll of a row of logits (N, V), 0 where its target is -1; then, with GRADIENT, logits are the
    gradient of the sum / count."""
    n = tl.program_id(0).to(tl.int64)
    logits += n * V
    target = tl.load(targets + n)
    counts = target != -1
    hit = tl.load(logits + tl.where(counts, target, 0)).to(tl.float32)
    m, total = float("-inf"), 0.0
    for c0 in range(0, V, BLOCK):
        c = c0 + tl.arange(0, BLOCK)
        x = tl.load(logits + c, c < V, float("-inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(x, 0))
        total = total * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new), 0)
        m = m_new
    lse = m + tl.log(total)
    tl.store(nll + n, tl.where(counts, lse - hit, 0.0))
    if GRADIENT:
        scale = tl.where(counts, 1.0 / tl.load(count).to(tl.float32), 0.0)
        for c0 in range(0, V, BLOCK):
            c = c0 + tl.arange(0, BLOCK)
            x = tl.load(logits + c, c < V, 0.0).to(tl.float32)
            g = (tl.exp(x - lse) - (c == target).to(tl.float32)) * scale
            tl.store(logits + c, g.to(logits.dtype.element_ty), c < V)


def loss(a: Tensor, w: Tensor, copy: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats of normed states a (N, D) by the head w (V, D), whose copy in low
    precision computes the logits; targets (N,) of -1 do not count."""
    return CrossEntropy.apply(a, w, copy, targets, torch.is_grad_enabled())


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, w, copy, targets, recording):
        """The loss; `recording`: is autograd on? The caller says so, as in here it never is."""
        count = (targets != -1).sum().clamp(min=1)
        total = torch.zeros((), dtype=upcast(a[:0]).dtype, device=a.device)
        needed = recording and any(ctx.needs_input_grad)
        da = torch.empty_like(a) if needed else None
        dw = torch.zeros_like(w, dtype=total.dtype) if needed else None
        for i in range(0, len(a), CHUNK):
            chunk = slice(i, i + CHUNK)
            a_ = a[chunk].to(copy.dtype)
            logits = matmul(a_, copy.mT, needed)
            nll = logits.new_empty(len(logits), dtype=torch.float32)
            cross_entropy_kernel[len(logits),](
                logits, targets[chunk], count, nll, V=len(w), GRADIENT=needed,
                BLOCK=min(BLOCK, triton.next_power_of_2(len(w))), num_warps=WARPS)
            total += nll.sum()
            if needed:  # the logits are their gradient now
                da[chunk] = matmul(logits, copy, True)
                add_product(dw, logits.mT, a_)
        ctx.save_for_backward(da, dw)
        return total / count

    @staticmethod
    def backward(ctx, d):
        da, dw = ctx.saved_tensors
        return da * d.to(da.dtype), dw * d, None, None, None
