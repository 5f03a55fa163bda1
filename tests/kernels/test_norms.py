"""norm_kernels.py against the plain functions of model.py in float64, and the whole fast path."""

import pytest
import torch
from interpreted import DEVICE, GPU
from small import with_documents

import attention
import baselines
import model as plain
import pool
from kernels import norms as norm_kernels
from kernels import pool as pool_kernels
from model import (
    ModelConfig,
    add_partial_gradients,
    add_partials,
    rms_norm,
    set_compute_copies,
)
from solvers import cyclic, jacobi, solve
from train import flat_gradient

TOL = 1e-5
HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """More blocks than programs, and blocks that are not full."""
    monkeypatch.setattr(norm_kernels, "PROGRAMS", 2)
    monkeypatch.setattr(norm_kernels, "STORE_PROGRAMS", 2)
    monkeypatch.setattr(norm_kernels, "CONFIGS", {name: (4, 4) for name in norm_kernels.CONFIGS})


@pytest.fixture
def large_blocks(monkeypatch):
    """The interpreter's time goes by programs."""
    monkeypatch.setattr(norm_kernels, "CONFIGS", {name: (32, 4) for name in norm_kernels.CONFIGS})
    monkeypatch.setattr(pool_kernels, "CONFIGS", {
        name: (8, 8192, 4, 1, None) for name in pool_kernels.CONFIGS})


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def close(mine, theirs, tol=TOL):
    assert mine.shape == theirs.shape
    assert (mine.double() - theirs.double()).norm() <= tol * theirs.double().norm()


def gradients(outputs, inputs, seed=7):
    """Gradients of a random functional of the outputs."""
    total = sum((o * randn(*o.shape, seed=seed + i).to(o.dtype)).sum()
                for i, o in enumerate(outputs) if o is not None)
    return torch.autograd.grad(total, inputs)


def both(mine, reference, inputs, tol=TOL):
    """Outputs and gradients of a float32 function against a float64 one."""
    a = [x.clone().requires_grad_() for x in inputs]
    b = [x.double().requires_grad_() for x in inputs]
    out_a, out_b = mine(*a), reference(*b)
    for x, y in zip((*out_a, *gradients(out_a, a)), (*out_b, *gradients(out_b, b)), strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            close(x, y, tol)


@pytest.mark.parametrize("N", [3, 22])
def test_add_norm(N):
    def reference(x, y, gain):
        return x + y, rms_norm(x + y, gain), x + y

    both(norm_kernels.add_norm, reference, [randn(2, N, 24), randn(2, N, 24, seed=1),
                                            1 + 0.3 * randn(24, seed=2)])


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
def test_add_norm_where_not_all_is_read(used):
    """No gradient is not a gradient of zeros, and either must do."""
    def some(f):
        return lambda *inputs: [f(*inputs)[i] for i in used]

    def reference(x, y, gain):
        return x + y, rms_norm(x + y, gain) + 0 * gain, x + y

    x, y, gain = randn(2, 5, 16), randn(2, 5, 16, seed=1), 1 + 0.3 * randn(16, seed=2)
    if 1 in used:
        both(some(norm_kernels.add_norm), some(reference), [x, y, gain])
    else:
        fixed = gain.double()
        both(lambda x, y: some(norm_kernels.add_norm)(x, y, gain),
             lambda x, y: some(reference)(x, y, fixed), [x, y])


@pytest.mark.parametrize("n_kv", [0, 2])
def test_split_heads(n_kv):
    B, T, H, d = 2, 7, 4, 12
    cos, sin = plain.rotary_tables(torch.randint(0, 50, (B, T)).to(DEVICE), d)
    gains = [1 + 0.3 * randn(d, seed=i) for i in range(2 if n_kv else 1)]

    def call(f):
        return lambda x, *g: f(x, H, g[0], g[1] if n_kv else None, cos, sin)

    both(call(norm_kernels.split_heads), call(plain.split_heads),
         [randn(B, T, (H + 2 * n_kv) * d), *gains])


@pytest.mark.parametrize("columns", [slice(None), slice(1, None, 3), slice(2, 7)], ids=str)
def test_store_and_take(columns):
    """Into the cache and, of a gradient, out of it again; what lies beside is left alone."""
    C, B, S, Hkv, d = 3, 2, 10, 2, 12
    T = len(range(S)[columns])
    x, gain = randn(2, C, B, T, Hkv * d), 1 + 0.3 * randn(C, d, seed=1)
    cos, sin = plain.rotary_tables(torch.randint(0, 50, (B, T)).to(DEVICE), d)
    cache = randn(2, C, B, S, Hkv, d, seed=2)
    dcache = randn(2, C, B, S, Hkv, d, seed=3)
    wide, wide_gain = x.double().requires_grad_(), gain.double().requires_grad_()
    k, v = wide.unflatten(-1, (Hkv, d)).unbind()
    k = plain.norm_rotate(k, wide_gain[:, None, None, None], cos, sin)
    expected = cache.double()
    expected[:, :, :, columns] = torch.stack((k, v)).detach()
    grads = torch.autograd.grad((k, v), (wide, wide_gain), list(dcache.double()[:, :, :, columns]))

    norm_kernels.store(x, gain, cos, sin, columns, *cache)
    close(cache, expected)
    left = dcache.clone()
    left[:, :, :, columns] = 0
    for mine, theirs in zip(norm_kernels.take(x, gain, cos, sin, columns, *dcache), grads):
        close(mine, theirs)
    assert torch.equal(dcache, left)


def test_store_at_a_column_for_each_row():
    C, B, S, d = 2, 3, 6, 8
    x, gain, cache = randn(2, C, B, 1, d), 1 + 0.3 * randn(C, d), torch.zeros(2, C, B, S, 1, d)
    cos, sin = plain.rotary_tables(torch.arange(3)[:, None].to(DEVICE), d)
    columns = torch.tensor([[4], [0], [5]], device=DEVICE)
    cache = cache.to(DEVICE)
    norm_kernels.store(x, gain, cos, sin, columns, *cache)
    k = plain.norm_rotate(x[0].unflatten(-1, (1, d)), gain[:, None, None, None], cos, sin)
    for b, column in enumerate(columns[:, 0]):
        close(cache[0, :, b, column], k[:, b, 0])
        close(cache[1, :, b, column, 0], x[1, :, b, 0])
        assert cache[:, :, b].any(-1).sum() == 2 * C  # nothing else is written


# ---- everything together: a model on the fast path, against the same model without it


def model_and_batch(kv="whitematter", k=2, n_layer=2, n_groups=2, **options):
    torch.manual_seed(3)
    sizes = dict(vocab_size=24, eos_id=0, n_layer=n_layer, n_embd=16, n_head=4, n_kv_head=2,
                 head_dim=16, n_hidden=32, kv=kv, n_channels=k, n_groups=n_groups, **options)
    model = pool.build(ModelConfig(**sizes)).to(DEVICE)
    with torch.no_grad():
        for name, p in model.named_parameters():
            small = 0.2 if p.dim() == 1 or "norm" in name or "bias" in name else 0.1
            p.add_(small * randn(*p.shape, seed=len(name)))
    idx = with_documents(torch.randint(1, 24, (1, 6)), (2,)).to(DEVICE)
    return model, idx, torch.randint(1, 24, (1, 6)).to(DEVICE)


def loss_and_gradient(model, idx, targets, solver):
    flat = flat_gradient(model)
    flat.zero_()
    loss = model.loss(solver(model, idx), targets)
    loss.backward()
    add_partial_gradients(model)
    return loss.detach(), flat.clone()


SOLVERS = {"cyclic": lambda m, x: cyclic(m, x, 2, 1, 2, keep_cache=False).final,
           "cyclic, all passes with gradients": lambda m, x: cyclic(m, x, 3, 0, 2).final,
           "jacobi": lambda m, x: jacobi(m, x, 1, 2).final}


@pytest.mark.skipif(GPU, reason="in float32 here; on a GPU test_fast_path_on_gpu does it")
@pytest.mark.parametrize("k, solver, partials", [
    (2, "cyclic", True), (1, "cyclic, all passes with gradients", False), (2, "jacobi", False)])
def test_fast_path_equals_the_plain_one(k, solver, partials, monkeypatch, large_blocks):
    model, idx, targets = model_and_batch("whitematter", k)
    expected = loss_and_gradient(model, idx, targets, SOLVERS[solver])
    for module in (attention, plain, pool):
        monkeypatch.setattr(module, "is_fast", lambda x: True)
    if partials:
        add_partials(model, always=True)
    for mine, theirs in zip(loss_and_gradient(model, idx, targets, SOLVERS[solver]), expected):
        close(mine, theirs, 1e-4)


@pytest.mark.skipif(GPU, reason="in float32 here; on a GPU test_fast_path_on_gpu does it")
@pytest.mark.parametrize("partials", [False, True])
def test_fast_path_of_vanilla(partials, monkeypatch, large_blocks):
    model, idx, targets = model_and_batch("vanilla", 2)

    def solver(m, x):
        return m.states(m.embed_tokens(x), m.rows(x))[-1]

    expected = loss_and_gradient(model, idx, targets, solver)
    for module in (attention, plain, pool):
        monkeypatch.setattr(module, "is_fast", lambda x: True)
    if partials:
        add_partials(model, always=True)
    for mine, theirs in zip(loss_and_gradient(model, idx, targets, solver), expected):
        close(mine, theirs, 1e-4)


OTHERS = {"nofeedback": dict(kv="nofeedback"), "lckv": dict(kv="lckv", lckv_w=1, n_groups=1),
          "feedback": dict(kv="feedback"), "recurrent": dict(kv="recurrent"),
          "fusedkv": dict(kv="fusedkv"), "fusedkv_lite": dict(kv="fusedkv_lite"),
          # one pass is enough for these: what differs is the pool
          **{name: dict(n_nograd=0, n_grad=1, **option) for name, option in (
              ("static", dict(router="static")), ("top output", dict(top_output=True)),
              ("no dummy", dict(dummy=False)))}}


@pytest.mark.skipif(GPU, reason="in float32 here; on a GPU test_fast_path_on_gpu does it")
@pytest.mark.parametrize("name", OTHERS)
def test_fast_path_of_other_systems(name, monkeypatch, large_blocks):
    """With the copies of weights and the sums of gradients that CUDA trains with."""
    model, idx, targets = model_and_batch(**OTHERS[name], k=3, n_layer=3)

    def solver(m, x):
        return solve(m, x).final

    expected = loss_and_gradient(model, idx, targets, solver)
    for module in (attention, plain, pool, baselines):
        monkeypatch.setattr(module, "is_fast", lambda x: True)
    set_compute_copies(model, torch.float32)
    add_partials(model, always=True)
    for mine, theirs in zip(loss_and_gradient(model, idx, targets, solver), expected):
        close(mine, theirs, 1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize("name", ["whitematter", "vanilla", *OTHERS])
def test_fast_path_on_gpu(name, monkeypatch):
    """In bfloat16 the kernels are as close to float64 as the plain path is. How close that is
    depends on the system: iterated, rounding may be amplified."""
    model, idx, targets = model_and_batch(**OTHERS.get(name, dict(kv=name)), k=3, n_layer=3)

    def solver(m, x):
        return solve(m, x).final

    fast = loss_and_gradient(model.to(HALF), idx, targets, solver)
    for module in (attention, plain, pool, baselines):
        monkeypatch.setattr(module, "is_fast", lambda x: False)
    slow = loss_and_gradient(model, idx, targets, solver)
    exact = loss_and_gradient(model.double(), idx, targets, solver)
    for mine, theirs, true in zip(fast, slow, exact):
        error, usual = ((x.double() - true).norm() / true.norm() for x in (mine, theirs))
        assert error < 2 * usual + 0.005, (error, usual)
