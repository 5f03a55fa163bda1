"""Where a run begins: the data set of a name may not be what it was."""

import json

import pytest
import torch
from runs import in_process, load, make

import prepare_data
from configurator import UserError
from running.settings import TrainConfig
from running.start import check_data
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
