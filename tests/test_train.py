"""Training: what a step is, however it is split; what goes on after a stop; what is never lost."""

import csv
import errno
import json
import math
import os
import shutil
import signal
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import (
    ROOT,
    TINY,
    arguments,
    in_process,
    load,
    losses,
    make,
    refused,
    same_weights,
    start,
)

import checkpoint
import train
from checkpoint import save_checkpoint
from configurator import UserError, parse, run
from running.settings import settings
from running.start import model_config
from train import Lost, TrainConfig


def step_of(path):
    return load(path)["step"]


# ---- the same tokens, the same result

def test_a_batch_split_into_micro_steps_gives_the_same_parameters(folder, monkeypatch):
    a = in_process(folder, monkeypatch, out_dir="a", batch_size=4, grad_clip=0.0)
    b = in_process(folder, monkeypatch, out_dir="b", batch_size=1, grad_clip=0.0,
                   gradient_accumulation_steps=4)
    assert a.rows_seen == b.rows_seen == 12
    for p, q in zip(a.model.parameters(), b.model.parameters()):
        torch.testing.assert_close(p, q, rtol=0, atol=5e-5)
    # and the same validation, which counts rows: the advice against too little memory changes
    # nothing that decides which checkpoint is the best
    assert a.best == pytest.approx(b.best, abs=1e-5)


def test_an_evaluation_counts_rows_whatever_the_batch_size(folder, monkeypatch):
    trainer = make(folder, monkeypatch, eval_rows=7)
    values = []
    for batch_size in (1, 3, 7, 100):
        trainer.c.batch_size = batch_size
        values.append(trainer.validate())
    assert values == pytest.approx([values[0]] * 4, abs=1e-5)
    trainer.c.eval_rows = 6
    assert abs(trainer.validate() - values[0]) > 1e-4


@pytest.mark.slow
def test_two_processes_that_are_told_twice_to_stop_go_on_as_one(folder, monkeypatch):
    """torchrun passes a signal on to its workers, and whoever stops a job signals all of them:
    https://github.com/pytorch/pytorch/issues/115219. What they leave goes on in one process, with
    the weights of one."""
    how = dict(batch_size=2, gradient_accumulation_steps=2, grad_clip=0, warmup_iters=0,
               lr_decay_iters=1, eval_rows=0, eval_interval=10 ** 6)
    process = start(folder, 2, out_dir="two", max_iters=10 ** 6, **how)
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith("step 5:"):
            break
    workers = [int(pid) for pid in os.popen(f"pgrep -P {process.pid}").read().split()]
    for pid in (process.pid, *workers):
        os.kill(pid, signal.SIGTERM)
    rest, error = process.communicate(timeout=30)
    assert "stopped by a signal after step" in rest, error
    assert "64 tokens per step" in "".join(said)
    assert "".join(said).count("step 2: loss") == 1  # only rank 0 prints
    step = step_of(folder / "two/ckpt.pt")
    assert step >= 6
    resumed = in_process(folder, monkeypatch, out_dir="two", init_from="resume",
                         max_iters=step + 2, **how)
    whole = in_process(folder, monkeypatch, out_dir="one", max_iters=step + 2, **how)
    for p, q in zip(resumed.model.parameters(), whole.model.parameters()):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-4)
    two, one = (losses(folder / name / "log.csv") for name in ("two", "one"))
    assert sorted(two) == list(range(step + 2))
    assert all(abs(one[i] - two[i]) < 1e-4 for i in one)


def test_ar4_trains_by_the_exact_solution(folder, monkeypatch):
    from solvers import autoregressive, solve
    c = parse(TrainConfig(), [str(ROOT / "config/ar4.py")], "")
    assert (c.n_groups, c.n_nograd, c.n_grad) == (c.block_size, 0, 1)
    trainer = in_process(folder, monkeypatch, n_groups=16, n_nograd=0, n_grad=1)
    x, _ = trainer.rows.batch(0, 2, "cpu")
    mine, exact = solve(trainer.model, x), autoregressive(trainer.model, x)
    torch.testing.assert_close(mine.states, exact.states, rtol=0, atol=1e-5)
    assert trainer.best < losses("out/log.csv")[0]


@pytest.mark.parametrize("argv, schedule", [
    ([], (8, 1, 2)), (["--kv=lckv"], (1, 7, 2)), (["config/lckv16_w7.py"], (1, 7, 2)),
    (["config/tiny.py", "--lckv_w=2", "--kv=lckv"], (1, 7, 2)), (["config/tiny.py"], (4, 1, 2)),
    (["config/wm16.py", "--kv", "lckv", "--n_grad=1"], (1, 7, 1)),
    (["config/ar4.py", "--kv=whitematter"], (1024, 0, 1))])
def test_a_systems_own_schedule_is_its_default(monkeypatch, argv, schedule):
    """However the system is named: a config file's schedule is that of the file's system."""
    monkeypatch.chdir(ROOT)
    config = model_config(parse(TrainConfig(), argv, ""), {"vocab_size": 64, "eos_id": None})
    assert (config.n_groups, config.n_nograd, config.n_grad) == schedule


def test_a_batch_without_targets_counts_as_zero(folder, monkeypatch):
    trainer = make(folder, monkeypatch)
    x, y = trainer.rows.batch(0, 2, "cpu")
    loss = trainer.micro_step(x, torch.full_like(y, -1))
    assert loss == 0 and not trainer.flat.any()


def test_defaults_need_no_gpu(folder, monkeypatch, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    monkeypatch.chdir(folder)
    settings = [a for a in arguments(max_iters=1)
                if not a.startswith(("--device", "--dtype", "--compile"))]
    for more in ([], ["--device=cpu", "--dtype=bfloat16"]):
        train.main(settings + more)
        dtype = "bfloat16" if more else "float32"
        said = capsys.readouterr().out.splitlines()
        assert f"on 1 x cpu, {dtype}, plain PyTorch" in said[0]  # what is switched on
        assert any("loss" in line and "MFU n/a" in line for line in said)  # the peak is unknown


# ---- resuming

def test_a_run_that_is_stopped_and_started_again_is_the_whole_run_bit_for_bit(folder, monkeypatch):
    """By the same command each time, as a queue runs it: init_from=auto."""
    how = dict(max_iters=8, warmup_iters=2, eval_interval=3)
    whole = in_process(folder, monkeypatch, out_dir="whole", **how)
    stops = [3, 4]
    for at in stops:
        trainer = make(folder, monkeypatch, out_dir="parts", init_from="auto", **how)
        signals = types.SimpleNamespace(received=None)
        update = trainer.update

        def count(trainer=trainer, update=update, signals=signals, at=at):
            update()
            signals.received = signal.SIGUSR1 if trainer.step == at else None

        trainer.update = count
        with pytest.raises(SystemExit) as end:
            trainer.run(signals)
        assert end.value.code == 128 + signal.SIGUSR1
    parts = in_process(folder, monkeypatch, out_dir="parts", init_from="auto", **how)
    assert parts.rows_seen == whole.rows_seen and parts.best == whole.best
    assert same_weights(whole.model.state_dict(), parts.model.state_dict())
    assert losses("whole/log.csv") == losses("parts/log.csv")
    rows = [[line.split(",")[:3] for line in Path(name, "log.csv").read_text().splitlines()]
            for name in ("whole", "parts")]
    assert rows[0] == rows[1]  # the evaluation at which it was stopped came first the next time
    assert not Path("parts/previous").exists()
    again = make(folder, monkeypatch, out_dir="parts", init_from="auto", **how)
    assert again.step == 8  # nothing left to do


def test_a_new_run_moves_earlier_ones_away_and_overwrites_none(folder, monkeypatch, capsys):
    """A queue that starts the same command again destroyed the run before the last:
    https://github.com/EveryVoiceTTS/EveryVoice/issues/183"""
    kept = []
    for seed in range(4):
        in_process(folder, monkeypatch, seed=seed, max_iters=2)
        kept.append({name: Path("out", name).read_bytes()
                     for name in ("ckpt.pt", "best.pt", "log.csv")})
    assert "out held a run: it is kept in out/previous-3" in capsys.readouterr().out
    for files, where in zip(kept, ("previous", "previous-2", "previous-3", "")):
        for name, content in files.items():
            assert (Path("out") / where / name).read_bytes() == content


def test_a_start_that_fails_leaves_an_earlier_run_where_it_is(folder, monkeypatch, capsys):
    in_process(folder, monkeypatch, max_iters=2)
    before = {p.name: p.read_bytes() for p in Path("out").iterdir()}
    trainer = make(folder, monkeypatch)

    def full(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")

    trainer.micro_step = full
    with pytest.raises(RuntimeError):
        trainer.run()
    assert {p.name: p.read_bytes() for p in Path("out").iterdir()} == before


def test_a_resumed_run_goes_by_its_own_settings_and_says_so(folder, monkeypatch, capsys):
    """A longer max_iters makes the rate jump: https://github.com/MIC-DKFZ/nnUNet/issues/197"""
    in_process(folder, monkeypatch, max_iters=2)
    mine = dict(momentum=0.5, weight_decay=0.0, beta1=0.1, beta2=0.2, seed=5, n_groups=4, n_grad=1,
                n_nograd=0)
    trainer = make(folder, monkeypatch, max_iters=20, init_from="resume", **mine)
    trainer.lock.close()
    trainer.update()
    groups = [g for o in trainer.optimizers for g in o.param_groups]
    assert {g["weight_decay"] for g in groups} == {0.0}
    assert {g["momentum"] for g in groups if "momentum" in g} == {0.5}
    assert {g["betas"] for g in groups if "betas" in g} == {(0.1, 0.2)}
    said = capsys.readouterr().out
    assert f"note: goes on with seed=5 (there: {TrainConfig.seed})" in said
    assert "n_groups=4 (there: 2)" in said and "n_grad=1 (there: 2)" in said
    assert "note: goes on at a learning rate of 2.9" in said and "3.00e-05" in said
    assert "max_iters=20, there: 2" in said


def test_other_passes_than_the_weights_had_are_said(folder, monkeypatch, capsys):
    in_process(folder, monkeypatch, max_iters=1)
    make(folder, monkeypatch, init_from="out", out_dir="tuned", n_groups=4).lock.close()
    assert "note: goes on with n_groups=4 (there: 2); the weights fit" in capsys.readouterr().out


def best_of(path) -> tuple[int, float]:
    state = load(path)
    return state["step"], state["best_val_loss"]


def test_an_evaluation_is_without_dropout(folder, monkeypatch):
    trainer = make(folder, monkeypatch, max_iters=1)
    expected, modes = trainer.validate(), []
    trainer.model.blocks[0].down_proj.register_forward_hook(
        lambda module, x, out: modes.append(module.training) or torch.dropout(
            out, 0.5, module.training))
    assert trainer.validate() == expected and not any(modes)
    trainer.gradient()
    assert modes[-1] and trainer.model.training


@pytest.mark.parametrize("other", [{"dataset": "other"}, {"eval_rows": 5}, {"block_size": 8},
                                   {"dataset": TINY["dataset"]}], ids=str)
def test_losses_on_other_validation_rows_are_not_compared(folder, monkeypatch, capsys, other):
    """And the best checkpoint on the first ones is kept."""
    run = dict(eval_interval=1, init_from="auto")
    shutil.copytree(folder / "data" / TINY["dataset"], folder / "data/other")
    in_process(folder, monkeypatch, max_iters=1, **run)
    first = best_of("out/best.pt")
    if "dataset" in other:  # with another val.bin, also where it has the old name
        meta = Path("data", other["dataset"], "meta.json")
        meta.write_text(json.dumps(json.loads(meta.read_text()) | {"val_digest": "other"}))
    trainer = make(folder, monkeypatch, max_iters=3, **run | other)
    assert "note: the best loss so far was one of other validation rows" in capsys.readouterr().out
    assert trainer.rows_seen == (0 if other == {"dataset": "other"} else TINY["batch_size"])
    trainer.validate = iter((math.nan, math.nan, 98.0)).__next__
    trainer.run()
    assert best_of("out/best.pt") == (3, 98.0) and best_of("out/best-previous.pt") == first
    in_process(folder, monkeypatch, max_iters=3, **run | other)
    assert "other validation rows" not in capsys.readouterr().out
    in_process(folder, monkeypatch, max_iters=1, **run | {"init_from": "scratch"})
    assert sorted(p.name for p in Path("out/previous").glob("best*")) == ["best-previous.pt",
                                                                           "best.pt"]


def test_a_finished_run_is_evaluated_once_on_other_validation_rows(folder, monkeypatch, capsys):
    """And a slash behind the data set's name makes no other rows."""
    run = dict(max_iters=1, eval_interval=1)
    in_process(folder, monkeypatch, **run)
    name = settings(arguments(**run, dataset=TINY["dataset"] + "/"), "").dataset
    state = load("out/ckpt.pt")
    older = state["config"]["dataset"] = TINY["dataset"] + "/"
    state["best_id"] = [older, None, *state["best_id"][1:]]
    for _ in range(2):
        in_process(folder, monkeypatch, **run, init_from="auto", dataset=name)
        assert "note" not in capsys.readouterr().out
        save_checkpoint(Path("out/ckpt.pt"), state)
    for _ in range(2):
        in_process(folder, monkeypatch, **run, init_from="auto", eval_rows=5)
        with open("out/log.csv", newline="") as f:
            assert [bool(r["val_loss"]) for r in csv.DictReader(f)] == [False, True, True]


def test_a_data_set_that_has_moved_is_read_on(folder, monkeypatch, capsys):
    """By another path, or a link, but with the same bytes: the rows go on, and the best loss
    stays; with others it begins anew."""
    data = folder / "data" / TINY["dataset"]
    run = dict(init_from="auto", eval_interval=1, lr_decay_iters=4)
    meta = json.loads((data / "meta.json").read_text())
    for split in ("train", "val"):
        meta[f"{split}_digest"] = f"digest of {split}"
    (data / "meta.json").write_text(json.dumps(meta))
    shutil.copytree(data, folder / "elsewhere/mine")
    whole = in_process(folder, monkeypatch, max_iters=4, out_dir="whole", **run)
    in_process(folder, monkeypatch, max_iters=2, **run)
    capsys.readouterr()
    moved = in_process(folder, monkeypatch, max_iters=4, dataset=str(folder / "elsewhere/mine"),
                       **run)
    said = capsys.readouterr().out
    assert "note: goes on with dataset=" in said and "other" not in said
    assert moved.rows_seen == whole.rows_seen and not Path("out/best-previous.pt").exists()
    for a, b in zip(whole.model.parameters(), moved.model.parameters()):
        assert torch.equal(a, b)
    (data / "meta.json").write_text(json.dumps(meta | {"train_digest": "another"}))
    make(folder, monkeypatch, max_iters=6, **run)
    assert "and so on other rows" in capsys.readouterr().out


def test_a_best_loss_outlives_a_run_without_evaluations(folder, monkeypatch, capsys):
    run = dict(eval_interval=1, init_from="auto")
    for max_iters, eval_rows in ((1, 1000), (2, 0), (3, 2000)):  # more than there are: all of them
        trainer = make(folder, monkeypatch, max_iters=max_iters, eval_rows=eval_rows, **run)
        trainer.validate = lambda max_iters=max_iters: float(max_iters)
        trainer.run()
    assert best_of("out/best.pt") == (1, 1.0) and best_of("out/ckpt.pt") == (3, 1.0)
    assert "other validation rows" not in capsys.readouterr().out


def test_a_run_without_evaluations_goes_on(folder, monkeypatch):
    for max_iters in (2, 4):
        trainer = in_process(folder, monkeypatch, init_from="auto", eval_interval=1, eval_rows=0,
                             max_iters=max_iters)
    assert trainer.step == step_of("out/ckpt.pt") == 4


@pytest.mark.parametrize("damage", [{"rng": None}, {"optimizers": [{}]}, {"step": "x"}], ids=str)
def test_a_damaged_checkpoint_does_not_resume(folder, monkeypatch, damage):
    in_process(folder, monkeypatch, max_iters=1)
    torch.save(load("out/ckpt.pt") | damage, "out/ckpt.pt")
    with pytest.raises(UserError, match="out/ckpt.pt: not a checkpoint of train.py, or damaged"):
        make(folder, monkeypatch, init_from="resume")


def test_an_optimizer_s_state_of_other_shapes_does_not_resume(folder, monkeypatch):
    in_process(folder, monkeypatch, max_iters=1)
    state = load("out/ckpt.pt")
    for its in state["optimizers"][1]["state"].values():
        its["exp_avg"] = torch.zeros(3)
    torch.save(state, "out/ckpt.pt")
    with pytest.raises(UserError, match="of other shapes than the weights"):
        make(folder, monkeypatch, init_from="resume")


def test_a_checkpoint_from_a_gpu_resumes_on_a_cpu(folder, monkeypatch):
    in_process(folder, monkeypatch, max_iters=2)
    state = load("out/ckpt.pt")
    for group in state["optimizers"][1]["param_groups"]:
        assert type(group["lr"]) is float
        group.update(fused=True, capturable=True)
    torch.save(state, "out/ckpt.pt")
    assert in_process(folder, monkeypatch, max_iters=4, init_from="resume").step == 4


def test_resume_refuses_another_model(folder, monkeypatch):
    in_process(folder, monkeypatch, max_iters=1)
    with pytest.raises(UserError, match="n_hidden=48.*64"):
        make(folder, monkeypatch, init_from="resume", n_hidden=48)


# ---- fine-tuning

def test_a_new_run_may_begin_with_the_weights_of_another(folder, monkeypatch):
    """A model given away has no optimizers, and its sizes need not be said again."""
    first = in_process(folder, monkeypatch, out_dir="base")
    state = load("base/ckpt.pt")
    torch.save({k: state[k] for k in ("model", "model_config", "meta", "config")}, "given.pt")
    sizes = {k: getattr(TrainConfig, k) for k in ("n_layer", "n_embd", "n_head", "n_kv_head",
             "head_dim", "n_hidden", "n_channels", "router_stride", "n_groups")}
    for source in ("base", "base/best.pt", "given.pt", "auto:given.pt"):
        trainer = make(folder, monkeypatch, out_dir="tuned", init_from=source, **sizes)
        assert same_weights(trainer.model.state_dict(), first.model.state_dict())
        assert (trainer.step, trainer.rows_seen, trainer.best) == (0, 0, math.inf)
        assert trainer.model_config.n_groups == TINY["n_groups"]
        assert not trainer.optimizers[0].state
        trainer.lock.close()
    trainer.run()
    assert losses("tuned/log.csv")[0] < losses("base/log.csv")[0]
    again = make(folder, monkeypatch, out_dir="tuned", init_from="auto:given.pt", **sizes)
    assert again.step == 3 and again.model_config == trainer.model_config
    again.lock.close()
    with pytest.raises(UserError, match="^tuned/ckpt.pt has another model: n_layer=3"):
        make(folder, monkeypatch, out_dir="tuned", init_from="auto:given.pt", n_layer=3)


def test_weights_alone_do_not_resume(folder, monkeypatch, capsys):
    in_process(folder, monkeypatch, max_iters=1)
    state = load("out/ckpt.pt")
    del state["optimizers"]
    torch.save(state, "out/ckpt.pt")
    refused(arguments(init_from="resume"), capsys, "no state of the optimizers",
            "--init_from=out/ckpt.pt begins a new run")


@pytest.mark.parametrize("change, words", [
    ({"n_layer": 3}, ["out has another model", "n_layer=3 (there: 2)"]),
    ({"dataset": "other"}, ["data/other", "eos_id=7", "the checkpoint eos_id=256"])])
def test_weights_that_do_not_fit_are_refused(folder, monkeypatch, capsys, change, words):
    in_process(folder, monkeypatch, max_iters=1)
    shutil.copytree("data/random", "data/other")
    meta = Path("data/other/meta.json")
    meta.write_text(meta.read_text().replace('"eos_id": 256', '"eos_id": 7'))
    refused(arguments(init_from="out", out_dir="b", **change), capsys, *words)
    assert not Path("b").exists()


def test_a_default_that_is_given_is_a_wish_too(folder, monkeypatch, capsys):
    in_process(folder, monkeypatch, max_iters=1, kv="vanilla")
    own = arguments(init_from="out", out_dir="b", max_iters=1)
    refused([*own, "--kv=whitematter"], capsys, "kv=whitematter (there: vanilla)")
    train.main(own)
    assert load("b/ckpt.pt")["model_config"]["kv"] == "vanilla"


def test_a_resumed_run_needs_no_sizes_and_goes_on_by_its_schedule(folder, monkeypatch, capsys):
    """As a signal's message says: --init_from=resume goes on."""
    in_process(folder, monkeypatch, max_iters=1, n_grad=1)
    short = [a for a in arguments(init_from="resume", max_iters=2)
             if not a.startswith(("--n_", "--head_dim", "--router"))]
    train.main(short)
    assert load("out/ckpt.pt")["step"] == 2 and "n_grad" not in capsys.readouterr().out
    refused([*short, "--n_layer=16"], capsys, "out/ckpt.pt has another model", "n_layer=16")


# ---- nothing is lost

def test_an_evaluation_that_fails_loses_nothing(folder, monkeypatch):
    trainer = make(folder, monkeypatch, eval_interval=2)

    def broken():
        raise UserError("a bad id")

    trainer.validate = broken
    with pytest.raises(UserError, match="a bad id"):
        trainer.run()
    assert step_of("out/ckpt.pt") == 2


@pytest.mark.parametrize("split, words", [("val", "val.bin: holds the id 65535"),
                                          ("train", "train.bin: holds the id 65535")])
def test_a_bad_id_is_met_at_the_start_or_loses_nothing(folder, monkeypatch, capsys, split, words):
    path = folder / "data/random" / f"{split}.bin"
    ids = np.fromfile(path, "<u2")
    ids[-40:-20] = 65535
    monkeypatch.chdir(folder)
    ids.tofile(path)
    refused(arguments(eval_rows=1000, max_iters=400), capsys, words, "257")
    if split == "val":
        assert not Path("out").exists()
    else:  # all steps before the one that read it
        assert step_of("out/ckpt.pt") == len(losses("out/log.csv")) > 1


def test_no_memory_in_a_step_keeps_the_steps_before_it(folder, monkeypatch, capsys):
    """A CPU's allocator raises a RuntimeError."""
    trainer = make(folder, monkeypatch)
    micro_step = trainer.micro_step

    def full(x, y):
        if trainer.step == 2:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:129] err == 0. DefaultCPUAllocator: "
                               "can't allocate memory: you tried to allocate 4000000000 bytes.")
        return micro_step(x, y)

    trainer.micro_step = full
    parse(trainer.c, [], "")
    refused([], capsys, "out of memory: --batch_size=2 --gradient_accumulation_steps=2 takes less",
            main=lambda _: trainer.run())
    assert step_of("out/ckpt.pt") == 2 and sorted(losses("out/log.csv")) == [0, 1]


def test_a_process_that_ends_takes_no_step_of_the_others_along(folder, monkeypatch):
    trainer = make(folder, monkeypatch)
    largest = trainer.processes.largest

    def lost(number):
        if trainer.step == 2:
            raise Lost("another process has ended")
        return largest(number)

    trainer.processes.largest = lost
    with pytest.raises(Lost):
        trainer.run()
    assert step_of("out/ckpt.pt") == 2


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(folder, monkeypatch):
    trainer = make(folder, monkeypatch, eval_interval=1, max_iters=10, eval_rows=0)
    update = trainer.update

    def poisoned():
        if trainer.step == 4:
            with torch.no_grad():
                next(trainer.model.parameters())[:] = math.nan
        update()

    trainer.update = poisoned
    with pytest.raises(UserError, match="step 4"):
        trainer.run()
    state = load("out/ckpt.pt")
    assert state["step"] == 4 and all(t.isfinite().all() for t in state["model"].values())


def test_weights_that_are_not_finite_are_not_saved(folder, monkeypatch):
    """The loss was finite, the step that followed it was not."""
    trainer = in_process(folder, monkeypatch, eval_rows=0)
    before = Path("out/ckpt.pt").read_bytes()
    with torch.no_grad():
        next(trainer.model.parameters()).view(-1)[5] = math.inf
    with pytest.raises(UserError, match="step 3.*not finite"):
        trainer.save()
    assert Path("out/ckpt.pt").read_bytes() == before


def test_a_signal_saves_and_leaves_the_evaluation_to_the_next_start(folder, monkeypatch):
    trainer = make(folder, monkeypatch, max_iters=4, eval_interval=1)
    with pytest.raises(SystemExit) as end:
        trainer.run(types.SimpleNamespace(received=signal.SIGHUP))
    assert end.value.code == 128 + signal.SIGHUP
    assert step_of("out/ckpt.pt") == 1 and not Path("out/best.pt").exists()
    in_process(folder, monkeypatch, max_iters=2, eval_interval=1, init_from="resume")
    with open("out/log.csv", newline="") as f:
        assert [(r["step"], bool(r["val_loss"])) for r in csv.DictReader(f)] == [
            ("0", False), ("1", True), ("1", False), ("2", True)]


def test_a_reader_that_goes_away_is_a_request_to_stop(folder, monkeypatch, capfd):
    trainer = make(folder, monkeypatch, max_iters=9)
    read, write = os.pipe()
    update = trainer.update

    def last_read():
        update()
        if trainer.step == 2:
            os.close(read)

    trainer.update = last_read
    with open(write, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as end:
            run(lambda _: trainer.run(), [])
        print("more", flush=True)  # as at the end of Python: what nobody reads is no error
    assert end.value.code == 128 + 13 and capfd.readouterr().err == ""
    assert step_of("out/ckpt.pt") == len(losses("out/log.csv")) >= 2


def test_files_are_not_open_while_they_are_replaced(folder, monkeypatch):
    """As systems that lock open files demand: there every run ended with access denied."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("no /proc here")

    def refuses(function):
        def checked(path, *args, **kwargs):
            for name in (path, *args[:1]):
                held = [p for p in Path("/proc/self/fd").iterdir() if p.exists()
                        and os.path.samefile(p, name)] if os.path.exists(name) else []
                if held:
                    raise PermissionError(errno.EACCES, "access denied", str(name))
            return function(path, *args, **kwargs)
        return checked

    for name in ("replace", "rename", "unlink", "remove"):
        monkeypatch.setattr(os, name, refuses(getattr(os, name)))
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False:
                        os.unlink(self) if self.exists() or not missing_ok else None)
    for init_from in ("scratch", "scratch", "resume"):
        in_process(folder, monkeypatch, init_from=init_from, eval_interval=1,
                   max_iters=4 if init_from == "resume" else 2)
    assert sorted(losses("out/log.csv")) == [0, 1, 2, 3] and Path("out/previous/best.pt").exists()


def test_a_run_keeps_the_tokenizer_that_it_began_with(folder, monkeypatch):
    """Its data set may move, or be prepared again, while it reads the tokens."""
    data = folder / "data/random"
    meta = json.loads((data / "meta.json").read_text())
    (data / "meta.json").write_text(json.dumps(meta | {"tokenizer": "tokenizer/mine.tiktoken"}))
    with pytest.raises(UserError, match="mine.tiktoken: cannot be read .No such file"):
        make(folder, monkeypatch)
    (data / "tokenizer").mkdir()
    (data / "tokenizer/mine.tiktoken").write_text("mine")
    trainer = make(folder, monkeypatch, max_iters=2, eval_interval=1)
    (data / "tokenizer/mine.tiktoken").write_text("of the next run")
    trainer.update()
    trainer.save()
    data.rename(folder / "elsewhere")
    trainer.run()
    assert Path("out/tokenizer/mine.tiktoken").read_text() == "mine"


def test_the_best_checkpoint_is_kept(folder, monkeypatch):
    trainer = make(folder, monkeypatch, eval_interval=1, max_iters=4)
    values = iter((3.0, 2.0, 2.5, 2.25))
    trainer.validate = lambda: next(values)
    trainer.run()
    best, last = load("out/best.pt"), load("out/ckpt.pt")
    assert (best["step"], best["best_val_loss"], last["step"]) == (2, 2.0, 4)
    assert last["best_val_loss"] == 2.0
    assert checkpoint.load_model("out/best.pt")[1]["step"] == 2
    assert sorted(p.name for p in Path("out").iterdir()) == [".lock", "best.pt", "ckpt.pt",
                                                             "log.csv"]


@pytest.mark.parametrize("written, when", [(0, 2), (1, 0)])
def test_a_best_checkpoint_that_a_kill_has_cut_short_is_made_again(folder, monkeypatch, written,
                                                                   when):
    """And where best.pt was written, it is there whether or not the resumed run evaluates at that
    step again."""
    trainer = make(folder, monkeypatch, eval_interval=2, max_iters=2)
    evaluate = trainer.evaluate

    def dies():
        calls = iter([save_checkpoint] * written)

        def save(*args):
            next(calls, lambda *_: sys.exit("killed"))(*args)

        monkeypatch.setattr(train, "save_checkpoint", save)
        evaluate()

    trainer.evaluate = dies
    with pytest.raises(SystemExit, match="killed"):
        trainer.run()
    trainer.lock.close()
    monkeypatch.undo()
    in_process(folder, monkeypatch, eval_interval=when or 50, max_iters=2 if when else 3,
               eval_rows=TINY["eval_rows"] if when else 0, init_from="resume")
    assert step_of("out/best.pt") == 2
    if when:
        with open("out/log.csv", newline="") as f:
            assert [r["step"] for r in csv.DictReader(f) if r["val_loss"]] == ["2"]


# ---- what is refused

@pytest.mark.parametrize("args, words", [
    (["--dataset=nothing"], ["data/nothing"]),
    (["--block_size=5000"], ["5000", "5001"]),
    (["--n_head=6", "--n_kv_head=4"], ["n_head=6", "n_kv_head=4"]),
    (["--device=cuda:9"], ["cuda", "not available", "cpu"]),
    (["--device=meta"], ["meta", "not available"]),
    (["--device=hpu"], ["hpu", "not available"]),  # torch lacks its package
    (["--kv=vanila"], ["vanila", "vanilla"]),
    (["--dtype=float8"], ["float8", "bfloat16"]),
    (["--init_from=resume", "--out_dir=empty"], ["empty"]),
    (["--out_dir=~/empty"], ["out_dir=~/empty", f"{Path.home()}/empty"]),
])
def test_a_run_that_cannot_begin_says_why(folder, monkeypatch, capsys, args, words):
    monkeypatch.chdir(folder)
    refused(arguments() + args, capsys, *words)
    assert not (folder / "out").exists() and not (folder / "empty").exists()


def test_a_mistake_in_the_settings_is_said_within_a_second_of_cpu_time(folder):
    began = os.times()
    process = start(folder, nonsense=1)
    out, error = process.communicate(timeout=30)
    assert (process.returncode, out) == (1, "")
    assert error == "error: --nonsense: unknown setting nonsense (--help lists all)\n"
    ended = os.times()
    assert ended.children_user + ended.children_system - (
        began.children_user + began.children_system) < 1
