"""What the paper says about the schedules, and what decoding relies on, as exact facts.

float64 throughout, with every part of the pool active; the reference for "exact" is
`autoregressive`, which test_oracle.py compares with the equations themselves.
"""

import gc

import pytest
import torch
from small import channels, random_tokens, small_model, with_documents

import attention
import kernels
from attention import Cache
from model import rotary_tables
from pool import WhiteMatter
from solvers import autoregressive, cyclic, interleave, jacobi, one_pass, solve

T = 12


def close(a, b, tol=1e-10):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def each_pass(solver, model, idx, n, **options):
    """States after 1, 2, .. n passes."""
    return [solver(model, idx, n_nograd=t, n_grad=0, **options).states for t in range(1, n + 1)]


# -- exactness of the schedules -------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("k", [1, 2, 3])
def test_jacobi_is_exact_for_t_tokens_after_t_passes(k):
    model, idx = small_model(n_channels=k), random_tokens(2, T)
    exact = autoregressive(model, idx).states
    for t, h in enumerate(each_pass(jacobi, model, idx, T), start=1):
        close(h[:, :t], exact[:, :t])
        if t < 5:  # and the test can fail: later tokens are not there yet
            assert (h[:, t:] - exact[:, t:]).abs().max() > 1e-4


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 7, T])
def test_cyclic_with_as_many_groups_as_tokens_is_autoregressive_in_one_pass(length):
    model, idx = small_model(n_channels=2), with_documents(random_tokens(2, length), [0], [])
    exact = autoregressive(model, idx)
    one = cyclic(model, idx, n_groups=length, n_nograd=0, n_grad=1)
    close(one.states, exact.states, 1e-13)
    close(channels(one.cache), channels(exact.cache), 1e-13)


def test_cyclic_with_as_many_groups_as_tokens_has_the_autoregressive_gradients():
    model, idx = small_model(), with_documents(random_tokens(2, 6), [2], [])
    targets, found = random_tokens(2, 6, seed=2), []
    for solution in (autoregressive(model, idx), cyclic(model, idx, 6, 0, 1)):
        loss = model.loss(solution.final, targets)
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    for a, b in zip(*found):
        close(a, b, 1e-11)


@torch.no_grad()
def test_cyclic_with_one_group_is_jacobi_pass_by_pass():
    model, idx = small_model(), with_documents(random_tokens(2, T), [3, 4], [8])
    for a, b in zip(each_pass(cyclic, model, idx, 5, n_groups=1),
                    each_pass(jacobi, model, idx, 5)):
        assert torch.equal(a, b)


@torch.no_grad()
@pytest.mark.parametrize("length, g", [(1, 1), (1, 4), (5, 8), (T, 5), (T, T + 1), (T, 2)])
def test_any_length_and_number_of_groups_converge_to_the_same_states(length, g):
    model, idx = small_model(n_channels=2), random_tokens(2, length)
    solution = cyclic(model, idx, g, n_nograd=length, n_grad=1)
    exact = autoregressive(model, idx)
    close(solution.states, exact.states)
    close(channels(solution.cache), channels(exact.cache))


@torch.no_grad()
def test_more_groups_reach_the_exact_prefix_sooner():
    """One cyclic pass makes the first g tokens exact, where a Jacobi pass makes one."""
    model, idx = small_model(), random_tokens(2, T)
    exact = autoregressive(model, idx).states
    for g in (2, 3, 4):
        for t, h in enumerate(each_pass(cyclic, model, idx, 3, n_groups=g), start=1):
            close(h[:, :g * t], exact[:, :g * t])


# -- causality and documents ----------------------------------------------------------------

SCHEDULES = [("autoregressive", {}),
             *(("jacobi", dict(n_nograd=n - 1, n_grad=1)) for n in (1, 3)),
             *(("cyclic", dict(n_groups=g, n_nograd=n - 1, n_grad=1))
               for g in (1, 2, 4, 5, T) for n in (1, 3))]
SOLVERS = dict(autoregressive=autoregressive, jacobi=jacobi, cyclic=cyclic)
every_schedule = pytest.mark.parametrize(
    "solver, options", SCHEDULES,
    ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.values())))


@torch.no_grad()
@every_schedule
@pytest.mark.parametrize("documents", [False, True])
def test_no_output_depends_on_a_later_token(solver, options, documents):
    model, idx = small_model(n_channels=2), random_tokens(2, T)
    idx = with_documents(idx, [2, 7], [0]) if documents else idx
    after, rows = (0, 1, 4, 6, T - 2), [idx]
    for t in after:
        changed = idx.clone()
        changed[:, t + 1:] = idx[:, t + 1:] % 12 + 1  # other ids; EOS tokens vanish with them
        rows.append(changed)
    a, *others = SOLVERS[solver](model, torch.cat(rows), **options).states.split(2)
    for t, b in zip(after, others, strict=True):
        close(a[:, :t + 1], b[:, :t + 1], 1e-12)
        assert (a[:, t + 1:] - b[:, t + 1:]).abs().max() > 1e-3


@torch.no_grad()
def test_a_token_does_not_read_its_own_channels():
    """With the cache entry of token i changed, query i computes the same and query i + 1 not."""
    model, idx = small_model(), random_tokens(1, T)
    rows, x = model.rows(idx), model.embed_tokens(idx)
    cache = jacobi(model, idx, 2, 0).cache
    h = torch.stack(model.states(x, rows, cache), 2)
    for i in (0, 5, T - 1):
        k, v = channels(cache)
        k[:, :, i] += 1
        v[:, :, i] += 1
        other = torch.stack(model.states(x, rows, Cache(list(k), list(v), cache.sink)), 2)
        assert torch.equal(h[:, :i + 1], other[:, :i + 1])
        # h[1] has read the cache once: what differs there was read directly
        assert ((h - other)[:, i + 1:, 1].abs().amax(-1) > 1e-6).all()


@torch.no_grad()
def test_a_vanilla_token_reads_itself():
    model, idx = small_model(kv="vanilla"), random_tokens(1, T)
    rows, q, v = model.rows(idx), torch.randn(1, T, 4, 6), torch.randn(1, T, 2, 6)
    out = attention.attend(q, v, v, rows)
    for i in (0, 5, T - 1):
        changed = v.clone()
        changed[:, i] += 1
        other = attention.attend(q, v, changed, rows)
        assert torch.equal(out[:, :i], other[:, :i])
        assert ((out - other)[:, i:].abs().amax((-1, -2)) > 1e-6).all()


def spans(*lengths):
    end = 0
    for n in lengths:
        yield slice(end, end + n)
        end += n


@torch.no_grad()
@pytest.mark.parametrize("given", [False, True], ids=["by EOS", "by ids"])
def test_a_packed_document_equals_the_document_alone(given):
    """Under Jacobi pass by pass; under cyclic, whose groups go by the row, once converged."""
    model, tokens = small_model(n_channels=2), random_tokens(1, T)
    documents = list(spans(4, 1, 5, 2))
    idx = tokens if given else with_documents(tokens, [3, 4, 9])
    doc = torch.tensor([[3] * 4 + [1] + [2] * 5 + [1] * 2]) if given else None
    packed = each_pass(jacobi, model, idx, 4, doc=doc)
    converged = cyclic(model, idx, 5, T, 1, doc=doc).states
    for s in documents:
        for a, b in zip(packed, each_pass(jacobi, model, idx[:, s], 4)):
            close(a[:, s], b)
        close(converged[:, s], autoregressive(model, idx[:, s]).states)
        close(autoregressive(model, idx, doc=doc).states[:, s], converged[:, s])


@torch.no_grad()
def test_a_packed_document_equals_the_document_alone_in_vanilla():
    model = small_model(kv="vanilla")
    idx = with_documents(random_tokens(1, T), [3, 4, 9])
    for s in spans(4, 1, 5, 2):
        close(one_pass(model, idx).states[:, s], one_pass(model, idx[:, s]).states)


def test_documents_and_positions():
    """An EOS belongs to the document it closes; tokens count from 1, the dummy sits at 0."""
    idx = torch.tensor([[5, 0, 0, 3, 4, 0], [0, 1, 2, 3, 4, 5]])
    for kv, first in (("whitematter", 1), ("vanilla", 0)):
        model = small_model(kv=kv)
        rows = model.rows(idx)
        assert rows.start.tolist() == [[0, 0, 2, 3, 3, 3], [0, 1, 1, 1, 1, 1]]
        position = first + torch.tensor([[0, 1, 0, 0, 1, 2], [0, 0, 1, 2, 3, 4]])
        cos, sin = rotary_tables(position, 6)
        assert torch.equal(rows.cos, cos) and torch.equal(rows.sin, sin)
    assert (small_model(eos_id=None).rows(idx).start == 0).all()


@pytest.mark.parametrize("solver, options", [
    ("autoregressive", {}), ("jacobi", {}), ("cyclic", dict(n_groups=4))])
def test_the_first_token_reads_exactly_the_dummys_value(monkeypatch, solver, options):
    """No row of the mask is empty, also where EOS is everywhere; all gradients are finite."""
    model, idx = small_model(n_channels=2), random_tokens(2, T)
    idx = with_documents(idx, [0, 1, 2, 9], range(T))  # the second row: documents of one token
    first = model.document_starts(idx) == torch.arange(T)
    seen, attend = [], model.attend

    def spy(layer, q, h, own, rows, cache):
        out = attend(layer, q, h, own, rows, cache)
        seen.append((layer, rows, out.detach()))
        return out

    monkeypatch.setattr(model, "attend", spy)
    solution = SOLVERS[solver](model, idx, **options)
    _, values = model.dummy_channels()  # (k, Hkv, d)
    values = values.detach().repeat_interleave(2, dim=1)  # (k, H, d)
    count = 0
    for layer, rows, out in seen:
        alone = first[:, rows.columns]
        expected = values[layer % 2].expand_as(out)  # layer l reads channel l mod k
        assert torch.equal(out[alone], expected[alone])
        assert not torch.isclose(out[~alone], expected[~alone]).all(-1).any()
        count += alone.sum().item()
    # the last of the 3 layers, which no channel is made of, runs in the last pass alone
    assert count == (solution.report.passes * 2 + 1) * first.sum().item()
    loss = model.loss(solution.final, random_tokens(2, T, seed=2))
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters())
    assert model.kv_pool.dummy.grad.abs().max() > 0


# -- tolerance and report -------------------------------------------------------------------


def until(solver, model, idx, tol, max_passes=50, **options):
    return solver(model, idx, n_nograd=max_passes, n_grad=0, tol=tol, **options)


# gradients on or off: `n_grad=0` must give the same either way
with_and_without_grad = pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad on"])
both_iterations = pytest.mark.parametrize(
    "solver, options", [(jacobi, {}), (cyclic, dict(n_groups=4))], ids=["jacobi", "cyclic"])


@both_iterations
@with_and_without_grad
def test_a_tolerance_stops_the_passes_and_is_reported(solver, options, grad):
    model, idx = small_model(), random_tokens(2, T)
    with torch.set_grad_enabled(grad):
        loose, tight = (until(solver, model, idx, tol, **options) for tol in (1e-2, 1e-6))
    for solution, tol in ((loose, 1e-2), (tight, 1e-6)):
        report = solution.report
        assert report.converged and report.tol == tol and report.residual <= tol
        assert len(report.residuals) == report.passes <= T + 1
        assert all(r > tol for r in report.residuals[:-1])  # it stopped at once
    assert loose.report.passes <= tight.report.passes
    close(tight.states, autoregressive(model, idx).states, 1e-4)


@both_iterations
@with_and_without_grad
def test_hitting_the_limit_of_passes_is_flagged(solver, options, grad):
    model, idx = small_model(), random_tokens(2, T)
    with torch.set_grad_enabled(grad):
        report = until(solver, model, idx, 1e-6, max_passes=1, **options).report
    assert report.passes == 1 and report.converged is False and report.residual > 1e-6


@both_iterations
@pytest.mark.parametrize("measure", [False, True])
def test_fixed_passes_are_done_exactly(solver, options, measure):
    model, idx = small_model(), random_tokens(1, 4)
    report = solver(model, idx, n_nograd=9, n_grad=2, measure=measure, **options).report
    assert report.passes == 11 and report.converged is None
    assert len(report.residuals) == (11 if measure else 0)


@both_iterations
def test_a_tolerance_never_costs_the_passes_with_gradients(solver, options):
    model, idx = small_model(), random_tokens(1, 4)
    top = []  # runs of the last block, which no channel is made of
    model.blocks[-1].mlp_norm.register_forward_hook(lambda *_: top.append(None))
    solution = solver(model, idx, n_nograd=50, n_grad=2, tol=1e-6, **options)
    assert solution.report.passes <= 5 + 2 and solution.report.converged
    assert len(top) == len(solution.parts)  # each group's in the last pass alone
    model.loss(solution.final, idx).backward()
    assert all(p.grad is not None for p in model.parameters())


@both_iterations
@pytest.mark.parametrize("passes", [(-1, 1), (1, -1), (0, 0)])
def test_impossible_numbers_of_passes_are_refused(solver, options, passes):
    with pytest.raises(ValueError, match=f"n_nograd={passes[0]}.*n_grad={passes[1]}"):
        solver(small_model(), random_tokens(1, 4), n_nograd=passes[0], n_grad=passes[1], **options)


def test_impossible_number_of_groups_is_refused():
    with pytest.raises(ValueError, match="n_groups=0"):
        cyclic(small_model(), random_tokens(1, 4), n_groups=0)


def test_solve_runs_the_schedule_of_the_config():
    model, idx = small_model(n_groups=3, n_nograd=2, n_grad=1), random_tokens(2, 5)
    assert torch.equal(solve(model, idx).states, cyclic(model, idx, 3, 2, 1).states)
    model = small_model(kv="vanilla")
    assert torch.equal(solve(model, idx).states, one_pass(model, idx).states)


# -- gradients through passes ---------------------------------------------------------------


def loss_of(model, idx, *options):
    return model.loss(cyclic(model, idx, *options, keep_cache=False, measure=False).final,
                      random_tokens(*idx.shape, seed=2))


@pytest.mark.parametrize("branch", ["key", "value"])
def test_gradient_of_a_router_bias_by_finite_differences(branch):
    """With gradients in all passes nothing is truncated: the derivative is the true one."""
    model, idx = small_model(), random_tokens(2, 6)
    bias = getattr(model.kv_pool, branch).bias
    loss_of(model, idx, 3, 0, 3).backward()
    step, at = 1e-5, (1, 2)
    sides = []
    with torch.no_grad():
        for sign in (1, -1):
            bias[at] += sign * step
            sides.append(loss_of(model, idx, 3, 0, 3).item())
            bias[at] -= sign * step
    slope = (sides[0] - sides[1]) / (2 * step)
    assert bias.grad[at].item() == pytest.approx(slope, rel=1e-4)


@pytest.mark.parametrize("truncation", [(0, 1), (1, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("router", ["dynamic", "static"])
def test_every_parameter_learns_whatever_is_truncated(truncation, router):
    model, idx = small_model(router=router), random_tokens(2, 6)
    loss_of(model, idx, 4, *truncation).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.any(), name


def test_a_fresh_model_learns_everything_too():
    """At the start router weights are 0, yet their gradients are not."""
    model, idx = small_model(), random_tokens(2, 6)
    model.init_weights()
    loss_of(model, idx, 4, 1, 2).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.any(), name


def two_phases(model, idx, g, n_nograd, n_grad):
    """`cyclic`, written out as passes without gradients and passes with them, each on a cache of
    its own that is filled from the states so far: h[L] of the groups."""
    x, groups = model.embed_tokens(idx), model.rows(idx).split(g)
    xs = [x[:, group.columns] for group in groups]
    parts = [[x] * (len(model.blocks) + 1) for x in xs]
    for n_passes, records in ((n_nograd, False), (n_grad, True)):
        with torch.set_grad_enabled(records):
            if n_nograd:
                parts = [[x.detach() for x in h] for h in parts]
            cache = model.new_cache(*idx.shape, like=x)
            for h, group in zip(parts, groups):
                model.refill(h, group, cache)
            for _ in range(n_passes):
                for q, group in enumerate(groups):
                    parts[q] = model.states(xs[q], group, cache)
                    model.store(parts[q], group, cache)
    return interleave([h[-1] for h in parts])


@pytest.mark.parametrize("truncation", [(0, 2), (1, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("sizes", [
    {}, dict(n_channels=2, router="static"), dict(n_channels=1, dummy=False),
    dict(kv="lckv", lckv_w=0), dict(kv="feedback"), dict(kv="recurrent")], ids=str)
def test_gradients_are_those_of_two_phases_that_fill_their_caches(truncation, sizes):
    model, idx = small_model(**sizes), with_documents(random_tokens(2, T), [2], [])
    final, targets = two_phases(model, idx, 3, *truncation), random_tokens(2, T, seed=2)
    expected = torch.autograd.grad(model.loss(final, targets), list(model.parameters()))
    solution = cyclic(model, idx, 3, *truncation)
    close(solution.final, final, 1e-13)
    found = torch.autograd.grad(model.loss(solution.final, targets), list(model.parameters()))
    for (name, _), a, b in zip(model.named_parameters(), found, expected):
        assert b.any() and (a - b).abs().max() <= 1e-12 * b.abs().max(), name


@pytest.mark.parametrize("sizes", [{}, dict(kv="lckv", lckv_w=1)], ids=str)
def test_a_tolerance_that_leaves_out_passes_leaves_gradients_as_they_are(sizes):
    """Then no stored value has recorded gradients before the first pass that does."""
    model, idx = small_model(**sizes), random_tokens(2, T)
    ended = cyclic(model, idx, 3, 9, 1, tol=0.1)
    n = ended.report.passes - 1
    assert 0 < n < 9
    found = []
    for solution in (ended, cyclic(model, idx, 3, n, 1)):
        model.zero_grad()
        model.loss(solution.final, random_tokens(2, T, seed=2)).backward()
        found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found):
        close(a, b, 1e-12)


@pytest.mark.parametrize("n_nograd, n_grad", [(0, 2), (1, 2), (3, 1)])
def test_how_often_the_pool_is_evaluated(n_nograd, n_grad):
    """Of H(0) and after each group step but the last; with gradients, of the states that passes
    with gradients start from, and after their steps."""
    model, idx, g, seen = small_model(), random_tokens(2, 12), 4, []
    model.kv_pool.register_forward_hook(
        lambda pool, args, out: seen.append((args[0][0].size(1), out[0].requires_grad)))
    loss_of(model, idx, g, n_nograd, n_grad)
    assert seen.count((1, True)) == 1 and seen.count((1, False)) == 0  # the dummy
    assert seen.count((3, True)) == g * (1 + n_grad) - 1
    assert seen.count((3, False)) == g * n_nograd


def saved_bytes(run):
    total = 0

    def pack(tensor):
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return total


@pytest.mark.parametrize("solver", [jacobi, cyclic])
def test_memory_does_not_grow_with_passes_without_gradients(solver):
    model, idx = small_model(), random_tokens(2, 9)
    used = [saved_bytes(lambda n=n: solver(model, idx, n_nograd=n, n_grad=2)) for n in (1, 2, 6)]
    assert used[0] == used[1] == used[2] > 0
    assert saved_bytes(lambda: solver(model, idx, n_nograd=1, n_grad=3)) > used[0]


@pytest.mark.parametrize("order", [
    lambda rows, g: [rows.at(slice(q, None, g)) for q in reversed(range(g))],  # strided, backwards
    lambda rows, g: [rows.at(slice(i, i + 3)) for i in range(0, 9, 3)]])  # blocks
def test_groups_in_another_order_come_to_the_same_solution(order, monkeypatch):
    """Whoever changes the order of updates gets every token's states in its own place."""
    model, idx = small_model(), random_tokens(2, 9)
    exact = autoregressive(model, idx).states
    monkeypatch.setattr(attention.Rows, "split", order)
    for n_passes in (9, 10):
        torch.testing.assert_close(cyclic(model, idx, 3, n_passes, 0).states, exact)


def test_a_pool_of_ones_own_mixes_the_dummy_too():
    class Twice(WhiteMatter):
        def pool(self, h, rows):
            return tuple(2 * x for x in super().pool(h, rows))

    model = small_model()
    other = Twice(model.config).double()
    other.load_state_dict(model.state_dict())
    for mine, theirs in zip(other.dummy_channels(), model.dummy_channels()):
        torch.testing.assert_close(mine, 2 * theirs)


def test_a_pool_of_ones_own_may_read_the_final_output():
    class Top(WhiteMatter):
        def pool(self, h, rows):
            return self.kv_pool([*h[:2], h[-1]], rows.cos, rows.sin)

    model, idx = small_model(), random_tokens(2, 7)
    other = Top(model.config).double()
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(jacobi(other, idx, 8, 0).states, autoregressive(other, idx).states)


@pytest.mark.parametrize("solver, options", [
    (jacobi, {}), (cyclic, dict(n_groups=3)), (cyclic, dict(n_groups=4))])
def test_no_grad_gives_the_same_states_as_gradients(solver, options):
    """Without gradients the cache is written in place; that may change nothing."""
    model, idx = small_model(n_channels=2), random_tokens(2, 8)
    a = solver(model, idx, n_nograd=1, n_grad=2, **options)
    with torch.no_grad():
        b = solver(model, idx, n_nograd=1, n_grad=2, **options)
    assert torch.equal(a.states, b.states)
    assert all(map(torch.equal, channels(a.cache), channels(b.cache)))


def test_compiled_gradients_equal_eager_ones(monkeypatch):
    """The same compiled functions serve the passes with and without gradients; two of them here,
    with another compiler behind them, as all would take half a minute."""
    model = small_model(n_layer=2, n_channels=2, n_groups=2, n_grad=1, dummy=False)
    idx = random_tokens(2, 6)

    def gradients(of):
        model.zero_grad()
        of.loss(solve(of, idx).final, idx).backward()
        return [p.grad.clone() for p in model.parameters()]

    eager, made, compile = gradients(model), [], torch.compile

    def counted(function, **options):
        made.append(function.__name__)
        return compile(function, backend="aot_eager", **options)

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", counted)
    monkeypatch.setattr(kernels, "PIECES", {"Pool": ("forward",)})
    compiled = kernels.compile_pieces(model)
    assert made == ["forward", "nats"]
    for _ in range(2):
        for a, b in zip(gradients(compiled), eager, strict=True):
            close(a, b, 1e-10)


# -- the cache and decoding -----------------------------------------------------------------


@torch.no_grad()
def decode(model, cache, tokens, length):
    """Feed tokens (B, n) one step at a time to rows that already hold `length` (B,) tokens each,
    as one document; returns states (B, n, L + 1, D) and the cache."""
    steps = []
    for t in range(tokens.size(1)):
        column = (torch.tensor(length) + t)[:, None]  # (B, 1): every row has its own
        rows = model.place(column, column, torch.zeros_like(column))
        h = model.states(model.embed_tokens(tokens[:, t:t + 1]), rows, cache)
        if model.iterates:
            cache.put(column, *model.pool(h, rows))
        steps.append(torch.stack(h, 2))
    return torch.cat(steps, 1), cache


def grow(cache, S):
    """The same cache with room for S tokens; the room holds garbage, which must not be read."""
    k, v = (torch.cat((t, torch.full_like(t[:, :, :1], 1e3).expand(-1, -1, S - t.size(2), -1, -1)),
                      dim=2) for t in channels(cache))
    return Cache(list(k), list(v), cache.sink)


@torch.no_grad()
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("prefill", ["nothing", "autoregressive", "jacobi", "cyclic"])
def test_cached_decoding_equals_the_full_computation(k, prefill):
    model, idx = small_model(n_channels=k), random_tokens(2, T)
    full = autoregressive(model, idx)
    n = 0 if prefill == "nothing" else 5
    if prefill == "nothing":
        cache = model.new_cache(2, T, like=full.states)
    elif prefill == "autoregressive":
        cache = grow(autoregressive(model, idx[:, :n]).cache, T)
    else:
        cache = grow(until(SOLVERS[prefill], model, idx[:, :n], 1e-13).cache, T)
    h, cache = decode(model, cache, idx[:, n:], [n, n])
    close(h, full.states[:, n:])
    close(channels(cache), channels(full.cache))
    assert channels(cache)[0].shape == (k, 2, T, 2, 6)  # k / L of a vanilla cache


@torch.no_grad()
@pytest.mark.parametrize("kv", ["whitematter", "vanilla"])
def test_rows_of_different_length_decode_together(kv):
    model, new = small_model(kv=kv, n_channels=2), random_tokens(2, 4, seed=3)
    prompts = [random_tokens(1, n, seed=n) for n in (3, 7)]
    solver = autoregressive if kv == "whitematter" else one_pass
    padded = torch.cat([torch.nn.functional.pad(p, (0, 7 - p.size(1)), value=1) for p in prompts])
    cache = grow(solver(model, padded).cache, 11)
    h, cache = decode(model, cache, new, [3, 7])
    for b, prompt in enumerate(prompts):
        alone = solver(model, torch.cat((prompt, new[b:b + 1]), dim=1))
        n = prompt.size(1)
        close(h[b], alone.states[0, n:])
        for ours, theirs in zip(channels(cache), channels(alone.cache)):
            close(ours[:, b, :n + 4], theirs[:, 0])


@torch.no_grad()
def test_decoding_inside_a_later_document():
    model, idx = small_model(), with_documents(random_tokens(1, 8), [2])
    full = autoregressive(model, idx)
    cache = grow(autoregressive(model, idx[:, :5]).cache, 8)
    start = torch.tensor([[3]])
    for i in range(5, 8):
        column = torch.tensor([[i]])
        rows = model.place(column, column, start)
        h = model.states(model.embed_tokens(idx[:, i:i + 1]), rows, cache)
        cache.put(column, *model.pool(h, rows))
        close(torch.stack(h, 2)[:, 0], full.states[:, i])


@both_iterations
@with_and_without_grad
@pytest.mark.parametrize("n", [1, 2])
def test_the_cache_belongs_to_the_returned_states(solver, options, grad, n):
    """Also after too few passes, and with n_grad=0 whether or not gradients are on."""
    model, idx = small_model(), random_tokens(2, 9)
    with torch.set_grad_enabled(grad):
        for passes in ((n, 0), (n - 1, 1)):
            solution = solver(model, idx, n_nograd=passes[0], n_grad=passes[1], **options)
            expected = model.pool(list(solution.states.unbind(2)), model.rows(idx))
            close(channels(solution.cache), expected)


@torch.no_grad()
def test_keep_cache_false_keeps_none_and_changes_nothing():
    model, idx = small_model(), random_tokens(2, 9)
    for solver in (jacobi, cyclic, autoregressive):
        a, b = solver(model, idx), solver(model, idx, keep_cache=False)
        assert b.cache is None and torch.equal(a.states, b.states)


def test_a_step_leaves_no_cache_behind():
    """What it has written and read is free at once, and not when Python looks for circles."""
    model, idx = small_model(), random_tokens(2, 9)

    def alive():
        return sum(isinstance(x, Cache) for x in gc.get_objects())

    gc.collect()
    before = alive()
    gc.disable()
    try:
        model.loss(solve(model, idx).final, idx).backward()
        assert alive() == before
    finally:
        gc.enable()


def test_reads_of_overwritten_keys_get_their_own_gradients():
    """While gradients are recorded, a write changes nothing that was read before."""
    model, idx = small_model(), random_tokens(1, 4)
    rows = model.rows(idx)
    q = torch.randn(1, 4, 4, 6, dtype=torch.float64)
    keys = [torch.randn(3, 1, 4, 2, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    cache, total, plain = model.new_cache(1, 4, like=q), 0, 0
    version = torch.zeros(3, 1, 4, 2, 6, dtype=torch.float64)
    sink = [s[1].detach() for s in cache.sink]
    cache.sink = [s.detach() for s in cache.sink]
    odd, two = slice(1, None, 2), slice(1, 3)
    for columns, i in ((slice(None), 0), (odd, 1), (odd, 0), (two, 1), (odd, 1), (slice(None), 0)):
        k = keys[i][:, :, columns]
        cache.put(columns, k, k)
        version = version.clone()
        version[:, :, columns] = k
        total = total + cache.attend(q, 1, rows).square().sum()
        plain = plain + attention.attend(q, version[1], version[1], rows, sink).square().sum()
    close(channels(cache)[0], version)
    close(total, plain)
    for a, b in zip(torch.autograd.grad(total, keys), torch.autograd.grad(plain, keys)):
        close(a, b)
    with torch.no_grad():
        memory = cache.k[0].data_ptr()
        cache.put(torch.tensor([[3]]), keys[1][:, :, :1], keys[1][:, :, :1])
    after = channels(cache)[0]
    assert cache.k[0].data_ptr() == memory  # in place where nothing is recorded
    assert torch.equal(after[:, :, 3], keys[1][:, :, 0])
    assert torch.equal(after[:, :, :3], version[:, :, :3])


@torch.no_grad()
@pytest.mark.parametrize("kv", ["whitematter", "vanilla", "recurrent"])
def test_attention_in_blocks_of_queries_is_attention(monkeypatch, kv):
    """Long prompts: no more pairs of a query and a key at a time than fit (mlx-vlm#1355)."""
    model, idx = small_model(kv=kv), with_documents(random_tokens(2, T), [3], [7])
    whole = cyclic(model, idx, 3, 3, 0).states
    monkeypatch.setattr(attention, "PAIRS", 2 * T * 4)
    close(cyclic(model, idx, 3, 3, 0).states, whole, 1e-12)


# -- precision ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, tol", [(torch.float32, 1e-4), (torch.bfloat16, 0.1),
                                        (torch.float16, 0.02)])
def test_lower_precision_stays_close(dtype, tol):
    """In every precision the angles are float32, whatever the model is cast to."""
    exact, idx = small_model(), random_tokens(2, 9)
    model = small_model().to(dtype)
    rows = model.rows(idx)
    assert rows.cos.dtype == rows.sin.dtype == torch.float32
    assert torch.equal(rows.cos, exact.rows(idx).cos)
    a, b = (cyclic(m, idx, 9, 0, 1) for m in (model, exact))
    assert a.states.dtype == a.cache.k[0].dtype == a.cache.v[0].dtype == dtype
    assert (a.final.double() - b.final).norm() / b.final.norm() < tol
    loss = model.loss(a.final, idx)
    loss.backward()
    assert loss.dtype == torch.float32 and all(p.grad.isfinite().all() for p in model.parameters())


def test_bfloat16_autocast_trains_and_decodes():
    """Weights in float32, products in bfloat16, on CPU as on GPU."""
    model, idx = small_model(dtype=torch.float32), random_tokens(2, 9)
    exact = small_model()
    with torch.autocast("cpu", torch.bfloat16):
        solution = cyclic(model, idx, 4, 1, 2)
        loss = model.loss(solution.final, idx)
        full = autoregressive(model, idx)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    reference = exact.loss(cyclic(exact, idx, 4, 1, 2).final, idx)
    assert loss.item() == pytest.approx(reference.item(), rel=0.1)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        start = cyclic(model, idx[:, :5], 5, 0, 1).cache
        h, _ = decode(model, grow(start, 9), idx[:, 5:], [5, 5])
    assert (h - full.states[:, 5:]).norm() / h.norm() < 0.1
