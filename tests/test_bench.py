"""bench.py: FLOP per token beside the paper's table, and the convergence study end to end."""

import errno
import gc
import json
import statistics
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small import channels

import baselines
import bench
import model
from baselines import build
from bench import PAPER
from checkpoint import save_checkpoint
from configurator import UserError, run
from kernels import accelerate
from measure import convergence, flops, timing
from measure.flops import MODES, count_flops, flops_per_token
from model import ModelConfig
from solvers import autoregressive, cyclic

TINY = dict(vocab_size=64, n_layer=3, n_embd=16, n_head=4, n_kv_head=2, head_dim=6, n_hidden=24,
            n_channels=3)


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """A bench searches for garbage before it measures: not in what the first optimizer imports."""
    import torch._dynamo  # noqa: F401

    gc.collect()
    gc.freeze()


# ---- flops

@pytest.mark.parametrize("name", PAPER)
def test_formula_against_the_papers_table(name):
    sizes, paper = PAPER[name]
    ours = [flops_per_token(ModelConfig(**sizes), 2048, mode) / 1e9 for mode in MODES]
    assert ours == pytest.approx(paper, rel=0.07)  # WhiteMatter's prefill; see below
    exact = ours if "vanilla" in name else ours[2:]  # decode, and all of vanilla: to the digit
    assert [f"{x:.3f}" for x in exact] == [f"{x:.3f}" for x in paper[-len(exact):]]


def as_the_paper_counts(k):
    """FLOP a token of training and prefill with what we need not compute. The last block runs once
    in three passes. Prefill: five evaluations of the pool for our four. Training: six forward for
    3 7/8."""
    c = ModelConfig(n_channels=k)
    pool, _ = flops.store_flops(c)
    queries, _, rest = flops.block_flops(c)
    twice = 2 * (queries + rest + 4 * (2048 + 1) / 2 * c.n_head * c.head_dim)  # the block
    training, prefill = (flops_per_token(c, 2048, mode) for mode in ("training", "prefill"))
    return training + twice + 2.125 * pool, prefill + twice + pool


def test_the_papers_other_figures_are_explained():
    for k, *figures in ((16, "1.111", "0.467"), (8, "1.028", "0.432")):
        assert [f"{x / 1e9:.3f}" for x in as_the_paper_counts(k)] == figures


def test_ratios_to_vanilla():
    vanilla = flops_per_token(ModelConfig(kv="vanilla"), 2048, "training")
    for k, ratio in ((16, 2.50), (8, 2.32)):
        assert as_the_paper_counts(k)[0] / vanilla == pytest.approx(ratio, rel=0.0025)


# any two values of two of them together
@pytest.mark.parametrize("n_nograd, n_grad, n_groups", (
    (0, 1, 1), (0, 2, 4), (1, 1, 4), (1, 2, 1), (2, 1, 1), (2, 2, 4)))
def test_formula_equals_count_in_training(n_nograd, n_grad, n_groups):
    c = ModelConfig(**TINY, n_nograd=n_nograd, n_grad=n_grad, n_groups=n_groups)
    counted = count_flops(c, 11, "training", device="cpu")
    assert counted == pytest.approx(flops_per_token(c, 11, "training"), rel=1e-9)


@pytest.mark.parametrize("changes", (
    dict(kv="vanilla"), dict(), dict(n_channels=2), dict(router="static"), dict(router_stride=1),
    dict(n_groups=99), dict(eos_id=0)), ids=str)
@pytest.mark.parametrize("mode", ("training", "decode"))  # prefill: test_baselines.py
def test_formula_equals_count(changes, mode):
    c = ModelConfig(**{**TINY, "n_groups": 3, **changes})
    counted = count_flops(c, 5, mode, device="cpu")  # groups of two tokens and of one
    assert counted == pytest.approx(flops_per_token(c, 5, mode), rel=1e-9)


def test_formula_equals_count_of_decoding_at_the_papers_sizes():
    """Of vanilla in every mode: test_flops_command."""
    c = ModelConfig()
    assert count_flops(c, 2048, "decode") == pytest.approx(
        flops_per_token(c, 2048, "decode"), rel=1e-9)


def test_head_is_three_products_in_training():
    c = ModelConfig(**TINY)
    for mode, products in (("training", 3), ("prefill", 1), ("decode", 1)):
        head = flops_per_token(c, 32, mode, head=True) - flops_per_token(c, 32, mode)
        assert head == products * 2 * 64 * 16
    with pytest.raises(ValueError, match="mode='train'"):
        flops_per_token(c, 32, "train")


def test_flops_command(tmp_path, monkeypatch, capsys):
    """Of two layers; all of them would take half a minute, most of it PyTorch's and not ours."""
    monkeypatch.setattr(bench, "PAPER", {
        "vanilla L=16": (dict(kv="vanilla", n_layer=2), PAPER["vanilla L=16"][1]),
        "WhiteMatter k=2": (dict(n_layer=2, n_channels=2, n_groups=2),
                            PAPER["WhiteMatter k=8"][1])})
    monkeypatch.setattr(bench, "OTHERS", {"FusedKV": dict(kv="fusedkv", n_layer=2)})
    bench.main(["flops", f"--json={tmp_path}/flops.json"])
    assert "6,491,008" in capsys.readouterr().out
    models = json.loads((tmp_path / "flops.json").read_text())["models"]
    assert models["vanilla L=16"]["params"] == (51_924_480 - 512) / 8 + 512
    for name, mode in (("WhiteMatter k=2", "training"), ("FusedKV", "training"),
                       *(("vanilla L=16", mode) for mode in MODES)):
        cell = models[name]["modes"][mode]
        assert cell["counted"] == pytest.approx(cell["formula"], rel=1e-9)


# ---- prefill

@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A tiny model in out/, with held-out tokens of its data set, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data" / "noise"
    folder.mkdir(parents=True)
    meta = {"tokenizer": "bytes", "vocab_size": 64, "eos_id": 0, "dtype": "uint16",
            "tokens": {"train": 0, "val": 300, "test": 0}}
    (folder / "meta.json").write_text(json.dumps(meta))
    np.random.default_rng(0).integers(64, size=300).astype("<u2").tofile(folder / "val.bin")
    torch.manual_seed(0)
    config = ModelConfig(**TINY, eos_id=0)
    save_checkpoint(tmp_path / "out" / "ckpt.pt", {
        "model": build(config).state_dict(), "model_config": asdict(config), "meta": meta,
        "config": {"dataset": "noise", "block_size": 24}})
    return tmp_path


def test_prefill_command(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", None)  # must not be called
    bench.main(["prefill", "--out_dir=out", "--rows=3", "--batch_size=2", "--trials=2",
                "--warmups=1", "--device=cpu", "--json=result.json"])
    result = json.loads((checkpoint / "result.json").read_text())
    assert [s["g"] for s in result["schedules"]] == [1, 2, 4, 8, 16, 24]
    assert result["block_size"] == 24 and result["rows"] == 3 and result["batch_size"] == 2
    assert result["device"] == "cpu" and result["dtype"] == "float32"
    assert "not compiled" in result["runs"]
    for s in result["schedules"]:
        *before, last = (abs(p / result["exact_perplexity"] - 1) for p in s["perplexities"])
        assert last <= 0.01 and all(e > 0.01 for e in before) and len(before) + 1 == s["passes"]
        assert s["warmup_seconds"] > 0 and len(s["trial_seconds"]) == 2
        assert s["median_seconds"] == statistics.median(s["trial_seconds"])
        assert min(s["trial_seconds"]) <= s["median_seconds"] <= max(s["trial_seconds"])
        assert s["tokens_per_second"] == pytest.approx(2 * 24 / s["median_seconds"], rel=0.01)
    assert list(result["residuals"]) == ["1", "4", "8", "16"]
    out = capsys.readouterr().out
    assert "token by token" in out and "relative residual" in out and "float32" in out


def test_passes_are_counted_in_the_given_precision(checkpoint, capsys):
    exact = {}
    for dtype in ("float32", "bfloat16"):
        bench.main(["prefill", "--out_dir=out", "--rows=2", "--trials=1", "--warmups=1",
                    "--block_size=9", f"--passes_dtype={dtype}", "--device=cpu",
                    "--json=result.json"])
        result = json.loads((checkpoint / "result.json").read_text())
        exact[dtype] = result["exact_perplexity"]
        assert result["dtype"] == "float32"  # of the timed runs
        assert f"perplexity of 2 rows in {dtype}" in capsys.readouterr().out
    assert exact["bfloat16"] != exact["float32"]
    assert exact["bfloat16"] == pytest.approx(exact["float32"], rel=0.02)


@pytest.mark.parametrize("system", (
    dict(), dict(kv="lckv", lckv_w=1), dict(kv="lckv", n_layer=5, lckv_w=2), dict(kv="recurrent")),
    ids=str)
def test_perplexity_per_pass_is_that_of_separate_solves(system):
    """Also where a pass runs the middle of the stack only."""
    torch.manual_seed(0)
    model = build(ModelConfig(**TINY | system)).double()
    x = torch.randint(64, (3, 10))
    y = x.roll(-1, 1)
    with torch.no_grad():
        ours = convergence.perplexities(model, x, y, batch_size=2, n_groups=4, passes=3)
        for n, ppl in enumerate(ours, 1):
            final = convergence.cyclic(model, x, 4, n, 0).final
            assert ppl == pytest.approx(model.loss(final, y).exp().item(), rel=1e-12)
    assert "states" not in vars(model)


def test_passes_that_do_not_suffice(capsys):
    torch.manual_seed(0)
    model = build(ModelConfig(**TINY))
    x = torch.randint(64, (1, 8))
    with torch.no_grad():
        n, ppl = convergence.passes_needed(model, x, x, 1, 1, 2, 5, exact=1e9)
    assert n is None and len(ppl) == 5
    assert "states" not in vars(model)
    bench.main(["prefill", "--n_layer=2", "--block_size=16", "--rows=2", "--max_passes=1",
                "--trials=1", "--warmups=1", "--device=cpu"])
    jacobi = next(row for row in capsys.readouterr().out.splitlines() if row.endswith("Jacobi"))
    assert jacobi.split()[:2] == ["1", ">1"] and jacobi.split()[-3:] == ["n/a", "n/a", "Jacobi"]


@pytest.mark.parametrize("rows", [2, 5])
@pytest.mark.parametrize("after", [3, 6])
def test_passes_end_when_they_suffice(rows, after):
    """In one batch and in three; the first guess may be too hopeful."""
    torch.manual_seed(0)
    model = build(ModelConfig(**TINY)).double()
    x = torch.randint(64, (rows, 12))
    y = x.roll(-1, 1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(20)  # far from converged after a pass
        ppl = convergence.perplexities(model, x, y, 2, 1, 12)
        expected = next(t for t, p in enumerate(ppl, 1) if abs(p / ppl[after - 1] - 1) <= 0.01)
        n, mine = convergence.passes_needed(model, x, y, 2, 1, 4, 12, ppl[after - 1])
    assert n == expected and mine == pytest.approx(ppl[:n])


def test_given_schedules(tmp_path, capsys):
    bench.main(["prefill", "--schedules=jacobi:5,cyclic4:2,autoregressive", "--block_size=16",
                "--batch_size=2", "--trials=2", "--warmups=1", "--device=cpu",
                f"--json={tmp_path}/r.json"])
    result = json.loads((tmp_path / "r.json").read_text())
    jacobi, cyclic, single = result["schedules"]
    assert [s["passes"] for s in (jacobi, cyclic, single)] == [5, 2, 1]
    assert cyclic["ratio"] == 1 and jacobi["seconds_per_sequence"] == pytest.approx(
        jacobi["ratio"] * cyclic["seconds_per_sequence"])
    assert jacobi["paper_ratio"] is None  # of 16 groups, in the paper
    c = ModelConfig(**result["model"])
    one_pass = flops_per_token(c, 16, "prefill", passes=1) - 2 * flops.store_flops(c)[0]
    queries, _, rest = flops.block_flops(c)
    top = queries + rest + 4 * 17 / 2 * c.n_head * c.head_dim  # the last block, once
    pool, _ = flops.store_flops(c)
    for s, n_pool in ((jacobi, 6), (cyclic, 3), (single, 1)):
        assert s["flops_per_token"] == pytest.approx(
            s["passes"] * (one_pass - top - pool / 16) + top + (n_pool + 1 / 16) * pool)
    assert "token" in capsys.readouterr().out


def test_prefill_of_systems(tmp_path):
    bench.main(["prefill", "--systems=vanilla,k2,lckv1,nofeedback,recurrent", "--n_layer=3",
                "--block_size=16", "--batch_size=2", "--trials=2", "--warmups=1", "--device=cpu",
                f"--json={tmp_path}/r.json"])
    systems = json.loads((tmp_path / "r.json").read_text())["systems"]
    assert {name: (s["schedule"], s["passes"]) for name, s in systems.items()} == {
        "vanilla": ("one pass", 1), "k2": ("cyclic8", 3), "lckv1": ("jacobi", 9),
        "nofeedback": ("one pass", 1), "recurrent": ("cyclic8", 3)}
    for s in systems.values():
        assert s["ratio"] == pytest.approx(
            s["seconds_per_sequence"] / systems["vanilla"]["seconds_per_sequence"])
        assert s["flops_per_token"] >= systems["vanilla"]["flops_per_token"] * 0.9


@pytest.mark.parametrize("text, passes, groups", (
    ("jacobi:75", 75, 1), ("cyclic16:4", 4, 16), ("autoregressive", 1, 99)))
def test_schedules_by_name(text, passes, groups):
    s = convergence.schedule_named(text, 99)
    assert (s.passes, s.n_groups) == (passes, groups)
    assert convergence.short_name(s) == text.split(":")[0]


@pytest.mark.parametrize("graph", (False, True))
@pytest.mark.parametrize("solver", ("autoregressive", "cyclic"))
@torch.no_grad()
def test_timed_prefill_by_steps_is_the_real_one(solver, graph, monkeypatch):
    """Also what a CUDA graph replays, for each token if there is no other way."""
    monkeypatch.setattr(convergence, "record",
                        lambda function, state: SimpleNamespace(replay=function))
    torch.manual_seed(0)
    model = build(ModelConfig(**TINY, eos_id=0)).double()
    idx = torch.randint(64, (3, 9)) * (torch.rand(3, 9) > 0.2)
    fast = accelerate(model, torch.float64)
    fast.graph = graph
    run_once = convergence.make_prefill(fast, idx, convergence.Schedule(solver, 2, 3))
    for _ in range(2):
        solution = run_once()
    exact = cyclic(model, idx, 3, 2, 0).cache
    if solver == "autoregressive":
        exact = autoregressive(model, idx, keep_cache=True).cache
    cache = run_once.steps.cache if solution is None else solution.cache
    for mine, theirs in zip(channels(cache), channels(exact)):
        assert (mine - theirs).abs().max() < 1e-10


# ---- train and decode

SIZES = ["--vocab_size=64", "--n_layer=2", "--n_embd=16", "--n_head=2", "--n_kv_head=1",
         "--head_dim=8", "--n_hidden=24", "--systems=vanilla,k2", "--trials=3", "--warmups=1",
         "--device=cpu"]


def test_train_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", None)  # must not be called
    bench.main(["train", *SIZES, "--batch_size=2", "--block_size=16", "--document=5",
                f"--json={tmp_path}/r.json"])
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["device"] == "cpu" and result["peak_flops"] is None
    vanilla, k2 = (result["systems"][name] for name in ("vanilla", "k2"))
    for r in (vanilla, k2):
        for part in (r["micro_step"], r["optimizer"], r["loss"]):
            assert len(part["trial_seconds"]) == 3 and part["warmups"] == 1
            assert part["median_seconds"] == statistics.median(part["trial_seconds"])
        assert r["micro_step"]["tokens_per_second"] == pytest.approx(
            32 / r["micro_step"]["median_seconds"])
        assert r["mfu"] is None and r["peak_bytes"] is None and 0 < r["optimizer_share"] < 1
        assert r["kernels"] is None
    assert k2["ratio"] == pytest.approx(k2["micro_step"]["median_seconds"]
                                        / vanilla["micro_step"]["median_seconds"])
    assert k2["flops_per_token"] == flops_per_token(
        ModelConfig(vocab_size=64, n_layer=2, n_embd=16, n_head=2, n_kv_head=1, head_dim=8,
                    n_hidden=24, n_channels=2), 16, "training", head=True)
    assert "n/a" in capsys.readouterr().out


def test_groups_of_the_schedule():
    c = bench.parse(bench.TrainBenchConfig(), ["--systems=k16,recurrent,lckv4", "--n_groups=4"], "")
    assert [config.n_groups for config in c.models().values()] == [4, 4, 1]


def test_profile(capsys):
    bench.main(["train", *SIZES, "--batch_size=1", "--block_size=8", "--systems=vanilla",
                "--profile"])
    lines = capsys.readouterr().out.partition("ms  number\n")[2].splitlines()
    rows = [line.rsplit(None, 2) for line in lines]
    table = {kind.strip(): int(count.replace(",", "")) for kind, _, count in rows}
    assert set(table) <= {kind for kind, _ in bench.KINDS} | {"sum"} and min(table.values()) > 0
    assert {"attention", "matrix products"} < set(table) and "pool" not in table
    assert sum(table.values()) == 2 * table["sum"]


@pytest.mark.parametrize("name, kind", (
    ("forward_kernel", "attention"), ("add_norm_kernel", "norms and residuals"),
    ("store_kernel", "pool"), ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>",
                               "matrix products"),
    ("nvjet_tst_128x64_64x10_1x2_h_bz_coopA_TNT", "matrix products"),
    ("Memcpy DtoD (Device -> Device)", "copies"), ("triton_poi_fused_silu", "other element-wise"),
    ("triton_red_fused_logsumexp_sum_where", "cross-entropy")))
def test_kinds_of_kernels(name, kind):
    assert bench.kind_of(name) == kind


def test_peak_by_name(monkeypatch):
    for name, peak in (("NVIDIA H100 80GB HBM3", 989.4e12), ("NVIDIA H100 PCIe", 756e12),
                       ("NVIDIA H200", 989.4e12), ("NVIDIA A100-SXM4-80GB", 312e12),
                       ("NVIDIA RTX A6000", 154.8e12), ("NVIDIA GeForce RTX 4090", 165.2e12),
                       ("Tesla T4", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert flops.peak_flops("cuda") == peak
    assert flops.peak_flops("cpu") is None


def test_random_rows_have_documents():
    c = bench.TrainBenchConfig(batch_size=4, block_size=500, document=10, vocab_size=50)
    x, y = bench.random_rows(c, "cpu")
    assert x.shape == y.shape == (4, 500) and torch.equal(x[:, 1:], y[:, :-1])
    assert 100 < (x == 49).sum() < 300 and x.min() == 0 and x.max() == 49


def test_decode_command(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", None)
    bench.main(["decode", *SIZES, "--batch_sizes=1,3", "--context=10", "--steps=4",
                f"--json={tmp_path}/r.json"])
    results = json.loads((tmp_path / "r.json").read_text())["results"]
    assert [(r["system"], r["batch_size"]) for r in results] == [
        ("vanilla", 1), ("k2", 1), ("vanilla", 3), ("k2", 3)]
    for r in results:
        assert r["seconds_per_step"] == pytest.approx(statistics.median(r["trial_seconds"]) / 4)
        assert r["tokens_per_second"] == pytest.approx(r["batch_size"] / r["seconds_per_step"])
        assert r["cache_bytes"] == 2 * 2 * r["batch_size"] * 10 * 8 * 4
    assert results[3]["ratio"] == pytest.approx(
        results[3]["seconds_per_step"] / results[2]["seconds_per_step"])


# ---- systems

ALL = ("vanilla", "k2", "static2", "static1", "nofeedback", "lckv1", "feedback", "recurrent",
       "fusedkv", "fusedkv_lite")


def test_every_system_is_timed(capsys):
    sizes = [*SIZES, "--n_layer=3", f"--systems={','.join(ALL)}", "--trials=1"]
    for argv in (["train", *sizes, "--batch_size=1", "--block_size=3"],
                 ["decode", *sizes, "--batch_sizes=1", "--context=8", "--steps=2"]):
        bench.main(argv)
        lines = capsys.readouterr().out.splitlines()[-len(ALL):]
        assert [line.split()[0] for line in lines] == list(ALL)


@pytest.fixture
def small_config(tmp_path, monkeypatch):
    """c.py, small sizes, in a working folder with a data set of noise."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data" / "noise"
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(json.dumps({
        "tokenizer": "bytes", "vocab_size": 64, "eos_id": 0, "dtype": "uint16",
        "tokens": {"train": 300, "val": 100, "test": 0}}))
    for split, n in (("train", 300), ("val", 100)):
        np.random.default_rng(n).integers(64, size=n).astype("<u2").tofile(folder / f"{split}.bin")
    sizes = dict(n_layer=3, n_embd=16, n_head=4, n_kv_head=2, head_dim=6, n_hidden=24,
                 n_groups=2, batch_size=2, block_size=8, gradient_accumulation_steps=1,
                 eval_rows=2)
    config = "".join(f"{k} = {v}\n" for k, v in sizes.items())
    (tmp_path / "c.py").write_text(config + 'dataset = "noise"\n')


def test_systems_command(small_config, tmp_path, capsys):
    """All are trained on the same rows, by train.py."""
    bench.main(["systems", "--config=c.py", f"--systems={','.join(ALL)}", "--max_iters=2",
                "--device=cpu", "--json=r.json"])
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["tokens_per_step"] == 16 and list(result["systems"]) == list(ALL)
    for name, r in result["systems"].items():
        state = torch.load(f"out/systems/{name}/ckpt.pt", weights_only=True)
        assert state["step"] == 2 and state["rows_seen"] == 4 and state["config"]["seed"] == 1337
        assert r["val_loss"] == pytest.approx(state["best_val_loss"])
        assert r["params"] == build(ModelConfig(**state["model_config"])).n_params()
    assert {name: round(3 * r["cache"]) for name, r in result["systems"].items()} == dict(
        zip(ALL, (3, 2, 2, 1, 3, 2, 1, 3, 1, 1)))
    assert [r["passes"] for r in result["systems"].values()] == [
        "1", "1+2", "1+2", "1+2", "1", "7+2", "1+2", "1+2", "1", "1"]
    assert "step" not in capsys.readouterr().out.split("\n\n")[1]


def test_systems_are_trained_anew_each_by_its_own_schedule(small_config, tmp_path, capsys):
    with open("c.py", "a") as f:
        f.write('init_from = "auto"; kv = "lckv"; lckv_w = 1; n_nograd = 5; n_grad = 1\n')
    argv = ["systems", "--config=c.py", "--systems=lckv1,k2,feedback", "--device=cpu"]
    for steps in (2, 1):
        bench.main([*argv, f"--max_iters={steps}", "--json=r.json"])
        for name in ("lckv1", "k2"):
            assert torch.load(f"out/systems/{name}/ckpt.pt", weights_only=True)["step"] == steps
    systems = json.loads((tmp_path / "r.json").read_text())["systems"]
    assert [r["passes"] for r in systems.values()] == ["7+2", "1+2", "1+2"]


def test_a_system_of_ones_own_is_timed_and_trained_without_a_plan(small_config, monkeypatch,
                                                                  tmp_path, capsys):
    monkeypatch.setattr(model, "SYSTEMS", (*model.SYSTEMS, "mine"))
    monkeypatch.setitem(baselines.SYSTEMS, "mine", type("Mine", (model.Decoder,), {}))
    sizes = [*SIZES, "--systems=vanilla,mine", "--trials=1"]
    for argv in (["train", *sizes, "--batch_size=1", "--block_size=3"],
                 ["decode", *sizes, "--batch_sizes=1", "--context=8", "--steps=2"],
                 ["prefill", "--random=paper", "--systems=vanilla,mine", "--n_layer=2",
                  "--block_size=8", "--batch_size=1", "--trials=1", "--device=cpu"],
                 ["systems", "--config=c.py", "--systems=vanilla,mine", "--max_iters=1",
                  "--device=cpu"]):
        bench.main(argv)
        assert capsys.readouterr().out.splitlines()[-1].startswith("mine")
    with pytest.raises(UserError, match="kv=mine: no plan"):
        flops_per_token(ModelConfig(kv="mine"), 8, "training")


def test_what_a_system_of_ones_own_leaves_behind_is_not_guessed(monkeypatch):
    monkeypatch.setattr(model, "SYSTEMS", (*model.SYSTEMS, "mine"))
    feedback = baselines.plan(ModelConfig(kv="feedback"))
    monkeypatch.setattr(flops, "plan", lambda c: feedback)
    with pytest.raises(UserError, match="kv=mine: no formula"):
        flops_per_token(ModelConfig(kv="mine"), 8, "training")
    assert flops.flops_if_known(ModelConfig(kv="mine"), 8, "decode") is None


@pytest.mark.parametrize("line, said", [("eval_rows = 0", "eval_rows=0: at least 1"),
                                        ("warmup_iters = 9", "warmup_iters=9: fewer than")])
def test_systems_are_checked_as_train_checks_its_settings(small_config, tmp_path, line, said):
    with open("c.py", "a") as f:
        f.write(line)
    with pytest.raises(UserError, match=f"vanilla: {said}"):
        bench.main(["systems", "--config=c.py", "--systems=vanilla,k1", "--max_iters=2"])
    assert not (tmp_path / "out").exists()


def test_systems_that_are_done_are_written_where_the_next_one_fails(small_config, tmp_path,
                                                                    monkeypatch):
    trainer = bench.train.Trainer
    run = trainer.run
    monkeypatch.setattr(trainer, "run", lambda t: run(t) if t.c.kv == "vanilla" else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.main(["systems", "--config=c.py", "--systems=vanilla,k1", "--max_iters=1",
                    "--device=cpu", "--json=r.json"])
    assert list(json.loads((tmp_path / "r.json").read_text())["systems"]) == ["vanilla"]


# ---- bad input

@pytest.mark.parametrize("argv, message", (
    ([], "no command; choose one of flops, train, decode, prefill, systems"),
    (["speed"], "speed: unknown command; choose one of flops, train, decode, prefill, systems"),
    (["--trials=2"], "--trials=2: unknown command"),
    (["prefill", "--trials=0"], "trials=0: at least 1"),
    (["prefill", "--schedules=cyclic:3"], "'cyclic:3' is none of jacobi:PASSES"),
    (["prefill", "--schedules=jacobi:0"], "'jacobi:0' is none of"),
    (["prefill", "--passes_dtype=half"], "passes_dtype=half: choose auto"),
    (["prefill", "--random=huge"], "random=huge: choose tiny or paper"),
    (["train", "--systems=vanilla,16"], "16: no system; choose vanilla, k16"),
    (["decode", "--systems=k17"], "k17: n_channels=17"),
    (["systems", "--systems=vanilla,lckv"], "systems=vanilla,lckv, lckv: no system"),
    (["systems", "--max_iters=0"], "max_iters=0: at least 1"),
    (["systems", "--systems=vanilla,k16"], "systems=vanilla,k16, k16: n_channels=16"),
    (["prefill", "--systems=lckv3"], "lckv3: lckv_w=3: 0 to n_layer-2=2"),
    (["prefill", "--systems=k2", "--out_dir=x"], "without out_dir"),
    (["decode", "--batch_sizes=1,x"], "batch_sizes: 'x' is no number"),
    (["train", "--trials=0"], "trials=0: at least 1"),
    (["prefill", "--trails=2"], "did you mean trials"),
    (["prefill", "--device=nonsense"], "device=nonsense"),
    (["prefill", "--out_dir=nowhere"], "no such checkpoint"),
    (["prefill", "--schedules=cyclic00:2"], "'cyclic00:2' is none of"),
    (["prefill", "--systems=k4", "--schedules=jacobi:1"], "without schedules"),
    (["train", "--n_head=5"], "n_head=5 is no multiple of n_kv_head=3"),
    (["train", "--vocab_size=1"], "vocab_size=1: at least 2"),
    (["train", "--document=-3"], "document=-3: a length"),
    (["decode", "--temperature=-1"], "temperature=-1.0: at least 0"),
    (["decode", "--top_k=-5"], "top_k=-5: a positive number"),
    (["decode", "--top_p=7"], "top_p=7.0: a number above 0"),
    (["decode", "--batch_sizes=\u00b2"], "batch_sizes: '\u00b2' is no number"),
    (["flops", "--json=."], "json=.: this is a folder"),
    (["flops", "--block_size=0"], "block_size=0: at least 1"),
    (["flops", "--json=no/such/file"], "there is no such folder")))
def test_bad_input(argv, message):
    with pytest.raises(UserError) as error:
        bench.main(argv)
    assert message in str(error.value)


def test_results_that_a_full_disk_does_not_take_are_printed_and_those_before_stay(
        tmp_path, monkeypatch, capsys):
    old, link = tmp_path / "r.json", tmp_path / "link.json"
    link.symlink_to(old)
    timing.write_json(str(link), {"a": 1})
    assert json.loads(old.read_text()) == {"a": 1} and link.is_symlink()

    def full(path, data):
        with open(path, "wb") as file:
            file.write(data[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match="No space left on device.; the results are on stdout"):
        timing.write_json(str(old), {"a": 2})
    assert json.loads(capsys.readouterr().out) == {"a": 2}
    assert json.loads(old.read_text()) == {"a": 1} and len(list(tmp_path.iterdir())) == 2


def test_vanilla_has_no_schedules(checkpoint):
    state = torch.load("out/ckpt.pt", weights_only=True)
    config = ModelConfig(**TINY, kv="vanilla")
    state |= {"model": build(config).state_dict(), "model_config": asdict(config)}
    save_checkpoint(checkpoint / "out" / "ckpt.pt", state)
    with pytest.raises(UserError, match="exact in one pass"):
        bench.main(["prefill", "--out_dir=out"])


def test_help(capsys):
    bench.main(["--help"])
    assert "commands: flops, train, decode, prefill, systems" in capsys.readouterr().out
    with pytest.raises(SystemExit) as leave:
        run(bench.main, ["prefill", "--help"])
    assert leave.value.code == 0 and "--max_passes=128" in capsys.readouterr().out
