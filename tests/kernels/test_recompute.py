"""Recomputing keeps less, and changes no bit."""

import pytest
import torch
from small import random_tokens, small_model, with_documents

from configurator import UserError
from kernels import accelerate
from kernels.recompute import recomputing
from model import Block
from running.optimizers import flat_gradient
from solvers import autoregressive, cyclic, solve

SYSTEMS = {"whitematter": {}, "one static channel": dict(n_channels=1, router="static"),
           "lckv": dict(kv="lckv", lckv_w=1, n_groups=1), "feedback": dict(kv="feedback"),
           "recurrent": dict(kv="recurrent")}
SOLVERS = {"as trained": solve, "all passes with gradients": lambda m, x: cyclic(m, x, 3, 0, 2),
           "token by token": autoregressive}


def gradient(model, flat, solver):
    """Loss, gradient, and how many numbers autograd has kept."""
    idx, targets = with_documents(random_tokens(2, 12), (3,), (7,)), random_tokens(2, 12, seed=5)
    kept = 0

    def keep(x):
        nonlocal kept
        kept += x.numel()
        return x

    flat.zero_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model.loss(solver(model, idx).final, targets)
    loss.backward()
    return loss.detach(), flat.clone(), kept


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_recomputing_changes_no_bit_and_keeps_half_at_most(system, solver):
    model = small_model(**SYSTEMS[system])
    flat = flat_gradient(model)
    loss, expected, kept = gradient(model, flat, SOLVERS[solver])
    again, flat, less = gradient(recomputing(model), flat, SOLVERS[solver])
    assert loss == again and torch.equal(flat, expected) and expected.abs().sum() > 0
    assert less <= kept / 2


def test_random_numbers_are_drawn_again():
    class Dropping(Block):
        def mlp(self, a):
            return torch.dropout(super().mlp(a), 0.2, True)

    model, found = small_model(), []
    for block in model.blocks:
        block.__class__ = Dropping
    flat = flat_gradient(model)
    for other in (model, accelerate(model, torch.float32, False, training=True,
                                    recompute=True).model):
        torch.manual_seed(1)
        found.append(gradient(other, flat, solve)[:2])
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


def test_it_is_said_and_refused_where_there_are_no_passes():
    fast = accelerate(small_model(), torch.float32, False, training=True, recompute=True)
    assert "recomputing" in str(fast)
    with pytest.raises(UserError, match="kv=vanilla has no passes"):
        accelerate(small_model(kv="vanilla"), torch.float32, False, training=True, recompute=True)
