"""The three schedules are the paper's equations: every state, the cache that is left for decoding,
the residual of every pass and every parameter's gradient, against oracle.py in float64."""

import pytest
import torch
from oracle import Oracle, document_ids, stack
from small import random_tokens, small_model, with_documents

from solvers import autoregressive, cyclic, jacobi, one_pass


def check_against_oracle(model, solver, method, idx, options=(), doc=None, zero=()):
    """States to 1e-9, cache to 1e-9 and every gradient to 1e-8, relative to its scale.

    `zero` names (by prefix) the parameters whose gradient is zero for a reason.
    """
    oracle = Oracle({n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()},
                    model.config)
    ids = doc.tolist() if doc is not None else [document_ids(row, model.config.eos_id)
                                                for row in idx.tolist()]
    traces = [getattr(oracle, method)(row, d, *options) for row, d in zip(idx.tolist(), ids)]
    expected = [trace[-1] for trace in traces]
    targets = random_tokens(*idx.shape, seed=2)
    targets[0, 1:2] = -1
    theirs = oracle.loss(expected, targets.tolist())
    theirs.backward()

    solution = solver(model, idx, *options, doc=doc)
    torch.testing.assert_close(solution.states, stack(expected), rtol=1e-9, atol=1e-9)
    assert torch.equal(solution.final, solution.states[:, :, -1])
    ours = model.loss(solution.final, targets)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    if model.iterates:
        check_cache(oracle, solution.cache, expected, ids)
    ours.backward()
    grads = {name.removesuffix(".weight"): p.grad for name, p in model.named_parameters()}
    for name, p in oracle.p.items():
        if name.startswith(tuple(zero)):
            assert grads[name] is None or grads[name].abs().max() < 1e-12, name
            continue
        assert p.grad is not None and grads[name] is not None, f"{name} gets no gradient"
        scale = p.grad.abs().max().item()
        assert scale > 1e-8, f"{name}: all gradients are zero"
        error = (grads[name] - p.grad).abs().max().item()
        assert error <= 1e-8 * scale, f"{name}: gradient off by {error:.1e} of {scale:.1e}"
    if options:
        start = model.embed(idx).unsqueeze(2).expand(-1, -1, oracle.L + 1, -1)  # H(0)
        check_residuals(solution.report, [start, *(stack(h) for h in zip(*traces))])


def check_cache(oracle, cache, expected, ids):
    """The cache holds Pool(H) of the returned states, channel by channel, and the dummy's."""
    for b, (h, doc) in enumerate(zip(expected, ids)):
        position, _ = oracle.places(doc, first=1)
        for i in range(len(h)):
            for j, (keys, values) in enumerate(oracle.pool(h[i][:oracle.L], position[i])):
                torch.testing.assert_close(cache.k[j][b, i], torch.stack(keys), rtol=0, atol=1e-9)
                torch.testing.assert_close(cache.v[j][b, i], torch.stack(values), rtol=0,
                                           atol=1e-9)
    for j, (keys, values) in enumerate(oracle.dummy()):
        torch.testing.assert_close(cache.sink[0][j], torch.stack(keys), rtol=0, atol=1e-9)
        torch.testing.assert_close(cache.sink[1][j], torch.stack(values), rtol=0, atol=1e-9)


def check_residuals(report, trace):
    """One residual per pass: ||new - old|| / ||new|| over the L sources of all tokens."""
    assert report.passes == len(report.residuals) == len(trace) - 1
    for old, new, residual in zip(trace, trace[1:], report.residuals):
        change = (new - old)[:, :, :-1].norm() / new[:, :, :-1].norm()
        assert residual == pytest.approx(change.item(), rel=1e-9)


every_pool = pytest.mark.parametrize("router, k", [
    (router, k) for router in ("dynamic", "static") for k in (1, 2, 3)])
every_truncation = pytest.mark.parametrize("truncation", [(0, 1), (1, 1), (1, 2)], ids=str)
with_and_without_documents = pytest.mark.parametrize("documents", [False, True])


def rows(T, documents):
    """One row; or two whose documents break at different columns, some after a single token."""
    return with_documents(random_tokens(2, T), [1, 3], [0]) if documents else random_tokens(1, T)


@every_pool
@with_and_without_documents
def test_oracle_autoregressive(router, k, documents):
    model = small_model(router=router, n_channels=k)
    check_against_oracle(model, autoregressive, "autoregressive", rows(6, documents))


@every_pool
def test_oracle_jacobi(router, k):
    """One truncation: it is the cyclic solver with one group, and that is looked at with all."""
    model = small_model(router=router, n_channels=k)
    check_against_oracle(model, jacobi, "jacobi", rows(5, False), (1, 2))


@every_pool
@every_truncation
def test_oracle_cyclic(router, k, truncation):
    """With documents; jacobi's rows, and half of the other's, are one document each."""
    model = small_model(router=router, n_channels=k)
    check_against_oracle(model, cyclic, "cyclic", rows(5, True), (2, *truncation))


# a lone token reads only the dummy: the weight is 1 whatever the scores are, so nothing that
# shapes queries or keys matters
LONE = ("kv_pool.key", *(f"blocks.{layer}.{name}" for layer in range(3)
                         for name in ("q_proj", "q_norm", "attn_norm")))


@pytest.mark.parametrize("T, g", [(7, 3), (4, 4), (3, 5), (6, 1)])
def test_oracle_cyclic_any_number_of_groups(T, g):
    check_against_oracle(small_model(n_channels=2), cyclic, "cyclic", random_tokens(1, T),
                         (g, 1, 2))


@pytest.mark.parametrize("g", [1, 3])
def test_oracle_one_token(g):
    check_against_oracle(small_model(n_channels=2), cyclic, "cyclic", random_tokens(2, 1),
                         (g, 1, 1), zero=LONE)


@pytest.mark.parametrize("L, p", [(4, 1), (4, 2), (4, 3), (3, 1), (3, 9)])
def test_oracle_router_stride(L, p):
    model = small_model(n_layer=L, router_stride=p, n_channels=2)
    check_against_oracle(model, jacobi, "jacobi", random_tokens(1, 4), (1, 1))


@pytest.mark.parametrize("solver, options", [
    (autoregressive, ()), (jacobi, (1, 1)), (cyclic, (4, 1, 1))],
    ids=["autoregressive", "jacobi", "cyclic"])
def test_oracle_document_ids_given(solver, options):
    """Ids from outside win over EOS tokens; any ids do that are constant on contiguous runs."""
    doc = torch.tensor([[7, 7, 7, 2, 2], [5, 4, 4, 4, 9]])
    idx = with_documents(random_tokens(2, 5), [1], [3])
    check_against_oracle(small_model(), solver, solver.__name__, idx, options, doc=doc)


@with_and_without_documents
def test_oracle_vanilla(documents):
    check_against_oracle(small_model(kv="vanilla"), one_pass, "vanilla", rows(6, documents))
