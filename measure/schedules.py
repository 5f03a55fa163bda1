"""
How the states of a batch are found when a model is scored, and its loss after each pass.

Dimensions: B rows, T tokens, g groups.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from attention import Cache, Rows
from configurator import UserError, key
from decoding import TOLERANCE, check_solver, prefill
from model import Decoder
from solvers import Report, Solution, interleave, solve

CLOSE = 0.01  # perplexity counts as converged within 1 % of the exact one


@dataclass
class Schedule:
    """How the states of a batch are found."""

    solver: str  # one pass, cyclic, jacobi or autoregressive; training: as solvers.solve does
    passes: int = 1
    n_groups: int = 1
    tol: float | None = None

    def __call__(self, model: Decoder, idx: Tensor, keep_cache: bool = False) -> Solution:
        """States, and the cache if it is to be kept, of tokens idx (B, T)."""
        if self.solver == "training":
            return solve(model, idx, keep_cache=keep_cache)
        return prefill(model, idx, self.solver, self.passes, self.n_groups, self.tol, keep_cache)

    def __str__(self):
        if self.solver in ("one pass", "autoregressive"):
            return {"autoregressive": "token by token"}.get(self.solver, self.solver)
        groups = "" if self.solver == "jacobi" else f", g={self.n_groups}"
        passes = "until converged" if self.tol is not None else \
            f"{self.passes} pass{'es' * (self.passes != 1)}"
        solver = "as in training" if self.solver == "training" else self.solver
        return f"{solver}{groups}, {passes}"


@dataclass
class ScoreConfig:
    """What the commands that score a checkpoint take."""

    out_dir: str = key("out", "folder with ckpt.pt, or a file such as out/best.pt")
    solver: str | None = key(None, "cyclic, jacobi or autoregressive; None: as in training")
    passes: int | None = key(None, "of cyclic and jacobi; None: as in training (paper: 3)")
    n_groups: int | None = key(None, "g of cyclic; None: as in training")
    exact: bool = key(False, "iterate until converged, whatever passes says")
    tol: float | None = key(None, "relative change of the states at which exact ends; None: 1e-5 "
                            "in float32, 1e-2 in bfloat16")
    device: str = key("auto", "auto (cuda, else mps, else cpu), or a torch device")
    dtype: str = key("auto", "auto (bfloat16 on cuda), float32 or bfloat16")
    json: str | None = key(None, "write the results to this file (-: to stdout)")


def schedule_of(c: ScoreConfig, model: Decoder, dtype: torch.dtype, *more: str) -> Schedule:
    """What the settings solver, passes, n_groups, tol and exact mean for this model; `more`:
    solvers of which the caller takes care.

    What is not set is as in training. A model that needs no iteration takes its one pass.
    """
    check_solver(c, *more)
    if c.tol is not None and not c.tol > 0:
        raise UserError(f"tol={c.tol}: a number above 0 is needed")
    mc = model.config
    if not model.iterates:
        return Schedule("one pass")
    if c.solver == "autoregressive":
        return Schedule(c.solver)
    tol = TOLERANCE[dtype] if c.exact and c.tol is None else c.tol
    passes = mc.n_nograd + mc.n_grad if c.passes is None else c.passes
    groups = mc.n_groups if c.n_groups is None else c.n_groups
    if (c.solver, c.passes, c.n_groups, tol) == (None,) * 4:
        return Schedule("training", passes, groups)
    return Schedule(c.solver or "cyclic", passes, 1 if c.solver == "jacobi" else groups, tol)


# ---- losses


class PassLosses:
    """Watches `model.states` during a cyclic solve and takes the loss after every pass.

    All layers run in every pass then, also those that only the last one needs.
    """

    def __init__(self, model: Decoder, targets: Tensor, n_groups: int):
        self.model, self.targets, self.n_groups = model, targets, min(n_groups, targets.size(1))
        self.states, self.parts, self.columns, self.losses = model.states, [], [], []

    def __enter__(self) -> "PassLosses":
        self.model.states = self
        return self

    def __exit__(self, *_):
        del self.model.states  # back to the method

    def __call__(self, x: Tensor, rows: Rows, cache: Cache, first: int = 0,
                 end: int | None = None) -> list[Tensor]:
        if rows.complete:  # the layers below and above, which run once
            self.rows = rows
            return self.states(x, rows, cache, first, end)
        end = self.model.iterated[1]
        h = self.states(x, rows, cache, first, end)
        self.parts.append(h[-1])
        self.columns.append(rows.columns)
        if len(self.parts) == self.n_groups:
            final, self.parts, self.columns = interleave(self.parts, self.columns), [], []
            if end < len(self.model.blocks):
                final = self.states(final, self.rows, None, end)[-1]
            self.losses.append(self.model.loss(final, self.targets))
        return h


class Losses:
    """Nats of all targets of a batch under a schedule: after the last pass, or after each."""

    def __init__(self, model: Decoder, schedule: Schedule, every_pass: bool = False):
        self.model, self.schedule, self.every_pass = model, schedule, every_pass
        self.reports: list[Report] = []

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y (B, T) -> sums (passes,) or (1,), float64 where the device has it."""
        watch = PassLosses(self.model, y, self.schedule.n_groups)
        with watch if self.every_pass else nullcontext():
            solution = self.schedule(self.model, x)
        losses = torch.stack(watch.losses or [self.model.loss(solution.final, y)])
        self.reports.append(solution.report)
        losses = losses.float() if x.device.type == "mps" else losses.double()
        return losses * (y != -1).sum()

    @property
    def passes(self) -> int:
        return max(report.passes for report in self.reports)

    @property
    def converged(self) -> bool | None:
        """Whether every batch has; None where no tolerance was given."""
        each = [report.converged for report in self.reports]
        return None if None in each else all(each)


def first_within(perplexities: list[float], target: float, lower_too: bool = True) -> int | None:
    """Number of passes after which a perplexity is at most 1 % above the target; unless any
    lower one will do, at most 1 % below it, too."""
    least = 0 if lower_too else target * (1 - CLOSE)
    return next((n for n, p in enumerate(perplexities, 1) if least <= p <= target * (1 + CLOSE)),
                None)


def until(after: Callable[[int], list[float]], n: int, limit: int,
          enough: Callable[[list[float]], object]) -> list[float]:
    """Perplexity after each pass, after(n), for so many that it is enough, or for `limit`; n is a
    guess, which is doubled."""
    while True:
        found = after(min(n, limit))
        if n >= limit or enough(found):
            return found
        n *= 2
