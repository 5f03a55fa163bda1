"""kernels/decode.py and choose.py against plain functions, and steps against the whole."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from exact import norm_rotate, reference
from interpreted import DEVICE, GPU, randn
from interpreted import close as close_to
from small import random_tokens, small_model

import decoding
from attention import Rows
from kernels import attention as kernels
from kernels import choose as choose_kernels
from kernels import decode as decode_kernels
from kernels import graphs, known, twin
from model import rms_norm, rotary_tables
from solvers import autoregressive, one_pass

TOL = 2e-3 if GPU else 1e-5  # a GPU's float32 products round their factors
close = partial(close_to, tol=TOL)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several programs and several steps of each loop."""
    monkeypatch.setattr(decode_kernels, "PRODUCT", (16, 16, 4))
    monkeypatch.setattr(decode_kernels, "HEAD", {16: (32, 64, 4, 2), 32: (32, 64, 4, 2)})
    monkeypatch.setattr(decode_kernels, "ATTENTION", (16, 4, 2))


@pytest.mark.parametrize("B, K, E", [(1, 128, 40), (3, 72, 24), (16, 64, 16)])
def test_products(B, K, E):
    x, w, w2, y = (randn(*shape, seed=i)
                   for i, shape in enumerate([(B, K), (E, K), (2 * E, K), (B, E)]))
    normed = rms_norm(x.double(), None)
    close(decode_kernels.product(x, w), x.double() @ w.double().T)
    close(decode_kernels.product(x, w, residual=y), y + x.double() @ w.double().T)
    close(decode_kernels.product(x, w, normed=True), normed @ w.double().T)
    gate, up = (normed @ w2.double().T).chunk(2, -1)
    close(decode_kernels.product(x, w2, normed=True, gated=True), F.silu(gate) * up)


@pytest.mark.parametrize("B", [3, 20])
def test_head(B):
    x, w = randn(B, 72), randn(40, 72, seed=1)
    close(decode_kernels.head(x, w), rms_norm(x.double(), None) @ w.double().T)


def layer_with(q_norm, k_norm):
    return decode_kernels.Layer(None, q_norm, k_norm, None, None, None)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("splits, d, sink", [(1, 48, True), (4, 48, False), (4, 16, True)])
def test_attention(splits, d, sink, own):
    """Rows that read nothing, little, or from the middle on; twice, as counters must be reset."""
    B, H, Hkv, S = 4, 4, 2, 72
    qkv, cache = randn(B, (H + 2 * Hkv * own) * d), randn(2, 2, B, S, Hkv, d, seed=1)
    gains, sinks = randn(2, d, seed=3), randn(2, Hkv, d, seed=2) if sink else None
    start = torch.tensor([[0], [3], [40], [0]], dtype=torch.int32, device=DEVICE)
    stop = torch.tensor([[70], [3], [61], [1]], dtype=torch.int32, device=DEVICE)
    rows = Rows(stop.long(), start, stop, *rotary_tables(stop - start, d))
    scratch = decode_kernels.Scratch(cache, B, H, kernels.splits_of(B * Hkv, S))
    scratch.splits = splits
    scratch.part, scratch.lse2 = randn(splits, B, H, d), randn(splits, B, H)

    def turned(x, gain):
        return norm_rotate(x.double(), gain.double(), rows.cos.double(), rows.sin.double())

    parts = qkv.view(B, 1, -1, d)
    expected = cache.double()
    if own:
        expected[0, 1, torch.arange(B), stop[:, 0]] = turned(parts[:, :, H:H + Hkv], gains[1])[:, 0]
        expected[1, 1, torch.arange(B), stop[:, 0]] = parts[:, 0, H + Hkv:].double()
    out, _ = reference(turned(parts[:, :, :H], gains[0]), *expected[:, 1], start, stop + own,
                       *(t.double() for t in sinks if sink) if sink else ())
    layer = layer_with(gains[0], gains[1] if own else None)
    for _ in range(2):
        mine = decode_kernels.attention(qkv, layer, *cache[:, 1], rows, sinks, scratch)
        close(mine, out.reshape(B, H * d))
        close(cache, expected)
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
    monkeypatch.setattr(choose_kernels, "GROUP", 4)
    monkeypatch.setattr(choose_kernels, "GROUPS", 2)
    how = {"temperature": 0.8, "top_k": None} | how
    logits = (3 * randn(6, 40)).bfloat16()[:, :37]
    logits[4] = logits[4].round() / 4
    logits[5] *= 0  # zeros of both signs
    u = torch.rand(3, 6, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    u[2, 0], u[2, 1] = 0, 1 - 1e-6
    count = torch.tensor([2], device=DEVICE)
    plain = decoding.choose(logits, u[2], **how)

    mine, choice = torch.empty_like(plain), decoding.Choice(u, **how, top_p=1.0, n_ids=None)
    choose_kernels.choose(choice, logits, count, mine)
    assert mine.tolist() == plain.tolist()
    logits[0, 5] = logits[2, 0] = torch.nan
    logits[3, 1], logits[5, 36] = torch.inf, -torch.inf
    choose_kernels.choose(choice, logits, count, mine)
    assert (mine == -1).nonzero().flatten().tolist() == [0, 2, 3, 5]


@pytest.mark.filterwarnings("ignore:invalid value")
def test_infinite_logits_become_nan():
    x, w = torch.ones(2, 64, device=DEVICE), torch.ones(40, 64, device=DEVICE)
    w[3], w[7] = torch.inf, -torch.inf
    y = decode_kernels.head(x, w)
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
    sizes = dict(n_embd=16, head_dim=16)
    model = twin_of(small_model(dtype=torch.float32, **sizes, **system).to(DEVICE))
    B, S, n = 2, 40, 3
    ids = random_tokens(B, n, seed=3).to(DEVICE)
    ids[0, 1] = 0
    cache = model.new_cache(B, S, like=model.embed_tokens(ids))
    script, logits = iter(ids.T.clone()), []

    def forced(x, n, out):
        logits.append(x)
        out.copy_(next(script))

    monkeypatch.setattr(decode_kernels, "PART", 1)
    if not few:
        monkeypatch.setattr(decode_kernels, "MAX_ROWS", 0)
    zeros = ids.new_zeros(B)
    steps = graphs.Decoding(model, model.embed_tokens(zeros), cache, zeros, zeros, forced)
    assert isinstance(steps.steps, decode_kernels.Steps) == few
    list(steps.tokens(n))
    assert steps.index.tolist() == [n - 1] * B and steps.n.tolist() == [n - 1]
    assert steps.start.tolist() == [2, 0]
    monkeypatch.undo()
    exact = small_model(**sizes, **system)
    solve = autoregressive if exact.iterates else one_pass
    expected = exact.logits(solve(exact, ids.cpu()).final)[:, :-1]
    close(torch.stack(logits[1:], 1).cpu(), expected, tol=10 * TOL)


@pytest.mark.parametrize("limit", ["MAX_ROWS", "MAX_WIDTH"])
def test_what_is_left_to_the_plain_steps(limit, monkeypatch):
    sizes = dict(n_embd=16, head_dim=16, dtype=torch.float32)
    model = twin_of(small_model(**sizes))
    assert decode_kernels.serve(model, 3)
    monkeypatch.setattr(decode_kernels, limit, 2)
    assert not decode_kernels.serve(model, 3)
    assert not decode_kernels.serve(twin_of(small_model(**sizes, kv="lckv", lckv_w=1)), 1)


def twin_of(model):
    return twin.twin(model, torch.float32, False, known.unknown(model))


def test_attention_on_8200_keys(monkeypatch):
    monkeypatch.setattr(decode_kernels, "ATTENTION", (128, 4, 2))
    B, H, Hkv, S, d = 1, 2, 1, 8300, 16
    q, cache = randn(B, H * d), randn(2, 1, B, S, Hkv, d, seed=1)
    start, stop = (torch.tensor([[n]], dtype=torch.int32, device=DEVICE) for n in (5, 8205))
    rows = Rows(None, start, stop, *rotary_tables(stop * 0, d))
    scratch = decode_kernels.Scratch(cache, B, H, kernels.splits_of(B * Hkv, S))
    assert scratch.splits == 64
    layer, (k, v) = layer_with(torch.ones(d, device=DEVICE), None), cache[:, 0]
    mine = decode_kernels.attention(q, layer, k, v, rows, None, scratch)
    queries = rms_norm(q.view(B, 1, H, d).double(), None)
    expected, _ = reference(queries, k.double(), v.double(), start, stop)
    close(mine, expected.reshape(B, H * d))
