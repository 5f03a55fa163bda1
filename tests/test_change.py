"""docs/change.md: the modification that it shows works, in the files that it names."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHECK = """
import torch
from baselines import build
from kernels import known
from model import ModelConfig
from running.optimizers import matrices
from running.settings import TrainConfig
from solvers import solve

sizes = dict(vocab_size=13, n_layer=3, n_embd=16, n_head=2, n_kv_head=1, head_dim=16, n_hidden=10)
model = build(ModelConfig(n_channels=3, router_hidden=5, **sizes))
assert TrainConfig().router_hidden == 0
assert known.unknown(model) == {"pool"}  # so no kernel computes the old one
names = {f"kv_pool.{b}.router.{n}.weight" for b in ("key", "value") for n in (0, 2)}
assert names <= matrices(model)
idx = torch.randint(0, 13, (2, 9))
for _ in range(2):  # at first the last matrix is zero, and nothing reaches the one before it
    model.zero_grad()
    model.loss(solve(model, idx).final, idx).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= p.grad
assert all(p.grad.any() for p in model.parameters())
print("a router with a hidden layer learns")
"""


def test_the_change_that_is_shown_can_be_made(tmp_path):
    if not shutil.which("git"):
        pytest.skip("needs git apply")
    page = (ROOT / "docs/change.md").read_text(encoding="utf-8")
    diff = re.search("```diff\n(.*?)```", page, re.DOTALL)[1]
    shutil.copytree(ROOT, tmp_path / "copy", ignore=shutil.ignore_patterns(
        ".*", "data", "out", "docs", "results", "tests"))
    (tmp_path / "change.diff").write_text(diff, encoding="utf-8")
    subprocess.run(["git", "apply", "--unidiff-zero", "../change.diff"], cwd=tmp_path / "copy",
                   check=True)
    done = subprocess.run([sys.executable, "-c", CHECK], cwd=tmp_path / "copy", text=True,
                          capture_output=True, check=False)
    assert "learns" in done.stdout, done.stderr
