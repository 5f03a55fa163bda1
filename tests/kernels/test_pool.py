"""kernels/pool.py against float64 branches."""

import pytest
import torch
from interpreted import DEVICE, GPU
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import pool as pool_kernels
from model import ModelConfig, rms_norm
from pool import Branch

TOL = (5e-3, 5e-3) if GPU else (1e-5, 1e-4)  # a GPU multiplies float32 as tf32
CASES = {
    "k = L": dict(N=5, n_layer=4, n_channels=4, n_embd=32),
    "every third source": dict(N=4, n_layer=5, n_channels=2, n_embd=48, router_stride=3),
    "every source": dict(N=3, n_layer=3, n_channels=1, n_embd=16, router_stride=1),
    "17 sources": dict(N=3, n_layer=17, n_channels=4, n_embd=32),
    "static": dict(N=5, n_layer=4, n_channels=3, n_embd=32, router="static"),
    "one source": dict(N=2, n_layer=1, n_channels=1, n_embd=16),
}


@pytest.fixture(params=["blocks", "whole"])
def tiles(request, monkeypatch):
    """Tiles of some or of all columns, programs of two tokens, fewer programs than tokens."""
    elements = 256 if request.param == "blocks" else 8192
    monkeypatch.setattr(pool_kernels, "MULTIPROCESSORS", 1)
    monkeypatch.setattr(pool_kernels, "CONFIGS", {
        name: (2, elements, 4, 1) for name in pool_kernels.CONFIGS})


def case(N, dtype=torch.float32, seed=0, **sizes):
    """Two branches in float64 whose every parameter is random, L states, channel gradients."""
    r = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(shape, generator=r, dtype=torch.float64)  # noqa: E731
    c = ModelConfig(**{**dict(n_head=2, n_kv_head=1, head_dim=4), **sizes})
    branches = [Branch(c).double(), Branch(c).double()]
    for branch in branches:
        weights = dict(branch.named_parameters())
        for name in (n for n in ("pre_norm", "router.weight", "bias", "post_norm", "proj")
                     if n in weights):
            w = weights[name]
            x = randn(*w.shape)
            w.data = 1 + 0.3 * x if "norm" in name else x / w.size(-1) ** 0.5
            if not name.endswith("norm"):
                w.data = w.data.to(dtype).double()
        branch.to(DEVICE)
    size = torch.arange(1, c.n_layer + 1)[:, None, None] / 2  # sources are not of one scale
    states = (randn(c.n_layer, N, c.n_embd) * size).to(dtype).double()
    grad = randn(2 * c.n_channels, N, c.n_kv_head * c.head_dim).to(dtype).double()
    return branches, list(states.to(DEVICE)), grad.to(DEVICE)


def reference(branches, states):
    unit = rms_norm(torch.stack(states, 1)[None], None)
    return torch.cat([branch(unit)[:, 0] for branch in branches])


def folded_of(branches, dtype):
    return pool_kernels.Folded(pool_kernels.fold(*branches), branches[0].stride, dtype)


def ours(branches, states):
    return folded_of(branches, states[0].dtype).channels(states).flatten(0, 1)


def results(function, branches, states, grad):
    """Output, gradients of states, gradients of parameters."""
    states = [h.detach().requires_grad_() for h in states]
    for branch in branches:
        branch.zero_grad()
    out = function(branches, states)
    out.backward(grad.to(out.dtype))
    named = [x for b in branches for x in b.named_parameters()]
    return out.detach(), [h.grad for h in states], {f"{i} {n}": w.grad.clone()
                                                    for i, (n, w) in enumerate(named)}


def close(mine, theirs, tol, scale=None):
    assert mine.shape == theirs.shape and mine.isfinite().all()
    scale = theirs.norm() if scale is None else scale
    assert (mine.double() - theirs).norm() <= tol * scale


def check(dtype, tol, **sizes):
    branches, states, grad = case(dtype=dtype, **sizes)
    out, dh, dw = results(reference, branches, states, grad)
    for branch in branches:
        branch.float()
    states = [h.to(dtype) for h in states]
    mine, my_dh, my_dw = results(ours, branches, states, grad)
    close(mine, out, tol[0])
    for a, b in zip(my_dh, dh, strict=True):
        close(a, b, tol[1], max(b.norm(), 1e-3 * torch.stack(dh).norm()))
    for name in dw:
        # the norm divides a single source's weight away: of what is left of its gradient, a
        # hundredth of the others, tf32 has hardly a digit
        if not (GPU and sizes["n_layer"] == 1 and name.endswith(("bias", "router.weight"))):
            close(my_dw[name], dw[name], tol[1])


@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
def test_against_branches(sizes, tiles):
    check(torch.float32, TOL, **sizes)


def test_views_of_stacked_states(tiles):
    """Bit for bit the same as separate tensors, whichever way they are stacked."""
    branches, states, _ = case(N=4, n_layer=3, n_channels=3, n_embd=32)
    branches, states = [b.float() for b in branches], [h.float() for h in states]
    expected = ours(branches, states)
    for dim in (0, 1):
        assert ours(branches, torch.stack(states, dim).unbind(dim)).equal(expected)
    # one state as a column of a longer row, as a solver that goes token by token has it
    for tokens in (4, 1):
        few = [h[:tokens] for h in states]
        wide = torch.stack((few[0], few[1]), 1)
        column = ours(branches, [wide[:, :1], *few[1:]]).flatten(1, 2)
        assert column.equal(ours(branches, few))
    rows = [h.unflatten(0, (2, 2)) for h in states]
    assert ours(branches, rows).flatten(1, 2).equal(expected)


def test_evaluations_add_up(tiles):
    """Gradients of two evaluations, the first on fewer tokens, are one sum."""
    branches, states, grad = case(N=4, n_layer=4, n_channels=4, n_embd=16)
    for b in branches:
        b.float()
    states = [h.float() for h in states]

    def twice(branches, states):
        folded = folded_of(branches, states[0].dtype)
        first = folded.channels([h[:1] for h in states]).flatten(0, 1)
        return torch.cat([first, folded.channels(states).flatten(0, 1)], 1)

    def apart(branches, states):
        return torch.cat([ours(branches, [h[:1] for h in states]), ours(branches, states)], 1)

    grad = torch.cat([grad[:, :1], grad], 1)
    out, dh, dw = results(twice, branches, states, grad)
    expected, dh_expected, dw_expected = results(apart, branches, states, grad)
    assert out.equal(expected)
    for a, b in zip((*dh, *dw.values()), (*dh_expected, *dw_expected.values()), strict=True):
        close(a, b.double(), 1e-5)


class Shapes(TorchDispatchMode):
    """Of the tensors that are made."""

    def __init__(self):
        super().__init__()
        self.made = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.made.add(tuple(out.shape))
        return out


@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
def test_one_state_as_all_sources(sizes, tiles):
    """H(0), where no gradients are recorded: it is read once."""
    branches, states, _ = case(**sizes | dict(N=7))
    (N, D), n = states[0].shape, len(states)
    inputs = -(-n // branches[0].stride)
    expected = reference(branches, [states[0]] * n)
    branches, h = [b.float() for b in branches], states[0].float()
    with torch.no_grad(), Shapes() as shapes:
        close(ours(branches, [h] * n), expected.detach(), TOL[0])
        once = shapes.made.copy()
        ours(branches, [h, *(h.clone() for _ in range(n - 1))])
    if inputs > 1 and branches[0].router is not None:
        assert (N, inputs * D) in shapes.made - once


@pytest.mark.parametrize("router", ["dynamic", "static"])
def test_states_that_are_constants(router, tiles):
    """They get no gradient, and none is computed; the weights' are the same."""
    branches, states, grad = case(N=5, n_layer=4, n_channels=3, n_embd=32, router=router)
    weights, found = [w for b in branches for w in b.float().parameters()], []
    for constant in (False, True):
        h = [x.float().requires_grad_(not constant) for x in states]
        out = ours(branches, h)
        with Shapes() as shapes:
            found.append(torch.autograd.grad(out, weights, grad.float()))
        assert ((4, 5, 32) in shapes.made) == (not constant)  # of the states
        # of the router's two inputs
        assert ((5, 2 * 32) in shapes.made) == (not constant and router == "dynamic")
    for mine, theirs in zip(found[1], found[0]):
        close(mine, theirs.double(), 1e-6)


def test_wrong_arguments():
    branches, states, _ = case(N=4, n_layer=3, n_channels=3, n_embd=32)
    folded = folded_of([b.float() for b in branches], torch.float32)
    states = [h.float() for h in states]
    with pytest.raises(ValueError, match="are needed"):
        folded.channels([*states[:2], states[2].double()])
    with pytest.raises(ValueError, match="float64"):
        folded.channels([h.double() for h in states])
    with pytest.raises(ValueError, match="router"):
        folded.router = folded.router[:, 32:]
        folded.channels(states)
    folded.gain = folded.gain[..., :24]
    with pytest.raises(ValueError, match="multiple of 16"):
        folded.channels([h[:, :24] for h in states])


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize("sizes", [
    dict(n_layer=16, n_channels=16), dict(n_layer=16, n_channels=8), dict(n_layer=24, n_channels=2),
    dict(n_layer=16, n_channels=1, router="static"), dict(n_layer=32, n_channels=32),
    dict(n_layer=20, n_channels=4, n_embd=2048),
    dict(n_layer=5, n_channels=5, n_embd=768, router_stride=1)], ids=str)
def test_bfloat16(sizes):
    check(torch.bfloat16, (2e-2, 2e-2), **{**dict(N=300, n_embd=512), **sizes})


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
def test_captured_in_a_graph():
    branches, states, grad = case(N=256, dtype=torch.bfloat16, n_layer=8, n_channels=8,
                                     n_embd=512)
    for b in branches:
        b.float()
    states = [h.bfloat16().requires_grad_() for h in states]
    weights = [w for b in branches for w in b.parameters()]

    def step():
        out = ours(branches, states)
        return out, *torch.autograd.grad(out, (*states, *weights), grad.bfloat16())

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for h in states:
            h.mul_(1.25).add_(0.5)
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        close(a, b.double(), 1e-2)
