"""bench.py: FLOP per token beside the paper's table, and the convergence study end to end."""

import json
import statistics
from dataclasses import asdict

import numpy as np
import pytest
import torch

import bench
from bench import MODES, PAPER, count_flops, flops_per_token
from configurator import UserError, run
from model import ModelConfig
from pool import build
from train import save_checkpoint

TINY = dict(vocab_size=64, n_layer=3, n_embd=16, n_head=4, n_kv_head=2, head_dim=6, n_hidden=24,
            n_channels=3)


# ---- flops

@pytest.mark.parametrize("name", PAPER)
def test_formula_against_the_papers_table(name):
    sizes, paper = PAPER[name]
    ours = [flops_per_token(ModelConfig(**sizes), 2048, mode) / 1e9 for mode in MODES]
    assert ours == pytest.approx(paper, rel=0.03)
    exact = ours if "vanilla" in name else ours[2:]  # decode, and all of vanilla: to the digit
    assert [f"{x:.3f}" for x in exact] == [f"{x:.3f}" for x in paper[-len(exact):]]


def test_the_papers_other_figures_are_explained():
    """Prefill: five evaluations of the pool for our four. Training: six forward for 4 6/8."""
    for k, training, prefill in ((16, "1.111", "0.467"), (8, "1.028", "0.432")):
        c = ModelConfig(n_channels=k)
        pool = bench.pool_flops(c)
        assert f"{(flops_per_token(c, 2048, 'prefill') + pool) / 1e9:.3f}" == prefill
        assert f"{(flops_per_token(c, 2048, 'training') + 1.25 * pool) / 1e9:.3f}" == training


def test_case_33_ratios_to_vanilla():
    vanilla = flops_per_token(ModelConfig(kv="vanilla"), 2048, "training")
    for k, ratio in ((16, 2.50), (8, 2.32)):
        wm = flops_per_token(ModelConfig(n_channels=k), 2048, "training")
        assert wm / vanilla == pytest.approx(ratio, rel=0.03)


@pytest.mark.parametrize("n_nograd", (0, 1, 2))
@pytest.mark.parametrize("n_grad", (1, 2))
@pytest.mark.parametrize("n_groups", (1, 4))
def test_case_33_formula_equals_count_in_training(n_nograd, n_grad, n_groups):
    c = ModelConfig(**TINY, n_nograd=n_nograd, n_grad=n_grad, n_groups=n_groups)
    counted = count_flops(c, 30, "training", device="cpu")
    assert counted == pytest.approx(flops_per_token(c, 30, "training"), rel=1e-9)


@pytest.mark.parametrize("changes", (
    dict(kv="vanilla"), dict(), dict(n_channels=2), dict(router="static"), dict(router_stride=1),
    dict(n_groups=99), dict(eos_id=0)), ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_formula_equals_count(changes, mode):
    c = ModelConfig(**{**TINY, **changes})
    counted = count_flops(c, 21, mode, device="cpu")
    assert counted == pytest.approx(flops_per_token(c, 21, mode), rel=1e-9)


@pytest.mark.parametrize("kv, mode", (("vanilla", "training"), ("vanilla", "prefill"),
                                      ("vanilla", "decode"), ("whitematter", "decode")))
def test_formula_equals_count_at_the_papers_sizes(kv, mode):
    c = ModelConfig(kv=kv)
    assert count_flops(c, 2048, mode) == pytest.approx(flops_per_token(c, 2048, mode), rel=1e-9)


def test_head_is_three_products_in_training():
    c = ModelConfig(**TINY)
    for mode, products in (("training", 3), ("prefill", 1), ("decode", 1)):
        head = flops_per_token(c, 32, mode, head=True) - flops_per_token(c, 32, mode)
        assert head == products * 2 * 64 * 16
    with pytest.raises(ValueError, match="mode='train'"):
        flops_per_token(c, 32, "train")


def test_flops_command(tmp_path, monkeypatch, capsys):
    # WhiteMatter at full size would take half a minute: most of it PyTorch's, not ours
    small = {"WhiteMatter k=2": (dict(n_layer=2, n_channels=2), PAPER["WhiteMatter k=8"][1])}
    monkeypatch.setattr(bench, "PAPER", {"vanilla L=16": PAPER["vanilla L=16"], **small})
    bench.main(["flops", "--block_size=8", f"--json={tmp_path}/flops.json"])
    assert "51,924,480" in capsys.readouterr().out
    models = json.loads((tmp_path / "flops.json").read_text())["models"]
    assert models["vanilla L=16"]["params"] == 51_924_480
    cell = models["WhiteMatter k=2"]["modes"]["training"]
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


def test_case_64_prefill_command(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", None)  # must not be called
    bench.main(["prefill", "--out_dir=out", "--rows=3", "--batch_size=2", "--trials=2",
                "--warmups=1", "--device=cpu", "--json=result.json"])
    result = json.loads((checkpoint / "result.json").read_text())
    assert [s["g"] for s in result["schedules"]] == [1, 2, 4, 8, 16, 24]
    assert result["block_size"] == 24 and result["rows"] == 3 and result["batch_size"] == 2
    assert result["device"] == "cpu" and result["dtype"] == "float32" and not result["compiled"]
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


def test_perplexity_per_pass_is_that_of_separate_solves():
    torch.manual_seed(0)
    model = build(ModelConfig(**TINY)).double()
    x = torch.randint(64, (3, 10))
    y = x.roll(-1, 1)
    with torch.no_grad():
        ours = bench.perplexities(model, x, y, batch_size=2, n_groups=4, passes=3)
        for n, ppl in enumerate(ours, 1):
            final = bench.cyclic(model, x, 4, n, 0).final
            assert ppl == pytest.approx(model.loss(final, y).exp().item(), rel=1e-12)
    assert "states" not in vars(model)


def test_passes_that_do_not_suffice():
    torch.manual_seed(0)
    model = build(ModelConfig(**TINY))
    x = torch.randint(64, (1, 8))
    with torch.no_grad():
        n, ppl = bench.passes_needed(model, x, x, 1, 1, 5, exact=1e9)
    assert n is None and len(ppl) == 5
    row = bench.schedule_line({"g": 1, "solver": "jacobi", "passes": n, "perplexities": ppl}, 1., 5)
    assert ">5" in row


# ---- bad input

@pytest.mark.parametrize("argv, message", (
    ([], "no command; choose one of flops, prefill"),
    (["speed"], "speed: unknown command; choose one of flops, prefill"),
    (["--trials=2"], "--trials=2: unknown command"),
    (["prefill", "--trials=0"], "trials=0: at least 1"),
    (["prefill", "--trails=2"], "did you mean trials"),
    (["prefill", "--device=nonsense"], "device=nonsense"),
    (["prefill", "--out_dir=nowhere"], "no such checkpoint"),
    (["flops", "--block_size=0"], "block_size=0: at least 1"),
    (["flops", "--json=no/such/file"], "there is no such folder")))
def test_bad_input(argv, message):
    with pytest.raises(UserError) as error:
        bench.main(argv)
    assert message in str(error.value)


def test_vanilla_has_no_schedules(checkpoint):
    state = torch.load("out/ckpt.pt", weights_only=True)
    config = ModelConfig(**TINY, kv="vanilla")
    state |= {"model": build(config).state_dict(), "model_config": asdict(config)}
    save_checkpoint(checkpoint / "out" / "ckpt.pt", state)
    with pytest.raises(UserError, match="exact in one pass"):
        bench.main(["prefill", "--out_dir=out"])


def test_help(capsys):
    bench.main(["--help"])
    assert "commands: flops, prefill" in capsys.readouterr().out
    with pytest.raises(SystemExit) as leave:
        run(bench.main, ["prefill", "--help"])
    assert leave.value.code == 0 and "--max_passes=128" in capsys.readouterr().out
