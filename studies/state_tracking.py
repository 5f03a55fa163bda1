"""
How far a state travels from deep layers to shallow ones.

    python -m studies.state_tracking train --kv=feedback --schedule=32x0+1 --json=one.json
    python -m studies.state_tracking all --at_once=8          # out/state_tracking.json
    python -m studies.state_tracking plot                     # out/state_tracking.png

A row is T random elements of a group; the target at each position is the product so far. For S5,
which is not solvable, a Transformer of fixed depth cannot do that for long rows, as each layer adds
only so much (Merrill and Sabharwal, 2023, under the usual conjecture); Z60, which is commutative,
is the control. A model that hands each token's last state to the first layers of the next one can,
if its training lets a state travel: a cyclic pass of g groups takes it over g tokens, so n passes
reach g x n.

A model has seen rows of --block_size tokens; it is scored token by token, which is exact (in
bfloat16 where it computes in that), on longer ones, and by the schedule that it was trained with.
"""

import itertools
import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

# before torch, which reads what it tells OpenMP
from configurator import UserError, key, run, run_command

# isort: split
import torch
from torch import Tensor

from baselines import build
from kernels import Fast, accelerate
from measure.schedules import Schedule
from measure.timing import check, environment, write_json
from model import SCHEDULES, Decoder, ModelConfig
from pictures import COLOURS, mixing_weights, plot, save
from running.devices import pick_device, pick_dtype
from running.optimizers import clip_and_reduce, flat_gradient, make_optimizers, set_rate
from running.processes import Processes
from running.settings import SCHEDULE, TrainConfig, learning_rate
from running.settings import check as check_settings
from solvers import autoregressive, cyclic, solve
from studies.jobs import Job, StudyConfig, read_records, study
from train import make_micro_step, make_optimizer_step

GROUPS = ("s5", "z60")


# ---- the task

def multiplication_table(group: str) -> Tensor:
    """table[a, b] = a b, (n, n) int64; of permutations: first b, then a."""
    if group == "z60":
        n = torch.arange(60)
        return (n[:, None] + n) % 60
    permutations = list(itertools.permutations(range(5)))
    number = {p: i for i, p in enumerate(permutations)}
    return torch.tensor([[number[tuple(a[i] for i in b)] for b in permutations]
                         for a in permutations])


def products(table: Tensor, elements: Tensor) -> Tensor:
    """Elements (n, T) -> the products x_t ... x_1 x_0 so far, (n, T)."""
    out = elements.clone()
    for t in range(1, elements.size(1)):
        out[:, t] = table[elements[:, t], out[:, t - 1]]
    return out


class Rows:
    """Random rows and their targets, the same for a seed on every machine."""

    def __init__(self, group: str, T: int, seed: int, device: str):
        self.table, self.T, self.device = multiplication_table(group), T, device
        self.random = torch.Generator().manual_seed(seed)

    def __call__(self, n: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(len(self.table), (n, self.T), generator=self.random)
        return x.to(self.device), products(self.table, x).to(self.device)


# ---- a run

@dataclass
class TrackingConfig:
    group: str = key("s5", "s5 or z60")
    kv: str = key("whitematter", "the system")
    n_channels: int = key(1, "k of whitematter")
    lckv_w: int = key(2, "w of lckv")
    start: str = key("own", "which source each channel begins with: own, as the model has it, or "
                     "last, that of k = 1")
    schedule: str | None = key(None, "groups x passes without + with gradients, such as 8x1+2; T "
                               "groups, 0 + 1: exact; None: the system's own")
    then: str | None = key(None, "another schedule for the last steps")
    then_steps: int = key(1000, "how many")
    n_layer: int = key(4, "L")
    n_embd: int = key(256, "D")
    n_head: int = key(4, "query heads")
    n_kv_head: int = key(2, "key-value heads")
    head_dim: int = key(64, "features of a head")
    n_hidden: int = key(768, "features inside the MLP")
    block_size: int = key(32, "T, tokens of a row of training")
    batch_size: int = key(256, "rows of a step")
    max_iters: int = key(8000, "steps")
    learning_rate: float = key(1e-3, "peak")
    score_length: int = key(128, "tokens of a row that is scored")
    score_rows: int = key(1024, "of them")
    seed: int = key(1337, "of weights and rows")
    log_interval: int = key(500, "steps between lines")
    device: str = key("auto", "auto (cuda, else mps, else cpu), or a torch device")
    dtype: str = key("auto", "auto (bfloat16 on cuda), float32 or bfloat16")
    compile: bool | None = key(None, "as for train.py")
    json: str | None = key(None, "write the results to this file (-: to stdout)")

    def model(self) -> ModelConfig:
        """The model's config, with the first schedule, which is chosen here where none is given.
        Raises UserError."""
        if self.group not in GROUPS:
            raise UserError(f"group={self.group}: choose one of {', '.join(GROUPS)}")
        if self.start not in ("own", "last"):
            raise UserError(f"start={self.start}: choose own or last")
        if self.start == "last" and self.kv != "whitematter":
            raise UserError(f"start=last: kv={self.kv} has no channels with a choice")
        one_pass = self.kv in ("vanilla", "nofeedback", "fusedkv", "fusedkv_lite")
        if self.schedule is None:
            own = "{}x{}+{}".format(*SCHEDULES.get(self.kv, (8, 1, 2)))
            self.schedule = ONE_PASS if one_pass else own
        if one_pass and (self.then or self.schedule != ONE_PASS):
            raise UserError(f"schedule={self.schedule}, then={self.then}: kv={self.kv} has one "
                            f"pass, {ONE_PASS}")
        settings = {k: v for k, v in vars(self).items() if hasattr(ModelConfig, k)}
        settings |= zip(SCHEDULE, passes(self.schedule))
        if self.kv != "whitematter":
            settings["n_channels"] = self.n_layer
        try:
            return ModelConfig(vocab_size=128, **settings)
        except ValueError as error:
            raise UserError(str(error)) from None


def passes(schedule: str, name: str = "schedule") -> tuple[int, int, int]:
    """Of "8x1+2": groups, passes without and with gradients. Raises UserError."""
    found = re.fullmatch(r"(\d+)x(\d+)\+(\d+)", schedule)
    if not found or not int(found[1]) or not int(found[3]):
        raise UserError(f"{name}={schedule}: groups x passes without + with gradients are "
                        "needed, such as 8x1+2")
    return int(found[1]), int(found[2]), int(found[3])


def make_model(c: TrackingConfig, device: str) -> Decoder:
    """The model as its training begins. Raises UserError."""
    config = c.model()
    torch.manual_seed(c.seed)
    model = build(config).to(device)
    if c.start == "last":  # every channel as that of k = 1: with the last source
        with torch.no_grad():
            for branch in (model.kv_pool.key, model.kv_pool.value):
                branch.bias.zero_()
                branch.bias[:, -1] = 0.25
    return model


def train(c: TrackingConfig, device: str, dtype: torch.dtype) -> tuple[Decoder, Fast, list]:
    """A model after all steps, the last ones by the schedule `then`, if there is one; how it runs;
    and the number and loss of the last step before each line."""
    settings = TrainConfig(learning_rate=c.learning_rate, max_iters=c.max_iters, out_dir=".")
    check_settings(settings)
    model = make_model(c, device)
    rows, flat = Rows(c.group, c.block_size, c.seed, device), flat_gradient(model)
    optimizers = make_optimizers(model, settings)
    fast = accelerate(model, dtype, c.compile, training=True)
    micro_step, optimizer_step = make_micro_step(fast, 1.0), make_optimizer_step(fast, optimizers)
    print(f"{c.kv}, {model.n_params():,} parameters, {c.schedule}, {fast}")
    losses = []
    for step in range(c.max_iters):
        if c.then and step == c.max_iters - c.then_steps:
            vars(model.config).update(zip(SCHEDULE, passes(c.then, "then")))
            micro_step = make_micro_step(fast, 1.0)  # a graph is of the schedule before
        flat.zero_()
        loss = micro_step(*rows(c.batch_size))
        norm = clip_and_reduce(flat, settings.grad_clip, Processes())
        set_rate(optimizers, learning_rate(step, settings))
        optimizer_step(norm)
        if (step + 1) % c.log_interval == 0 or step + 1 == c.max_iters:
            losses.append([step + 1, loss.item()])
            if not math.isfinite(losses[-1][1]):
                raise UserError(f"step {step + 1}: loss {loss.item()}; lower learning_rate")
            print(f"step {step + 1}: loss {losses[-1][1]:.4f}", flush=True)
    if not torch.stack(torch._foreach_norm(list(model.parameters()))).isfinite().all():
        raise UserError(f"step {c.max_iters}: the weights are not finite; lower learning_rate")
    return model, fast, losses


# ---- scores

@torch.no_grad()
def accuracies(fast: Fast, x: Tensor, y: Tensor, solver, rows: int = 256) -> list[float]:
    """Share of rows (n, T) that are right at each position, after solver(model, x)."""
    right = 0
    for part, target in zip(x.split(rows), y.split(rows)):
        with fast.autocast():
            guess = fast.model.logits(solver(fast.model, part).final).argmax(-1)
        right = right + (guess == target).sum(0)
    return (right / len(x)).tolist()


@torch.no_grad()
def routing(model: Decoder, x: Tensor) -> dict | None:
    """Root mean square of the mixing weights of exact states: keys' and values', k x L each."""
    if model.config.kv != "whitematter":
        return None
    alpha = mixing_weights(model, x, Schedule("autoregressive"))
    return dict(zip(("keys", "values"), alpha.square().mean((1, 2)).sqrt().tolist()))


def train_command(c: TrackingConfig):
    """One run: train, score token by token and as trained, write the JSON."""
    check(c, "block_size", "batch_size", "max_iters", "score_length", "score_rows", "log_interval")
    c.model()
    for name in ("schedule", "then"):
        schedule = getattr(c, name)
        if schedule is not None and passes(schedule, name)[0] > c.block_size:
            raise UserError(f"{name}={schedule}: more groups than block_size={c.block_size}")
    if c.then and not 0 < c.then_steps < c.max_iters:
        raise UserError(f"then_steps={c.then_steps}: 1 to max_iters-1={c.max_iters - 1}")
    device, T, began = pick_device(c.device), c.block_size, time.perf_counter()
    dtype = pick_dtype(c.dtype, device)
    model, fast, losses = train(c, device, dtype)
    seconds = time.perf_counter() - began
    x, y = Rows(c.group, c.score_length, c.seed + 1, device)(c.score_rows)
    exact = accuracies(fast, x, y, autoregressive)
    trained = accuracies(fast, x[:, :T], y[:, :T], solve)
    print(f"right, token by token: {summary(exact)}; as trained: {summary(trained)}")
    write_json(c.json, {**{k: v for k, v in asdict(c).items() if k not in ("json", "device")},
                        "seconds": seconds, "losses": losses, "exact": exact,
                        "as_trained": trained, "each_pass": each_pass(fast, x, y),
                        "routing": routing(model, x[:256, :T]), **environment(device, dtype)})


@torch.no_grad()
def each_pass(fast: Fast, x: Tensor, y: Tensor, most: int = 12) -> list[list[float]] | None:
    """Accuracies after 1, 2, ... passes of training's groups: how much further does each get?"""
    if not fast.model.iterates:
        return None
    g = fast.model.config.n_groups
    return [accuracies(fast, x, y, partial(cyclic, n_groups=g, n_nograd=n, n_grad=0))
            for n in range(1, most + 1)]


def summary(right: list[float]) -> str:
    """Means at positions 1-16, 17-32, 33-64 and so on, those there are."""
    edges, n = [0, 16, *(32 << i for i in range(10))], len(right)
    return ", ".join(f"{100 * sum(right[a:b]) / len(right[a:b]):.1f} % at {a + 1}-{min(b, n)}"
                     for a, b in zip(edges, edges[1:]) if a < n)


def reach(right: list[float], level: float = 0.9) -> int:
    """Positions from the first on at which at least so many are right."""
    return next((i for i, share in enumerate(right) if share < level), len(right))


# ---- all runs

SYSTEMS = {"vanilla": dict(kv="vanilla"), "nofeedback": dict(kv="nofeedback"),
           "lckv2": dict(kv="lckv"), "k1": dict(n_channels=1), "k4": dict(n_channels=4),
           "recurrent": dict(kv="recurrent"), "feedback": dict(kv="feedback")}
EXACT, PAPER, LCKV, ONE_PASS = "32x0+1", "8x1+2", "1x7+2", "1x0+1"
TRAINED_BY = dict.fromkeys(SYSTEMS, [EXACT, PAPER]) | {
    "vanilla": [ONE_PASS], "nofeedback": [ONE_PASS], "lckv2": [LCKV]}
RATES, RATE = (4e-4, 1e-3, 2.5e-3), 1e-3
SEEDS = 1337, 1338, 1339


def plans() -> Iterator[dict]:
    """The settings of every run, the most telling first; some come twice."""
    for system in SYSTEMS:  # every system with the best of its rates
        for rate in RATES:
            for schedule in TRAINED_BY[system]:
                yield dict(system=system, schedule=schedule, learning_rate=rate)
    for system in ("k1", "feedback"):  # how far does a state travel?
        for g in (4, 8, 16, 2):
            for n in ("1+1", "1+2", "2+2"):
                yield dict(system=system, schedule=f"{g}x{n}")
        yield dict(system=system, schedule=PAPER, then=EXACT)
    for rate in RATES:  # what does the start do?
        yield dict(system="k4", schedule=EXACT, learning_rate=rate, start="last")
    for system in ("vanilla", "nofeedback", "k1", "feedback"):  # the control
        yield dict(group="z60", system=system, schedule=TRAINED_BY[system][0])
    for seed in SEEDS[1:]:
        for system in ("vanilla", "k1", "feedback"):
            for schedule in TRAINED_BY[system]:
                yield dict(system=system, schedule=schedule, seed=seed)


def jobs(c: StudyConfig) -> list[Job]:
    """The runs by name, each once."""
    made = {}
    for given in plans():
        p = {"learning_rate": RATE, "seed": SEEDS[0], **given}
        system = p.pop("system")
        parts = [p.get("group", "s5"), system, p["schedule"], p.get("then"), p.get("start")]
        name = "-".join([*filter(None, parts), f"{p['learning_rate']:g}", str(p["seed"])])
        out = Path(c.folder) / f"{name}.json"
        settings = [f"--{k}={v}" for k, v in (SYSTEMS[system] | p).items()]
        made.setdefault(name, Job(
            name, [["-m", "studies.state_tracking", "train", *settings, f"--json={out}"]],
            lambda out=out, system=system: {
                "system": system, **json.loads(out.read_text(encoding="utf-8"))}))
    return list(made.values())


def all_command(c: StudyConfig):
    """All runs that have no result yet; what is not ready in time is lost."""
    study(c, jobs, has=("system", "exact", "as_trained"))


# ---- picture

@dataclass
class PlotConfig:
    json: str = key("out/state_tracking.json", "what `all` has written")
    output: str = key("out/state_tracking.png", "file to write; its ending says in which format")


def plot_command(c: PlotConfig):
    """Accuracy by position, and how far states travel."""
    plt = plot(c.output)
    records = read_records(c.json, "system", "schedule", "exact", "as_trained", "group", "start",
                           "then", "seed", "learning_rate", "block_size")
    if not records:
        raise UserError(f"json={c.json}: no results there")
    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    seeds = [r for r in records if (r["group"], r["start"], r["then"]) == ("s5", "own", None)]
    records = [r for r in seeds if r["seed"] == SEEDS[0]]
    shown = ("vanilla", "nofeedback", "lckv2", "k4", "k1", "recurrent", "feedback")
    for system, colour in zip(shown, COLOURS):
        exactly = system, TRAINED_BY[system][0]
        rates = [r for r in records if (r["system"], r["schedule"]) == exactly]
        if r := max(rates, key=lambda r: sum(r["exact"]), default=None):
            left.plot(range(1, 1 + len(r["exact"])), r["exact"], color=colour,
                      label=f"{system}, {r['learning_rate']:g}")
            left.axvline(r["block_size"], color="#bbbbbb", lw=0.8, ls=":")
    left.set(title="trained exactly (LCKV: by 9 passes), best of its rates",
             ylabel="right, token by token", xlabel="position (dotted: end of rows in training)")
    left.set_xscale("log", base=2)
    ticks = [1 << i for i in range(8)]
    left.set_xticks(ticks, ticks)
    grid = [r for r in seeds if r["learning_rate"] == RATE
            and r["system"] in ("k1", "feedback") and r["schedule"] != EXACT]
    first = [r for r in grid if r in records and r["system"] == "k1"]
    for r, colour in zip(sorted(first, key=distance),
                         plt.cm.viridis([i / 12 for i in range(13)])):
        middle.plot(range(1, 1 + len(r["exact"])), r["exact"], color=colour,
                    label=f"{r['schedule']}: {distance(r)}")
        middle.plot(distance(r), 0.02, marker="^", color=colour, clip_on=False)
    middle.set(title="k=1 by schedule of training; marks: g x passes", xlim=(0, 80),
               xlabel="position", ylabel="right, token by token")
    for ax, size in ((left, 9), (middle, 7)):
        if ax.get_legend_handles_labels()[0]:  # the first results may be of others
            ax.legend(fontsize=size)
    for system, marker in (("k1", "o"), ("feedback", "x")):
        its = [r for r in grid if r["system"] == system]
        at = Counter((distance(r), reach(r["as_trained"])) for r in its)
        right.plot([x for x, _ in at], [y for _, y in at], marker, ls="", label=system)
        for (x, y), n in at.items():
            if n > 1:
                side = (7, -9) if system == "k1" else (-22, 3)
                right.annotate(f"{n} x", (x, y), side, textcoords="offset points", fontsize=8)
    right.axline((0, 0), slope=1, color="#999999", lw=0.8, ls="--")
    right.axhline(32, color="#bbbbbb", lw=0.8, ls=":")
    right.set(title="how far a state travels, all seeds", xlabel="g x passes in training",
              ylabel="positions right in 90 % of the rows, as trained")
    right.legend()
    save(fig, c.output)


def distance(r: dict) -> int:
    """The tokens that a state can pass in training: g x passes."""
    g, n_nograd, n_grad = passes(r["schedule"])
    return g * (n_nograd + n_grad)


COMMANDS = {train_command: TrackingConfig(),
            all_command: StudyConfig(folder="out/state_tracking", json="out/state_tracking.json"),
            plot_command: PlotConfig()}

if __name__ == "__main__":
    run(lambda argv: run_command("python -m studies.state_tracking", COMMANDS, argv, __doc__))
