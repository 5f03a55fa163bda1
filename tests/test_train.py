"""Training: what a step is, however it is split; what survives a kill; what is refused."""

import csv
import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoint
import train
from configurator import UserError, run
from train import Muon, Processes, TokenRows, TrainConfig, clip_and_reduce, learning_rate

ROOT = Path(__file__).parent.parent
TINY = dict(n_layer=2, n_embd=32, n_head=2, n_kv_head=1, head_dim=16, n_hidden=64, n_channels=2,
            router_stride=1, n_groups=4, block_size=32, batch_size=4, max_iters=3,
            gradient_accumulation_steps=1, eval_iters=2, eval_interval=100, log_interval=1,
            learning_rate=3e-4, dataset="random", device="cpu", dtype="float32", compile="false")


META = {"vocab_size": 70000, "dtype": "uint16", "tokens": {}}


@pytest.fixture
def folder(tmp_path):
    """A working folder with a small random data set in the documented format."""
    data = tmp_path / "data" / "random"
    data.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for split, n in (("train", 5000), ("val", 700)):
        ids = rng.integers(0, 40, n).astype("<u2")
        ids[rng.random(n) < 0.03] = 256
        ids.tofile(data / f"{split}.bin")
    (data / "meta.json").write_text(json.dumps(
        {"tokenizer": "bytes", "vocab_size": 257, "eos_id": 256, "dtype": "uint16",
         "tokens": {"train": 5000, "val": 700, "test": 0}}))
    return tmp_path


def command(processes=1, **overrides):
    start = [sys.executable, str(ROOT / "train.py")]
    if processes > 1:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                 f"--nproc_per_node={processes}", str(ROOT / "train.py")]
    return start + [f"--{k}={v}" for k, v in (TINY | overrides).items()]


def launch(folder, *args, processes=1, **overrides):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command(processes, **overrides) + list(args), check=False, cwd=folder,
                          env=env, capture_output=True, text=True, timeout=120)


def in_process(folder, monkeypatch, **overrides) -> train.Trainer:
    """Train without a new process, and return the trainer."""
    monkeypatch.chdir(folder)
    settings = TINY | overrides | {"compile": False}
    trainer = train.Trainer(TrainConfig(**settings), Processes())
    trainer.run()
    return trainer


def weights(path):
    return torch.load(path, weights_only=True)["model"]


def losses(path):
    with open(path, newline="") as f:
        return {int(r["step"]): float(r["loss"]) for r in csv.DictReader(f) if r["loss"]}


def refused(argv, capsys, *words):
    """One clear line on stderr, exit status not 0."""
    with pytest.raises(SystemExit) as exit_:
        run(train.main, argv)
    assert exit_.value.code != 0
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    for word in words:
        assert str(word) in error


# ---- the same tokens, the same result

def test_batch_split_into_micro_steps_gives_the_same_parameters(folder, monkeypatch):
    a = in_process(folder, monkeypatch, out_dir="a", batch_size=4, grad_clip=0.0)
    b = in_process(folder, monkeypatch, out_dir="b", batch_size=1, grad_clip=0.0,
                   gradient_accumulation_steps=4)
    assert a.rows_seen == b.rows_seen == 12
    for p, q in zip(a.model.parameters(), b.model.parameters()):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)


def start(folder, processes=1, **overrides):
    return subprocess.Popen(command(processes, **overrides), cwd=folder, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.slow
def test_case_26_29_two_processes_give_the_parameters_of_one(folder, monkeypatch):
    """And two such runs on one machine do not get in each other's way."""
    how = dict(batch_size=2, gradient_accumulation_steps=2, grad_clip=0)
    runs = [start(folder, 2, out_dir=name, **how) for name in ("two", "three")]
    in_process(folder, monkeypatch, out_dir="one", **how)
    for process in runs:
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        assert "128 tokens per step" in out
        assert out.count("step 2: loss") == 1  # only rank 0 prints
    a, b = weights(folder / "one/ckpt.pt"), weights(folder / "two/ckpt.pt")
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-5)
    for step, loss in losses(folder / "one/log.csv").items():
        assert abs(loss - losses(folder / "two/log.csv")[step]) < 1e-5


def test_the_end_of_the_group_joins_its_threads():
    """A thread of gloo that is alive while Python shuts down may abort the process."""
    if not Path("/proc/self/task").exists():
        pytest.skip("no /proc here")
    code = """if True:
        import glob, torch, train
        def threads():
            names = [open(name).read().strip() for name in glob.glob("/proc/self/task/*/comm")]
            return names.count("pt_gloo_runloop")
        processes = train.Processes(rank=0, world=2)
        processes.start("cpu")
        processes.sum(torch.ones(1))
        assert threads()
        torch.optim.AdamW([torch.zeros(1)])  # imports much of torch
        processes.end()
        assert not threads()
    """
    env = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost",
                        "MASTER_PORT": "0"}
    result = subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, env=env,
                            capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_case_29_documented_commands_do_not_need_a_port():
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines():
        assert "torchrun " not in line or "--standalone" in line or "--rdzv" in line


def test_case_26_accumulation_must_divide(folder, monkeypatch):
    with pytest.raises(UserError, match="3.*2"):
        train.check(TrainConfig(gradient_accumulation_steps=3), Processes(0, 2))


def test_case_28_clip_is_local_and_sees_all_micro_steps(monkeypatch):
    local = [torch.tensor([10.0, 0.0]), torch.tensor([0.0, 0.5])]
    clipped = [g.clone() for g in local]
    for g in clipped:
        clip_and_reduce(g, 1.0, Processes())
    for rank in (0, 1):  # the sum adds what the other process has

        def add_other(self, x, other=1 - rank):
            return x.add_(clipped[other] if x.dim() else local[other].norm())

        monkeypatch.setattr(Processes, "sum", add_other)
        mine = local[rank].clone()
        norm = clip_and_reduce(mine, 1.0, Processes(rank, 2))
        torch.testing.assert_close(mine, (local[0] / 10 + local[1]) / 2)
        assert norm == pytest.approx(5.25)
    g = torch.tensor([3.0, 4.0])
    assert clip_and_reduce(g, 0.0, Processes()) == 5 and g.tolist() == [3.0, 4.0]


# ---- resuming

def test_case_19_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(folder, monkeypatch):
    whole = in_process(folder, monkeypatch, out_dir="whole", max_iters=8, lr_decay_iters=8,
                       warmup_iters=2)
    in_process(folder, monkeypatch, out_dir="half", max_iters=4, lr_decay_iters=8, warmup_iters=2)
    half = in_process(folder, monkeypatch, out_dir="half", max_iters=8, lr_decay_iters=8,
                      warmup_iters=2, init_from="resume")
    assert half.rows_seen == whole.rows_seen
    for p, q in zip(whole.model.parameters(), half.model.parameters()):
        assert torch.equal(p, q)
    assert losses(folder / "whole/log.csv") == losses(folder / "half/log.csv")
    starts = [whole.rows.start(n) for n in range(32)]
    assert len(set(starts)) == 32  # the second half saw other windows than the first


def test_a_new_run_keeps_the_one_before(folder, monkeypatch, capsys):
    in_process(folder, monkeypatch, max_iters=2)
    files = {name: (folder / "out" / name).read_bytes() for name in ("ckpt.pt", "log.csv")}
    in_process(folder, monkeypatch, max_iters=3, seed=5)
    assert "out held a run: it is kept in out/previous" in capsys.readouterr().out
    for name, content in files.items():
        assert (folder / "out/previous" / name).read_bytes() == content
        assert (folder / "out" / name).read_bytes() != content


def test_a_resumed_run_goes_by_its_own_settings(folder, monkeypatch, capsys):
    in_process(folder, monkeypatch, max_iters=2)
    mine = dict(momentum=0.5, weight_decay=0.0, beta1=0.1, beta2=0.2, seed=5)
    trainer = in_process(folder, monkeypatch, max_iters=3, init_from="resume", **mine)
    groups = [g for o in trainer.optimizers for g in o.param_groups]
    assert {g["weight_decay"] for g in groups} == {0.0}
    assert {g["momentum"] for g in groups if "momentum" in g} == {0.5}
    assert {g["betas"] for g in groups if "betas" in g} == {(0.1, 0.2)}
    said = capsys.readouterr().out
    assert f"note: goes on with seed=5 (there: {TrainConfig.seed})" in said


def test_another_data_set_has_no_best_loss_yet(folder, monkeypatch):
    in_process(folder, monkeypatch, max_iters=2)
    shutil.copytree(folder / "data" / TINY["dataset"], folder / "data/other")
    settings = TINY | dict(dataset="other", init_from="resume", max_iters=3, compile=False)
    trainer = train.Trainer(TrainConfig(**settings), Processes())
    assert (trainer.step, trainer.best, trainer.rows_seen) == (2, math.inf, 0)


@pytest.mark.parametrize("damage", [{"rng": None}, {"optimizers": []}, {"step": "x"}], ids=str)
def test_a_damaged_checkpoint_does_not_resume(folder, monkeypatch, damage):
    in_process(folder, monkeypatch, max_iters=2)
    state = torch.load("out/ckpt.pt", weights_only=True)
    torch.save(state | damage, "out/ckpt.pt")
    with pytest.raises(UserError, match="out/ckpt.pt: not a checkpoint of train.py, or damaged"):
        in_process(folder, monkeypatch, max_iters=3, init_from="resume")


def test_the_log_is_never_without_its_rows(folder, monkeypatch):
    """Whoever is killed while a resumed run begins has the old log or the new one."""
    in_process(folder, monkeypatch, max_iters=4)
    before = (folder / "out/log.csv").read_text()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        train.Log.begin(folder / "out/log.csv", 4)
    assert (folder / "out/log.csv").read_text() == before


def test_two_runs_do_not_share_a_folder(folder, monkeypatch):
    pytest.importorskip("fcntl")
    in_process(folder, monkeypatch, max_iters=2)
    settings = TINY | dict(max_iters=3, init_from="resume", compile=False)
    first = train.Trainer(TrainConfig(**settings), Processes())  # which is not done
    before = (folder / "out/log.csv").read_text()
    for init_from in ("scratch", "resume"):
        with pytest.raises(UserError, match="out_dir=out: another run is writing there"):
            in_process(folder, monkeypatch, max_iters=3, init_from=init_from)
    assert (folder / "out/log.csv").read_text() == before
    first.log.close()
    in_process(folder, monkeypatch, max_iters=3, init_from="resume")


def test_a_torn_line_of_the_log_does_not_count(folder, monkeypatch):
    in_process(folder, monkeypatch, max_iters=2)
    with open("out/log.csv", "ab") as f:
        f.write(b"1,\xff\n3")
    in_process(folder, monkeypatch, max_iters=4, init_from="resume")
    assert sorted(losses(folder / "out/log.csv")) == [0, 1, 2, 3]


def test_a_signal_at_an_evaluation_does_not_skip_it(folder, monkeypatch):
    monkeypatch.chdir(folder)
    trainer = train.Trainer(TrainConfig(**TINY | dict(max_iters=4, eval_interval=1)), Processes())
    with pytest.raises(SystemExit):
        trainer.run(types.SimpleNamespace(received=signal.SIGTERM))
    with open("out/log.csv", newline="") as f:
        assert [(r["step"], bool(r["val_loss"])) for r in csv.DictReader(f)] == [
            ("0", False), ("1", True)]
    assert (folder / "out/best.pt").exists()


@pytest.mark.parametrize("rank, local, together, said", [
    ("0", "0", False, "error: x"), ("1", "1", False, ""), ("8", "0", False, "error (rank 8): x"),
    ("1", "1", True, "error (rank 1): x")])
def test_who_of_several_processes_says_what_is_wrong(monkeypatch, capsys, rank, local, together,
                                                     said):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: together)

    def main(_):
        raise UserError("x")

    with pytest.raises(SystemExit):
        run(main, [])
    assert capsys.readouterr().err.strip() == said


def test_a_resumed_log_keeps_what_was_written_before(folder, monkeypatch):
    in_process(folder, monkeypatch, max_iters=4, eval_interval=2)
    in_process(folder, monkeypatch, max_iters=6, eval_interval=2, init_from="resume")
    with open("out/log.csv", newline="") as f:
        rows = [(int(r["step"]), bool(r["loss"])) for r in csv.DictReader(f)]
    assert rows == [(0, True), (1, True), (2, False), (2, True), (3, True), (4, False), (4, True),
                    (5, True), (6, False)]


def test_case_22_a_failed_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "ckpt.pt"
    checkpoint.save_checkpoint(path, {"a": torch.ones(3)})
    before = path.read_bytes()

    def broken(state, f):
        f.write(b"x" * 100)
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(UserError, match="no space.*earlier checkpoint"):
        checkpoint.save_checkpoint(path, {"a": torch.zeros(3)})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt.pt"]


@pytest.mark.slow
def test_case_22_sigkill_leaves_a_checkpoint_that_resumes(folder, monkeypatch):
    process = start(folder, out_dir="k", max_iters=100000, eval_interval=1, eval_iters=0)
    for line in process.stdout:
        if line.startswith("step 7:"):
            break
    time.sleep(0.013)
    process.send_signal(signal.SIGKILL)
    process.wait()
    step = torch.load(folder / "k/ckpt.pt", weights_only=True)["step"]
    assert step >= 7
    in_process(folder, monkeypatch, out_dir="k", max_iters=step + 2, init_from="resume",
               eval_iters=0)
    assert sorted(losses(folder / "k/log.csv")) == list(range(step + 2))


def test_case_21_wrapper_prefixes_are_stripped_and_unknown_keys_refused(folder, monkeypatch):
    trainer = in_process(folder, monkeypatch, out_dir="a")
    state = torch.load("a/ckpt.pt", weights_only=True)
    assert not any("_orig_mod" in k or k.startswith("module.") for k in state["model"])
    state["model"] = {f"module._orig_mod.{k}": v for k, v in state["model"].items()}
    torch.save(state, "b.pt")
    model, _ = checkpoint.load_model("b.pt")
    assert torch.equal(model.embed, trainer.model.embed)
    state["model"]["surprise"] = torch.zeros(1)
    torch.save(state, "c.pt")
    with pytest.raises(UserError, match="surprise"):
        checkpoint.load_model("c.pt")


@pytest.mark.parametrize("part, value, words", [
    ("config", {}, "block_size"), ("meta", {"tokenizer": "bytes"}, "vocab_size"),
    ("meta", "x", "TypeError"), ("model_config", {"kv": "foo"}, "kv='foo'"),
    ("model_config", {"n_future": 3}, "n_future"), ("model_config", [1], "TypeError")])
def test_case_21_what_a_checkpoint_lacks_is_named(folder, monkeypatch, part, value, words):
    in_process(folder, monkeypatch, out_dir="a")
    state = torch.load("a/ckpt.pt", weights_only=True)
    torch.save(state | {part: value}, "b.pt")
    with pytest.raises(UserError, match="b.pt: not a checkpoint of train.py.*" + words):
        checkpoint.load_model("b.pt")


def test_a_flipped_bit_is_noticed(folder, monkeypatch):
    in_process(folder, monkeypatch, out_dir="a")
    content = bytearray((folder / "a/ckpt.pt").read_bytes())
    content[len(content) // 2] ^= 4
    (folder / "without_ending").write_bytes(content)
    with pytest.raises(UserError, match="without_ending: not a checkpoint of train.py, or damaged"):
        checkpoint.load_model("without_ending")


def test_ar4_trains_by_the_exact_solution(folder, monkeypatch):
    from configurator import parse
    from solvers import autoregressive, solve
    c = parse(TrainConfig(), [str(ROOT / "config/ar4.py")], "")
    assert (c.n_groups, c.n_nograd, c.n_grad) == (c.block_size, 0, 1)
    trainer = in_process(folder, monkeypatch, n_groups=32, n_nograd=0, n_grad=1)
    x, _ = trainer.rows.batch(0, 2, "cpu")
    mine, exact = solve(trainer.model, x), autoregressive(trainer.model, x)
    torch.testing.assert_close(mine.states, exact.states, rtol=0, atol=1e-5)
    assert losses("out/log.csv")[2] < losses("out/log.csv")[0]


def test_a_checkpoint_from_a_gpu_resumes_on_a_cpu(folder, monkeypatch):
    in_process(folder, monkeypatch, max_iters=2)
    state = torch.load("out/ckpt.pt", weights_only=True)
    for group in state["optimizers"][1]["param_groups"]:
        group.update(fused=True)
    torch.save(state, "out/ckpt.pt")
    assert in_process(folder, monkeypatch, max_iters=4, init_from="resume").step == 4


def test_resume_refuses_another_model(folder, monkeypatch):
    in_process(folder, monkeypatch, out_dir="a")
    with pytest.raises(UserError, match="n_hidden=48.*64"):
        in_process(folder, monkeypatch, out_dir="a", init_from="resume", n_hidden=48)


# ---- data order

def test_rows_are_a_permutation_each_epoch_and_the_same_for_any_start(tmp_path):
    np.arange(1000, dtype="<u2").tofile(tmp_path / "x.bin")
    rows = TokenRows(tmp_path / "x.bin", META, 32, seed=1)
    first = [rows.start(n) for n in range(rows.n_rows)]
    second = [rows.start(n) for n in range(rows.n_rows, 2 * rows.n_rows)]
    assert len(set(first)) == rows.n_rows == len(set(second)) and first != second
    assert TokenRows(tmp_path / "x.bin", META, 32, seed=1).start(40) == second[40 - rows.n_rows]
    x, y = rows.batch(0, 3, "cpu")
    assert torch.equal(x[:, 1:], y[:, :-1]) and x[:, 0].tolist() == first[:3]


def test_case_10_exactly_one_window_is_enough(tmp_path):
    for n in (33, 32, 34):
        np.arange(n, dtype="<u2").tofile(tmp_path / f"{n}.bin")
    x, y = TokenRows(tmp_path / "33.bin", META, 32, seed=0).batch(0, 1, "cpu")
    assert x[0].tolist() == list(range(32)) and y[0].tolist() == list(range(1, 33))
    with pytest.raises(UserError, match="32 tokens.*33"):
        TokenRows(tmp_path / "32.bin", META, 32, seed=0)
    rows = TokenRows(tmp_path / "34.bin", META, 32, seed=0)
    assert {rows.start(n) for n in range(200)} == {0, 1}


# ---- optimizers

@pytest.mark.parametrize("shape", [(64, 32), (32, 64), (48, 48)])
def test_case_31_muon_is_torchs_muon_and_near_orthogonal(shape):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for _ in range(3)]
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    ours = Muon(params, lr=0.02, weight_decay=0.1)
    theirs = torch.optim.Muon(copies, lr=0.02, weight_decay=0.1, momentum=0.95,
                              adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        before = params[0].detach().clone()
        for p, q in zip(params, copies):
            p.grad = torch.randn(shape)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    update = (before * (1 - 0.02 * 0.1) - params[0]) / (0.02 * 0.2 * max(shape) ** 0.5)
    singular = torch.linalg.svdvals(update)
    assert singular.min() > 0.5 and singular.max() < 1.3
    for p, q in zip(params, copies):  # theirs orthogonalises in bfloat16
        assert (p - q).norm() / (p - before).norm().clamp(min=1) < 0.02


def test_case_31_muon_decay_and_missing_gradients():
    p, q = (torch.nn.Parameter(torch.ones(4, 8)) for _ in range(2))
    p.grad = torch.zeros(4, 8)
    Muon([p, q], lr=0.1, weight_decay=0.1).step()
    torch.testing.assert_close(p, torch.full((4, 8), 0.99), rtol=0, atol=1e-6)
    assert torch.equal(q, torch.ones(4, 8))


def test_a_learning_rate_may_be_a_tensor():
    """As a captured step needs it."""
    torch.manual_seed(0)
    start, grad = torch.randn(3, 8, 4), torch.randn(3, 8, 4)
    results = []
    for lr in (0.02, torch.tensor(0.02)):
        params = [torch.nn.Parameter(p.clone()) for p in start]
        for p, g in zip(params, grad):
            p.grad = g.clone()
        step = train.OptimizerStep([Muon(params)], lambda: None, graph=False)
        for _ in range(3):
            step(lr)
        results.append(torch.stack(params))
    torch.testing.assert_close(*results, rtol=0, atol=1e-7)
    assert (results[0] - start).abs().max() > 0.01


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_captured_optimizer_step_is_the_eager_one():
    results = []
    for graph in (False, True):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(32, 16, device="cuda")) for _ in range(4)]
        optimizers = [Muon(params[:2]), torch.optim.AdamW(params[2:], fused=True)]
        step = train.OptimizerStep(optimizers, lambda: None, graph)
        for p in params:
            p.grad = torch.zeros_like(p)
        for i in range(5):  # eager, captured, replayed
            for p in params:
                p.grad.copy_(torch.randn_like(p))
            step(1e-2 / (i + 1))
        assert optimizers[1].param_groups[0]["lr"] == 1e-2 / 5
        results.append(torch.stack(params))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_parameters_go_to_their_optimizers():
    model = train.build(train.ModelConfig(vocab_size=64, n_layer=2, n_embd=32, n_head=2,
                                          n_kv_head=1, head_dim=16, n_hidden=64, n_channels=2))
    muon, adamw = train.make_optimizers(model, TrainConfig())
    names = {id(p): n for n, p in model.named_parameters()}
    sets = [{names[id(p)] for p in g["params"]} for g in (*muon.param_groups, *adamw.param_groups)]
    assert sets[0] == {n for n in names.values() if n.endswith(
        ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj", ".router"))}
    assert sets[1] == {"kv_pool.key.proj", "kv_pool.value.proj"}
    assert sets[2] == set(names.values()) - sets[0] - sets[1] and "embed" in sets[2]
    assert [g["weight_decay"] for g in adamw.param_groups] == [0.1, 0.0]


def test_learning_rate_warms_up_and_decays_to_a_tenth():
    c = TrainConfig(max_iters=1000, learning_rate=1.0)
    assert learning_rate(0, c) == pytest.approx(1 / 20) and learning_rate(19, c) == 1.0
    assert learning_rate(510, c) == pytest.approx(0.55, abs=0.01)
    assert learning_rate(1000, c) == pytest.approx(0.1) == learning_rate(5000, c)


def test_case_34_a_non_finite_loss_stops_the_run_and_keeps_the_checkpoint(folder, monkeypatch):
    monkeypatch.chdir(folder)
    trainer = train.Trainer(TrainConfig(**TINY | {"compile": False, "eval_interval": 1,
                                                  "max_iters": 10, "eval_iters": 0}), Processes())
    update = trainer.update

    def poisoned():
        if trainer.step == 4:
            with torch.no_grad():
                trainer.model.norm[0] = float("nan")
        update()

    trainer.update = poisoned
    with pytest.raises(UserError, match="step 4"):
        trainer.run()
    state = torch.load("out/ckpt.pt", weights_only=True)
    assert state["step"] == 4 and all(t.isfinite().all() for t in state["model"].values())


def test_case_34_no_checkpoint_of_weights_that_are_not_finite(folder, monkeypatch):
    """The loss was finite, the step that followed it was not."""
    trainer = in_process(folder, monkeypatch, eval_iters=0)
    before = Path("out/ckpt.pt").read_bytes()
    with torch.no_grad():
        trainer.model.embed[3, 0] = float("inf")
    with pytest.raises(UserError, match="step 3.*not finite"):
        trainer.save()
    assert Path("out/ckpt.pt").read_bytes() == before


def test_case_34_a_batch_without_targets_counts_as_zero(folder, monkeypatch):
    trainer = in_process(folder, monkeypatch, eval_iters=0, max_iters=1)
    trainer.flat.zero_()
    x, y = trainer.rows.batch(0, 2, "cpu")
    loss = trainer.micro_step(x, torch.full_like(y, -1))
    assert loss == 0 and not trainer.flat.any()


@pytest.mark.slow
@pytest.mark.parametrize("number, processes", [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_case_24_a_signal_saves_and_the_resumed_run_goes_on(folder, monkeypatch, number, processes):
    how = dict(batch_size=2, gradient_accumulation_steps=2, eval_interval=100000, eval_iters=0,
               grad_clip=0, warmup_iters=0, lr_decay_iters=1)
    process = start(folder, processes, out_dir="s", max_iters=100000, **how)
    for line in process.stdout:
        if line.startswith("step 5:"):
            break
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert "stopped by a signal after step" in out
    assert process.returncode == 128 + number or processes > 1  # torchrun has a status of its own
    step = torch.load(folder / "s/ckpt.pt", weights_only=True)["step"]
    assert step >= 6
    how["max_iters"] = step + 2
    in_process(folder, monkeypatch, out_dir="s", init_from="resume", **how)
    in_process(folder, monkeypatch, out_dir="whole", **how)
    mine, whole = (losses(folder / name / "log.csv") for name in ("s", "whole"))
    assert sorted(mine) == list(range(step + 2))
    assert all(abs(mine[i] - whole[i]) < 1e-5 for i in mine)


def test_case_33_mfu_is_not_a_number_where_the_peak_is_unknown(folder, monkeypatch, capsys):
    in_process(folder, monkeypatch, eval_iters=0)
    lines = [x for x in capsys.readouterr().out.splitlines() if "loss" in x]
    assert len(lines) == 3 and all("MFU n/a" in line for line in lines)


def test_case_37_wandb_is_off_and_reported_early_when_missing(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    refused([f"--{k}={v}" for k, v in TINY.items()] + ["--wandb=true", "--dataset=nothing"], capsys,
            "wandb", "not installed")
    in_process(folder, monkeypatch, eval_iters=0, max_iters=2)
    with open("out/log.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    assert [r["step"] for r in rows] == ["0", "1"]
    assert all(float(r[c]) > 0 for r in rows for c in ("loss", "lr", "grad_norm", "tokens_per_s"))


def test_case_37_wandb_gets_the_log(folder, monkeypatch):
    rows = []
    fake = types.SimpleNamespace(init=lambda **k: rows.append(k),
                                 log=lambda values, step: rows.append((step, values)))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    in_process(folder, monkeypatch, wandb=True, max_iters=2)
    assert rows[0]["name"] == "out" and [r[0] for r in rows[1:]] == [0, 1, 2]
    assert rows[1][1]["loss"] > 0 and rows[3][1]["val_loss"] > 0


def test_case_38_reading_batches_does_not_grow_memory(tmp_path):
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("no /proc here")

    def anonymous():
        line = next(x for x in status.read_text().splitlines() if x.startswith("RssAnon"))
        return int(line.split()[1]) / 1024

    np.arange(50_000_000, dtype="<u4").tofile(tmp_path / "train.bin")
    meta = {"vocab_size": 2 ** 31, "dtype": "uint32", "tokens": {}}
    rows = TokenRows(tmp_path / "train.bin", meta, 1024, seed=0)
    rows.batch(0, 8, "cpu")
    before = anonymous()
    for n in range(5000):
        rows.batch(8 * n, 8, "cpu")
    assert anonymous() - before < 20


def test_the_best_checkpoint_is_kept(folder, monkeypatch):
    monkeypatch.chdir(folder)
    trainer = train.Trainer(TrainConfig(**TINY | {"compile": False, "eval_interval": 1,
                                                  "max_iters": 4}), Processes())
    values = iter((3.0, 2.0, 2.5, 2.25))
    trainer.validate = lambda: next(values)
    trainer.run()
    best, last = (torch.load(f"out/{n}.pt", weights_only=True) for n in ("best", "ckpt"))
    assert (best["step"], best["best_val_loss"], last["step"]) == (2, 2.0, 4)
    assert checkpoint.load_model("out/best.pt")[1]["step"] == 2
    assert sorted(p.name for p in Path("out").iterdir()) == ["best.pt", "ckpt.pt", "log.csv"]


def test_out_of_memory_says_what_to_lower(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(train.MicroStep, "run", full)
    refused([f"--{k}={v}" for k, v in TINY.items()], capsys, "out of memory", "batch_size=4",
            "gradient_accumulation_steps")


@pytest.mark.parametrize("damage, words", [
    (lambda p: p.write_bytes(p.read_bytes()[:-2]), ["4999 tokens", "5000", "train.bin"]),
    (lambda p: p.write_bytes(b"\xff\xff" * 5000), ["65535", "257", "train.bin"]),
])
def test_damaged_data_is_named(folder, monkeypatch, capsys, damage, words):
    monkeypatch.chdir(folder)
    damage(folder / "data/random/train.bin")
    refused([f"--{k}={v}" for k, v in TINY.items()], capsys, *words)


def test_case_35_defaults_need_no_gpu(folder, monkeypatch, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    settings = {k: v for k, v in TINY.items() if k not in ("device", "dtype", "compile")}
    monkeypatch.chdir(folder)
    for more in ([], ["--device=cpu", "--dtype=bfloat16"]):
        train.main([f"--{k}={v}" for k, v in settings.items()] + ["--max_iters=1", *more])
        dtype = "bfloat16" if more else "float32"
        assert f"on 1 x cpu, {dtype}" in capsys.readouterr().out
    refused(["--device=cuda"], capsys, "cuda", "not available", "cpu")


# ---- settings

@pytest.mark.parametrize("args, words", [
    (["--lerning_rate=1"], ["lerning_rate", "learning_rate"]),
    (["--batch_size=4.5"], ["batch_size", "whole number"]),
    (["nowhere.py"], ["nowhere.py"]),
    (["--dataset=nothing"], ["data/nothing"]),
    (["--block_size=5000"], ["5000", "5001"]),
    (["--n_head=6", "--n_kv_head=4"], ["n_head=6", "n_kv_head=4"]),
    (["--device=cuda:9"], ["cuda"]),
    (["--device=meta"], ["meta", "not available"]),
    (["--seed=99999999999999999999"], ["seed", "whole number"]),
    (["--seed=-1"], ["seed=-1", "at least 0"]),
    (["--max_iters=0"], ["max_iters=0", "at least 1"]),
    (["--learning_rate=nan"], ["learning_rate=nan", "at least 0"]),
    (["--grad_clip=-1"], ["grad_clip=-1.0", "at least 0"]),
    (["--momentum=1"], ["momentum=1.0", "less than 1"]),
    (["--out_dir=data/random/meta.json"], ["out_dir", "no folder"]),
    (["--kv=vanila"], ["vanila", "vanilla"]),
    (["--dtype=float8"], ["float8", "bfloat16"]),
    (["--init_from=resume", "--out_dir=empty"], ["empty"]),
])
def test_case_14_16_18_bad_input_is_one_clear_line(folder, monkeypatch, capsys, args, words):
    monkeypatch.chdir(folder)
    refused([f"--{k}={v}" for k, v in TINY.items()] + args, capsys, *words)
    assert not (folder / "out").exists() and not (folder / "empty").exists()


@pytest.mark.slow
def test_case_14_bad_input_ends_the_process_without_a_traceback(folder):
    result = launch(folder, "--lerning_rate=1")
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_case_14_16_settings_override_in_both_orders_and_convert(tmp_path):
    from configurator import parse
    path = tmp_path / "c.py"
    path.write_text("import math\n_note = 3\nbatch_size = 5\nlearning_rate = 1\ncompile = False\n")
    for argv in ([str(path), "--batch_size=7"], ["--batch_size=7", str(path)]):
        c = parse(TrainConfig(), argv, "")
        assert (c.batch_size, c.learning_rate, c.compile) == (7, 1.0, False)
        assert type(c.learning_rate) is float
    for text, value in (("0", False), ("false", False), ("no", False), ("True", True), ("1", True)):
        assert parse(TrainConfig(), [f"--compile={text}"], "").compile is value
    for text in ("1", "1e-3"):
        assert parse(TrainConfig(), [f"--learning_rate={text}"], "").learning_rate == float(text)
    assert train.pick_dtype("bf16", "cpu") == torch.bfloat16
    assert train.pick_device("cpu:0") == "cpu"
    path.write_text("from math import pi as _pi, sqrt\nfrom functools import lru_cache\n"
                    "@lru_cache\ndef f(): return 4\nbatch_size = f()\n")
    assert parse(TrainConfig(), [str(path)], "").batch_size == 4
    path.write_bytes(b"# \xff\n")
    with pytest.raises(UserError, match="c.py: cannot read this file as UTF-8"):
        parse(TrainConfig(), [str(path)], "")
    path.write_text("lerning_rate = 1\n")
    with pytest.raises(UserError, match="c.py.*learning_rate"):
        parse(TrainConfig(), [str(path)], "")
    for bad in ("--compile=maybe", "--batch_size=four", "--grad_clip=x", "--seed"):
        with pytest.raises(UserError, match=bad[2:6]):
            parse(TrainConfig(), [bad], "")
