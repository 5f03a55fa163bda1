"""The systems that WhiteMatter is compared with: their equations, their caches, their sizes."""

import unittest.mock
from pathlib import Path

import oracle_baselines
import pytest
import torch
from oracle import document_ids, stack
from small import SMALL, channels, random_tokens, small_model, with_documents

from baselines import build, lckv_sources, plan
from configurator import parse
from decoding import step
from measure.flops import MODES, count_flops, flops_per_token
from measure.systems import named
from model import ModelConfig, rotary_tables, rotate
from running.optimizers import make_optimizers
from running.settings import TrainConfig
from running.start import model_config
from solvers import autoregressive, cyclic, jacobi, one_pass, solve

ROOT = Path(__file__).parent.parent

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


# documents break at different columns, some after a single token
ROWS = with_documents(random_tokens(2, 5), [1, 3], [0])


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
        grad = oracle.p[key.removesuffix(".weight")].grad
        if key == "memory.weights" and options == (0, 1):  # they sum to 1, over equal states
            assert grad.abs().max() < 1e-12 and p.grad.abs().max() < 1e-12
            continue
        assert grad is not None and grad.abs().max() > 1e-8, f"{key}: the oracle has no gradient"
        assert p.grad is not None, f"{key} gets no gradient"
        error = (p.grad - grad).abs().max().item() / grad.abs().max().item()
        assert error <= 1e-8, f"{key}: gradient off by {error:.1e} of its scale"
    return oracle, solution, traces


@pytest.mark.parametrize("name", ONE_PASS)
def test_the_equations_of_one_pass(name):
    check(name, one_pass, "one_pass", ROWS)


@pytest.mark.parametrize("name", ONE_PASS)
@pytest.mark.parametrize("solver, options", [(autoregressive, ()), (jacobi, (0, 1)),
                                             (cyclic, (3, 1, 2))], ids=["ar", "jacobi", "cyclic"])
def test_no_solver_iterates_what_is_exact_in_one_pass(name, solver, options):
    model, targets, results = make(name), random_tokens(*ROWS.shape, seed=2), []
    for solution in (one_pass(model, ROWS), solver(model, ROWS, *options)):
        grads = torch.autograd.grad(model.loss(solution.final, targets), list(model.parameters()))
        results.append((solution.states, *channels(solution.cache), *grads))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("name", ITERATED)
def test_the_equations_token_by_token(name):
    check(name, autoregressive, "autoregressive", ROWS)


@pytest.mark.parametrize("name", ITERATED)
def test_the_equations_of_jacobi_passes(name):
    check(name, jacobi, "jacobi", ROWS, (1, 2))


@pytest.mark.parametrize("name", ITERATED)
@pytest.mark.parametrize("truncation", [(0, 2), (1, 1)], ids=str)
def test_the_equations_of_cyclic_passes(name, truncation):
    oracle, solution, traces = check(name, cyclic, "cyclic", ROWS, (2, *truncation))
    residual = solution.report.residuals[-1]
    if isinstance(oracle, oracle_baselines.LCKV):
        assert residual > 0
        return
    # of the states that the channels are made of
    new, old = (stack([trace[n] for trace in traces])[:, :, oracle.residual_of()]
                for n in (-1, -2))
    assert residual == pytest.approx(((new - old).norm() / new.norm()).item(), rel=1e-9)


def test_the_residual_of_lckv_is_that_of_the_source_layers_input():
    model, idx = make("lckv, w=3"), random_tokens(2, 6)
    a, b = (jacobi(model, idx, n, 0) for n in (2, 3))
    new, old = b.states[:, :, 3], a.states[:, :, 3]
    assert b.report.residuals[2] == pytest.approx(((new - old).norm() / new.norm()).item())
    assert len(b.report.residuals) == 3
    exact = jacobi(model, idx, 20, 0, tol=1e-12)
    assert exact.report.converged and exact.report.passes <= 7  # T passes are exact, one notices


# -- claims ---------------------------------------------------------------------------------


def solution_of(model, idx, exact=False, **options):
    """By the schedule of training, or converged."""
    if not exact:
        return solve(model, idx, keep_cache=True, **options)
    return autoregressive(model, idx, **options) if model.iterates else one_pass(
        model, idx, **options)


@torch.no_grad()
@every_system
def test_no_output_depends_on_a_later_token(name):
    model, idx = make(name), random_tokens(2, 9)
    before = solve(model, idx).states
    for t in (1, 4, 8):
        other = idx.clone()
        other[:, t:] = other[:, t:] % 12 + 1
        after = solve(model, other).states
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.isclose(after[:, t:], before[:, t:]).all(-1).any()


@torch.no_grad()
@every_system
def test_decoding_on_the_cache_is_the_whole_computation(name):
    """Half of each row is prefilled, the rest decoded, in rows of different documents."""
    model, idx = make(name), with_documents(random_tokens(2, 9), [1, 6], [3])
    whole = solution_of(model, idx, exact=True)
    start = model.document_starts(idx)
    half = solution_of(model, idx[:, :4], exact=True)
    cache = model.new_cache(2, 9, like=model.norm.weight)
    cache.put(slice(0, 4), *channels(half.cache))
    for i in range(4, 9):
        index = torch.full((2,), i)
        h = step(model, cache, idx[:, i], index, start[:, i])
        torch.testing.assert_close(h, whole.final[:, i], rtol=1e-9, atol=1e-9)
    for ours, theirs in zip(channels(cache), channels(whole.cache)):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@every_system
def test_packed_documents_equal_separate_ones(name):
    """Exact solutions; Jacobi passes too, one by one."""
    model, idx = make(name), with_documents(random_tokens(1, 9), [3])
    schedules = [autoregressive, lambda *a: jacobi(*a, 2, 0)] if model.iterates else [one_pass]
    for schedule in schedules:
        packed = schedule(model, idx)
        for part in (slice(0, 4), slice(4, 9)):
            alone = schedule(model, idx[:, part])
            torch.testing.assert_close(packed.states[:, part], alone.states, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(channels(packed.cache)[0][:, :, part],
                                       channels(alone.cache)[0], rtol=1e-9, atol=1e-9)


@torch.no_grad()
@every_system
def test_one_stack_pass_decodes_a_token_and_the_plan_names_the_passes(name):
    """Calls of each block: once if nothing iterates; else the iterated layers in every pass."""
    model, idx = make(name, n_nograd=2, n_grad=1, n_groups=1), random_tokens(1, 6)
    calls = [0] * model.config.n_layer
    for layer, block in enumerate(model.blocks):
        def counted(*args, layer=layer, queries=block.queries):
            calls[layer] += 1
            return queries(*args)
        block.queries = counted
    solution = solve(model, idx, keep_cache=True)
    wiring = plan(model.config)
    first, end = wiring.iterated
    assert wiring.iterates == model.iterates
    repeated = range(first, end - model.n_top if wiring.iterates else first)
    expected = [3 if n in repeated else 1 for n in range(len(calls))]
    assert calls == expected and solution.report.passes == max(expected)
    calls[:] = [0] * len(calls)
    cache = model.new_cache(1, 7, like=model.norm.weight)
    step(model, cache, idx[:, 0], torch.tensor([6]), torch.tensor([0]))
    assert calls == [1] * len(calls)


def test_lckv_iterates_the_condensed_layers_alone():
    assert plan(ModelConfig(kv="lckv", lckv_w=4)).iterated == (2, 14)
    assert plan(ModelConfig(kv="lckv", lckv_w=7)).iterated == (3, 12)
    assert lckv_sources(ModelConfig(kv="lckv")) == [0, 1, *[13] * 12, 14, 15]
    assert lckv_sources(ModelConfig(kv="lckv", lckv_w=7)) == [0, 1, 2, *[11] * 9, 12, 13, 14, 15]


@torch.no_grad()
def test_fused_scores_depend_on_relative_positions_alone():
    """Fused keys of one content, shifted together with the query: the same score."""
    torch.manual_seed(0)  # with which no score is nearly 0
    model = make("fusedkv")
    q, *kv = torch.randn(5, 1, 2, 2, 6, dtype=torch.float64)

    def score(shift):
        cos, sin = rotary_tables(torch.tensor([[3, 8]]) + shift, 6)
        turned = rotate(q, cos, sin)[:, 1]
        bottom, middle = ((rotate(k, cos, sin), v) for k, v in (kv[:2], kv[2:]))
        keys, _ = model.fuse(3, bottom, middle)
        return (turned * keys[:, 0]).sum(-1)

    torch.testing.assert_close(score(40), score(0), rtol=1e-4, atol=1e-4)
    model.fuse_key.data = torch.randn(2, 2, 2, 6, dtype=torch.float64)[..., :3]
    assert score(0).abs().min() > 1e-3


def test_fused_weights_start_as_an_expanded_chain():
    torch.manual_seed(3)
    model = build(ModelConfig(kv="fusedkv", n_layer=8, n_embd=16, n_hidden=16, vocab_size=16))
    torch.manual_seed(0)
    fresh = {name: torch.randn(4, 2, 3, d) for name, d in (("fuse_key", 48), ("fuse_value", 96))}
    with unittest.mock.patch("torch.nn.init.normal_", side_effect=lambda w, **_: w.copy_(
            fresh.get("fuse_key" if w.shape[-1] == 48 else "fuse_value", w))
            if w.dim() == 4 else w):
        model.init_weights()
    bottom, middle = (torch.randn(3, 48) for _ in range(2))
    for name, anchor in (("fuse_key", middle), ("fuse_value", bottom)):
        draws = fresh[name][..., :48]
        read = draws[0, 0] * bottom + draws[0, 1] * middle
        for n in range(4):
            if n:
                read = draws[n, 0] * read + draws[n, 1] * anchor
            w = getattr(model, name)[n, ..., :48]
            torch.testing.assert_close(w[0] * bottom + w[1] * middle, read)


# -- sizes, caches, settings ----------------------------------------------------------------


def wm16(k, inputs=8):
    """Blocks without keys and values, and the pool: gains, router, bias, projections; dummy."""
    branch = 16 * 512 + k * 16 * inputs * 512 + k * 16 + k * 512 + k * 288 * 512
    return 51_924_480 - 16 * 295_008 + 2 * branch + k * 96 + 512


@pytest.mark.parametrize("name, count, n_channels", [
    ("lckv16_w4", 48_679_392, 5), ("lckv16_w7", 49_564_416, 8), ("fusedkv16", 49_571_328, 8),
    ("fusedkv16_lite", 49_564_416, 8), ("nofeedback16", 54_055_424, 16),
    ("recurrent16", 51_924_480, 16), ("feedback16", 51_924_480 - 15 * 295_008 + 17, 1),
    ("static16", 54_055_424 - 2 * 16 * 16 * 8 * 512, 16), ("static16_k1", wm16(1, 0), 1),
    *((f"wm16_k{k}", wm16(k), k) for k in (12, 4, 2, 1))])
def test_the_papers_configs(name, count, n_channels):
    """Parameters without the embedding; a cache of so many channels."""
    c = parse(TrainConfig(), [str(ROOT / "config" / f"{name}.py")], "")
    assert c.out_dir == f"out/{name}" and c.max_iters == 30518
    assert c.batch_size * c.gradient_accumulation_steps * c.block_size == 128 * 2048
    config = model_config(c, {"vocab_size": 151936, "eos_id": 3})
    with torch.device("meta"):
        model = build(config)
        cache = model.new_cache(1, 4, like=model.norm.weight)
    assert model.n_params() == count
    assert len(cache.k) == len(cache.v) == n_channels
    assert all(x.shape == (1, 4, 3, 96) for x in (*cache.k, *cache.v))
    assert len(plan(config).channels) == n_channels
    schedule = config.n_groups, config.n_nograd, config.n_grad
    assert schedule == ((1, 7, 2) if "lckv" in name else (8, 1, 2))


@pytest.mark.parametrize("name, settings", [
    ("vanilla", dict(kv="vanilla", n_channels=16)),
    ("k4", dict(kv="whitematter", router="dynamic", n_channels=4)),
    ("static1", dict(kv="whitematter", router="static", n_channels=1)),
    ("lckv7", dict(kv="lckv", lckv_w=7, n_groups=1, n_nograd=7, n_grad=2)),
    *((name, dict(kv=name, n_channels=16)) for name in (
        "nofeedback", "feedback", "recurrent", "fusedkv", "fusedkv_lite"))])
def test_short_names(name, settings):
    assert named(name, 16) == settings
    build(ModelConfig(**{**SMALL, "n_layer": 16, **settings}))


@pytest.mark.parametrize("name", ["", "16", "k", "lckv", "whitematter", "vanilla2", "static"])
def test_names_of_no_system(name):
    with pytest.raises(ValueError, match="no system"):
        named(name, 16)


def test_plans_are_the_table_of_systems():
    def wiring(name):
        p = plan(make(name).config)
        return ([c.sources for c in p.channels], [c.mixing for c in p.channels],
                [(r.keys, r.values, r.own) for r in p.layers], p.dummy)

    same = [((n,), (n,), (n,)) for n in range(6)]
    assert wiring("fusedkv") == ([(0,), (1,)], ["none"] * 2, [
        *same[:2], *[((0, 1), (0, 1), (0, 1))] * 2], False)
    assert wiring("fusedkv_lite")[2] == [*same[:2], *[((1,), (0,), (0, 1))] * 2]
    assert wiring("lckv, w=3") == ([(0,), (3,), (4,), (5,)], ["none"] * 4, [
        same[0], *[((1,), (1,), None)] * 2, ((1,), (1,), (3,)), ((2,), (2,), (4,)),
        ((3,), (3,), (5,))], False)
    assert wiring("feedback") == ([(0, 1, 2, 3)], ["softmax"], [((0,), (0,), None)] * 3, False)
    assert wiring("recurrent") == ([(1,), (2,), (3,)], ["none"] * 3, same[:3], False)
    assert wiring("nofeedback") == ([(0,), (0, 1), (0, 1, 2)], ["router"] * 3, [
        ((n,), (n,), None) for n in range(3)], True)
    assert wiring("top output") == ([(0, 1, 2, 3)] * 2, ["router"] * 2, [
        ((n % 2,), (n % 2,), None) for n in range(3)], True)
    channels = plan(make("top output, k=L").config).channels
    assert [c.weights for c in channels] == [(0, 0.25, 0, 0), (0, 0, 0.25, 0), (0, 0, 0, 0.25)]
    vanilla = plan(small_model(kv="vanilla").config)
    assert not vanilla.iterates and [c.sources for c in vanilla.channels] == [(0,), (1,), (2,)]


def test_the_router_starts_as_the_plan_says():
    for name in ("nofeedback", "top output", "top output, k=L", "both", "no dummy"):
        model = build(make(name).config)
        for bias in (model.kv_pool.key.bias, model.kv_pool.value.bias):
            for row, channel in zip(bias, plan(model.config).channels):
                expected = [0.0] * len(row)
                for s, w in zip(channel.sources, channel.weights):
                    expected[s] = w
                assert row.tolist() == expected


@pytest.mark.parametrize("change, named", [
    (dict(kv="lckv", lckv_w=15), ("lckv_w=15", "14")), (dict(kv="lckv", lckv_w=-1), ("lckv_w=-1",)),
    (dict(kv="nofeedback", n_channels=8), ("n_channels=8", "16")),
    (dict(kv="fusedkv", n_layer=1), ("n_layer=1", "2")),
    (dict(kv="vanilla", top_output=True), ("top_output", "whitematter")),
    (dict(kv="recurrent", dummy=False), ("dummy", "whitematter")),
    (dict(kv="lkcv"), ("lkcv", "lckv", "recurrent"))], ids=lambda x: "-".join(map(str, x)))
def test_what_a_system_cannot_do_is_refused(change, named):
    with pytest.raises(ValueError) as error:
        ModelConfig(**change)
    assert all(part in str(error.value) for part in named) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["feedback", "fusedkv", "lckv, w=3", "nofeedback"])
def test_parameters_go_to_their_optimizers(name):
    """Matrices to Muon; weights of mixtures are not decayed, projections of channels are."""
    model = make(name)
    muon, adamw = make_optimizers(model, TrainConfig())
    names = {id(p): n for n, p in model.named_parameters()}
    groups = [*muon.param_groups, *adamw.param_groups]
    found = {names[id(p)]: (g is groups[0], g["weight_decay"]) for g in groups
             for p in g["params"]}
    assert found.keys() == set(names.values())
    for n, p in model.named_parameters():
        matrix = p.dim() == 2 and n.split(".")[-2] in (
            "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "router")
        decay = 0.1 if matrix or n.endswith(".proj") else 0.0
        assert found[n] == (matrix, decay), n
    special = {"feedback": {"memory.k_proj.weight": (True, 0.1), "memory.weights": (False, 0.0)},
               "fusedkv": {"fuse_key": (False, 0.0), "fuse_value": (False, 0.0)}}
    assert special.get(name, {}).items() <= found.items()


# -- other ways to compute ------------------------------------------------------------------


@every_system
def test_training_in_bfloat16_autocast(name):
    """Finite, and near float32."""
    model, idx = make(name, dtype=torch.float32), ROWS
    losses = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            losses.append(model.loss(solve(model, idx).final, idx))
    losses[1].backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=0.15)


@every_system
@pytest.mark.parametrize("mode", ["training", "prefill", "decode"])
def test_flops_by_closed_form_are_those_of_the_code(name, mode):
    options = SYSTEMS[name][1] | dict(n_nograd=1, n_grad=2, n_groups=2)
    c = ModelConfig(**{**SMALL, **options})
    counted = count_flops(c, 5, mode, device="cpu")  # so small, it is faster than the meta device
    assert flops_per_token(c, 5, mode) == pytest.approx(counted, rel=1e-12)


@pytest.mark.parametrize("mode", ["training", "prefill", "decode"])
def test_flops_of_a_single_layer(mode):
    """Whose only source is not mixed, but scaled."""
    c = ModelConfig(**{**SMALL, "n_layer": 1, "n_channels": 1, "n_groups": 2})
    counted = count_flops(c, 5, mode, device="cpu")
    assert flops_per_token(c, 5, mode) == pytest.approx(counted, rel=1e-12)


@pytest.mark.parametrize("w, printed", [(4, (1.421, 0.935, 0.173)), (7, (1.174, 0.738, 0.175))])
def test_flops_of_lckv_beside_the_papers(w, printed):
    """Within one of the last digit, but for prefill, where the paper's is 0.2 % higher; and if the
    queries that nobody asks for, in the pass before the last, had a backward pass, as they have
    where queries, keys and values are one product."""
    c = ModelConfig(kv="lckv", lckv_w=w, n_groups=1, n_nograd=7, n_grad=2)
    for mode, theirs in zip(MODES, printed):
        ours = flops_per_token(c, 2048, mode) / 1e9
        unasked = 2 * 2 * 512 * 576 / 1e9 * (mode == "training")
        assert ours + unasked == pytest.approx(theirs, abs=0.0025 if mode == "prefill" else 0.001)


def test_flops_by_hand():
    """FusedKV, L = 16: eight of sixteen layers project keys and values, 2047 / 2 + 1 keys."""
    projections = 16 * 2 * 512 * 576 * 2 + 8 * 2 * 512 * 288 * 2
    mlp, attention_ = 16 * 2 * 3 * 512 * 1536, 16 * 4 * 1024.5 * 576
    forward = projections + mlp + attention_
    c = ModelConfig(kv="fusedkv")
    assert flops_per_token(c, 2048, "prefill") == forward
    assert flops_per_token(c, 2048, "training") == forward + 2 * (
        projections + mlp) + 2.5 * attention_
