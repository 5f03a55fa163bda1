"""Runs of train.py on the small data set of conftest.py, for the tests of training."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train
from configurator import run
from train import Processes, TrainConfig

ROOT = Path(__file__).parent.parent
TINY = dict(n_layer=2, n_embd=32, n_head=2, n_kv_head=1, head_dim=16, n_hidden=64, n_channels=2,
            router_stride=1, n_groups=2, block_size=16, batch_size=4, max_iters=3,
            gradient_accumulation_steps=1, eval_rows=8, eval_interval=100, log_interval=1,
            learning_rate=3e-4, dataset="random", device="cpu", dtype="float32", compile=False)


def arguments(**overrides) -> list[str]:
    return [f"--{k}={v}" for k, v in (TINY | overrides).items()]


def start(folder, processes=1, env=None, **overrides):
    """train.py as processes of its own."""
    command = [sys.executable, str(ROOT / "train.py")]
    if processes > 1:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   f"--nproc_per_node={processes}", str(ROOT / "train.py")]
    return subprocess.Popen(command + arguments(**overrides), cwd=folder, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env=os.environ | (env or {}))


def make(folder, monkeypatch, **overrides) -> train.Trainer:
    """A trainer in this process."""
    monkeypatch.chdir(folder)
    return train.Trainer(TrainConfig(**TINY | overrides), Processes())


def in_process(folder, monkeypatch, **overrides) -> train.Trainer:
    """Train without a new process, and return the trainer."""
    trainer = make(folder, monkeypatch, **overrides)
    trainer.run()
    return trainer


def load(path):
    return torch.load(path, weights_only=True)


def losses(path):
    with open(path, newline="") as f:
        return {int(r["step"]): float(r["loss"]) for r in csv.DictReader(f) if r["loss"]}


def same_weights(a, b) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.values(), b.values(), strict=True))


def refused(argv, capsys, *words, main=train.main):
    """One clear line on stderr, exit status not 0."""
    with pytest.raises(SystemExit) as exit_:
        run(main, argv)
    assert exit_.value.code != 0
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    for word in words:
        assert str(word) in error
