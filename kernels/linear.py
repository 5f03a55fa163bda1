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

import ctypes
from collections import defaultdict
from functools import cache
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

FEW_ROWS = 2048  # the products of fewer take less time than to add them to a weight's gradient
MANY_ROWS = 8192  # products of more fill a GPU by themselves, and what waits takes memory

# of cuBLAS: cudaDataType; CUBLAS_OP_N and _T, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT
TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
AS_IT_IS, TRANSPOSED, IN_FLOAT32, ANY_WAY = 0, 1, 68, -1


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
        if any(ctx.needs_input_grad[2:]):  # of weights that are frozen, none is made
            parts[0].waiting.add(parts, dy.flatten(0, -2), x.flatten(0, -2))
        return dy @ joined([part.copy for part in parts]), None, *(None for _ in parts)


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


def add_product(total: Tensor, a: Tensor, b: Tensor):
    """total += a @ b, summed in total's precision; matrices or batches of them."""
    add = torch.addmm if a.dim() == 2 else torch.baddbmm
    if a.dtype == total.dtype:
        add(total, a, b, out=total)
    elif total.is_cuda:
        add(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a.to(total.dtype) @ b.to(total.dtype)


def add_products(products: list[tuple[Tensor, Tensor, Tensor]]):
    """total += dy^T @ x for all (total (E, D), dy (N, E), x (N, D)), whose types, shapes
    and strides are equal. Raises RuntimeError if cuBLAS refuses."""
    total, dy, x = products[0]
    # cuBLAS reads 16 bytes at a time, and does not see which addresses are no multiple of that
    fit = total.dtype == torch.float32 and x.dtype in TYPES and all(
        m.stride(1) == 1 and m.stride(0) >= m.size(1) and m.data_ptr() % 16 == 0
        for m in (total, dy, x))
    gemm = batched_gemm() if fit and len(products) > 1 else None
    if gemm is None:
        for total, dy, x in products:
            add_product(total, dy.mT, x)
        return
    totals, dys, xs = zip(*products)
    at = torch.empty(3, len(products), dtype=torch.int64, device=x.device)
    addresses_kernel[1,](xs + dys + totals, at, num_warps=1)
    a, b, c = (row.data_ptr() for row in at)
    one = ctypes.byref(ctypes.c_float(1))
    # it takes rows for columns: total^T (D, E) += x^T (D, N) @ dy (N, E), of which dy is transposed
    status = gemm(torch.cuda.current_blas_handle(), AS_IT_IS, TRANSPOSED, *total.mT.shape, len(x),
                  one, a, TYPES[x.dtype], x.stride(0), b, TYPES[dy.dtype], dy.stride(0),
                  one, c, TYPES[total.dtype], total.stride(0), len(products), IN_FLOAT32, ANY_WAY)
    if status:
        raise RuntimeError(f"cublasGemmBatchedEx failed with status {status}")


@triton.jit
def addresses_kernel(tensors, out):
    """out[i] = where tensor i is. A CUDA graph keeps a kernel's arguments; of a copy from the host
    it would keep where to read at each replay."""
    for i in tl.static_range(len(tensors)):
        tl.store(out + i, tensors[i].to(tl.int64))


@cache
def batched_gemm():
    """cublasGemmBatchedEx of the library that PyTorch calls: it is looked up among the dependencies
    of PyTorch's own. None, so that products go one by one, without a GPU or in another build."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
        gemm = library.cublasGemmBatchedEx
    except (OSError, AttributeError):
        return None
    i, p = ctypes.c_int, ctypes.c_void_p
    gemm.restype = i
    gemm.argtypes = p, i, i, i, i, i, p, p, i, i, p, i, i, p, p, i, i, i, i, i
    return gemm if torch.cuda.is_available() else None
