"""
Products with weights in low precision, whose gradients are added to .grad where they arise.

A weight is used by each of some ten group steps of a micro-step. Autograd would cast it, make a
gradient and add that up every time. Here a weight has one copy in low precision, renewed after
each optimizer step, and the product of the backward pass adds to .grad in the weight's own
precision: no cast and no sum of its own. Products of few rows wait for each other, as adding to a
weight's gradient takes longer than they do.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

FEW_ROWS = 2048  # the products of fewer take less time than to add them to a weight's gradient


class Linear(nn.Module):
    """Stands in for an nn.Linear without bias, whose weight it shares."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = linear.weight
        self.copy: Tensor = None  # `weight` in low precision, which the twin sets
        self.waiting: list[tuple[Tensor, Tensor]] = []  # (dy, x) of backward passes
        self.together: tuple[Linear, ...] = ()  # those that wait with it

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self)


def linear(x: Tensor, *parts: Linear) -> Tensor:
    """x (..., D) by weights (E_i, D) that count as one, below each other: (..., sum E_i)."""
    return MixedLinear.apply(x.to(parts[0].copy.dtype), parts, *(part.weight for part in parts))


class MixedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, parts, *weights):
        ctx.save_for_backward(x)
        ctx.parts = parts
        return F.linear(x, joined([part.copy for part in parts]))

    @staticmethod
    def backward(ctx, dy):
        """dx; the weights' gradients are added up on the side."""
        (x,), parts = ctx.saved_tensors, ctx.parts
        add_gradient(parts, dy.flatten(0, -2), x.flatten(0, -2))
        return dy @ joined([part.copy for part in parts]), None, *(None for _ in parts)


def add_gradient(parts: tuple[Linear, ...], dy: Tensor, x: Tensor):
    """Add dy^T @ x, of dy (N, E) and x (N, D), to the gradients of weights that together are
    (E, D), as soon as there are FEW_ROWS."""
    waiting = parts[0].waiting
    waiting.append((dy, x))
    parts[0].together = parts
    if sum(len(rows) for rows, _ in waiting) >= FEW_ROWS:
        add_waiting(parts[0])


def add_waiting(first: Linear):
    """Move what waits to the gradients."""
    if not first.waiting:
        return
    dy, x = (rows[0] if len(rows) == 1 else torch.cat(rows) for rows in zip(*first.waiting))
    first.waiting.clear()
    grads = []
    for part in first.together:
        if part.weight.grad is None:
            part.weight.grad = torch.zeros_like(part.weight)
        grads.append(part.weight.grad)
    if neighbours(grads):
        return add_product(joined(grads), dy.mT, x)
    for grad, some in zip(grads, dy.split([len(grad) for grad in grads], 1)):
        add_product(grad, some.mT, x)


def neighbours(matrices: list[Tensor]) -> bool:
    """Do they follow each other in memory?"""
    return all(a.data_ptr() + a.numel() * a.element_size() == b.data_ptr()
               for a, b in zip(matrices, matrices[1:]))


def joined(matrices: list[Tensor]) -> Tensor:
    """Matrices (E_i, D) one below the other: a view of neighbours in memory, else a copy."""
    first = matrices[0]
    if len(matrices) == 1:
        return first
    if not neighbours(matrices):
        return torch.cat(matrices)
    rows = sum(len(m) for m in matrices)
    return first.as_strided((rows, first.size(1)), (first.size(1), 1))


def add_product(total: Tensor, a: Tensor, b: Tensor):
    """total += a @ b, summed in total's precision; matrices or batches of them."""
    add = torch.addmm if a.dim() == 2 else torch.baddbmm
    if a.dtype == total.dtype:
        add(total, a, b, out=total)
    elif total.is_cuda:
        add(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a.to(total.dtype) @ b.to(total.dtype)
