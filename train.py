"""
Train a model of any system: on one CPU, one GPU, or several with torchrun.

    python train.py config/tiny.py
    torchrun --standalone --nproc_per_node=8 train.py config/wm16.py
    python train.py config/tiny.py --init_from=resume --max_iters=2000
    python train.py config/wm16.py --init_from=auto              # for a queue that starts it again
    python train.py config/tiny.py --init_from=out/tiny --dataset=mine --out_dir=out/tuned

A step reads the same tokens whatever the number of processes and accumulation steps. Each process
clips its gradient before the all-reduce, as the paper does. `out_dir` holds ckpt.pt, all that a
resumed run needs; best.pt, the same at the lowest validation loss (which becomes
best-previous.pt when the validation rows change); and log.csv, a row per step. SIGTERM, SIGINT
(Ctrl-C), SIGHUP, SIGUSR1 and SIGUSR2 finish the step, save, and exit with 128 + the signal's
number.
"""

import math
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from configurator import UserError, ranks, run
from running.settings import SCHEDULE, TrainConfig, learning_rate, settings, starting_point
from running.signals import Signals

# torch takes seconds to import: a mistake in the settings is said, and a signal obeyed, before
if __name__ == "__main__":
    signals = Signals()
    run(lambda argv: settings(argv, __doc__))

import torch
from torch import Tensor

from baselines import build
from checkpoint import load_checkpoint, load_weights, save_checkpoint, set_aside
from kernels import Fast, accelerate
from measure.flops import flops_if_known, peak_flops
from model import ModelConfig
from prepare_data import ensure_python
from running.devices import pick_device, pick_dtype
from running.lock import Lock
from running.log import Log, import_wandb, start_wandb
from running.optimizers import clip_and_reduce, flat_gradient, make_optimizers, set_rate
from running.processes import Lost, Processes
from running.start import check_data, differing, keep_later_best, model_config, restore
from solvers import solve
from text.rows import TokenRows, load_meta
from text.tokenizer import carried, carry_on

# ---- the two halves of a step, each a CUDA graph where there is one

def make_micro_step(fast: Fast, weight: float):
    """A function of tokens and targets (B, T) that adds weight times the gradient of their loss to
    every .grad, and returns weight times the loss."""
    def micro_step(x: Tensor, y: Tensor) -> Tensor:
        with fast.autocast():
            loss = weight * fast.model.loss(solve(fast.model, x).final, y)
        loss.backward()
        fast.after_backward()
        return loss.detach()

    return fast.graphed(micro_step)


def make_optimizer_step(fast: Fast, optimizers: list[torch.optim.Optimizer]):
    """A function of the gradient's norm, which it returns, that makes a step of all optimizers."""
    def optimizer_step(norm: Tensor) -> Tensor:
        for optimizer in optimizers:
            optimizer.step()
        fast.after_step()
        return norm

    return fast.graphed(optimizer_step)


# ---- the run

class Trainer:
    """A model in training: what a checkpoint holds, and the steps between two checkpoints."""

    def __init__(self, c: TrainConfig, processes: Processes):
        self.c, self.processes = c, processes
        self.device = pick_device(c.device)
        if self.device == "cuda" and processes.world > 1:
            self.device = pick_device(f"cuda:{processes.local_rank}")
        self.dtype = pick_dtype(c.dtype, self.device)
        if c.wandb:
            import_wandb()  # before anything takes time
        self.path, self.lock = Path(c.out_dir) / "ckpt.pt", None
        if processes.rank == 0 and self.path.parent.is_dir():
            # an earlier start may still be writing there
            self.lock = Lock(self.path.parent, processes.print)
        source, resumes = starting_point(c)
        state = load_checkpoint(source) if source else None

        # ---- data
        if c.dataset == "python":
            ensure_python(processes.rank)
        folder, self.meta = load_meta(c.dataset)
        # were parts of the training on other versions of the data set?
        self.again = state is not None and check_data(c, self.meta, state, processes.print)
        self.tokenizer_files = carried(self.meta, folder)
        self.model_config = model_config(c, self.meta, state, source)
        self.rows = TokenRows(folder / "train.bin", self.meta, c.block_size, c.seed)
        self.tokens_per_step = c.gradient_accumulation_steps * c.batch_size * c.block_size
        self.val_rows, self.val_id = None, None
        if c.eval_rows > 0:
            self.val_rows = TokenRows(folder / "val.bin", self.meta, c.block_size, None)
            # the rows that an evaluation is of: losses of others cannot be compared with it
            self.val_id = [self.meta.get("val_digest") or c.dataset, c.block_size,
                           min(c.eval_rows, self.val_rows.n_rows)]
            for _ in self.val_batches("cpu"):  # a bad id is met before the first step
                pass

        # ---- model and optimizers, as they begin
        processes.start(self.device)
        torch.manual_seed(c.seed)
        self.model = build(self.model_config).to(self.device)
        self.flat = flat_gradient(self.model)
        self.optimizers = make_optimizers(self.model, c)
        self.step, self.rows_seen, self.tokens_seen, self.saved = 0, 0, 0, 0
        self.best, self.best_id = math.inf, self.val_id  # the loss, and the rows that it is of
        if state is not None:
            load_weights(self.model, state, source)
            theirs = ModelConfig(**state["model_config"])
            if other := differing(SCHEDULE, self.model_config, theirs):
                processes.print(f"note: goes on with {other}; the weights fit")
        if resumes:
            restore(self, state)
        if processes.largest(self.step) != self.step:
            raise UserError(f"{self.path}: step {self.step} here, another process found a later "
                            "one: out_dir must be a folder that all nodes share")

        # ---- what makes it fast
        self.fast = accelerate(self.model, self.dtype, c.compile, c.kernels, training=True,
                               recompute=c.recompute)
        weight = processes.world / c.gradient_accumulation_steps
        self.micro_step = make_micro_step(self.fast, weight)
        self.optimizer_step = make_optimizer_step(self.fast, self.optimizers)

        # ---- its folder, which is rank 0's, and log
        wandb = None
        if processes.rank == 0:
            self.lock = self.lock or Lock(self.path.parent, processes.print)
            if c.wandb:  # with the model's own sizes, which may be a checkpoint's
                wandb = start_wandb(asdict(c) | asdict(self.model_config),
                                    state.get("wandb") if resumes else None)
            if resumes:
                keep_later_best(self.path, self.step, processes.print)
        peak = peak_flops(self.device)
        flops = flops_if_known(self.model_config, c.block_size, "training", head=True)
        share = flops and peak and flops / (peak * processes.world)  # of it, by a token a second
        self.log = Log(self.path.with_name("log.csv"), self.step, self.tokens_per_step, share,
                       processes, c, wandb, self.lock)

    def run(self, signals: Signals | None = None):
        """Train to max_iters, with a checkpoint and an evaluation every eval_interval steps.

        After a signal: save, and end the process with status 128 + the signal's number. Whoever
        sent it may not wait for an evaluation: the resumed run begins with it.
        """
        c, p, stop = self.c, self.processes, 0
        try:
            # what the log has may be of other validation rows
            known = self.log.validated and self.best_id == self.val_id
            if self.step and self.is_due() and p.largest(p.rank == 0 and not known):
                self.evaluate()
            while self.step < c.max_iters and not stop:
                self.update()
                stop = self.asked(signals)
                if self.is_due() or stop:
                    self.save()
                if self.is_due() and not stop:
                    self.evaluate()  # after the checkpoint: if it fails, nothing is lost
                    stop = self.asked(signals)
        except Lost:
            self.rescue()
            raise
        if p.rank == 0:
            self.log.close()
            self.lock.close()
        if stop:
            p.largest(0)  # nobody leaves while rank 0 still writes: torchrun would end it
            p.print(f"{self.path}: stopped by a signal after step {self.step}; "
                    "--init_from=resume goes on")
            p.end()
            sys.exit(128 + stop)

    def is_due(self) -> bool:
        return self.step % self.c.eval_interval == 0 or self.step == self.c.max_iters

    def asked(self, signals: Signals | None) -> int:
        """The number of the signal by which one of the processes was asked to stop, or 0."""
        stop = self.processes.largest((signals and signals.received) or self.processes.closed)
        if signals:
            signals.begun = True  # there is something to save from now on
        return stop

    def update(self):
        """One optimizer step."""
        c, lr = self.c, learning_rate(self.step, self.c)
        try:
            loss = self.gradient()
            norm = clip_and_reduce(self.flat, c.grad_clip, self.processes)
        except Exception:  # no memory, a bad id: the steps before it are kept
            self.rescue()
            raise
        set_rate(self.optimizers, lr)
        self.optimizer_step(norm)
        self.rows_seen += c.gradient_accumulation_steps * c.batch_size
        self.tokens_seen += self.tokens_per_step
        self.step += 1
        self.log.add(self.step - 1, loss, lr, norm)

    def gradient(self) -> Tensor:
        """Fill the flat gradient from this process's rows of the next global batch; mean loss."""
        c, p = self.c, self.processes
        micro_steps = c.gradient_accumulation_steps // p.world
        self.flat.zero_()
        total = self.flat.new_zeros(())
        for m in range(micro_steps):
            first = self.rows_seen + (m * p.world + p.rank) * c.batch_size
            x, y = self.rows.batch(first, c.batch_size, self.device)
            total += self.micro_step(x, y)
        return total

    def evaluate(self):
        """The validation loss, if there is such data; a checkpoint that is the best yet is kept."""
        if self.val_rows is None:
            return
        loss = self.validate()
        known = self.best_id == self.val_id
        best = loss < (self.best if known else math.inf)
        if best:
            if not known and self.processes.rank == 0:
                set_aside(self.path.with_name("best.pt"))
            self.best, self.best_id = loss, self.val_id
            self.save(best)
        self.log.validation(self.step, loss, best)

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss in nats per token over the first eval_rows rows (or all)."""
        p, model = self.processes, self.fast.model.eval()
        total = torch.zeros(2, device=self.device)  # nats, tokens
        for x, y in self.val_batches(self.device, p.rank, p.world):
            with self.fast.autocast():
                loss = model.loss(solve(model, x).final, y)
            total += torch.stack((loss.float() * y.numel(), total.new_tensor(y.numel())))
        model.train()
        nats, tokens = p.sum(total).tolist()
        return nats / tokens

    def val_batches(self, device: str, rank: int = 0, world: int = 1) -> Iterator[tuple]:
        """One process's batches of the first eval_rows rows (or all)."""
        c, n_rows = self.c, min(self.c.eval_rows, self.val_rows.n_rows)
        for n in range(rank * c.batch_size, n_rows, world * c.batch_size):
            yield self.val_rows.batch(n, min(c.batch_size, n_rows - n), device)

    def save(self, best: bool = False):
        """Write ckpt.pt, and before it best.pt if it is the best, after a last look that losses and
        weights are finite. Killed in between, a run has a better best.pt than ckpt.pt knows."""
        self.log.flush()
        if not torch.stack(torch._foreach_norm(list(self.model.parameters()))).isfinite().all():
            raise UserError(f"step {self.step}: the weights are not finite, so nothing was saved; "
                            "lower learning_rate or raise warmup_iters")
        if self.processes.rank == 0:
            self.lock.keep()
            state = self.state()
            for name in ("best.pt", "ckpt.pt") if best else ("ckpt.pt",):
                save_checkpoint(self.path.with_name(name), state)
            carry_on(self.tokenizer_files, self.path.parent)
        self.saved = self.step
        self.log.start_clock()

    def state(self) -> dict:
        """What a checkpoint holds."""
        optimizers = [o.state_dict() for o in self.optimizers]
        for group in (g for o in optimizers for g in o["param_groups"]):
            group["lr"] = float(group["lr"])
        wandb = self.log.wandb.id if self.log.wandb else None
        return {"model": self.model.state_dict(), "model_config": asdict(self.model_config),
                "optimizers": optimizers, "meta": self.meta, "config": asdict(self.c),
                "prepared_again": self.again, "step": self.step, "rows_seen": self.rows_seen,
                "tokens_seen": self.tokens_seen, "best_val_loss": self.best,
                "best_id": self.best_id, "rng": torch.get_rng_state(), "wandb": wandb}

    def rescue(self):
        """Save what no checkpoint holds yet, without the help of other processes."""
        if self.processes.rank == 0 and self.step > self.saved:
            if self.processes.world > 1:
                self.log.lose()
            self.save()


def main(argv: list[str], signals: Signals | None = None):
    """Train by the settings; under torchrun, one of its processes."""
    c = settings(argv, __doc__)
    processes = Processes(*ranks())
    trainer = Trainer(c, processes)
    kv, n = trainer.model_config.kv, trainer.model.n_params()
    processes.print(
        f"{kv}, {n:,} parameters without the embedding, on "
        f"{processes.world} x {trainer.device.partition(':')[0]}, {trainer.fast}; "
        f"{trainer.tokens_per_step:,} tokens per step")
    if trainer.step >= c.max_iters:
        processes.print(f"step {trainer.step} of {c.max_iters}: nothing left to do")
    trainer.run(signals)
    processes.print(f"{trainer.path}: step {trainer.step}; "
                    + shlex.join(["python", "sample.py", f"--out_dir={c.out_dir}"]))
    processes.end()


if __name__ == "__main__":
    run(lambda argv: main(argv, signals))
