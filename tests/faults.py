"""
Break training on purpose, and see that the next start resumes or says what is wrong.

    python tests/faults.py            # about six minutes on a quiet machine; not part of pytest

SIGKILL at random moments of a run that saves after every step; SIGTERM and SIGHUP, twice each, to
torchrun and its workers; a queue that starts the same command again and again; a disk that fills
during each kind of write (a limit on the size of files); truncated data; a corrupted checkpoint;
one of two ranks killed. Ends with status 1 if something was lost beyond the steps since the last
checkpoint, or after a request to stop anything at all.
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
STEPS, KILLS, STOPS = 400, 20, 10
SETTINGS = dict(n_layer=2, n_embd=32, n_head=2, n_kv_head=1, head_dim=16, n_hidden=64,
                n_channels=2, router_stride=1, n_groups=4, block_size=32, batch_size=2,
                max_iters=STEPS, gradient_accumulation_steps=2, eval_rows=0, eval_interval=1,
                log_interval=1, dataset="random", device="cpu", dtype="float32", compile="false")
failures = []


def expect(ok: bool, what: str):
    print(f"  {'ok  ' if ok else 'FAIL'} {what}", flush=True)
    if not ok:
        failures.append(what)


def make_data(folder: Path):
    data = folder / "data/random"
    data.mkdir(parents=True)
    for split in ("train", "val"):
        np.random.default_rng(0).integers(0, 257, 20000).astype("<u2").tofile(data / f"{split}.bin")
    (data / "meta.json").write_text(json.dumps(
        {"tokenizer": "bytes", "vocab_size": 257, "eos_id": 256, "dtype": "uint16",
         "tokens": {"train": 20000, "val": 20000, "test": 0}}))


def start(folder: Path, processes: int = 1, limit: int | None = None, restarts: int = 0,
          **changes):
    """train.py as a process of its own; `limit` bytes are the largest file that it may write;
    torchrun may start its workers again, `restarts` times."""
    command = [sys.executable, str(ROOT / "train.py")]
    if processes > 1:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   f"--max_restarts={restarts}", f"--nproc_per_node={processes}",
                   str(ROOT / "train.py")]

    def before():
        for number in (signal.SIGINT, signal.SIGHUP):  # which this process may ignore
            signal.signal(number, signal.SIG_DFL)
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write then fails with EFBIG
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.Popen(
        command + [f"--{k}={v}" for k, v in (SETTINGS | changes).items()], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=before,  # noqa: PLW1509
        env=os.environ | {"OMP_NUM_THREADS": "1"})


def finish(process, seconds: int = 600) -> tuple[int, str, str]:
    """Status and output; a process that is not over in time, even on a busy machine, is killed."""
    try:
        out, error = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, error


def step_of(path: Path) -> int:
    return torch.load(path, weights_only=True)["step"] if path.exists() else 0


def weights(path: Path) -> dict:
    return torch.load(path, weights_only=True)["model"]


def first_step(process) -> int:
    for line in process.stdout:
        if line.startswith("step "):
            return int(line.split()[1].rstrip(":"))
    return -1


def killed(folder: Path, rng: random.Random):
    print(f"{KILLS} times SIGKILL at a random moment of a run of {STEPS} steps")
    code, out, error = finish(start(folder, out_dir="whole"))
    expect(code == 0, f"the uninterrupted run ends {error[-300:]}")
    resumed, path = 0, folder / "killed/ckpt.pt"
    for _ in range(KILLS):
        how = "resume" if path.exists() else "scratch"
        before = step_of(path)
        process = start(folder, out_dir="killed", init_from=how)
        first_step(process)
        time.sleep(rng.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        code, out, error = finish(process)
        resumed += code == -signal.SIGKILL and step_of(path) >= before
    code, out, error = finish(start(folder, out_dir="killed", init_from="resume"))
    expect(resumed == KILLS, f"{resumed} of {KILLS} left a checkpoint that resumes")
    expect(code == 0 and step_of(path) == STEPS, f"the last start ends at step {STEPS}")
    a, b = weights(folder / "whole/ckpt.pt"), weights(path)
    expect(all(torch.equal(a[k], b[k]) for k in a), "its weights are the uninterrupted run's")
    logs = [(folder / name / "log.csv").read_text().splitlines()[-1].split(",")[:2]
            for name in ("whole", "killed")]
    expect(logs[0] == logs[1], f"and so is its last loss: {logs}")


def stopped(folder: Path, number: int, how: dict):
    """A run of two processes, of which no step is on the disk but what a request to stop saves."""
    name = signal.Signals(number).name
    print(f"{STOPS} times {name} to torchrun and, at once, to its workers")
    path, lost, late = folder / "stopped/ckpt.pt", 0, 0
    for _ in range(STOPS):
        process = start(folder, 2, out_dir="stopped", init_from="auto", **how)
        last = first_step(process)
        until = time.time() + random.uniform(0, 0.3)
        while time.time() < until and (line := process.stdout.readline()).startswith("step "):
            last = int(line.split()[1].rstrip(":"))
        workers = [int(pid) for pid in children_of(process)]
        for pid in (process.pid, *workers):
            os.kill(pid, number)
        began = time.time()
        code, out, error = finish(process)
        steps = [last, *(int(line.split()[1].rstrip(":")) for line in out.splitlines()
                         if line.startswith("step "))]
        lost += step_of(path) != max(steps) + 1 or "stopped by a signal" not in out
        late += time.time() - began > 25
    expect(not lost, f"{lost} of {STOPS} lost a step or said nothing")
    expect(not late, f"{late} of {STOPS} took longer than torchrun waits")


def children_of(process) -> list[str]:
    return subprocess.run(["pgrep", "-P", str(process.pid)], check=False, capture_output=True,
                          text=True).stdout.split()


def stops(folder: Path):
    how = dict(max_iters=5000, eval_interval=10 ** 6, lr_decay_iters=1, warmup_iters=0)
    for number in (signal.SIGTERM, signal.SIGHUP):
        stopped(folder, number, how)
    steps = step_of(folder / "stopped/ckpt.pt")
    code, out, error = finish(start(folder, out_dir="all", **how | {"max_iters": steps}))
    rows = [(folder / name / "log.csv").read_text().splitlines() for name in ("stopped", "all")]
    same = [[line.split(",")[0] for line in lines] for lines in rows]
    expect(same[0] == same[1] and len(same[0]) == steps + 1,
           f"the log has each of the {steps} steps once {error[-200:]}")
    a, b = weights(folder / "stopped/ckpt.pt"), weights(folder / "all/ckpt.pt")
    expect(all(torch.allclose(a[k], b[k], rtol=0, atol=1e-3) for k in a),
           "its weights are those of one process, to what the order of sums changes")


def requeued(folder: Path):
    print("a queue that starts the same command five times")
    how = dict(max_iters=60, eval_rows=16, eval_interval=25, init_from="auto")
    code, out, error = finish(start(folder, out_dir="quiet", **how))
    expect(code == 0 and step_of(folder / "quiet/ckpt.pt") == 60,
           f"the uninterrupted run ends {error[-300:]}")
    seen, numbers = [], (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    for attempt in range(5):
        process = start(folder, out_dir="queue", **how)
        if attempt < 4:
            first_step(process)
            time.sleep(random.uniform(0, 0.4))
            process.send_signal(numbers[attempt])
        code, out, error = finish(process)
        seen.append((code, step_of(folder / "queue/ckpt.pt")))
    expect([code for code, _ in seen] == [*(128 + n for n in numbers), 0] and
           seen == sorted(seen, key=lambda s: s[1]), f"status and step: {seen}")
    a, b = weights(folder / "quiet/ckpt.pt"), weights(folder / "queue/ckpt.pt")
    expect(all(torch.equal(a[k], b[k]) for k in a), "its weights are the uninterrupted run's")
    rows = [[line.split(",")[:3] for line in (folder / n / "log.csv").read_text().splitlines()]
            for n in ("quiet", "queue")]
    expect(rows[0] == rows[1], "and so is every row of its log")
    expect(not (folder / "queue/previous").exists(), "nothing was moved away")


def full_disk(folder: Path):
    finish(start(folder, out_dir="full", max_iters=5))
    path, log = folder / "full/ckpt.pt", folder / "full/log.csv"
    before, rows = path.read_bytes(), log.read_bytes()
    how = dict(out_dir="full", init_from="resume", max_iters=10)
    for what, limit in (("a checkpoint", len(before) // 2), ("the log", len(rows) + 20),
                        ("the first row of the log", 40)):
        print(f"a disk that fills when {what} is written")
        code, out, error = finish(start(folder, limit=limit, **how))
        expect(code == 1 and error.count("\n") == 1 and "ckpt.pt: cannot be written" in error,
               f"says so: {error.strip()[-200:]}")
        expect(limit > 10000 or "log.csv takes no rows now" in out, "of the log, too")
        expect(path.read_bytes() == before, "the checkpoint is as it was")
        expect(log.read_bytes().startswith(rows), "no row of the log is lost")
        expect(not list(path.parent.glob("*.tmp")), "no half-written file is left")
    print("a disk that fills when the log alone is written")
    code, out, error = finish(start(folder, limit=len(before) + 1000, out_dir="long", max_iters=2,
                                    eval_interval=1))
    long = folder / "long/log.csv"
    with open(long, "a") as f:  # a long run's
        f.write("".join(f"0,{n:.6f},,0,0,0\n" for n in range(1 + len(before) // 15)))
    code, out, error = finish(start(folder, limit=len(before) + 1000, out_dir="long", max_iters=4,
                                    init_from="resume"))
    expect(code == 1 and step_of(folder / "long/ckpt.pt") == 4 and "rows cannot be" in error,
           f"the run goes on, saves, and says so: {error.strip()[-200:]}")
    print("a new run where the disk is full")
    code, out, error = finish(start(folder, limit=40, out_dir="full", max_iters=5, seed=2))
    expect(code == 1 and "cannot be written" in error, f"says so: {error.strip()[-200:]}")
    expect(path.read_bytes() == before, "the run before is where it was")
    code, out, error = finish(start(folder, **how))
    expect(code == 0 and step_of(path) == 10, "with room again, the run goes on")


def damaged(folder: Path):
    print("damaged files")
    finish(start(folder, out_dir="damaged", max_iters=5))
    how = dict(out_dir="damaged", init_from="resume", max_iters=10)
    path, data = folder / "damaged/ckpt.pt", folder / "data/random/train.bin"
    good, tokens = path.read_bytes(), data.read_bytes()
    for name, bad in (("half of it", good[:len(good) // 2]), ("nothing", b""),
                      ("noise", os.urandom(len(good)))):
        path.write_bytes(bad)
        code, out, error = finish(start(folder, **how))
        expect(code == 1 and "ckpt.pt" in error and "damaged" in error,
               f"checkpoint with {name}: {error.strip()[-120:]}")
    path.write_bytes(good)
    data.write_bytes(tokens[:-1000])
    code, out, error = finish(start(folder, **how))
    expect(code == 1 and "19500 tokens" in error, f"data cut off: {error.strip()[-120:]}")
    data.write_bytes(tokens)
    code, out, error = finish(start(folder, **how))
    expect(code == 0 and step_of(path) == 10, "mended, the run goes on")


def lost_rank(folder: Path):
    print("one of two ranks killed")
    process = start(folder, 2, out_dir="ranks", eval_interval=10 ** 6)
    first_step(process)
    last = first_step(process)
    began = time.time()
    os.kill(int(children_of(process)[-1]), signal.SIGKILL)
    code, out, error = finish(process)
    expect(code != 0 and time.time() - began < 60 and "another process has ended" in error,
           "the other one ends too, within a minute, and says why")
    step = step_of(folder / "ranks/ckpt.pt")
    expect(step > last, f"and saves all that it has done, to step {step}")
    code, out, error = finish(start(folder, out_dir="ranks", init_from="resume"))
    expect(code == 0 and step_of(folder / "ranks/ckpt.pt") == STEPS,
           "one process alone resumes what two began")
    process = start(folder, 2, out_dir="early", eval_interval=10 ** 6, log_interval=10 ** 6,
                    max_iters=10 ** 6)
    process.stdout.readline()  # the model is there
    time.sleep(5)
    os.kill(int(children_of(process)[-1]), signal.SIGKILL)
    finish(process)
    expect(step_of(folder / "early/ckpt.pt") > 0, "before the first line, too, its steps are saved")
    process = start(folder, 2, restarts=1, out_dir="again", init_from="auto", eval_interval=10 ** 6)
    first_step(process)
    os.kill(int(children_of(process)[-1]), signal.SIGKILL)
    code, out, error = finish(process)
    expect(code == 0 and step_of(folder / "again/ckpt.pt") == STEPS,
           "torchrun --max_restarts=1 starts both again, which go on to the end")


def main():
    seed = sys.argv[1] if len(sys.argv) > 1 else "0"
    if not seed.isdecimal():
        sys.exit(__doc__.strip() + "\n\nAn argument is the seed, a number.")
    rng = random.Random(int(seed))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(folder)
        killed(folder, rng)
        stops(folder)
        requeued(folder)
        full_disk(folder)
        damaged(folder)
        lost_rank(folder)
    print(f"{len(failures)} failures" if failures else "all as it should be")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
