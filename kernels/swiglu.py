"""
SwiGLU, silu(gate) * up, in Triton. Backward, the gradients of both go where the product that
follows reads them as one; compiled kernels made two and concatenated them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, WARPS = 4, 512, 4  # of a program


@triton.jit
def place(x, N, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Offsets in x (N, 2 F) and in (N, F), which of them exist, and gate and up there."""
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = (n < N) & (c < F)
    wide = n * (2 * F) + c
    gate = tl.load(x + wide, mask, 0.0).to(tl.float32)
    return wide, n * F + c, mask, gate, tl.load(x + wide + F, mask, 0.0).to(tl.float32)


@triton.jit
def swiglu_kernel(x, y, N, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    _, at, mask, gate, up = place(x, N, F, ROWS, COLUMNS)
    tl.store(y + at, (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty), mask)


@triton.jit
def swiglu_backward_kernel(x, dy, dx, N, F: tl.constexpr, ROWS: tl.constexpr,
                           COLUMNS: tl.constexpr):
    wide, at, mask, gate, up = place(x, N, F, ROWS, COLUMNS)
    d, s = tl.load(dy + at, mask, 0.0).to(tl.float32), tl.sigmoid(gate)
    dgate = d * up * s * (1 + gate * (1 - s))
    tl.store(dx + wide, dgate.to(dx.dtype.element_ty), mask)
    tl.store(dx + wide + F, (d * gate * s).to(dx.dtype.element_ty), mask)


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        ctx.save_for_backward(x)
        y = x.new_empty(*x.shape[:-1], x.size(-1) // 2)
        run(swiglu_kernel, x, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, = ctx.saved_tensors
        dx = torch.empty_like(x)
        run(swiglu_backward_kernel, x, dy.contiguous(), dx)
        return dx


def run(kernel, x: Tensor, *others: Tensor):
    F = x.size(-1) // 2
    N = x.numel() // (2 * F)
    kernel[triton.cdiv(N, ROWS), triton.cdiv(F, COLUMNS)](
        x, *others, N, F=F, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of (..., 2 n): gate, then up; computed in float32."""
    return SwiGLU.apply(gate_up)
