"""kernels/swiglu.py against its definition in float64."""

import pytest
import torch
import torch.nn.functional as F
from interpreted import DEVICE

from kernels import swiglu as kernels


def exact(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize("shape", [(3, 2, 24), (1, 66), (9, 16)])
@pytest.mark.parametrize("dtype, tol", [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
def test_swiglu_and_its_gradient(shape, dtype, tol, monkeypatch):
    monkeypatch.setattr(kernels, "COLUMNS", 16)
    g = torch.Generator().manual_seed(len(shape))
    x = (3 * torch.randn(*shape, generator=g)).to(DEVICE, dtype).requires_grad_()
    y = x.detach().double().requires_grad_()
    mine, theirs = kernels.swiglu(x), exact(y)
    d = torch.randn(*mine.shape, generator=g).to(DEVICE, dtype)
    mine.backward(d)
    theirs.backward(d.double())
    for a, b in ((mine, theirs), (x.grad, y.grad)):
        assert a.shape == b.shape and a.dtype == dtype
        assert (a.double() - b).norm() <= tol * b.norm()
