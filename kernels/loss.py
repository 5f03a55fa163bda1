"""
Cross-entropy of the logits a @ w^T without ever holding them all; the gradient, if it is asked for,
is computed along the way, while a chunk's logits are there, so that nothing is computed twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.compiled import cross_entropy, cross_entropy_and_gradient
from kernels.linear import add_product
from model import upcast

CHUNK = 4096  # tokens; their logits in bfloat16 are 0.4 GB for 50,304 ids


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
            logits = a_ @ copy.mT
            if not needed:
                total += cross_entropy(logits, targets[chunk])
                continue
            nll, dlogits = cross_entropy_and_gradient(logits, targets[chunk], count)
            total += nll
            da[chunk] = dlogits @ copy
            add_product(dw, dlogits.mT, a_)
        ctx.save_for_backward(da, dw)
        return total / count

    @staticmethod
    def backward(ctx, d):
        da, dw = ctx.saved_tensors
        return da * d.to(da.dtype), dw * d, None, None, None
