"""decode_kernels.py against the plain functions of model.py, and steps against the whole."""

import pytest
import torch
from interpreted import DEVICE, GPU
from small import random_tokens, small_model
from test_kernels import reference

import attention
import baselines
import choose_kernels
import decode_kernels
import decoding
import kernels
import model as plain
import pool
import train
from attention import Rows
from model import rms_norm, rotary_tables, rotate, swiglu
from solvers import autoregressive, one_pass

TOL = 2e-3 if GPU else 1e-5  # a GPU's float32 products round their factors


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def close(mine, theirs, tol=TOL):
    assert mine.shape == theirs.shape and mine.isfinite().all()
    assert (mine.double() - theirs.double()).norm() <= tol * theirs.double().norm()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several programs and several steps of each loop."""
    monkeypatch.setattr(decode_kernels, "CONFIGS", {
        "product": {16: (16, 64, 128, 4)}, "gated": {16: (16, 64, 128, 4)},
        "heads": {16: (None, 64, 128, 4)}, "logits": {16: (32, 64, 64, 4), 32: (32, 64, 64, 4)}})
    monkeypatch.setattr(decode_kernels, "ATTENTION", (16, 4, 2))


@pytest.mark.parametrize("B, K, E", [(1, 128, 40), (3, 72, 24), (20, 64, 16)])
def test_products(B, K, E):
    x, w, w2, y = (randn(*shape, seed=i)
                   for i, shape in enumerate([(B, K), (E, K), (2 * E, K), (B, E)]))
    normed = rms_norm(x.double(), None)
    close(decode_kernels.product(x, w), x.double() @ w.double().T)
    close(decode_kernels.product(x, w, residual=y), y + x.double() @ w.double().T)
    close(decode_kernels.product(x, w, normed=True, kind="logits"), normed @ w.double().T)
    close(decode_kernels.product(x, w2, normed=True, gated=True), swiglu(normed @ w2.double().T))


def place(index, start):
    cos, sin = rotary_tables(index - start, 16)
    return Rows(index, start.int(), (index + 1).int(), cos, sin)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("B", [2, 17])
def test_heads(B, own):
    H, KV, d, K, S = 4, 2, 16, 72, 9
    F = H + 2 * KV * own
    x, w = randn(B, K), randn(F * d, K, seed=1)
    q_gain, k_gain = randn(d, seed=3), randn(d, seed=4)
    index = torch.arange(B, device=DEVICE)[:, None] % S
    rows = place(index, index // 2)
    cache = torch.zeros(2, B, S, KV, d, device=DEVICE)
    q = decode_kernels.heads(x, w, q_gain, k_gain if own else None, rows, *cache)
    y = (rms_norm(x.double(), None) @ w.double().T).view(B, 1, F, d)

    def turned(t, g):
        return rotate(rms_norm(t, g.double()), rows.cos.double(), rows.sin.double())[:, 0]

    close(q, turned(y[:, :, :H], q_gain))
    if own:
        written = cache[:, torch.arange(B), index[:, 0]]
        close(written[0], turned(y[:, :, H:H + KV], k_gain))
        close(written[1], y[:, 0, H + KV:])
        cache[:, torch.arange(B), index[:, 0]] = 0
    assert (cache == 0).all()


@pytest.mark.parametrize("splits, d, sink", [(1, 48, True), (4, 48, False), (4, 16, True)])
def test_attention(splits, d, sink):
    """Rows that read nothing, little, or from the middle on; twice, as counters must be reset."""
    B, H, Hkv, S = 4, 4, 2, 70
    q, cache = randn(B, H, d), randn(2, 2, B, S, Hkv, d, seed=1)
    sinks = randn(2, Hkv, d, seed=2) if sink else None
    start = torch.tensor([[0], [3], [40], [0]], dtype=torch.int32, device=DEVICE)
    stop = torch.tensor([[70], [3], [61], [1]], dtype=torch.int32, device=DEVICE)
    rows = Rows(None, start, stop, None, None)
    scratch = decode_kernels.Scratch(cache, B, H, S)
    scratch.splits = splits
    scratch.part, scratch.lse2 = randn(splits, B, H, d), randn(splits, B, H)
    k, v = cache[0, 1], cache[1, 1]
    expected, _ = reference(*(t.double() for t in (q[:, None], k, v)), start, stop,
                            *(t.double() for t in sinks if sink) if sink else ())
    for _ in range(2):
        mine = decode_kernels.attention(q, k, v, rows, sinks, scratch)
        close(mine, expected.reshape(B, H * d))
    assert (scratch.done == 0).all()


def test_shares_of_the_keys():
    assert [kernels.splits_of(3 * B, 2048) for B in (1, 8, 64, 512)] == [16, 16, 2, 1]
    assert kernels.splits_of(3, 100) == 1


@pytest.mark.parametrize("how", [dict(temperature=0), dict(top_k=1), dict(top_k=6), dict(),
                                 dict(top_k=99, temperature=0.3)], ids=str)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_choose_is_that_of_the_plain_path(how, monkeypatch):
    """The same ids by the same numbers, also where logits are equal; a row of logits that are not
    finite is marked."""
    monkeypatch.setattr(choose_kernels, "CHUNK", 16)
    how = {"temperature": 0.8} | how
    logits = (3 * randn(6, 40)).bfloat16()[:, :37]
    logits[4:] = logits[4:].round() / 4
    u = torch.rand(3, 6, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    u[2, 0], u[2, 1] = 0, 1 - 1e-6
    count = torch.tensor([2], device=DEVICE)
    plain = decoding.choose(logits, u[2], **how)
    assert choose_kernels.choose(logits, u, count, **how).tolist() == plain.tolist()
    logits[0, 5] = logits[2, 0] = torch.nan
    logits[3, 1], logits[5, 36] = torch.inf, -torch.inf
    marked = choose_kernels.choose(logits, u, count, **how) == -1
    assert marked.nonzero().flatten().tolist() == [0, 2, 3, 5]


@pytest.mark.filterwarnings("ignore:invalid value")
def test_infinite_logits_become_nan():
    x, w = torch.ones(2, 64, device=DEVICE), torch.ones(40, 64, device=DEVICE)
    w[3], w[7] = torch.inf, -torch.inf
    y = decode_kernels.product(x, w, normed=True, kind="logits")
    assert y.isnan().any(0).nonzero().flatten().tolist() == [3, 7]


@pytest.mark.parametrize("system, few", [
    (dict(kv="vanilla"), True), (dict(n_channels=2), True), (dict(n_channels=2), False),
    (dict(dummy=False, top_output=True), True), (dict(kv="nofeedback"), False),
    (dict(kv="lckv", lckv_w=1), False), (dict(kv="recurrent"), False),
    (dict(kv="fusedkv"), False)], ids=str)
@torch.no_grad()
def test_steps_equal_the_whole(system, few, monkeypatch):
    """Rows of one batch on a cache that is longer than needed, documents that end on the way;
    by these kernels and, for many rows, by those of training with flash-decoding."""
    for module in (attention, plain, pool, baselines, decode_kernels):
        monkeypatch.setattr(module, "is_fast", lambda x: True)
    sizes = dict(n_embd=16, head_dim=16)
    model = small_model(dtype=torch.float32, **sizes, **system).to(DEVICE)
    train.set_compute_copies(model, torch.float32)
    B, S, n = 2, 40, 3
    ids = random_tokens(B, n, seed=3).to(DEVICE)
    ids[0, 1] = 0
    cache = model.new_cache(B, S, like=model.embed_tokens(ids))
    script, logits = iter(ids.T.clone()), []

    def forced(x, n):
        logits.append(x)
        return next(script)

    if not few:
        monkeypatch.setattr(decode_kernels, "MAX_ROWS", 0)
    zeros = ids.new_zeros(B)
    steps = decoding.Decoding(model, model.embed_tokens(zeros), cache, zeros, zeros, forced,
                              static=True)
    assert (steps.fast is not None) == few
    list(steps.tokens(n))
    assert steps.index.tolist() == [n - 1] * B and steps.n.tolist() == [n - 1]
    assert steps.start.tolist() == [2, 0]
    monkeypatch.undo()
    exact = small_model(**sizes, **system)
    solve = autoregressive if exact.iterates else one_pass
    expected = exact.logits(solve(exact, ids.cpu()).final)[:, :-1]
    close(torch.stack(logits[1:], 1).cpu(), expected, 10 * TOL)


def test_attention_on_8200_keys(monkeypatch):
    monkeypatch.setattr(decode_kernels, "ATTENTION", (128, 4, 2))
    B, H, Hkv, S, d = 1, 2, 1, 8300, 16
    q, cache = randn(B, H, d), randn(2, 1, B, S, Hkv, d, seed=1)
    start, stop = (torch.tensor([[n]], dtype=torch.int32, device=DEVICE) for n in (5, 8205))
    scratch = decode_kernels.Scratch(cache, B, H, S)
    assert scratch.splits == 64
    k, v = cache[0, 0], cache[1, 0]
    mine = decode_kernels.attention(q, k, v, Rows(None, start, stop, None, None), None, scratch)
    expected, _ = reference(*(t.double() for t in (q[:, None], k, v)), start, stop)
    close(mine, expected.reshape(B, H * d))
