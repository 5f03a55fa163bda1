"""
log.csv, a row per step; the progress lines; Weights & Biases.
"""

import csv
import math
import os
import time
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import keep_previous, written_beside
from configurator import UserError, package
from running.lock import Lock
from running.processes import Processes, brief


class Log:
    """What a run says of its steps; losses stay on the device until a line is due.

    The file is open only while rows are added to it. A new run moves an earlier one away when its
    first rows are written, and not before: a start that fails leaves the folder as it was.
    """

    columns = ("step", "loss", "val_loss", "lr", "grad_norm", "tokens_per_s")

    def __init__(self, path: Path, step: int, tokens_per_step: int, flops_share: float | None,
                 processes: Processes, c, wandb=None, lock: Lock | None = None):
        self.path, self.c, self.processes, self.wandb = path, c, processes, wandb
        self.lock = lock
        self.tokens_per_step = tokens_per_step
        self.flops_share = flops_share  # of the devices' peak, per token and second; or unknown
        self.waiting: list[tuple] = []  # steps whose losses are on the device
        self.rows: list[tuple] = []  # for the file
        self.start_clock()
        self.last_loss = None
        self.is_new, self.begun = not step, False
        self.kept = self.read(path, step) if step else []
        self.validated = any(row[2] and int(row[0]) == step for row in self.kept)

    @classmethod
    def read(cls, path: Path, step: int) -> list[list[str]]:
        """The rows up to `step`, which a resumed run does not repeat."""
        if not path.exists():
            return []
        with open(path, encoding="utf-8", errors="replace") as f:  # maybe with zeros at its end
            rows = [r for r in (line.rstrip("\n").split(",") for line in f)
                    if len(r) == len(cls.columns) and r[0].isdigit()]
        # a validation after n steps is in row n
        return [r for r in rows if int(r[0]) < step or int(r[0]) == step and r[2]]

    def begin(self):
        """The file with the rows that are kept and those that wait; whatever happens, it has either
        all old rows or these."""
        folder = self.path.parent
        with written_beside(self.path) as temporary:
            with open(temporary, "w", newline="", encoding="utf-8") as f:
                csv.writer(f).writerows([self.columns, *self.kept, *self.rows])
            if self.is_new and (previous := keep_previous(folder)):
                self.processes.print(f"{folder} held a run: it is kept in {previous}")
        self.begun, self.is_new, self.kept = True, False, []

    def write(self):
        """Add the rows that wait to the file; if it takes none, they wait for the next time. Raises
        UserError if a new run's file cannot be begun."""
        if self.processes.rank or not self.rows:
            return
        self.lock.keep()
        size = 0
        try:
            if self.begun and self.path.exists():
                size = self.path.stat().st_size
            if size:
                with open(self.path, "a", newline="", encoding="utf-8") as f:
                    csv.writer(f).writerows(self.rows)
            else:  # or somebody tidied up
                self.begin()
            self.rows.clear()
        except OSError as error:
            if self.is_new:
                raise UserError(f"{self.path}: cannot be written ({error.strerror}); what was "
                                "there before is as it was") from None
            if size:
                os.truncate(self.path, size)  # no half a row
            self.processes.print(f"note: {self.path} takes no rows now ({error.strerror})")

    def add(self, step: int, loss: Tensor, lr: float, norm: Tensor):
        self.waiting.append((step, loss, lr, norm))
        if (step + 1) % self.c.log_interval == 0:
            self.flush()

    def lose(self):
        """Steps whose losses nobody can add up any more get rows without them."""
        self.rows += [(step, "", "", f"{lr:.4g}", f"{norm.item():.4f}", "")
                      for step, _, lr, norm in self.waiting]
        self.waiting.clear()

    def flush(self):
        """Fetch what waits, write it, print the last one; stop the run if it is not finite."""
        if not self.waiting:
            return self.write()
        losses = self.processes.sum(torch.stack([w[1] for w in self.waiting]).float())
        losses = (losses / self.processes.world).tolist()
        norms = torch.stack([w[3] for w in self.waiting]).tolist()
        seconds = time.perf_counter() - self.since
        speed = self.tokens_per_step * len(self.waiting) / seconds
        for (step, _, lr, _), loss, norm in zip(self.waiting, losses, norms):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self.write()
                raise UserError(f"step {step}: loss {loss}, gradient norm {norm}; the last finite "
                                f"loss was {self.last_loss}. A checkpoint, if there is one, is "
                                "from before; lower learning_rate or raise warmup_iters")
            self.last_loss = loss
            self.rows.append((step, f"{loss:.6f}", "", f"{lr:.4g}", f"{norm:.4f}", f"{speed:.0f}"))
            if self.wandb:
                self.wandb.log({"loss": loss, "lr": lr, "norm": norm, "tokens_per_s": speed},
                               step=step)
        self.write()
        left = seconds / len(self.waiting) * (self.c.max_iters - step - 1)
        mfu = "n/a" if self.flops_share is None else f"{100 * self.flops_share * speed:.1f} %"
        self.processes.print(f"step {step}: loss {loss:.4f}, lr {lr:.2e}, norm {norm:.2f}, "
                             f"{speed:,.0f} tokens/s, MFU {mfu}, {left / 60:.1f} min left")
        self.waiting.clear()
        self.start_clock()

    def start_clock(self):
        """Speed is measured from here on."""
        self.since = time.perf_counter()

    def validation(self, step: int, loss: float, best: bool):
        self.rows.append((step, "", f"{loss:.6f}", "", "", ""))
        self.write()
        if self.wandb:
            self.wandb.log({"val_loss": loss}, step=step)
        self.processes.print(f"step {step}: val loss {loss:.4f}{', the best yet' if best else ''}")
        self.start_clock()

    def close(self):
        """The run is over. Raises UserError for rows that could not be written all the time."""
        self.write()
        if self.rows and not self.processes.rank:
            raise UserError(f"{self.path}: its last {len(self.rows)} rows cannot be written; the "
                            "checkpoint has all steps")


def import_wandb():
    return package("wandb", "wandb=True: the package is not installed (pip install wandb)")


def start_wandb(settings: dict, run_id: str | None):
    """Weights & Biases' run: the one of the checkpoint, if there is one, else a new one, with the
    settings of the run and its model."""
    try:
        return import_wandb().init(project=settings["wandb_project"],
                                   name=settings["out_dir"], config=settings, id=run_id,
                                   resume="allow")
    except Exception as error:  # no key, no network, no disk: all of its own kinds
        raise UserError(f"wandb=True: {brief(error)} (`wandb login` stores a key; WANDB_MODE="
                        "offline needs none; --wandb=false goes without)") from None
