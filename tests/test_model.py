"""The decoder: the paper's sizes, Qwen3's arithmetic, attention at awkward shapes, clear errors."""

import re

import pytest
import torch
from qwen3 import from_qwen3, to_qwen3
from small import SMALL, random_tokens, small_model, with_documents

from attention import Cache, attend
from baselines import build
from model import SYSTEMS, ModelConfig, rms_norm, rotary_tables, rotate
from pool import initial_sources
from solvers import cyclic, one_pass, solve

# -- sizes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes, count", [
    (dict(kv="vanilla", n_layer=16), 51_924_480),
    (dict(kv="whitematter", n_layer=16, n_channels=16), 54_055_424),
    (dict(kv="whitematter", n_layer=16, n_channels=8), 50_638_336)],
    ids=["vanilla", "k=16", "k=8"])
@pytest.mark.parametrize("vocab_size", [50304, 151936])
def test_the_papers_parameter_counts(sizes, count, vocab_size):
    """Exact, without the embedding, whatever the vocabulary."""
    with torch.device("meta"):
        model = build(ModelConfig(vocab_size=vocab_size, **sizes))
    assert model.n_params() == count
    assert sum(p.numel() for p in model.parameters()) == count + vocab_size * 512


def test_a_static_router_has_no_router_matrix():
    with torch.device("meta"):
        dynamic, static = (build(ModelConfig(router=r)) for r in ("dynamic", "static"))
    # two branches, kL rows, L' D columns
    assert dynamic.n_params() - static.n_params() == 2 * (16 * 16) * (8 * 512)
    names = {n for n, _ in dynamic.named_parameters()} - {n for n, _ in static.named_parameters()}
    assert names == {"kv_pool.key.router.weight", "kv_pool.value.router.weight"}


def test_only_vanilla_layers_project_keys_and_values():
    own = {"k_proj", "k_norm", "v_proj"}
    for kv, expected in (("vanilla", own), ("whitematter", set())):
        names = {n.split(".")[-2] for n, _ in small_model(kv=kv).blocks.named_parameters()}
        assert names & own == expected


def test_the_start_of_training():
    """N(0, 0.02) matrices and dummy, gains at 1, router weights 0, selected biases 0.25."""
    model = build(ModelConfig(vocab_size=1000, n_layer=4, n_channels=2, n_embd=64, n_hidden=96))
    for name, p in model.named_parameters():
        if "norm" in name:
            assert (p == 1).all(), name
        elif ".router." in name:
            assert (p == 0).all(), name
        elif name.endswith("bias"):
            assert p.tolist() == [[0.25, 0, 0.25, 0], [0, 0.25, 0, 0.25]], name
        else:
            assert p.std().item() == pytest.approx(0.02, rel=0.3 if p.dim() == 1 else 0.05), name
            assert abs(p.mean().item()) < 0.02 / p.numel() ** 0.5 * 4, name


@pytest.mark.parametrize("k, L, sources", [
    (1, 4, [{3}]),  # top
    (2, 5, [{0, 2, 4}, {1, 3}]), (3, 4, [{0, 3}, {1}, {2}]),  # cyclic: source l to l mod k
    (4, 4, [{1}, {2}, {3}, {3}]),  # shifted identity: min(j + 1, L - 1)
    (1, 1, [{0}])])
def test_sources_that_the_router_starts_with(k, L, sources):
    start = initial_sources(k, L)
    assert start.shape == (k, L) and set(start.unique().tolist()) <= {0, 1}
    assert [set(row.nonzero().flatten().tolist()) for row in start] == sources


# -- configurations -------------------------------------------------------------------------


@pytest.mark.parametrize("change, named", [
    (dict(n_head=6, n_kv_head=4), ("n_head=6", "n_kv_head=4")),
    (dict(head_dim=15), ("head_dim=15", "even")),
    (dict(n_channels=0), ("n_channels=0", "n_layer=16")),
    (dict(n_channels=17), ("n_channels=17", "n_layer=16")),
    (dict(router_stride=0), ("router_stride=0", "1")),
    (dict(n_groups=0), ("n_groups=0", "1")),
    (dict(n_grad=0), ("n_grad=0", "1")),
    (dict(n_nograd=-1), ("n_nograd=-1", "0")),
    (dict(n_layer=0), ("n_layer=0", "1")),
    (dict(n_kv_head=0), ("n_kv_head=0", "1")),
    (dict(vocab_size=0), ("vocab_size=0", "1")),
    (dict(vocab_size=10, eos_id=10), ("eos_id=10", "9")),
    (dict(eos_id=-1), ("eos_id=-1", "0")),
    (dict(kv="white"), ("kv='white'", "whitematter", "vanilla")),
    (dict(router="fixed"), ("router='fixed'", "dynamic", "static"))],
    ids=lambda x: "-".join(map(str, x)))
def test_impossible_sizes_are_refused_with_the_numbers(change, named):
    with pytest.raises(ValueError) as error:
        ModelConfig(**change)
    for part in named:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_a_system_of_ones_own_has_the_pools_settings(monkeypatch):
    """Where it derives from WhiteMatter, whose checks hold for it, too."""
    monkeypatch.setattr("model.SYSTEMS", (*SYSTEMS, "mine"))
    assert ModelConfig(**SMALL | dict(kv="mine", top_output=True, dummy=False)).top_output
    with pytest.raises(ValueError, match="n_channels=50: 1 to n_layer="):
        ModelConfig(**SMALL | dict(kv="mine", n_channels=50))


@pytest.mark.parametrize("change", [
    dict(n_channels=1), dict(n_channels=3), dict(router_stride=50), dict(n_groups=50),
    dict(n_nograd=0, n_grad=1), dict(n_layer=1, n_channels=1), dict(n_kv_head=4),
    dict(n_kv_head=1), dict(kv="vanilla", n_channels=0), dict(eos_id=None),
    dict(n_head=6, n_kv_head=3, head_dim=96)], ids=str)
def test_unusual_sizes_work(change):
    model = build(ModelConfig(**{**SMALL, **change}))
    idx = random_tokens(2, 5)
    loss = model.loss(solve(model, idx).final, idx)
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters())


# -- parts ----------------------------------------------------------------------------------


def test_rms_norm_and_its_eps():
    x = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert rms_norm(x, None, eps=0.5).tolist() == pytest.approx((x / 13 ** 0.5).tolist())
    gain = torch.tensor([2.0, -1.0], dtype=torch.float64)
    expected = [6 / (12.5 + 1e-6) ** 0.5, -4 / (12.5 + 1e-6) ** 0.5]
    assert rms_norm(x, gain).tolist() == pytest.approx(expected, rel=1e-12)
    assert rms_norm(torch.zeros(4), None).eq(0).all()
    # 300^2 overflows float16: the statistic is taken in float32
    assert rms_norm(torch.full((4,), 300.0, dtype=torch.float16), None).eq(1).all()


@pytest.mark.parametrize("dtype, tol", [(torch.bfloat16, 0.004), (torch.float32, 2e-4)])
def test_rotary_tables_are_computed_in_float32(dtype, tol):
    """Head size 96, 2048 positions; casting the model changes no angle."""
    model = small_model(head_dim=96).to(dtype)
    rows = model.rows(torch.ones(1, 2048, dtype=torch.long))
    assert rows.cos.dtype == rows.sin.dtype == torch.float32
    position = torch.arange(1, 2049, dtype=torch.float64)
    angle = position[:, None] / 1e6 ** (torch.arange(0, 96, 2, dtype=torch.float64) / 96)
    for ours, exact in ((rows.cos, angle.cos()), (rows.sin, angle.sin())):
        assert (ours[0].to(dtype).double() - exact).abs().max() <= tol
    with torch.autocast("cpu", torch.bfloat16):
        again = model.rows(torch.ones(1, 2048, dtype=torch.long))
    assert torch.equal(again.cos, rows.cos) and torch.equal(again.sin, rows.sin)


def test_rotary_positions_are_relative():
    """The score of a query at m and a key at n depends on m - n alone, and 0 turns nothing."""
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(m, n):
        a, b = (rotate(x, *rotary_tables(torch.tensor([[p]]), 8)) for x, p in ((q, m), (k, n)))
        return (a * b).sum().item()

    assert score(9, 4) == pytest.approx(score(5, 0), abs=1e-5)
    assert score(9, 4) != pytest.approx(score(4, 9), abs=1e-3)
    assert torch.equal(rotate(q, *rotary_tables(torch.tensor([[0]]), 8)), q)


def test_the_same_position_in_decoding_and_in_a_whole_row():
    model = small_model()
    whole = model.rows(random_tokens(1, 12))
    nine = torch.tensor([[9]])
    step = model.place(nine, nine, torch.zeros_like(nine))
    assert torch.equal(step.cos, whole.cos[:, 9:10]) and torch.equal(step.sin, whole.sin[:, 9:10])
    assert torch.equal(step.stop, whole.stop[:, 9:10])


def reference_attention(q, k, v, start, stop, sink):
    """Float64 with an explicit mask; the sink, if any, is one more key."""
    q, k, v = (t.double() for t in (q, k, v))
    G = q.size(2) // k.size(2)
    k, v = (t.repeat_interleave(G, dim=2) for t in (k, v))
    score = torch.einsum("bihd,bjhd->bhij", q, k) / q.size(-1) ** 0.5
    j = torch.arange(k.size(1))
    visible = (j >= start[..., None]) & (j < stop[..., None])
    score = score.masked_fill(~visible[:, None], -torch.inf)
    if sink is not None:
        key, value = (t.double().repeat_interleave(G, dim=0) for t in sink)
        score = torch.cat((score, torch.einsum("bihd,hd->bhi", q, key)[..., None]
                           / q.size(-1) ** 0.5), dim=-1)
        v = torch.cat((v, value.expand(len(v), 1, -1, -1)), dim=1)
    return torch.einsum("bhij,bjhd->bihd", score.softmax(-1), v)


@pytest.mark.parametrize("T", [1, 5, 100, 127, 128, 130])
@pytest.mark.parametrize("kv", ["whitematter", "vanilla"])
def test_attention_at_awkward_lengths(T, kv):
    """Head size 96, documents, with and without the dummy: forward and backward to 1e-4."""
    model = small_model(kv=kv, head_dim=96)
    idx = with_documents(random_tokens(2, T), [0, T // 2], [T // 3])
    torch.manual_seed(T)
    inputs = [torch.randn(2, T, n, 96) for n in (4, 2, 2)]
    if kv == "whitematter":
        inputs += [torch.randn(2, 96) for _ in range(2)]
    inputs = [t.requires_grad_() for t in inputs]
    upstream = torch.randn(2, T, 4, 96)
    rows = model.rows(idx)
    found = []
    for function, place in ((attend, (rows,)), (reference_attention, (rows.start, rows.stop))):
        out = function(*inputs[:3], *place, tuple(inputs[3:]) or None)
        grads = torch.autograd.grad((out * upstream).sum(), inputs)
        found.append([out, *grads])
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-4, atol=1e-4)


def test_attention_of_a_strided_group_reads_every_column():
    """Queries of group q, keys of the whole row."""
    model, T = small_model(), 11
    idx = with_documents(random_tokens(2, T), [0, 6], [3])
    rows = model.rows(idx)
    q, k, v = (torch.randn(2, T, n, 6) for n in (4, 2, 2))
    sink = torch.randn(2, 6), torch.randn(2, 6)
    whole = attend(q, k, v, rows, sink)
    groups = rows.split(4)
    assert len(groups) == 4 and len(rows.split(50)) == T
    for group in groups:
        part = attend(q[:, group.columns], k, v, group, sink)
        torch.testing.assert_close(part, whole[:, group.columns])


@torch.no_grad()
@pytest.mark.parametrize("kv", ["whitematter", "vanilla"])
def test_one_model_serves_any_length_in_any_order(kv):
    model = small_model(kv=kv, dtype=torch.float32)
    for T in (128, 64, 130):
        idx = with_documents(random_tokens(2, T), [5, 40], [])
        fresh = small_model(kv=kv, dtype=torch.float32)
        assert torch.equal(solve(model, idx).states, solve(fresh, idx).states)


# -- head and loss --------------------------------------------------------------------------


def test_the_head_is_the_embedding():
    """One tensor, before and after a save, a load and an optimizer step."""
    model, idx = small_model(), random_tokens(2, 6)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    assert [n for n, t in state.items() if t.shape == (13, 8)] == ["embed.weight"]
    other = small_model(seed=5)
    other.load_state_dict(state)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other.loss(solve(other, idx).final, idx).backward()
    optimizer.step()
    h = torch.randn(3, 8, dtype=torch.float64)
    embed = other.embed.weight
    assert not torch.equal(embed, model.embed.weight)
    torch.testing.assert_close(other.logits(h), rms_norm(h, other.norm.weight) @ embed.T)
    assert torch.equal(other.embed_tokens(idx), embed[idx])


def test_the_loss_counts_all_targets_but_minus_one():
    model, idx = small_model(), random_tokens(2, 6)
    h = solve(model, idx).final
    targets = random_tokens(2, 6, seed=4, low=0)
    targets[0, 2] = 0  # what follows an EOS, and an EOS itself, count like any other
    each = -model.logits(h).log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    assert model.loss(h, targets).item() == pytest.approx(each.mean().item(), rel=1e-12)
    targets[1, 3:] = -1
    keep = targets != -1
    assert model.loss(h, targets).item() == pytest.approx(each[keep].mean().item(), rel=1e-12)


def test_the_loss_of_chunks_is_that_of_all_tokens(monkeypatch):
    """The last of them is shorter; gradients, too."""
    h, targets = torch.randn(3, 4, 8, dtype=torch.float64, requires_grad=True), random_tokens(3, 4)
    targets[1, 2] = -1
    found = []
    for n in (100, 5):
        monkeypatch.setattr("model.CHUNK", n)
        model = small_model()
        loss = model.loss(h, targets)
        found.append([loss, *torch.autograd.grad(loss, (h, model.embed.weight, model.norm.weight))])
    for whole, in_chunks in zip(*found):
        torch.testing.assert_close(in_chunks, whole, rtol=1e-12, atol=1e-12)


def test_the_loss_without_any_target_is_zero():
    model, idx = small_model(), random_tokens(2, 6)
    loss = model.loss(solve(model, idx).final, torch.full_like(idx, -1))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad.isfinite().all() for p in model.parameters())


# -- Hugging Face's Qwen3 -------------------------------------------------------------------


@pytest.fixture
def qwen3(monkeypatch):
    """A random small Qwen3ForCausalLM in float64."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    def forward(self, x):
        # theirs computes in float32 whatever the model is cast to; 1e-9 needs all of float64
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True)
                                              + self.variance_epsilon))

    monkeypatch.setattr(Qwen3RMSNorm, "forward", forward)
    # attention by sdpa: their eager softmax is computed in float32 too
    sizes = dict(vocab_size=29, hidden_size=16, intermediate_size=20, num_hidden_layers=3,
                 num_attention_heads=4, num_key_value_heads=2, head_dim=6, rms_norm_eps=1e-6,
                 tie_word_embeddings=True, attn_implementation="sdpa")
    config = transformers.Qwen3Config(**sizes, rope_theta=1e6)
    # version 5 keeps theta under rope_parameters
    theta = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}
    assert theta["rope_theta"] == 1e6
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).double().eval()
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, mean=1.0 if "norm" in name else 0.0, std=0.3)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model


def our_qwen3():
    return build(ModelConfig(kv="vanilla", vocab_size=29, n_layer=3, n_embd=16, n_hidden=20,
                             n_head=4, n_kv_head=2, head_dim=6)).double()


@torch.no_grad()
def test_vanilla_equals_hugging_face_qwen3(qwen3):
    model, idx = our_qwen3(), random_tokens(2, 40, low=0, vocab_size=29)
    model.load_state_dict(from_qwen3(qwen3.state_dict()))
    solution = one_pass(model, idx)
    theirs = qwen3(idx, output_hidden_states=True)
    torch.testing.assert_close(model.logits(solution.final), theirs.logits, rtol=1e-9, atol=1e-9)
    assert theirs.logits.abs().max() > 1  # and not because everything is tiny
    for layer in range(3):  # h[l] is what enters layer l
        torch.testing.assert_close(solution.states[:, :, layer], theirs.hidden_states[layer],
                                   rtol=1e-9, atol=1e-9)


def test_vanilla_has_hugging_faces_loss_and_gradients(qwen3):
    model, idx = our_qwen3(), random_tokens(2, 12, low=0, vocab_size=29)
    model.load_state_dict(from_qwen3(qwen3.state_dict()))
    model.loss(one_pass(model, idx[:, :-1]).final, idx[:, 1:]).backward()
    # written out: their own loss is computed in float32
    logits = qwen3(idx[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), idx[:, 1:].flatten()).backward()
    theirs = from_qwen3({n: p.grad for n, p in qwen3.named_parameters()})
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, theirs[name], rtol=1e-8, atol=1e-9)


@torch.no_grad()
def test_names_go_to_hugging_face_and_back(qwen3):
    model, idx = our_qwen3(), random_tokens(1, 9, low=0, vocab_size=29)
    state = model.state_dict()
    theirs = to_qwen3(model)
    qwen3.load_state_dict(theirs, strict=True)
    torch.testing.assert_close(qwen3(idx).logits, model.logits(one_pass(model, idx).final),
                               rtol=1e-9, atol=1e-9)
    back = from_qwen3(theirs)
    assert back.keys() == state.keys() and all(torch.equal(back[n], state[n]) for n in state)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias",
                                  "model.layers.0.mlp.experts.3.up_proj.weight"])
def test_other_models_weights_are_refused_by_name(name):
    with pytest.raises(ValueError, match=re.escape(name)):
        from_qwen3({name: torch.zeros(1)})


def test_another_system_is_no_qwen3():
    """Recurrent has the same names, and would be computed as vanilla."""
    with pytest.raises(ValueError, match="kv=recurrent: only vanilla"):
        to_qwen3(small_model(kv="recurrent"))
    with pytest.raises(ValueError, match="no model.embed_tokens.weight"):
        from_qwen3({"lm_head.weight": torch.zeros(1)})


def test_an_untied_head_is_refused():
    state = to_qwen3(our_qwen3())
    with pytest.raises(ValueError, match="only a tied head"):
        from_qwen3(state | {"lm_head.weight": state["lm_head.weight"] + 1})


# -- layout ---------------------------------------------------------------------------------


def test_the_cache_is_k_channels_in_token_order():
    for kv, channels in (("whitematter", 2), ("vanilla", 3)):
        model = small_model(kv=kv, n_channels=2)
        idx = random_tokens(2, 7)
        solution = cyclic(model, idx, 3) if model.iterates else one_pass(model, idx)
        assert isinstance(solution.cache, Cache)
        for cache in (solution.cache, model.new_cache(2, 7, like=solution.final)):
            assert len(cache.k) == len(cache.v) == channels
            assert all(x.shape == (2, 7, 2, 6) for x in (*cache.k, *cache.v))
            assert (cache.sink is None) == (kv == "vanilla")
        if cache.sink:
            assert cache.sink[0].shape == cache.sink[1].shape == (2, 2, 6)
        assert solution.states.shape == (2, 7, 4, 8) and solution.final.shape == (2, 7, 8)
