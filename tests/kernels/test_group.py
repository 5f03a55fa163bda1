"""kernels/group.py against a plain float64 attention, and against the other kernels."""

import pytest
import torch
from exact import case, close, gradients, norm_rotate, reference
from interpreted import DEVICE, GPU

from attention import Rows
from kernels import attention as kernels
from kernels.norms import Gain, Gains, Projected
from kernels.tape import FEW, TapeCache
from model import rotary_tables

HOPPER = GPU and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="a Hopper GPU is needed")

CASES = {
    "paper": dict(B=2, S=2048, g=8, q0=3, H=6, Hkv=3, d=96),
    "one document": dict(B=1, S=1024, g=4, q0=0, H=4, Hkv=2, d=96, docs=False),
    "no sink": dict(B=2, S=700, g=4, q0=3, H=4, Hkv=2, d=96, sink=False),
    "no multiple of anything": dict(B=3, S=333, g=5, q0=4, H=2, Hkv=1, d=96),
    "one head a key head": dict(B=2, S=301, g=2, q0=1, H=2, Hkv=2, d=64),
    "three heads a key head": dict(B=1, S=515, g=3, q0=1, H=6, Hkv=2, d=80),
    "one key head": dict(B=1, S=200, g=2, q0=0, H=8, Hkv=1, d=32),
    "large heads": dict(B=2, S=600, g=4, q0=1, H=14, Hkv=7, d=128),
    "small heads": dict(B=1, S=260, g=2, q0=1, H=4, Hkv=2, d=16),
    "reads itself": dict(B=2, S=400, g=4, q0=2, H=4, Hkv=2, d=48, own=1),
    "few queries": dict(B=2, S=333, g=64, q0=20, H=4, Hkv=2, d=96),
}


def test_they_are_used():
    """Of the versions of Triton that come with the versions of PyTorch in requirements.txt."""
    (q, k, *_), _ = case(**CASES["no sink"], dtype=torch.bfloat16)
    assert kernels.by_hand("group", q, k), kernels.triton.__version__
    assert not kernels.by_hand("full", q, k) and not kernels.by_hand("group", q.float(), k.float())


def run(inputs, do, running, dsink):
    out, lse2 = kernels.attention_forward(*inputs)
    dq = kernels.attention_backward(do, *inputs[:3], out, lse2, *inputs[3:], *running, dsink)
    return out, lse2, dq


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients(name, dtype, monkeypatch):
    """Errors are at most a few of the format's steps, and no larger than the other kernels'."""
    inputs, do = case(**CASES[name], dtype=dtype)
    expected, grads = gradients(inputs, do)
    (_, k, _, _, _, sink, _), step = inputs, torch.finfo(dtype).eps
    results = []
    for gluon in (True, False):
        monkeypatch.setattr(kernels, "has_gluon", lambda gluon=gluon: gluon)
        before = torch.randn(2, *k.shape, generator=torch.Generator().manual_seed(1)).to(k)
        running = before.clone()
        dsink = None if sink is None else torch.zeros(
            2, kernels.sink_rows(*inputs[:2]), *sink.shape, device=DEVICE)
        out, lse2, dq = run(inputs, do, running, dsink)
        added = [x.double() - x0.double() for x, x0 in zip(running, before)]
        sinks = [] if sink is None else list(dsink.sum(1))
        results.append([out, dq, *added, *sinks])
        _, expected_lse = reference(*(x if x is None or x.dtype == torch.int32 else x.double()
                                      for x in inputs))
        B, Tq, H = expected_lse.shape
        Hkv, P = k.size(2), kernels.triton.next_power_of_2(H // k.size(2))
        ours = lse2.view(B, Hkv, Tq, P)[..., :H // Hkv].transpose(1, 2).reshape(B, Tq, H)
        some = expected_lse.isfinite()
        assert torch.equal(some, ours.isfinite())
        assert (ours[some].double() - expected_lse[some]).abs().max() < 4 * step
    for mine, other, theirs in zip(*results, [expected, *grads], strict=True):
        norm = theirs.norm()
        errors = [((x.double() - theirs).norm() / norm).item() for x in (mine, other)]
        assert errors[0] < max(2 * step, 1.5 * errors[1]), errors


def with_rows(weight, n):
    """A gain, whose rows stand beside another's."""
    gain = Gain(weight)
    Gains([Gain(weight), gain], n)
    return gain


def as_projected(q):
    """Inputs of `norm_rotate` in place of queries."""
    B, T, _, d = q.shape
    cos, sin = rotary_tables(torch.randint(0, 900, (B, T)).to(DEVICE), d)
    return 3 * q, 1 + 0.3 * torch.randn(d, device=DEVICE), cos, sin


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_norm_and_rotation_on_the_way(name, dtype):
    """The same from queries as they are projected, and the gain's gradient."""
    (q, k, v, start, stop, *sink), do = case(**CASES[name], dtype=dtype)
    x, gain, cos, sin = as_projected(q)
    leaves = [x.double().requires_grad_(), gain.double().requires_grad_()]
    normed = norm_rotate(*leaves, cos.double(), sin.double())
    expected, (dq, *others) = gradients([normed, k, v, start, stop, *sink], do)
    expected = [expected, *torch.autograd.grad(normed, leaves, dq), *others]
    results = []
    for late in (True, False):
        own = with_rows(gain, kernels.group.programs(q, k))
        cache = TapeCache(k[None], v[None], None if sink[0] is None else [s[None] for s in sink])
        rows = Rows(slice(0, None, 1), start, stop, cos, sin)
        projected = Projected(x.clone().requires_grad_(), own)
        assert kernels.takes_projected(projected.x, k, own)
        given = projected if late else projected.rotated(cos, sin)
        with torch.no_grad():
            without = cache.attend(given, 0, rows)
        out = cache.attend(given, 0, rows)
        assert x.size(1) <= FEW or torch.equal(without, out)
        out.backward(do)
        sinks = [] if sink[0] is None else [s.sum(1)[0] for s in cache.tape.dsink.unbind(1)]
        results.append([out, projected.x.grad, own.partial.sum(0), cache.tape.dk[0],
                        cache.tape.dv[0], *sinks])
    step = torch.finfo(dtype).eps
    for mine, other, theirs in zip(*results, expected, strict=True):
        norm = theirs.norm()
        errors = [((a.double() - theirs).norm() / norm).item() for a in (mine, other)]
        assert errors[0] < max(2 * step, 1.5 * errors[1]), errors


def test_too_few_rows_for_the_gain():
    """Then the norm is a kernel of its own."""
    (q, k, *_), _ = case(**CASES["paper"], dtype=torch.bfloat16)
    n = kernels.group.programs(q, k)
    gain = torch.ones(q.size(-1), device=DEVICE)
    assert kernels.takes_projected(q, k, Gain(gain))
    assert kernels.takes_projected(q, k, with_rows(gain, n))
    assert not kernels.takes_projected(q, k, with_rows(gain, n - 1))


def test_same_bits_every_time():
    inputs, do = case(**CASES["paper"], dtype=torch.bfloat16)
    q, k, *_, sink, _ = inputs
    x, *norm = as_projected(q)
    results = []
    for _ in range(3):
        running = torch.zeros(2, *k.shape).to(k)
        dsink = torch.zeros(2, kernels.sink_rows(*inputs[:2]), *sink.shape, device=DEVICE)
        dgain = torch.zeros(kernels.group.programs(q, k), q.size(-1), device=DEVICE)
        out, lse2, kept = kernels.attention_forward(x, *inputs[1:], norm=norm, keep=True)
        dx = kernels.attention_backward(do, kept, *inputs[1:3], out, lse2, *inputs[3:], *running,
                                        dsink, norm, x, dgain)
        results.append([*run(inputs, do, running, dsink), kept, dx, dgain, running, dsink])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_rows_that_read_nothing():
    """0 without a sink (log of an empty sum: -inf), else its value; no gradient is NaN."""
    (q, k, v, start, stop, *sinks), do = case(B=2, S=80, g=2, q0=0, H=4, Hkv=2, d=96,
                                              dtype=torch.bfloat16)
    stop = torch.maximum(start, stop - 19)
    stop[1] = start[1] = 7
    empty = start == stop
    assert (empty.sum() > 50) & ~empty.all()
    out, lse2 = kernels.attention_forward(q, k, v, start, stop)
    assert (out[empty] == 0).all() and (lse2[1] == -torch.inf).all()
    for sink in ([None, None], sinks):
        out, _ = kernels.attention_forward(q, k, v, start, stop, *sink)
        expected, grads = gradients([q, k, v, start, stop, *sink], do)
        close(out, expected, 1e-2)
        running = torch.zeros(2, *k.shape).to(k)
        dsink = None if sink[0] is None else torch.zeros(
            2, kernels.sink_rows(q, k), *sink[0].shape, device=DEVICE)
        _, _, dq = run([q, k, v, start, stop, *sink], do, running, dsink)
        sums = [] if dsink is None else dsink.sum(1)
        for mine, theirs in zip((dq, *running, *sums), grads, strict=True):
            close(mine, theirs, 1e-2)


def test_a_view_of_a_larger_cache():
    """Some columns of one channel, as of a prompt in a cache with room for more."""
    inputs, do = case(B=2, S=300, g=4, q0=1, H=4, Hkv=2, d=96, dtype=torch.bfloat16)
    q, k, v, *rest = inputs
    large = torch.full((2, 3, 2, 500, 2, 96), 9.0).to(k)  # of keys and values, three channels
    large[0, 1, :, :300], large[1, 1, :, :300] = k, v
    views = large[0, 1, :, :300], large[1, 1, :, :300]
    same = kernels.attention_forward(*inputs)[0]
    assert torch.equal(kernels.attention_forward(q, *views, *rest)[0], same)
    totals = torch.zeros_like(large)
    running = totals[0, 1, :, :300], totals[1, 1, :, :300]
    dsink = torch.zeros(2, kernels.sink_rows(q, k), 2, 96, device=DEVICE)
    out, lse2 = kernels.attention_forward(*inputs)
    kernels.attention_backward(do, q, *views, out, lse2, *rest, *running, dsink)
    _, grads = gradients(inputs, do)
    for mine, theirs in zip(running, grads[1:3]):
        close(mine, theirs, 1e-2)
    assert (totals[:, 0] == 0).all() and (totals[:, 2] == 0).all()
    assert (totals[:, 1, :, 300:] == 0).all()
