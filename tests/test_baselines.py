"""The systems that WhiteMatter is compared with: their equations, their caches, their sizes."""

import oracle_baselines
import pytest
import torch
from oracle import document_ids, stack
from small import random_tokens, small_model, with_documents

from solvers import autoregressive, cyclic, jacobi, one_pass

# name: (oracle, config); all of them small, with every part active
SYSTEMS = {
    "nofeedback": ("NoFeedback", dict(kv="nofeedback")),
    "nofeedback, static": ("NoFeedback", dict(kv="nofeedback", router="static")),
    "nofeedback, no dummy": ("NoFeedback", dict(kv="nofeedback", dummy=False)),
    "nofeedback, L=4, p=3": ("NoFeedback", dict(kv="nofeedback", n_layer=4, n_channels=4,
                                                router_stride=3)),
    "fusedkv": ("FusedKV", dict(kv="fusedkv", n_layer=4)),
    "fusedkv, L=5": ("FusedKV", dict(kv="fusedkv", n_layer=5)),
    "fusedkv_lite": ("FusedKVLite", dict(kv="fusedkv_lite", n_layer=4)),
    "lckv, w=3": ("LCKV", dict(kv="lckv", n_layer=6, lckv_w=3)),
    "lckv, w=1": ("LCKV", dict(kv="lckv", n_layer=4, lckv_w=1)),
    "lckv, w=0": ("LCKV", dict(kv="lckv", n_layer=4, lckv_w=0)),
    "feedback": ("Feedback", dict(kv="feedback")),
    "recurrent": ("Recurrent", dict(kv="recurrent")),
    "top output": ("WhiteMatter", dict(n_channels=2, top_output=True)),
    "top output, k=L": ("WhiteMatter", dict(n_channels=3, top_output=True, router="static")),
    "no dummy": ("WhiteMatter", dict(n_channels=2, dummy=False)),
    "both": ("WhiteMatter", dict(n_channels=1, dummy=False, top_output=True)),
}
ITERATED = [name for name, (oracle, _) in SYSTEMS.items()
            if oracle in ("LCKV", "Feedback", "Recurrent", "WhiteMatter")]
ONE_PASS = [name for name in SYSTEMS if name not in ITERATED]
every_system = pytest.mark.parametrize("name", SYSTEMS)


def make(name, seed=0, dtype=torch.float64, **changes):
    return small_model(seed, dtype, **{**SYSTEMS[name][1], **changes})


def rows(T, documents):
    """One row; or two whose documents break at different columns, some after a single token."""
    return with_documents(random_tokens(2, T), [1, 3], [0]) if documents else random_tokens(1, T)


# -- the equations --------------------------------------------------------------------------


def check(name, solver, method, idx, options=()):
    """States to 1e-9 and every gradient to 1e-8 of its scale."""
    model = make(name)
    oracle = getattr(oracle_baselines, SYSTEMS[name][0])(
        {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()},
        model.config)
    traces = [getattr(oracle, method)(row, document_ids(row, 0), *options) for row in idx.tolist()]
    expected = [trace[-1] for trace in traces]
    targets = random_tokens(*idx.shape, seed=2)
    theirs = oracle.loss(expected, targets.tolist())
    theirs.backward()
    solution = solver(model, idx, *options)
    torch.testing.assert_close(solution.states, stack(expected), rtol=1e-9, atol=1e-9)
    ours = model.loss(solution.final, targets)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    ours.backward()
    for key, p in model.named_parameters():
        grad = oracle.p[key].grad
        if key == "memory.weights" and options == (0, 1):  # they sum to 1, over equal states
            assert grad.abs().max() < 1e-12 and p.grad.abs().max() < 1e-12
            continue
        assert grad is not None and grad.abs().max() > 1e-8, f"{key}: the oracle has no gradient"
        assert p.grad is not None, f"{key} gets no gradient"
        error = (p.grad - grad).abs().max().item() / grad.abs().max().item()
        assert error <= 1e-8, f"{key}: gradient off by {error:.1e} of its scale"
    return oracle, solution, traces


@pytest.mark.parametrize("name", ONE_PASS)
@pytest.mark.parametrize("documents", [False, True])
def test_the_equations_of_one_pass(name, documents):
    _, solution, _ = check(name, one_pass, "one_pass", rows(6, documents))
    assert solution.report.passes == 1


@pytest.mark.parametrize("name", ITERATED)
@pytest.mark.parametrize("documents", [False, True])
def test_the_equations_token_by_token(name, documents):
    check(name, autoregressive, "autoregressive", rows(5, documents))


@pytest.mark.parametrize("name", ITERATED)
@pytest.mark.parametrize("truncation", [(0, 1), (1, 1), (2, 2)], ids=str)
def test_the_equations_of_jacobi_passes(name, truncation):
    check(name, jacobi, "jacobi", rows(5, True), truncation)


@pytest.mark.parametrize("name", ITERATED)
@pytest.mark.parametrize("truncation", [(0, 1), (1, 2)], ids=str)
def test_the_equations_of_cyclic_passes(name, truncation):
    check(name, cyclic, "cyclic", rows(5, True), (2, *truncation))
