"""
Products with weights in low precision, whose gradients are added to .grad where they arise.

A weight is used by each of some ten group steps of a micro-step. Autograd would cast it, make a
gradient and add that up every time. Here a weight has one copy in low precision, renewed after
each optimizer step, and the product of the backward pass adds to .grad in the weight's own
precision: no cast and no sum of its own.

Those products wait for each other (`Waiting`): of a group step's layers they are one call of
cuBLAS, which saves 22 us a layer and step (H200, 4,096 rows); of few rows and one weight they are
one product, as adding to the gradient takes longer than it.
"""

from collections import defaultdict

import torch
import torch.nn as nn
from torch import Tensor

from kernels.products import add_products, matmul

FEW_ROWS = 2048  # the products of fewer take less time than to add them to a weight's gradient
MANY_ROWS = 8192  # products of more fill a GPU by themselves, and what waits takes memory


class Linear(nn.Module):
    """Stands in for an nn.Linear without bias, whose weight it shares."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = linear.weight
        # what the twin sets: `weight` in low precision, and where its gradients wait
        self.copy: Tensor = None
        self.waiting: Waiting = None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self)


def linear(x: Tensor, *parts: Linear) -> Tensor:
    """x (..., D) by weights (E_i, D) that count as one, below each other: (..., sum E_i)."""
    return MixedLinear.apply(x.to(parts[0].copy.dtype), parts, torch.is_grad_enabled(),
                             *(part.weight for part in parts))


class MixedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, parts, recording, *weights):
        """`recording`: is autograd on? The caller says so, as in here it never is."""
        ctx.save_for_backward(x)
        ctx.parts = parts
        return matmul(x, joined([part.copy for part in parts]).mT, recording)

    @staticmethod
    def backward(ctx, dy):
        """dx; the weights' gradients are added up on the side."""
        (x,), parts = ctx.saved_tensors, ctx.parts
        if any(ctx.needs_input_grad[3:]):  # of weights that are frozen, none is made
            parts[0].waiting.add(parts, dy.flatten(0, -2), x.flatten(0, -2))
        dx = matmul(dy, joined([part.copy for part in parts]), True)
        return dx, None, None, *(None for _ in parts)


class Waiting:
    """Products dy^T @ x of backward passes, which wait to be added to gradients together."""

    def __init__(self):
        self.pairs = defaultdict(list)  # (dy, x) of weights that count as one

    def add(self, parts: tuple[Linear, ...], dy: Tensor, x: Tensor):
        """dy (N, E) and x (N, D) of weights that together are (E, D). When one comes again that has
        FEW_ROWS, the next step has begun, and what waits goes."""
        if sum(len(rows) for rows, _ in self.pairs[parts]) >= FEW_ROWS:
            self.flush()
        self.pairs[parts].append((dy, x))
        if len(dy) > MANY_ROWS:
            self.flush()

    def flush(self):
        """Add all to the gradients; what is alike by one call, but no weight twice in one."""
        batches, turns = defaultdict(list), defaultdict(int)
        for parts, pairs in self.pairs.items():
            dy, x = (rows[0] if len(rows) == 1 else torch.cat(rows) for rows in zip(*pairs))
            turn = max(turns[part.weight] for part in parts)  # 0 unless modules share a weight
            for part in parts:
                turns[part.weight] = turn + 1
                if part.weight.grad is None:
                    part.weight.grad = torch.zeros_like(part.weight)
            totals = [part.weight.grad for part in parts]
            if neighbours(totals):
                totals = [joined(totals)]
            for product in zip(totals, dy.split([len(t) for t in totals], 1), [x] * len(totals)):
                like = ((m.dtype, m.shape, m.stride(), m.data_ptr() % 16) for m in product)
                batches[(turn, *like)].append(product)
        self.pairs.clear()
        for batch in batches.values():
            add_products(batch)


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
