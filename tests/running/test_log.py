"""log.csv is never without its rows, whatever happens to the run or the disk."""

import csv
import errno
import os
import sys
import time
import types
from pathlib import Path

import pytest
from runs import arguments, in_process, load, losses, make, refused

import train
from checkpoint import save_checkpoint
from configurator import UserError
from train import TrainConfig


def test_a_resumed_log_keeps_what_was_written_before(folder, monkeypatch):
    in_process(folder, monkeypatch, max_iters=4, eval_interval=2)
    with open("out/log.csv", "ab") as f:
        f.write(b"1,\xff\n3")  # a torn line does not count
    in_process(folder, monkeypatch, max_iters=6, eval_interval=2, init_from="resume")
    with open("out/log.csv", newline="") as f:
        rows = [(int(r["step"]), bool(r["loss"])) for r in csv.DictReader(f)]
    assert rows == [(0, True), (1, True), (2, False), (2, True), (3, True), (4, False), (4, True),
                    (5, True), (6, False)]


def test_whoever_is_killed_while_a_resumed_run_begins_has_the_old_log_or_the_new(
        folder, monkeypatch):
    in_process(folder, monkeypatch, max_iters=4)
    before = Path("out/log.csv").read_text()
    trainer = make(folder, monkeypatch, max_iters=5, init_from="resume")
    assert Path("out/log.csv").read_text() == before

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert Path("out/log.csv").read_text() == before


def test_rows_wait_while_the_disk_is_full(folder, monkeypatch, capsys):
    trainer = make(folder, monkeypatch, max_iters=4)
    real, full = csv.writer, [False]

    def writer(file):
        def writerows(rows):
            if full[0]:
                file.write("1,half a r")
                file.flush()
                raise OSError(errno.ENOSPC, "No space left on device")
            real(file).writerows(rows)
        return types.SimpleNamespace(writerows=writerows)

    monkeypatch.setattr(csv, "writer", writer)
    update = trainer.update

    def step():
        full[0] = trainer.step in (1, 2)
        update()

    trainer.update = step
    trainer.run()
    said = capsys.readouterr().out
    assert "note: out/log.csv takes no rows now (No space left on device)" in said
    assert sorted(losses("out/log.csv")) == [0, 1, 2, 3]
    assert "half" not in Path("out/log.csv").read_text()

    full[0] = True
    trainer.log.rows.append((9, "", "1", "", "", ""))
    with pytest.raises(UserError, match="log.csv: its last 1 rows.*checkpoint has all steps"):
        trainer.log.close()


def test_a_log_that_is_tidied_away_is_begun_anew(folder, monkeypatch):
    trainer = make(folder, monkeypatch, max_iters=3)
    trainer.update()
    Path("out/log.csv").rename("kept.csv")
    trainer.run()
    assert sorted(losses("kept.csv")) == [0] and sorted(losses("out/log.csv")) == [1, 2]


def test_a_log_that_ends_in_zeros_is_read(folder, monkeypatch):
    """As files do after a power cut; no field of csv's may be so long."""
    in_process(folder, monkeypatch, max_iters=2)
    with open("out/log.csv", "ab") as f:
        f.write(bytes(200_000))
    in_process(folder, monkeypatch, max_iters=3, init_from="resume")
    assert sorted(losses("out/log.csv")) == [0, 1, 2]


def test_losses_that_nobody_can_add_up_any_more_leave_rows_without_them(folder, monkeypatch):
    trainer = make(folder, monkeypatch, max_iters=9, log_interval=9, eval_interval=9, eval_rows=8)
    for _ in range(3):
        trainer.update()
    monkeypatch.setattr(trainer.processes, "world", 2)
    trainer.rescue()
    trainer.lock.close()
    rows = list(csv.DictReader(open("out/log.csv", newline="")))
    assert [(row["step"], row["loss"], row["val_loss"]) for row in rows] == [
        ("0", "", ""), ("1", "", ""), ("2", "", "")]
    assert all(float(row["grad_norm"]) > 0 for row in rows)
    state = load("out/ckpt.pt")  # an older one: the row of its step is no validation
    save_checkpoint(Path("out/ckpt.pt"), state | {"step": 2})
    assert not make(folder, monkeypatch, init_from="resume", eval_rows=8).log.validated


def test_a_rescue_before_the_first_line_saves_the_run(folder, monkeypatch, capsys):
    """Of several processes, one of which has died: no losses can be added up any more."""
    trainer = make(folder, monkeypatch, max_iters=9, log_interval=100)
    for _ in range(3):
        trainer.update()
    trainer.processes.world = 2
    trainer.rescue()
    assert load("out/ckpt.pt")["step"] == 3 and Path("out/log.csv").exists()


def test_the_time_of_saving_is_not_that_of_steps(folder, monkeypatch):
    def slow(*args):
        time.sleep(0.5)
        save(*args)

    save = train.save_checkpoint
    monkeypatch.setattr(train, "save_checkpoint", slow)
    in_process(folder, monkeypatch, max_iters=3, eval_interval=1, eval_rows=0)
    with open("out/log.csv", newline="") as f:
        assert all(float(r["tokens_per_s"]) > 64 / 0.5 for r in csv.DictReader(f))


def test_a_new_run_without_room_for_its_log_moves_no_other_away(folder, monkeypatch):
    in_process(folder, monkeypatch, max_iters=2)
    before = {p.name: p.read_bytes() for p in Path("out").iterdir()}
    real = open

    def full(path, *args, **how):
        if str(path).endswith("log.csv.tmp"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *args, **how)

    monkeypatch.setattr("builtins.open", full)
    with pytest.raises(UserError, match="out/log.csv: cannot be written.*as it was"):
        in_process(folder, monkeypatch, seed=1)
    assert {p.name: p.read_bytes() for p in Path("out").iterdir()} == before


def test_wandb_is_off_and_reported_early_when_missing(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    refused(arguments(wandb=True, dataset="nothing"), capsys, "wandb", "not installed")
    in_process(folder, monkeypatch, eval_rows=0, max_iters=2)
    with open("out/log.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    assert [r["step"] for r in rows] == ["0", "1"]
    assert all(float(r[c]) > 0 for r in rows for c in ("loss", "lr", "grad_norm", "tokens_per_s"))


def test_wandb_gets_the_log_and_a_resumed_run_goes_on_in_the_same_one(folder, monkeypatch):
    rows, begun = [], []

    def init(**how):
        begun.append(how)
        return types.SimpleNamespace(id=how["id"] or f"new{len(begun)}",
                                     log=lambda values, step: rows.append((step, values)))

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    in_process(folder, monkeypatch, wandb=True, max_iters=2)
    in_process(folder, monkeypatch, wandb=True, max_iters=3, init_from="resume")
    in_process(folder, monkeypatch, wandb=True, max_iters=1)
    assert [how["id"] for how in begun] == [None, "new1", None]
    assert begun[0]["name"] == "out" and begun[0]["config"]["seed"] == TrainConfig.seed
    assert [r[0] for r in rows] == [0, 1, 2, 2, 3, 0, 1]
    assert rows[0][1]["loss"] > 0 and rows[2][1]["val_loss"] > 0
    train.main(["--dataset=random", "--init_from=out", "--out_dir=new", "--max_iters=1", "--wandb",
                "--batch_size=1", "--block_size=8", "--warmup_iters=0", "--eval_rows=0"])
    assert begun[3]["config"]["n_layer"] == begun[0]["config"]["n_layer"] != TrainConfig.n_layer


def test_wandb_without_a_key_is_one_line(folder, monkeypatch, capsys):
    def init(**_):
        raise RuntimeError("api_key not configured (no-tty). call wandb.login()\nand more")

    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    refused(arguments(wandb=True), capsys, "wandb=True: api_key not configured", "WANDB_MODE")
    assert not Path("out/ckpt.pt").exists()
