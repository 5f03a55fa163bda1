"""pictures.py: what is drawn, number by number; the pictures themselves are for the eye."""

import json
import math
import os
import sys
from dataclasses import asdict

import numpy as np
import pytest
import torch
from small import random_tokens, small_model

import bench
import pictures
from baselines import plan
from checkpoint import save_checkpoint
from configurator import UserError, run
from measure.schedules import Schedule
from measure.systems import named
from model import ModelConfig
from pictures import Curve, CurvesConfig
from solvers import cyclic
from train import Log

BYTES = dict(vocab_size=320, eos_id=256, n_groups=4)
META = {"tokenizer": "bytes", "vocab_size": 257, "eos_id": 256, "dtype": "uint16", "tokens": {}}
HEAD = "step,loss,val_loss,lr,grad_norm,tokens_per_s\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def figures(monkeypatch):
    """The figures that a command would save, to be looked at."""
    plt, kept = pytest.importorskip("matplotlib.pyplot"), []
    monkeypatch.setattr(pictures, "save", lambda fig, output: kept.append(fig))
    yield kept
    plt.close("all")


def write_log(folder, losses, val=(), first=0, checkpoint=None, **state):
    """log.csv of a run with these losses, and after n steps the validation losses val = (n, x)."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [f"{first + n},{x},,0.1,1.0,99\n" for n, x in enumerate(losses)]
    for n, x in reversed(val):
        rows.insert(n - first, f"{n},,{x},,,\n")
    (folder / "log.csv").write_text(HEAD + "".join(rows))
    if checkpoint:
        meta = {"tokenizer": "bytes", "vocab_size": 257, "eos_id": 256}
        save_checkpoint(folder / "ckpt.pt", {"model": {}, "model_config": {}, "meta": meta,
                                             "config": checkpoint, "w": torch.zeros(3), **state})


SIZES = {"gradient_accumulation_steps": 4, "batch_size": 2, "block_size": 8}


# ---- curves

def test_log_of_one_run(here):
    write_log(here / "a", [5.0, 4.0, 3.5], [(2, 4.1), (3, 3.6)])
    assert pictures.read_log(here / "a" / "log.csv") == (
        {0: 5.0, 1: 4.0, 2: 3.5}, {2: 4.1, 3: 3.6})


@pytest.mark.filterwarnings("error")
def test_log_with_lines_that_are_cut_off(here):
    (here / "log.csv").write_text(
        HEAD + "0,5.0,,,,\n1,4.0\n2,,,\n,\n3,nonsense,,\n4,nan,,,,\n1,3.0,,,,\n5,,9,,\n1")
    assert pictures.read_log(here / "log.csv") == ({0: 5.0, 1: 3.0}, {5: 9.0})


def test_running_mean_by_hand():
    x = np.array([1.0, 2.0, 6.0, 3.0, 8.0])
    assert pictures.running_mean(x, 1).tolist() == [1, 2, 6, 3, 8]
    assert pictures.running_mean(x, 3) == pytest.approx([1.5, 3, 11 / 3, 17 / 3, 5.5])
    assert pictures.running_mean(x, 4) == pytest.approx([1.5, 3, 11 / 3, 17 / 3, 5.5])
    assert pictures.running_mean(x, 99) == pytest.approx([4.0] * 5)


def test_tokens_come_from_the_checkpoint_or_the_setting(here):
    write_log(here / "a", [5.0, 4.0, 3.0], [(2, 4.5)], checkpoint=SIZES)
    write_log(here / "b", [5.0, 4.0], [(1, 4.5)])
    curve = pictures.read_curve("a", CurvesConfig(smooth=1))
    assert curve.x.tolist() == [64, 128, 192] and curve.loss.tolist() == [5, 4, 3]
    assert curve.val_x.tolist() == [128] and curve.val_loss.tolist() == [4.5]
    assert curve.in_tokens and curve.name == "a"
    curve = pictures.read_curve("b", CurvesConfig(smooth=1))
    assert curve.x.tolist() == [1, 2] and not curve.in_tokens
    both = pictures.read_curves(CurvesConfig(logs="a, b/log.csv,", smooth=1, tokens_per_step=10))
    assert [c.x[0] for c in both] == [10, 10] and [c.name for c in both] == ["a", "b"]


def test_runs_of_one_name_are_told_apart_by_their_paths(here):
    for place in ("x/run", "y/run"):
        write_log(here / place, [5.0, 4.0])
    names = [c.name for c in pictures.read_curves(CurvesConfig(logs="x/run,y/run"))]
    assert names == ["x/run", "y/run"]


def test_difference_to_the_first_run_by_hand():
    def curve(x, loss, val_x, val):
        return Curve("", *map(np.array, (x, loss, val_x, val)), True)

    base = curve([10.0, 20.0, 30.0], [5.0, 4.0, 2.0], [20.0, 30.0], [4.0, 3.0])
    other = curve([5.0, 15.0, 25.0, 35.0], [9.0, 4.0, 3.3, 1.0], [15.0, 30.0], [9.0, 2.5])
    off = pictures.relative(other, base)
    assert off.x.tolist() == [15, 25] and off.val_x.tolist() == [30]
    assert off.loss == pytest.approx([100 * (math.exp(-0.5) - 1), 100 * (math.exp(0.3) - 1)])
    assert off.val_loss == pytest.approx([100 * (math.exp(-0.5) - 1)])


def test_curves_picture(here, figures):
    losses = [6 - n / 10 for n in range(30)]
    write_log(here / "out" / "a", losses, [(10, 5.5), (30, 3.5)], checkpoint=SIZES)
    write_log(here / "out" / "b", [x - 0.1 for x in losses], [(10, 5.4), (30, 3.3)],
              checkpoint=SIZES)
    pictures.main(["curves", "--logs=out/a,out/b", "--smooth=1"])
    left, right = figures[0].axes
    lines = left.get_lines()
    assert lines[0].get_ydata() == pytest.approx(losses)
    assert lines[0].get_xdata() == pytest.approx([64 * (n + 1) for n in range(30)])
    assert lines[1].get_xdata() == pytest.approx([640, 1920])
    assert lines[1].get_ydata().tolist() == [5.5, 3.5]
    assert [t.get_text() for t in left.get_legend().get_texts()] == [
        "a  (validation 3.500)", "b  (validation 3.300)"]
    assert left.get_xlabel() == "tokens" and "nats" in left.get_ylabel()
    low, high = left.get_ylim()
    assert low < 3.0 < 5.9 < high
    assert right.get_lines()[0].get_ydata() == pytest.approx([100 * math.expm1(-0.1)] * 30)
    assert right.get_lines()[1].get_ydata() == pytest.approx(
        [100 * math.expm1(-0.1), 100 * math.expm1(-0.2)])
    low, high = right.get_ylim()
    assert low < 100 * math.expm1(-0.2) < 0 < high
    colours = {line.get_color() for line in lines}
    assert len(colours) == 2


@pytest.mark.filterwarnings("error")  # of matplotlib's: no such letter, no room
def test_runs_are_drawn_by_their_names_whatever_these_are(here, figures):
    """What matplotlib leaves out of a legend (a leading underscore), reads as mathematics (dollars,
    which may then be wrong), or has no room or letter for.
    [matplotlib/matplotlib#21295, matplotlib/matplotlib#20266]"""
    names = ["$\\frac{$", "_hidden", "$alpha$", r"a\$b", "100%_{x}^2", "\\", "модель"]
    odd = {"two\nlines": r"'two\nlines'", os.fsdecode(b"\xff"): r"'\udcff'",
           "l" * 50: f"{'l' * 40}\n{'l' * 10}"}
    for name in (*names, *odd, "a,b"):
        write_log(here / name, [5.0, 4.0])
    pictures.main(["curves", f"--logs={','.join([*names, *odd])}"])
    texts = figures[0].axes[0].get_legend().get_texts()
    assert [t.get_text() for t in texts] == [*names, *odd.values()]
    assert figures[0].axes[1].get_title() == f"perplexity against {names[0]}"
    figures[0].canvas.draw()
    assert [run.name for run in pictures.read_curves(CurvesConfig(logs="a,b"))] == ["a,b"]


def test_a_run_with_another_batch_on_the_way_is_noted(here, capsys):
    for tokens, noted in ((30 * 64, False), (30 * 32, True)):
        write_log(here / "a", [6 - n / 10 for n in range(30)], checkpoint=SIZES,
                  step=30, tokens_seen=tokens)
        pictures.read_curve("a", CurvesConfig())
        assert ("a/log.csv: this run has changed its batch" in capsys.readouterr().out) == noted


def test_curves_of_one_run_show_its_end(here, figures):
    write_log(here / "a", [6 - n / 10 for n in range(30)])
    pictures.main(["curves", "--logs=a", "--smooth=1"])
    left, right = figures[0].axes
    assert left.get_xlabel() == "steps" and right.get_xlim()[0] == pytest.approx(21)
    assert right.get_ylim()[0] < 3.1 and 4.0 <= right.get_ylim()[1] < 4.2


def test_a_run_that_ends_before_the_first_begins_differs_nowhere(here, figures):
    write_log(here / "long", [6.0, 5.0], [(0, 7.0), (2, 4.0)],
              checkpoint=SIZES | {"batch_size": 99})
    write_log(here / "trial", [6.0, 5.5], [(0, 8.0), (2, 5.4)], checkpoint=SIZES)
    write_log(here / "blind", [6.0, 5.5], checkpoint=SIZES)
    pictures.main(["curves", "--logs=long,trial,blind"])
    line, dots, *_ = figures[0].axes[1].get_lines()
    assert len(line.get_xdata()) == 0 and dots.get_ydata() == pytest.approx([100 * math.expm1(1)])
    assert figures[0].axes[1].get_ylim()[1] > 100 * math.expm1(1)


def test_files_are_written(here, capsys):
    pytest.importorskip("matplotlib")
    write_log(here / "a", [5.0, 4.0, 3.0])
    for output, begins in (("p.png", b"\x89PNG"), ("new/p.svg", b"<?xml")):
        pictures.main(["curves", "--logs=a", f"--output={output}"])
        assert (here / output).read_bytes().startswith(begins)
    assert capsys.readouterr().out == "p.png\nnew/p.svg\n"
    for output in ("other/p.nonsense", "p.png/q.png"):
        with pytest.raises(UserError, match=f"output={output}: cannot write it"):
            pictures.main(["curves", "--logs=a", f"--output={output}"])
    assert not (here / "other").exists()


def test_a_link_and_a_pipe_stay_what_they_are(here, capsys):
    pytest.importorskip("matplotlib")
    os.mkfifo(here / "pipe")
    for name, target in (("p.png", "real.png"), ("q.png", "pipe")):
        (here / name).symlink_to(target)
    reading = os.open(here / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for output in ("p.png", "q.png"):
        pictures.main(["connections", "--systems=k1", "--n_layer=1", f"--output={output}"])
        assert (here / output).is_symlink()
    data = os.read(reading, 2**20)
    os.close(reading)
    assert (here / "pipe").is_fifo() and data == (here / "real.png").read_bytes()


# ---- connections

def test_connections(figures):
    pictures.main(["connections", "--n_layer=5", "--systems=vanilla,k2,static1,nofeedback,lckv2"])
    titles = [ax.texts[-2].get_text() for ax in figures[0].axes[:5]]
    assert titles == ["Vanilla", "WhiteMatter, k = 2", "Static, k = 1", "No feedback",
                      "LCKV, w = 2"]
    assert figures[0].axes[1].texts[-1].get_text().endswith("\n2/5 of the cache")
    own = [line for line in figures[0].axes[4].get_lines() if line.get_xdata()[0] > 2]
    assert [line.get_ydata()[0] for line in own] == [0, 3, 4]  # layers 1 and 2 do not read it


def test_what_connections_draws():
    """The README's first panels by hand; of FusedKV-Lite, which channel for what."""
    def drawn(name, n_layer=4):
        config = ModelConfig(**{"n_layer": n_layer, **named(name, n_layer)})
        return pictures.wires(plan(config))

    same = [(n, n, "kv") for n in range(4)]
    assert drawn("vanilla") == ([(n, n, 1) for n in range(4)], same)
    produce, consume = drawn("k2")
    assert produce == [(s, j, float(s % 2 == j)) for j in range(2) for s in range(4)]
    assert consume == [(0, 0, "kv"), (1, 1, "kv"), (0, 2, "kv"), (1, 3, "kv")]
    assert drawn("feedback") == ([(s, 0, 1) for s in range(5)], [(0, n, "kv") for n in range(4)])
    assert drawn("recurrent")[0] == [(n + 1, n, 1) for n in range(4)]
    assert drawn("fusedkv_lite") == ([(0, 0, 1), (1, 1, 1)], [
        *same[:2], (0, 2, "v"), (1, 2, "k"), (0, 3, "v"), (1, 3, "k")])


@pytest.mark.parametrize("kind", pictures.SYSTEMS)
def test_every_system_has_a_picture(kind, figures):
    name = kind + "2" * (kind in ("k", "static", "lckv"))
    pictures.main(["connections", "--n_layer=4", f"--systems={name}"])
    assert len(figures[0].axes) == 1


# ---- convergence

def prefill_json(path, **changes):
    schedules = [
        {"g": 1, "solver": "jacobi", "passes": None, "perplexities": [9.0, 6.0, 5.0]},
        {"g": 8, "solver": "cyclic", "passes": 2, "perplexities": [6.0, 4.02],
         "seconds_per_sequence": 0.02},
        {"g": 64, "solver": "autoregressive", "passes": 1, "perplexities": [4.0],
         "seconds_per_sequence": 0.17}]
    path.write_text(json.dumps({"schedules": schedules, "exact_perplexity": 4.0, "block_size": 64,
                                "batch_size": 8, "device": "cpu", "dtype": "float32"} | changes))


def test_convergence_picture(here, figures):
    prefill_json(here / "p.json")
    pictures.main(["convergence", "--json=p.json"])
    passes, times, off = figures[0].axes
    assert passes.get_lines()[0].get_xdata().tolist() == [1, 2]
    assert passes.get_lines()[0].get_ydata().tolist() == [2, 1]
    assert times.get_lines()[0].get_ydata() == pytest.approx([20, 170])
    assert [t.get_text() for t in times.get_xticklabels()] == ["Jacobi", "8", "token\nby token"]
    assert [t.get_text() for t in times.texts] == ["20", "170", "not\nreached"]
    assert off.get_lines()[0].get_ydata() == pytest.approx([125, 50, 25])
    assert off.get_lines()[1].get_ydata() == pytest.approx([50, 0.5])
    assert [t.get_text() for t in off.get_legend().get_texts()] == ["Jacobi", "g=8"]


def test_convergence_of_given_schedules(here, figures):
    """Times only: no perplexities, groups under another name."""
    path = here / "p.json"
    prefill_json(path)
    results = json.loads(path.read_text())
    del results["exact_perplexity"]
    results["schedules"] = [
        {"n_groups": 16, "solver": "cyclic", "passes": 4, "seconds_per_sequence": 0.0125},
        {"n_groups": 1, "solver": "jacobi", "passes": 75, "seconds_per_sequence": 0.1393}]
    path.write_text(json.dumps(results))
    pictures.main(["convergence", f"--json={path}"])
    passes, times = figures[0].axes
    assert passes.get_lines()[0].get_ydata().tolist() == [75, 4]
    assert times.get_lines()[0].get_ydata() == pytest.approx([139.3, 12.5])


# ---- connectome

def rms(x, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@torch.no_grad()
@pytest.mark.parametrize("changes", (dict(), dict(n_channels=2), dict(router="static"),
                                     dict(n_channels=1, router_stride=1)), ids=str)
def test_weights_are_those_that_the_pool_mixes_with(changes):
    """From these weights and the states, by the paper's equations: the values in the cache."""
    model = small_model(**changes)
    idx = random_tokens(2, 9)
    alpha = pictures.mixing_weights(model, idx, Schedule("cyclic", 3, 4))
    solution = cyclic(model, idx, 4, 3, 0)
    branch, L = model.kv_pool.value, model.config.n_layer
    h = rms(solution.states[:, :, :L], 1e-6) * branch.pre_norm  # (B, T, L, D)
    for j in range(model.config.n_channels):
        mixed = rms((alpha[1, :, :, j, :, None] * h).sum(2), 1e-4) * branch.post_norm[j]
        v = mixed @ branch.proj[j].T
        assert solution.cache.v[j].flatten(-2) == pytest.approx(v, rel=1e-9, abs=1e-9)
    # and of the keys, from their own router
    key = model.kv_pool.key
    h = rms(solution.states[:, :, :L], 1e-6) * key.pre_norm
    expected = key.bias.expand(2, 9, -1, -1)
    if key.router is not None:
        x = h[:, :, (L - 1) % key.stride::key.stride].flatten(2)
        expected = expected + (x @ key.router.weight.T).view(2, 9, -1, L)
    assert alpha[0] == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_dependence_by_hand():
    alpha = torch.randn(2, 50, 3, 4, generator=torch.Generator().manual_seed(0)) + 1
    mean, std = alpha.numpy().mean(1), alpha.numpy().std(1)
    for b in range(2):
        for j in range(3):
            ratio = math.sqrt((std[b, j] ** 2).sum() / (mean[b, j] ** 2).sum())
            assert pictures.dependence(alpha)[b, j].item() == pytest.approx(ratio, rel=1e-5)


def test_fibres_by_hand():
    alpha = torch.zeros(3, 2, 4)  # 3 tokens, channels 0 and 1, sources 0..3
    alpha[:, 0, 3] = torch.tensor([1.0, -2.0, 4.0])
    alpha[:, 1, 0] = 0.1  # below a twentieth of the strongest
    fibres = pictures.fibres_of(alpha, n_layer=4, n_fibres=3)
    # layers 0 and 2 read channel 0, which mixes source 3; the weak ones first
    assert [(s, layer) for s, layer, *_ in fibres] == [(3, 0), (3, 2)] * 3
    assert [f[2] for f in fibres] == [1, 1, -2, -2, 4, 4]
    assert [f[3] for f in fibres] == [-1, -1, 0, 0, 1, 1]
    assert len(pictures.fibres_of(alpha, 4, 2)) == 4  # the first token and the last
    assert pictures.fibres_of(torch.zeros(1, 2, 4), 4, 9) == []


@pytest.fixture
def checkpoint(here):
    """Checkpoints of three systems, and a data set of 100 tokens."""
    for name, changes in (("wm", {}), ("static", dict(router="static")),
                          ("vanilla", dict(kv="vanilla"))):
        model = small_model(dtype=torch.float32, **BYTES, **changes)
        save_checkpoint(here / name / "ckpt.pt", {
            "model": model.state_dict(), "model_config": asdict(model.config), "meta": META,
            "config": {"dataset": "noise", "block_size": 16}})
    (here / "data" / "noise").mkdir(parents=True)
    (here / "data" / "noise" / "meta.json").write_text(json.dumps(META))
    np.random.default_rng(0).integers(257, size=100).astype("<u2").tofile("data/noise/val.bin")
    return here


@torch.no_grad()
def test_connectome_command(checkpoint, figures, capsys):
    (checkpoint / "text.txt").write_text("A text of some thirty characters\n")
    pictures.main(["connectome", "--out_dir=wm", "--text=text.txt", "--device=cpu", "--json=a"])
    model = small_model(dtype=torch.float32, **BYTES)
    ids = [*b"A text of some thirty characters\n"]
    rows = [ids[:16], ids[16:32], ids[32:]]  # rows of block_size
    alpha = torch.cat([pictures.mixing_weights(model, torch.tensor([row]), Schedule(
        "cyclic", 3, 4)) for row in rows], 2)[:, 0]
    axes = figures[0].axes
    for b in range(2):  # heat maps: mean and spread
        assert np.asarray(axes[3 * b].images[0].get_array()) == pytest.approx(
            alpha[b].mean(0).numpy(), abs=1e-4)
        assert np.asarray(axes[3 * b + 1].images[0].get_array()) == pytest.approx(
            alpha[b].std(0, correction=0).numpy(), abs=1e-4)
    written = json.loads((checkpoint / "a").read_text())
    assert np.array(written["mean"]) == pytest.approx(alpha.mean(1).numpy(), abs=1e-6)
    assert np.array(written["spread"]) == pytest.approx(alpha.std(1, correction=0).numpy(),
                                                        abs=1e-6)
    assert (written["tokens"], written["step"]) == (33, None)
    fibres = pictures.fibres_of(alpha[0], 3, 24)
    colours = axes[2].collections[0].get_colors()[:, :3]
    assert [tuple(c) == pictures.FEEDBACK for c in colours] == [
        source > layer for source, layer, *_ in fibres]
    shares = [t.get_text() for t in axes[1].texts]
    assert shares == [f"{100 * r:.0f}%" for r in pictures.dependence(alpha)[0].tolist()]
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("33 tokens")
    assert out[2].split() == ["keys", *shares]
    assert len(out) == 4


def test_connectome_of_a_data_set_and_of_static_weights(checkpoint, figures, capsys, monkeypatch):
    # its ids are enough: a tokenizer may be out of reach
    monkeypatch.delattr(pictures, "tokenizer_of")
    pictures.main(["connectome", "--out_dir=wm", "--rows=2", "--exact", "--device=cpu"])
    assert capsys.readouterr().out.startswith("32 tokens")
    pictures.main(["connectome", "--out_dir=static", "--device=cpu"])
    out = capsys.readouterr().out
    assert "99 tokens" in out
    assert out.splitlines()[2].split() == ["keys", "0%", "0%", "0%"]
    assert len(figures) == 2


# ---- what the other scripts write

def test_the_columns_are_those_of_the_log():
    assert HEAD.strip().split(",") == list(Log.columns)


def test_convergence_of_what_bench_writes(checkpoint, figures):
    bench.main(["prefill", "--out_dir=wm", "--rows=2", "--batch_size=2", "--trials=1",
                "--warmups=1", "--block_size=6", "--device=cpu", "--json=p.json"])
    written = json.loads((checkpoint / "p.json").read_text())
    pictures.main(["convergence", "--json=p.json"])
    passes, times, off = figures[0].axes
    reached = [s for s in written["schedules"] if s["passes"] is not None]
    assert passes.get_lines()[0].get_ydata().tolist() == [s["passes"] for s in reached]
    assert times.get_lines()[0].get_ydata() == pytest.approx(
        [1e3 * s["seconds_per_sequence"] for s in reached])
    assert [t.get_text() for t in times.get_xticklabels()][:3] == ["Jacobi", "2", "4"]
    assert off.get_lines()[0].get_ydata()[0] == pytest.approx(100 * abs(
        written["schedules"][0]["perplexities"][0] / written["exact_perplexity"] - 1))


# ---- bad input

@pytest.mark.parametrize("argv, message", (
    ([], "no command; choose one of connections, curves, convergence, connectome"),
    (["curve"], "curve: unknown command; choose one of"),
    (["connections", "--systems=k7"], "k7: n_channels=7: 1 to n_layer=6"),
    (["connections", "--systems=vanilla,k"], "k: no system; choose vanilla"),
    (["curves", "--logs=nowhere"], "no such log"),
    (["curves", "--logs=,"], "logs is empty"),
    (["curves", "--logs=a", "--smooth=0"], "smooth=0: at least 1"),
    (["curves", "--logs=a", "--tokens_per_step=0"], "tokens_per_step=0: at least 1"),
    (["curves", "--logs=tokens,a"], "a: no ckpt.pt beside the log"),
    (["curves", "--logs=other.csv"], "no log of train.py, with columns step, loss"),
    (["curves", "--logs=empty.csv"], "not one training step"),
    (["convergence", "--json=nowhere.json"], "nowhere.json: not what python bench.py prefill"),
    (["convergence", "--json=other.csv"], "not what python bench.py prefill"),
    (["convergence", "--json=wrong.json"], "KeyError: 'schedules'"),
    (["convergence", "--json=systems.json"], "without --systems=, writes (KeyError"),
    (["convergence", "--json=none.json"], "not what python bench.py prefill"),
    (["connections", "--output=picture"], "output=picture: a file with an ending"),
    (["connections", "--output=."], "output=.: a file with an ending"),
    (["curves", "--logs=short.csv"], "no log of train.py, with columns step, loss"),
    (["connectome", "--out_dir=nowhere"], "no such checkpoint"),
    (["connectome", "--out_dir=vanilla"], "kv=vanilla, but only whitematter's"),
    (["connectome", "--out_dir=wm", "--rows=0"], "rows=0: at least 1"),
    (["connectome", "--out_dir=wm", "--split=all"], "split=all: choose one of train, val, test"),
    (["connectome", "--out_dir=wm", "--text=nowhere.txt"], "text=nowhere.txt: cannot read"),
    (["connectome", "--out_dir=wm", "--text=one.txt"], "1 tokens (text=one.txt): at least 2")))
def test_bad_input(checkpoint, argv, message):
    pytest.importorskip("matplotlib")
    write_log(checkpoint / "a", [5.0, 4.0])
    write_log(checkpoint / "tokens", [5.0, 4.0], checkpoint=SIZES)
    (checkpoint / "other.csv").write_text("x,y\n1,2\n")
    (checkpoint / "short.csv").write_text("x\n1,2\n")
    (checkpoint / "empty.csv").write_text(HEAD)
    (checkpoint / "wrong.json").write_text("{}")
    (checkpoint / "systems.json").write_text('{"command": "prefill", "systems": {}}')
    prefill_json(checkpoint / "none.json", schedules=[])
    (checkpoint / "one.txt").write_text("x")
    with pytest.raises(UserError) as error:
        pictures.main(argv)
    assert message in str(error.value)


def test_without_matplotlib(here, monkeypatch):
    write_log(here / "a", [5.0, 4.0])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        pictures.main(["curves", "--logs=a"])


def test_help(capsys):
    pictures.main(["--help"])
    assert "commands: connections, curves, convergence, connectome" in capsys.readouterr().out
    with pytest.raises(SystemExit) as leave:
        run(pictures.main, ["connectome", "--help"])
    assert leave.value.code == 0 and "--fibres=24" in capsys.readouterr().out
