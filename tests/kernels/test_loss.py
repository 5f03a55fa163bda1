"""kernels/loss.py against F.cross_entropy in float64."""

import pytest
import torch
import torch.nn.functional as F
from interpreted import DEVICE

from kernels import loss as kernels


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several chunks, the last one not full, and several blocks of a row."""
    monkeypatch.setattr(kernels, "CHUNK", 5)
    monkeypatch.setattr(kernels, "BLOCK", 16)


def case(V, counting, dtype=torch.float32):
    g = torch.Generator().manual_seed(V)
    a, w = torch.randn(12, 8, generator=g), 3 * torch.randn(V, 8, generator=g)
    targets = torch.randint(V, (12,), generator=g)
    targets[counting:] = -1
    return a.to(DEVICE, dtype), w.to(DEVICE), targets.to(DEVICE)


@pytest.mark.parametrize("V, counting", [(50, 12), (48, 7), (9, 1), (33, 0)])
def test_loss_and_gradients(V, counting):
    a, w, targets = case(V, counting)
    mine = [x.clone().requires_grad_() for x in (a, w)]
    exact = [x.double().requires_grad_() for x in (a, w)]
    loss = kernels.loss(*mine, w, targets)
    total = F.cross_entropy(exact[0] @ exact[1].T, targets, ignore_index=-1, reduction="sum")
    expected = total / max(1, counting)
    tol = 5e-3 if DEVICE == "cuda" else 1e-5
    assert abs(loss.item() - expected.item()) <= tol * abs(expected.item())
    (2 * loss).backward()
    (2 * expected).backward()
    for x, y in zip(mine, exact):
        assert (x.grad.double() - y.grad).norm() <= tol * y.grad.norm()


def test_loss_alone_is_the_same():
    """Without gradients, and with logits far from zero."""
    a, w, targets = case(50, 9)
    w = 100 * w
    with torch.no_grad():
        loss = kernels.loss(a, w, w, targets)
    assert torch.equal(loss, kernels.loss(a.requires_grad_(), w, w, targets).detach())
    expected = F.cross_entropy(a.double() @ w.double().T, targets, ignore_index=-1)
    assert abs(loss.item() - expected.item()) <= 5e-3 * expected.item()


def test_half_precision():
    a, w, targets = case(50, 12, torch.bfloat16)
    copy, exact = w.bfloat16(), a.double().requires_grad_()
    loss = kernels.loss(a.requires_grad_(), w, copy, targets)
    loss.backward()
    expected = F.cross_entropy(exact @ copy.double().T, targets)
    expected.backward()
    assert abs(loss.item() - expected.item()) <= 1e-2 * expected.item()
    assert (a.grad.double() - exact.grad).norm() <= 2e-2 * exact.grad.norm()
