"""kernels/attention.py against a plain float64 attention."""

import pytest
import torch
from exact import case, close, gradients, reference
from interpreted import DEVICE, GPU

from kernels import attention as kernels

SMALL = {key: {128: value} for key, value in {
    ("forward", "group"): (16, 16, 4, 2), ("forward", "full"): (32, 16, 4, 2),
    ("forward", "decode"): (16, 32, 4, 2), ("dq", "group"): (16, 16, 4, 2),
    ("dq", "full"): (32, 16, 4, 2), ("dkv", "group"): (16, 32, 4, 2),
    ("dkv", "full"): (16, 16, 4, 2)}.items()}


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that short rows have edges and interiors (and the interpreter is quick)."""
    monkeypatch.setattr(kernels, "CONFIGS", SMALL)


def check(inputs, do, tol):
    expected, grads = gradients(inputs, do)
    leaves = [x if x is None or x.dtype == torch.int32 else x.detach().requires_grad_()
              for x in inputs]
    out = kernels.attention(*leaves)
    out.backward(do)
    close(out.detach(), expected, tol)
    ours = [x.grad for x in leaves if x is not None and x.dtype != torch.int32]
    for mine, theirs in zip(ours, grads, strict=True):
        close(mine, theirs, tol)


TOL = 5e-3 if GPU else 1e-5  # a GPU multiplies float32 as tf32
CASES = {
    "group": dict(B=2, S=96, g=4, q0=1, H=4, Hkv=2, d=32),
    "group, no sink": dict(B=1, S=96, g=4, q0=3, H=4, Hkv=2, d=32, sink=False),
    "first group, no multiple": dict(B=2, S=75, g=4, q0=0, H=4, Hkv=2, d=32),
    "64 + 32 columns": dict(B=1, S=70, g=3, q0=2, H=2, Hkv=1, d=96),
    "three heads a key head": dict(B=1, S=45, g=2, q0=1, H=6, Hkv=2, d=16),
    "full": dict(B=1, S=75, g=1, q0=0, H=4, Hkv=2, d=48, own=1, sink=False),
    "full, no documents": dict(B=1, S=80, g=1, q0=0, H=2, Hkv=2, d=16, own=1, docs=False),
    "one query": dict(B=2, S=33, g=64, q0=20, H=4, Hkv=2, d=16),
}


@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients(name, small_blocks):
    check(*case(**CASES[name]), TOL)


def test_default_blocks():
    check(*case(B=1, S=150, g=2, q0=1, H=2, Hkv=1, d=96), TOL)
    check(*case(B=1, S=150, g=1, q0=0, H=2, Hkv=1, d=16, own=1), TOL)
    inputs, _ = case(B=1, S=300, g=512, q0=290, H=2, Hkv=1, d=16)
    expected, _ = reference(*(x if x.dtype == torch.int32 else x.double() for x in inputs))
    close(kernels.decode_forward(*inputs)[0], expected, TOL)


def test_empty_rows(small_blocks):
    """Rows that read nothing: 0 without a sink (log of an empty sum: -inf), else its value."""
    (q, k, v, start, stop, *sinks), do = case(B=2, S=40, g=1, q0=0, H=2, Hkv=1, d=16)
    stop = torch.maximum(start, stop - 9)
    stop[1] = start[1] = 7
    assert (start == stop).sum() > 50
    out, lse2 = kernels.attention_forward(q, k, v, start, stop)
    empty = start == stop
    assert (out[empty] == 0).all() and (lse2[0].view(40, 2)[empty[0]] == -torch.inf).all()
    check([q, k, v, start, stop, None, None], do, TOL)
    out, _ = kernels.attention_forward(q, k, v, start, stop, *sinks)
    close(out[empty], sinks[1].double().expand_as(out[empty]), TOL)
    check([q, k, v, start, stop, *sinks], do, TOL)


def test_log_sum(small_blocks):
    inputs, _ = case(B=2, S=60, g=4, q0=2, H=4, Hkv=2, d=32)
    _, lse2 = kernels.attention_forward(*inputs)
    _, expected = reference(*(x if x.dtype == torch.int32 else x.double() for x in inputs))
    B, Tq, H = expected.shape
    close(lse2.view(B, 2, Tq, H // 2).transpose(1, 2).reshape(B, Tq, H), expected, TOL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_accumulate(dtype, small_blocks):
    """Two calls add to one running gradient of a cache channel and leave the others alone."""
    inputs, do = case(B=2, S=50, g=4, q0=3, H=4, Hkv=2, d=32)
    _, grads = gradients(inputs, do)
    running = torch.randn(2, 3, 2, 50, 2, 32).to(DEVICE, dtype)
    before = running.clone()
    dsink = torch.zeros(2, kernels.sink_rows(*inputs[:2]), 2, 32, device=DEVICE)
    for _ in range(2):
        out, lse2 = kernels.attention_forward(*inputs)
        kernels.attention_backward(do, *inputs[:3], out, lse2, *inputs[3:],
                                   running[0, 1], running[1, 1], dsink)
    for mine, grad in zip(dsink.sum(1), grads[3:], strict=True):
        close(mine, 2 * grad, TOL)
    for x, x0, grad in zip(running, before, grads[1:3], strict=True):
        assert torch.equal(x[0::2], x0[0::2])
        close(x[1], x0[1].double() + 2 * grad, TOL if dtype == torch.float32 else 1e-2)


def test_keys_beyond_the_interval_do_not_matter(small_blocks):
    """A cache that is larger than its content may hold anything finite behind it."""
    inputs, _ = case(B=2, S=40, g=1, q0=0, H=2, Hkv=1, d=16, docs=False)
    q, k, v, start, stop, *sinks = inputs
    q, start, stop = q[:, 17:18], start[:, 17:18].contiguous(), stop[:, 17:18].contiguous()
    expected = kernels.attention_forward(q, k, v, start, stop, *sinks)[0]
    k[:, 17:], v[:, 17:] = 1e3, -1e3
    assert torch.equal(kernels.attention_forward(q, k, v, start, stop, *sinks)[0], expected)
    close(kernels.decode_forward(q, k, v, start, stop, *sinks)[0], expected.double(), TOL)


@pytest.mark.parametrize("d, Tq, sink", [(16, 1, False), (96, 2, True)])
def test_decode_splits(d, Tq, sink, small_blocks):
    """Shares of the keys, empty ones too, merge to the whole."""
    g = torch.Generator().manual_seed(d)
    stop = torch.tensor([[0], [5], [150]]) + torch.arange(Tq)
    start = torch.tensor([[0], [5], [20]]).expand(-1, Tq)
    start, stop = (x.int().contiguous().to(DEVICE) for x in (start, stop))
    q = torch.randn(3, Tq, 4, d, generator=g).to(DEVICE)
    k, v = torch.randn(2, 3, 160, 2, d, generator=g).to(DEVICE)
    sinks = list(torch.randn(2, 2, d, generator=g).to(DEVICE)) if sink else [None, None]
    expected, _ = reference(*(x.double() for x in (q, k, v)), start, stop,
                            *(x if x is None else x.double() for x in sinks))
    for splits in (2, 8):
        out, lse2 = kernels.attention_forward(q, k, v, start, stop, *sinks, "decode", splits)
        close(out, expected, TOL)
        assert not lse2.isnan().any()


def test_wrong_calls_are_named():
    (q, k, v, start, stop, *_), _ = case(B=1, S=20, g=1, q0=0, H=2, Hkv=1, d=16)
    with pytest.raises(ValueError, match="int32"):
        kernels.attention(q, k, v, start.long(), stop)
    with pytest.raises(ValueError, match="does not fit"):
        kernels.attention(q, k, v[:, :10], start, stop)
    with pytest.raises(ValueError, match="head size 20"):
        kernels.attention(*(torch.randn(1, 20, 2, 20) for _ in range(3)), start, stop)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize("shape", [
    dict(S=2048, g=8, q0=0), dict(S=2048, g=8, q0=7), dict(S=1000, g=8, q0=3),
    dict(S=1024, g=1, q0=0, own=1)], ids=str)
@pytest.mark.parametrize("H, Hkv, d", [(6, 3, 96), (8, 8, 64), (4, 1, 128)])
def test_bfloat16(shape, H, Hkv, d):
    check(*case(B=2, H=H, Hkv=Hkv, d=d, dtype=torch.bfloat16, **shape), 1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
def test_captured_in_a_graph():
    """One graph serves all groups and lengths: intervals are data."""
    inputs, _ = case(B=2, S=512, g=8, q0=0, H=6, Hkv=3, d=96, dtype=torch.bfloat16)
    kernels.attention_forward(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = kernels.attention_forward(*inputs)
    inputs[4] += 3
    out.fill_(torch.nan)
    graph.replay()
    expected, _ = reference(*(x if x.dtype == torch.int32 else x.double() for x in inputs))
    close(out, expected, 1e-2)
