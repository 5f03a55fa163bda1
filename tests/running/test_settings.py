"""train.py's settings: what cannot work together, and the learning rate that they make."""

import pytest
from runs import arguments, refused

import model
from running.settings import SYSTEMS, TrainConfig, check, learning_rate


@pytest.mark.parametrize("args, words", [
    (["--seed=-1"], ["seed=-1", "at least 0"]),
    (["--max_iters=0"], ["max_iters=0", "at least 1"]),
    (["--learning_rate=nan"], ["learning_rate=nan", "at least 0"]),
    (["--grad_clip=-1"], ["grad_clip=-1.0", "at least 0"]),
    (["--momentum=1"], ["momentum=1.0", "less than 1"]),
    (["--min_lr=1e-3"], ["min_lr=0.001", "more than learning_rate=0.0003"]),
    (["--warmup_iters=3"], ["warmup_iters=3", "max_iters=3", "never falls"]),
    (["--warmup_iters=2", "--lr_decay_iters=2"], ["warmup_iters=2", "lr_decay_iters=2"]),
    (["--out_dir=data/random/meta.json"], ["out_dir", "no folder"]),
    (["--init_from=reusme"], ["init_from=reusme", "scratch, resume, auto, or the path"]),
    (["--out_dir="], ["out_dir= is empty"]),
    (["--init_from="], ["init_from=", "scratch, resume, auto, or the path"]),
    (["--init_from=auto:"], ["init_from=auto:", "scratch, resume, auto, or the path"]),
    (["--init_from=scratch:out"], ["init_from=scratch:out", "scratch, resume, auto, or the path"]),
    (["--init_from=resume:out"], ["init_from=resume:out", "scratch, resume, auto, or the path"]),
    (["--eval_iters=50"], ["eval_iters is eval_rows now", "not batches"]),
])
def test_settings_that_cannot_work_are_refused(folder, monkeypatch, capsys, args, words):
    monkeypatch.chdir(folder)
    refused(arguments() + args, capsys, *words)
    assert not (folder / "out").exists()


def test_learning_rate_warms_up_and_decays_to_a_tenth():
    c = TrainConfig(max_iters=1000, learning_rate=1.0)
    assert learning_rate(0, c) == pytest.approx(1 / 20) and learning_rate(19, c) == 1.0
    assert learning_rate(510, c) == pytest.approx(0.55, abs=0.01)
    assert learning_rate(1000, c) == pytest.approx(0.1) == learning_rate(5000, c)
    c = TrainConfig(max_iters=9, learning_rate=1.0, warmup_iters=0, lr_decay_iters=0)
    assert {learning_rate(step, c) for step in range(9)} == {0.1}
    check(TrainConfig(max_iters=1))


def test_the_systems_are_the_models():
    """They are named without importing it, which takes seconds."""
    assert tuple(SYSTEMS.split(", ")) == model.SYSTEMS
    for kv in model.SYSTEMS:
        c = model.ModelConfig(kv=kv)
        assert (c.n_groups, c.n_nograd, c.n_grad) == ((1, 7, 2) if kv == "lckv" else (8, 1, 2))
