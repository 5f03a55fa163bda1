"""Muon against torch's own."""

import pytest
import torch

from muon import Muon


@pytest.mark.parametrize("shape", [(64, 32), (32, 64), (48, 48)])
def test_muon_is_torchs_muon_and_near_orthogonal(shape):
    torch.manual_seed(1)  # with which no square gradient is nearly singular
    params = [torch.nn.Parameter(torch.randn(shape)) for _ in range(3)]
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    ours = Muon(params, lr=0.02, weight_decay=0.1)
    theirs = torch.optim.Muon(copies, lr=0.02, weight_decay=0.1, momentum=0.95,
                              adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        before = [p.detach().clone() for p in params]
        for p, q in zip(params, copies):
            p.grad = torch.randn(shape)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for p, q, old in zip(params, copies, before):
        update = (old * (1 - 0.02 * 0.1) - p) / (0.02 * 0.2 * max(shape) ** 0.5)
        singular = torch.linalg.svdvals(update)
        assert singular.min() > 0.5 and singular.max() < 1.3
        assert (p - q).norm() / (p - old).norm() < 0.03  # theirs orthogonalises in bfloat16


def test_decay_and_missing_gradients():
    p, q = (torch.nn.Parameter(torch.ones(4, 8)) for _ in range(2))
    p.grad = torch.zeros(4, 8)
    Muon([p, q], lr=0.1, weight_decay=0.1).step()
    torch.testing.assert_close(p, torch.full((4, 8), 0.99), rtol=0, atol=1e-6)
    assert torch.equal(q, torch.ones(4, 8))
