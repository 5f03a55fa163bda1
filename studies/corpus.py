"""
Every system, and every schedule, on one corpus: `python -m studies.corpus COMMAND --key=value ...`

    python -m studies.corpus systems --dataset=mine      # out/study.json
    python -m studies.corpus schedules --dataset=mine    # out/schedules.json
    python -m studies.corpus plot                        # out/study.png, out/schedules.png

A run is train.py over config/short.py, 4,000 steps of 8 x 2,048 tokens, and evaluate.py perplexity
on all of the test set; for a schedule, half as many steps and the paper's three figures on the
first 320 rows. The dataset is of GPT-2's tokens, 65.5 M or more. A run whose record is in the JSON
file is not made again, and one that was stopped goes on: the same command may be given again until
it has nothing left to do.
"""

import json
import math
import os
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

# before torch, which reads what it tells OpenMP
from configurator import UserError, key, parse, run, run_command

# isort: split
from baselines import plan
from checkpoint import load_checkpoint
from measure.flops import flops_per_token
from pictures import plot, read_log, save
from running.settings import TrainConfig
from running.start import model_config
from studies.jobs import Job, StudyConfig, read_records, study
from text.rows import load_meta, open_tokens, prepared_since
from text.splits import SPLITS

SEEDS = 1337, 1338, 1339
RATE = 2e-3  # of config/short.py
SYSTEMS = {  # configs, and how pictures call them
    "vanilla16": "vanilla", "wm16": "k=16", "wm16_k12": "k=12", "wm16_k8": "k=8", "wm16_k4": "k=4",
    "wm16_k2": "k=2", "wm16_k1": "k=1", "static16": "static k=16", "static16_k1": "static k=1",
    "nofeedback16": "no feedback", "lckv16_w4": "LCKV w=4", "lckv16_w7": "LCKV w=7",
    "feedback16": "Feedback", "recurrent16": "Recurrent", "fusedkv16": "FusedKV",
    "fusedkv16_lite": "FusedKV-Lite", "vanilla24": "vanilla, 24 layers"}
# the last one is not asked for, but needs no iteration and came out first
THREE_SEEDS = "vanilla16", "wm16", "wm16_k8", "wm16_k1", "fusedkv16_lite"
THREE_RATES = "vanilla16", "wm16", "wm16_k8", "nofeedback16"
GROUPS, NO_GRAD, GRAD = (1, 4, 8, 16), (1, 4, 2), (1, 2)  # the least telling come last
JACOBI_ROWS = 320  # of the test set, for the three figures of a schedule
# settings that leave a result as it is
NO_MATTER = {"out_dir", "init_from", "device", "dtype", "compile", "kernels", "recompute",
             "log_interval", "eval_interval", "eval_rows", "wandb", "wandb_project"}


@dataclass
class CorpusConfig(StudyConfig):
    dataset: str = key("corpus", "folder under data/")

    def __post_init__(self):
        self.dataset = os.path.normpath(self.dataset)  # as train.py calls it


def job(c: CorpusConfig, name: str, config: str, settings: dict,
        score: tuple[str, ...] = ()) -> Job:
    """Training and score of a run."""
    out = f"{c.folder}/{c.dataset}/{name}"
    keys = [f"--{k}={v}" for k, v in settings.items()]
    commands = [["train.py", f"config/{config}.py", "config/short.py", f"--dataset={c.dataset}",
                 f"--out_dir={out}", "--init_from=auto", *keys],
                ["evaluate.py", "perplexity", f"--out_dir={out}", f"--json={out}/score.json",
                 *score]]
    argv = commands[0][1:]
    fits, chosen = partial(trained, Path(out), argv), partial(that_matter, argv)
    return Job(name, commands, lambda: {
        "dataset": c.dataset, "config": config, **fits(), **settings, "settings": chosen(),
        **outcome(Path(out))},
        # before it goes on: its own checkpoints will say what these settings are
        lambda: Path(out, "ckpt.pt").exists() and fits(), chosen)


def that_matter(argv: list[str]) -> dict:
    """The settings of a command of train.py that are not as by default."""
    default = asdict(TrainConfig())
    return {k: v for k, v in asdict(parse(TrainConfig(), argv, "")).items()
            if k not in NO_MATTER and v != default[k]}


def trained(out: Path, argv: list[str]) -> dict:
    """Seed, rate and test set of the checkpoint. Raises UserError if other settings, or another
    state of the data set, are those of today."""
    state, wanted = load_checkpoint(out, "meta"), parse(TrainConfig(), argv, "")
    for k, value in state["config"].items():
        if k not in NO_MATTER and value != getattr(wanted, k, value):
            raise UserError(f"{out} was trained with {k}={value}, and the settings say "
                            f"{getattr(wanted, k)}; --folder= names another place for new runs")
    meta = state["meta"]
    if when := prepared_since(load_meta(wanted.dataset)[1], state):
        raise UserError(f"{out}: dataset={wanted.dataset} was prepared again {when}; --folder= "
                        "names another place for new runs")
    test = {"test_digest": meta["test_digest"]} if "test_digest" in meta else {}
    return {"seed": wanted.seed, "learning_rate": wanted.learning_rate, **test}


def outcome(out: Path) -> dict:
    """What a run has left in its folder."""
    _, validation = read_log(out / "log.csv")
    score = json.loads((out / "score.json").read_text(encoding="utf-8"))
    kept = ("step", "targets", "loss", "perplexity", "training_schedule", "decoding", "jacobi",
            "device", "dtype", "torch", "commit")
    return {"validation": [[step, loss] for step, loss in validation.items()],
            **{k: score[k] for k in kept if k in score}}


def check_dataset(c: CorpusConfig):
    """Raise UserError for a file of results that has runs of another data set."""
    others = {r["dataset"] for r in read_records(c.json, "dataset")} - {c.dataset}
    if others:
        raise UserError(f"json={c.json}: it has results of dataset={', '.join(others)}, and "
                        f"takes none of {c.dataset}; --json= names another file")


def check_splits(c: CorpusConfig):
    """Raise UserError for a data set that lacks a split, or has another test set than the results
    so far are of, before hours of training."""
    folder, meta = load_meta(c.dataset)
    missing = [f"{split}.bin" for split in SPLITS if not (folder / f"{split}.bin").is_file()]
    if missing:
        raise UserError(f"dataset={c.dataset}: {folder} has no {', '.join(missing)}; a study needs "
                        "all three (python prepare_data.py --test_rows=5000 ...)")
    for split in SPLITS:
        open_tokens(folder / f"{split}.bin", meta)
    mine = meta.get("test_digest")
    if {r.get("test_digest") or mine for r in read_records(c.json)} - {mine}:
        raise UserError(f"json={c.json}: it has results on another test set, as {c.dataset} was "
                        "prepared again since; --json= names another file")


def systems(c: CorpusConfig) -> Iterator[Job]:
    """All systems with one seed; those that the paper rests on with three; and with half and double
    the learning rate three of them, and no feedback, which a rate too high hurts most. As it was
    best at half, that comes with three seeds, too, and half of it."""
    check_dataset(c)
    for seed in SEEDS:
        for config in SYSTEMS if seed == SEEDS[0] else THREE_SEEDS:
            yield job(c, f"{config}-{seed}", config, {"seed": seed})
    for rate in (RATE / 2, 2 * RATE):
        for config in THREE_RATES:
            yield job(c, f"{config}-{SEEDS[0]}-{rate:g}", config, {"learning_rate": rate})
    for rate, seed in ((RATE / 2, SEEDS[1]), (RATE / 2, SEEDS[2]), (RATE / 4, SEEDS[0])):
        yield job(c, f"nofeedback16-{seed}-{rate:g}", "nofeedback16",
                  {"seed": seed, "learning_rate": rate})


def schedules(c: CorpusConfig) -> Iterator[Job]:
    """The grid of the paper's section on schedules, k = 8, with its three figures on the first
    rows."""
    check_dataset(c)
    for n_nograd, n_grad, g in product(NO_GRAD, GRAD, GROUPS):
        yield job(c, f"g{g}-{n_nograd}+{n_grad}", "wm16_k8",
                  {"n_groups": g, "n_nograd": n_nograd, "n_grad": n_grad, "max_iters": 2000},
                  ("--solver=paper", f"--limit_rows={JACOBI_ROWS}"))


def systems_command(c: CorpusConfig):
    """Perplexity of every system: the runs that have no result yet."""
    study(c, systems, check_splits, ("config", "learning_rate", "perplexity"))


def schedules_command(c: CorpusConfig):
    """The grid of the paper's section on schedules: the runs that have no result yet."""
    study(c, schedules, check_splits, ("n_groups", "training_schedule"))


# ---- pictures

# points from a mark to its name, and the name's side that is there, where it would else meet others
NAME_PLACES = {"static16": (6, -2, "left"), "wm16_k4": (-6, -10, "right"),
               "wm16_k8": (-6, 4, "right"), "wm16_k12": (4, -11, "left"),
               "fusedkv16": (-6, 12, "right"), "lckv16_w4": (-6, -10, "right"),
               "vanilla24": (-6, 4, "right"), "nofeedback16": (-6, 4, "right")}


@dataclass
class PlotConfig:
    systems: str = key("out/study.json", "what `systems` has written")
    schedules: str = key("out/schedules.json", "what `schedules` has written")
    output: str = key("out", "folder for study.png and schedules.png")


def by_system(records: list[dict]) -> dict[str, list[float]]:
    """Test perplexities of all seeds at the rate of the study."""
    scores = {}
    for r in records:
        if r["learning_rate"] == RATE:
            scores.setdefault(r["config"], []).append(r["perplexity"])
    return scores


def sizes(config: str) -> tuple[float, float]:
    """Of a config: its cache, in that of vanilla16, and GFLOP of training per token."""
    c = parse(TrainConfig(), [f"config/{config}.py"], "")
    mc = model_config(c, {"vocab_size": 50257, "eos_id": 50256})
    return len(plan(mc).channels) / 16, flops_per_token(mc, 2048, "training") / 1e9


def plot_systems(records: list[dict], output: Path):
    """Perplexity against the size of the cache, and against training FLOP."""
    plt, found = plot(), by_system(records)
    if not found:
        print(f"no results at the study's rate, {RATE:g}, for {output.name}")
        return
    fig, axes = plt.subplots(1, 2, figsize=(12, 5.2), sharey=True, layout="constrained")
    colours = {"vanilla": "#000000", "wm": "#0072b2", "static": "#56b4e9", "nofeedback": "#009e73"}
    for config, scores in found.items():
        mean = statistics.mean(scores)
        colour = next((c for k, c in colours.items() if config.startswith(k)), "#d55e00")
        dx, dy, side = NAME_PLACES.get(config, (6, -10 if colour == "#d55e00" else 4, "left"))
        for ax, x in zip(axes, sizes(config)):
            ax.errorbar(x, mean, [[mean - min(scores)], [max(scores) - mean]], fmt="o", ms=5,
                        color=colour, capsize=3)
            ax.annotate(SYSTEMS.get(config, config), (x, mean), (dx, dy), fontsize=8, ha=side,
                        textcoords="offset points", color=colour)
    axes[0].set_xscale("log", base=2)
    axes[0].set_xticks([1 / 16, 1 / 8, 1 / 4, 1 / 2, 1], ["1/16", "1/8", "1/4", "1/2", "1"])
    axes[0].set_xlabel("cache, in that of vanilla with 16 layers")
    axes[0].set_ylabel("test perplexity (bars: lowest and highest of the seeds)")
    axes[0].set_xlim(right=4)  # room for names
    axes[1].set_xlabel("training, GFLOP a token, without the head")
    axes[1].margins(x=0.2)
    save(fig, str(output))


def plot_schedules(records: list[dict], output: Path):
    """The paper's heat maps: each of the three figures over passes and groups."""
    plt = plot()
    rows = [(grad, nograd) for grad in GRAD for nograd in sorted(NO_GRAD)]
    figures = {"best, groups of training": lambda r: r["training_schedule"]["best"],
               "as it would decode": lambda r: r["decoding"]["perplexity"],
               "Jacobi passes to within 1 %": lambda r: r["jacobi"]["passes_to_best"]}
    fig, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    for ax, (title, figure) in zip(axes, figures.items()):
        found = {(r["n_grad"], r["n_nograd"], r["n_groups"]): figure(r) for r in records}
        table = [[found.get((*row, g), math.nan) for g in GROUPS] for row in rows]
        ax.imshow([[math.nan if x is None else x for x in line] for line in table],
                  cmap="viridis_r", aspect="auto")
        for i, line in enumerate(table):
            for j, x in enumerate(line):
                text = "more" if x is None else "-" if x != x else \
                    f"{x}" if isinstance(x, int) else f"{x:#.4g}"
                ax.text(j, i, text, ha="center", va="center", fontsize=8,
                        bbox=dict(boxstyle="round,pad=0.15", fc="white", ec="none", alpha=0.8))
        ax.set_xticks(range(len(GROUPS)), ["Jacobi", *(f"g={g}" for g in GROUPS[1:])])
        ax.set_yticks(range(len(rows)), [f"{nograd} + {grad}" for grad, nograd in rows])
        ax.set_title(title)
        ax.grid(False)
    axes[0].set_ylabel("passes without + with gradients")
    save(fig, str(output))


def plot_command(c: PlotConfig):
    """Perplexity of all systems, and the heat maps of schedules; of one file that is named, its
    picture alone."""
    named = {getattr(c, name) for name in ("systems", "schedules") if name in c.given}
    for file, draw, name, needed in (
            (c.systems, plot_systems, "study.png", ("config", "learning_rate", "perplexity")),
            (c.schedules, plot_schedules, "schedules.png", ("n_groups", "training_schedule"))):
        if named and file not in named:
            continue
        records = read_records(file, *needed)
        if records:
            draw(records, Path(c.output) / name)
        else:
            print(f"{file}: no results yet")


COMMANDS = {systems_command: CorpusConfig(json="out/study.json"),
            schedules_command: CorpusConfig(json="out/schedules.json"), plot_command: PlotConfig()}

if __name__ == "__main__":
    run(lambda argv: run_command("python -m studies.corpus", COMMANDS, argv, __doc__))
