"""Where a run begins: the data set of a name may not be what it was."""

import json
import re
from pathlib import Path

import pytest
import torch
from runs import in_process, load, make
from small import SMALL

import prepare_data
from checkpoint import save_checkpoint
from configurator import UserError
from model import ModelConfig
from running.settings import TrainConfig
from running.start import check_data, model_config
from text.rows import load_meta


def prepare(folder, *texts, **settings) -> dict:
    """The meta data of data/mine, prepared from some texts."""
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    prepare_data.main([f"--input={folder / 'a.jsonl'}", "--out_dir=data/mine",
                       *(f"--{name}={value}" for name, value in settings.items())])
    return load_meta("mine")[1]


def test_optimizers_with_other_groups_are_not_called_damaged(folder, monkeypatch):
    in_process(folder, monkeypatch, max_iters=1)
    state = load("out/ckpt.pt")
    state["optimizers"][0]["param_groups"][0]["params"].pop()
    torch.save(state, "out/ckpt.pt")
    with pytest.raises(UserError, match="optimizers have other groups.*begins a new run with its"):
        make(folder, monkeypatch, max_iters=2, init_from="resume")


def test_training_on_two_versions_of_a_data_set_is_remembered(folder, monkeypatch):
    meta = folder / "data" / "random" / "meta.json"
    text = json.loads(meta.read_text())
    for n, digest, again in ((1, "1", False), (2, "1", False), (3, "2", True), (4, "2", True)):
        meta.write_text(json.dumps(text | {"train_digest": digest}))
        in_process(folder, monkeypatch, max_iters=n, init_from="auto")
        assert load("out/ckpt.pt")["prepared_again"] is again


def test_another_batch_is_said(folder, monkeypatch, capsys):
    in_process(folder, monkeypatch, max_iters=1)
    make(folder, monkeypatch, max_iters=2, init_from="resume", batch_size=2, beta1=0.5).lock.close()
    assert "note: goes on with batch_size=2 (there: 4), beta1=0.5 (there: 0.9)\n" in \
        capsys.readouterr().out


def test_a_later_change_of_the_rate_is_said(folder, monkeypatch, capsys):
    in_process(folder, monkeypatch, max_iters=1, warmup_iters=1, lr_decay_iters=100)
    make(folder, monkeypatch, max_iters=60, init_from="resume", warmup_iters=1, lr_decay_iters=100,
         min_lr=2.5e-4, dtype="bfloat16").lock.close()
    said = capsys.readouterr().out
    assert re.search(r"dtype=bfloat16 \(there: \w+\)", said)
    assert re.search("note: goes on at a learning rate of 2.[0-9]+e-04, in step [1-5][0-9],", said)


def test_an_older_checkpoint_does_not_cost_a_better_one(folder, monkeypatch, capsys):
    """The best loss of its own training is another one."""
    trainer = make(folder, monkeypatch, max_iters=2, eval_interval=1)
    trainer.validate = iter((9.0, 1.0)).__next__
    trainer.run()
    assert load("out/best.pt")["step"] == 2
    state = load("out/ckpt.pt")
    save_checkpoint(Path("out/ckpt.pt"), state | {"step": 1, "best_val_loss": 9.0})
    trainer = make(folder, monkeypatch, max_iters=2, init_from="resume", eval_interval=1)
    assert "best.pt is of a later step than out/ckpt.pt: it is kept as out/best-previous.pt" in \
        capsys.readouterr().out
    trainer.validate = lambda: 5.0
    trainer.run()
    assert load("out/best.pt")["best_val_loss"] == 5.0
    assert load("out/best-previous.pt")["best_val_loss"] == 1.0


def test_a_files_schedule_is_not_that_of_another_systems_weights(folder, monkeypatch):
    """It means the file's own system; a command line means what it says."""
    theirs = vars(ModelConfig(**SMALL, kv="lckv", lckv_w=1))
    for given, groups in ((False, 1), (True, 4)):
        c = TrainConfig(n_groups=4)
        c.given = {"n_groups": given}
        for name in SMALL.keys() & vars(c).keys():
            setattr(c, name, SMALL[name])
        found = model_config(c, {"vocab_size": 64, "eos_id": None}, {"model_config": theirs})
        assert (found.kv, found.n_groups, found.n_nograd) == ("lckv", groups, 7)


def test_a_data_set_prepared_again_under_its_name_is_noticed(tmp_path, monkeypatch, capsys):
    """https://github.com/Lightning-AI/litgpt/issues/471"""
    monkeypatch.chdir(tmp_path)
    texts, c = [f"text {i}" for i in range(50)], TrainConfig(dataset="mine")
    meta = prepare(tmp_path, *texts)
    state = {"meta": meta, "config": {"dataset": "mine"}}

    def said(meta: dict, state: dict) -> str:
        capsys.readouterr()
        check_data(c, meta, state)
        return capsys.readouterr().out

    again = prepare(tmp_path, *texts)
    assert said(again, state) == ""
    assert said(again, state | {"meta": {k: meta[k] for k in ("tokenizer", "vocab_size", "eos_id")}}
                ) == ""  # of an earlier version
    assert said(again, state | {"meta": meta | {"tokens": None}}) == ""
    more = said(meta | {"tokens": {"train": 9999}}, state)
    assert "data/mine was prepared again: train.bin of 9,999 tokens" in more and "val" not in more
    assert "val.bin of" in said(prepare(tmp_path, *texts, seed=1), state)
    other = meta | {"train_digest": "0", "val_digest": "1"}  # as many tokens
    assert "another train.bin, another val.bin" in said(other, state)
    with pytest.raises(UserError, match=r"tokenizer=bytes \(fingerprint=0\), the checkp"):
        check_data(c, meta | {"fingerprint": "0"}, state)
