"""kernels/norms.py against plain functions in float64."""

import pytest
import torch
from exact import norm_rotate, split_heads
from interpreted import DEVICE, close, randn

from kernels import norms
from kernels.norms import Gain, Gains
from model import rms_norm, rotary_tables


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """More blocks than programs, and blocks that are not full."""
    monkeypatch.setattr(norms, "PROGRAMS", 2)
    monkeypatch.setattr(norms, "STORE_PROGRAMS", 2)
    monkeypatch.setattr(norms, "CONFIGS", {name: (4, 4) for name in norms.CONFIGS})


def gradients(outputs, inputs, seed=7):
    """Gradients of a random functional of the outputs."""
    total = sum((o * randn(*o.shape, seed=seed + i).to(o.dtype)).sum()
                for i, o in enumerate(outputs) if o is not None)
    return torch.autograd.grad(total, inputs)


def both(mine, reference, inputs, tol=1e-5):
    """Outputs and gradients of a float32 function against a float64 one."""
    a = [x.clone().requires_grad_() for x in inputs]
    b = [x.double().requires_grad_() for x in inputs]
    out_a, out_b = mine(*a), reference(*b)
    for x, y in zip((*out_a, *gradients(out_a, a)), (*out_b, *gradients(out_b, b)), strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            close(x, y, tol)


def add_norm(x, y, gain):
    return norms.add_norm(x, y, Gain(gain))


@pytest.mark.parametrize("N", [3, 22])
def test_add_norm(N):
    def reference(x, y, gain):
        return x + y, rms_norm(x + y, gain), x + y

    both(add_norm, reference, [randn(2, N, 24), randn(2, N, 24, seed=1),
                               1 + 0.3 * randn(24, seed=2)])


def test_add_norm_of_nothing():
    both(lambda x, gain: add_norm(x, None, gain), lambda x, gain: (x, rms_norm(x, gain), x),
         [randn(2, 5, 24), 1 + 0.3 * randn(24, seed=2)])


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
def test_add_norm_where_not_all_is_read(used):
    """No gradient is not a gradient of zeros, and either must do."""
    def some(f):
        return lambda *inputs: [f(*inputs)[i] for i in used]

    def reference(x, y, gain):
        return x + y, rms_norm(x + y, gain) + 0 * gain, x + y

    x, y, gain = randn(2, 5, 16), randn(2, 5, 16, seed=1), 1 + 0.3 * randn(16, seed=2)
    if 1 in used:
        both(some(add_norm), some(reference), [x, y, gain])
    else:
        fixed = gain.double()
        both(lambda x, y: some(add_norm)(x, y, gain),
             lambda x, y: some(reference)(x, y, fixed), [x, y])


@pytest.mark.parametrize("n_kv", [0, 2])
def test_split_heads(n_kv):
    B, T, H, d = 2, 7, 4, 12
    cos, sin = rotary_tables(torch.randint(0, 50, (B, T)).to(DEVICE), d)
    gains = [1 + 0.3 * randn(d, seed=i) for i in range(2 if n_kv else 1)]

    def mine(x, *g):
        return norms.split_heads(x, H, Gain(g[0]), Gain(g[1]) if n_kv else None, cos, sin)

    def theirs(x, *g):
        return split_heads(x, H, g[0], g[1] if n_kv else None, cos, sin)

    both(mine, theirs,
         [randn(B, T, (H + 2 * n_kv) * d), *gains])


@pytest.mark.parametrize("columns", [slice(None), slice(1, None, 3), slice(2, 7)], ids=str)
def test_store_and_take(columns):
    """Into the cache and, of a gradient, out of it again; what lies beside is left alone."""
    C, B, S, Hkv, d = 3, 2, 10, 2, 12
    T = len(range(S)[columns])
    x, gain = randn(2, C, B, T, Hkv * d), 1 + 0.3 * randn(C, d, seed=1)
    cos, sin = rotary_tables(torch.randint(0, 50, (B, T)).to(DEVICE), d)
    cache = randn(2, C, B, S, Hkv, d, seed=2)
    dcache = randn(2, C, B, S, Hkv, d, seed=3)
    wide, wide_gain = x.double().requires_grad_(), gain.double().requires_grad_()
    k, v = wide.unflatten(-1, (Hkv, d)).unbind()
    k = norm_rotate(k, wide_gain[:, None, None, None], cos, sin)
    expected = cache.double()
    expected[:, :, :, columns] = torch.stack((k, v)).detach()
    grads = torch.autograd.grad((k, v), (wide, wide_gain), list(dcache.double()[:, :, :, columns]))

    norms.store(x, Gain(gain), cos, sin, columns, *cache)
    close(cache, expected)
    left = dcache.clone()
    for zeros in (False, True):
        if zeros:
            left[:, :, :, columns] = 0
        taken = norms.take(x, Gain(gain), cos, sin, columns, *dcache, zeros)
        for mine, theirs in zip(taken, grads):
            close(mine, theirs)
        assert torch.equal(dcache, left)


def test_store_at_a_column_for_each_row():
    C, B, S, d = 2, 3, 6, 8
    x, gain, cache = randn(2, C, B, 1, d), 1 + 0.3 * randn(C, d), torch.zeros(2, C, B, S, 1, d)
    cos, sin = rotary_tables(torch.arange(3)[:, None].to(DEVICE), d)
    columns = torch.tensor([[4], [0], [5]], device=DEVICE)
    cache = cache.to(DEVICE)
    norms.store(x, Gain(gain), cos, sin, columns, *cache)
    k = norm_rotate(x[0].unflatten(-1, (1, d)), gain[:, None, None, None], cos, sin)
    for b, column in enumerate(columns[:, 0]):
        close(cache[0, :, b, column], k[:, b, 0])
        close(cache[1, :, b, column, 0], x[1, :, b, 0])
        assert cache[:, :, b].any(-1).sum() == 2 * C  # nothing else is written


def test_sums_on_the_side_are_collected():
    """With rows of its own for each program, a gain's gradient is the same and comes at the end."""
    x, y, weight = randn(2, 22, 24), randn(2, 22, 24, seed=1), 1 + 0.3 * randn(24, seed=2)
    gains = [Gain(weight.clone().requires_grad_()) for _ in range(4)]
    frozen = gains[2].weight.requires_grad_(False)
    together = Gains(gains[1:], norms.PROGRAMS)
    for i, gain in enumerate(gains):
        for _ in range(2):
            z = norms.add_norm(x.requires_grad_(), y, gain)[1]
            ((i or 1) * z.square()).sum().backward()
    for _ in range(2):  # the second time there is nothing to add
        together.collect()
        for factor in (1, 3):
            close(gains[factor].weight.grad, factor * gains[0].weight.grad.double())
        assert frozen.grad is None and not together.partial.any()
    Gains(gains[2:3], norms.PROGRAMS).collect()
