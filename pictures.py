"""
All drawing, through matplotlib (an optional package): `python pictures.py PICTURE --key=value ...`

    python pictures.py connections                    # what each system connects
    python pictures.py curves --logs=out/a,out/b      # losses of several runs
    python pictures.py convergence --json=FILE        # what bench.py prefill has measured
    python pictures.py connectome --out_dir=out/wm16  # what the routers have learnt

Each writes one file, --output, whose ending (.png, .svg, .pdf) says in which format.
"""

import io
import json
import math
import os
import textwrap
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

# before torch, which reads what it tells OpenMP
from configurator import UserError, at_least, key, package, read_text, run, run_command, show

# isort: split
import numpy as np
import torch
from torch import Tensor

from baselines import Plan, plan
from checkpoint import load_checkpoint, load_model
from decoding import TOLERANCE
from evaluate import Windows
from measure.schedules import Schedule
from measure.systems import named_configs
from measure.timing import Table, check, write_results, write_whole
from model import Decoder, ModelConfig, rms_norm
from running.devices import pick_device
from text.rows import data_of
from text.splits import SPLITS
from text.tokenizer import tokenizer_of

PINK, BLUE, GREY, INK = "#b36680", "#4d78a8", "#d9d9d9", "#222222"
# Okabe and Ito's colours, which all can tell apart; then the same with another dash
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
STYLES = [dict(color=colour, ls=dash) for dash in ("-", "--", ":", "-.") for colour in COLOURS]
FEEDBACK, FORWARD = (0.835, 0.369, 0.0), (0.0, 0.447, 0.698)  # two of them
WIDTH = 40  # letters of a name on a line


def plot(output: str | None = None):
    """matplotlib.pyplot without a screen, for a picture of that name. Raises UserError where it is
    not installed, and for no name of a picture, which matplotlib would change."""
    if output is not None and (not Path(output).suffix or Path(output).is_dir()):
        raise UserError(f"output={output}: a file with an ending is needed, such as .png")
    package("matplotlib", "pictures need matplotlib: pip install matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({
        "font.family": ["sans-serif"], "text.parse_math": False,  # a name may hold dollars
        "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
        "axes.edgecolor": "#8a8a8a", "axes.labelcolor": INK, "text.color": INK,
        "xtick.color": "#555555", "ytick.color": "#555555", "axes.titlesize": 10,
        "axes.grid": True, "grid.color": "#e6e6e6", "legend.frameon": False})
    return plt


def save(fig, output: str):
    """Write the picture and say where. Raises UserError if that is not possible."""
    path, data = Path(output), io.BytesIO()
    try:
        fig.savefig(data, dpi=130, format=path.suffix[1:])
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data.getvalue())
    except (OSError, ValueError) as error:  # ValueError: no such format
        raise UserError(f"output={output}: cannot write it ({error})") from None
    finally:
        plot().close(fig)  # pyplot would keep it
    print(path)


# ---- connections

@dataclass
class ConnectionsConfig:
    output: str = key("out/connections.png", "the file to write")
    systems: str = key("vanilla,k6,k3,k1", "names as for bench.py train, a panel each")
    n_layer: int = key(6, "layers")


# name without its number: title, note
SYSTEMS = {
    "vanilla": ("Vanilla", "a layer reads its own depth"),
    "k": ("WhiteMatter, k = {}", "all depths, weights per token"),
    "static": ("Static, k = {}", "all depths, the same weights for all tokens"),
    "nofeedback": ("No feedback", "up to its own depth, weights per token"),
    "lckv": ("LCKV, w = {}", "the middle reads the last of its layers"),
    "feedback": ("Feedback Transformer", "one memory, the same weights for all tokens"),
    "recurrent": ("Recurrent Transformer", "a layer reads its own outputs"),
    "fusedkv": ("FusedKV", "the upper half mixes two lower layers"),
    "fusedkv_lite": ("FusedKV-Lite", "middle keys (solid), bottom values (dashed)"),
}


def wires(p: Plan) -> tuple[list[tuple[int, int, float]], list[tuple[int, int, str]]]:
    """What is drawn of a plan: (state h[s], channel, weight in 0..1, the channel's largest being
    1) and (channel, layer, "kv", "k" or "v": what the layer reads of it)."""
    produce = [(s, j, w / max(channel.weights)) for j, channel in enumerate(p.channels)
               for s, w in zip(channel.sources, channel.weights)]
    consume = [(j, n, "k" * (j in layer.keys) + "v" * (j in layer.values))
               for n, layer in enumerate(p.layers)
               for j in sorted({*layer.keys, *layer.values})]
    return produce, consume


def draw_connections(ax, title: str, note: str, p: Plan):
    """One system: the states of a past token, its cached channels, the layers that read them."""
    from matplotlib.patches import FancyBboxPatch

    def arrow(start: tuple, end: tuple, color: str, **style):
        ax.annotate("", end, start, arrowprops=dict(arrowstyle="->", color=color, **style))

    produce, consume = wires(p)
    L, n_channels = len(p.layers), len(p.channels)
    top = max(L - 1, *(s for s, _, _ in produce))  # L where the final output is a source
    heights = [(j + 0.5) * L / n_channels - 0.5 for j in range(n_channels)]
    write = partial(ax.text, ha="center", va="center")
    for x, name, highest in ((0, "past token", top), (2, "current token", L - 1)):
        for layer in range(highest + 1):
            ax.add_patch(FancyBboxPatch(
                (x - 0.26, layer - 0.22), 0.52, 0.44, fc=GREY, ec="#8a8a8a", lw=0.8, zorder=3,
                boxstyle="round,pad=0.02,rounding_size=0.08"))
            write(x, layer, f"{layer}" if layer < L else "out", fontsize=7)
            if layer:
                arrow((x, layer - 0.76), (x, layer - 0.24), "#9a9a9a", lw=0.8)
        write(x, -0.45, name, va="top", fontsize=8)
    for j, y in enumerate(heights):
        ax.plot(1, y, "o", ms=11, mfc="#f3e6ea", mec=PINK, mew=1, zorder=3)
        write(1, y, f"{j}", fontsize=6.5, color=PINK, zorder=4)
    write(1, -0.45, "cache,\ndummy" if p.dummy else "cache", va="top", fontsize=8, color=PINK)
    for s, j, weight in produce:
        arrow((0.28, s), (0.88, heights[j]), PINK, lw=0.5 + 1.3 * weight,
              alpha=0.25 + 0.75 * weight)
    for j, layer, what in consume:
        arrow((1.12, heights[j]), (1.72, layer), BLUE, lw=1.2, ls="--" if what == "v" else "-")
    for n, layer in enumerate(p.layers):
        if layer.own is not None:
            ax.plot(2.36, n, "o", ms=4, color=BLUE)
    write(1, top + 1.2, title, va="baseline", fontsize=10, fontweight="bold")
    write(1, top + 0.5, f"{note}\n{n_channels}/{L} of the cache", va="baseline", fontsize=7.5,
          style="italic", color="#555555")
    ax.set(xlim=(-0.5, 2.5), ylim=(-1.1, top + 1.5))


def connections(c: ConnectionsConfig):
    """Systems side by side, from their plans, at the start of training.

    A box is the state that enters this layer of a past token, or the layer of the current one.
    Bold: the sources with weight at the start; thin: others, whose weights the router sets token
    by token, or training. A dot: the layer also reads its own token, which is not in the cache.
    """
    at_least(1, c, "n_layer")
    plt, sizes = plot(c.output), ModelConfig(n_layer=c.n_layer, n_channels=c.n_layer)
    configs = named_configs(c.systems, sizes)
    columns = min(4, len(configs))
    rows = -(-len(configs) // columns)
    height = 0.5 * max(c.n_layer + 2.6, 8.6)  # inches; names need room however few layers
    fig, axes = plt.subplots(rows, columns, figsize=(3.25 * columns, height * rows), squeeze=False)
    for ax in axes.flat:
        ax.axis("off")
    for ax, (name, config) in zip(axes.flat, configs.items()):
        kind = name if name in SYSTEMS else name.rstrip("0123456789")
        title, note = SYSTEMS.get(kind, (name, "a system of your own"))
        draw_connections(ax, title.format(name.removeprefix(kind)), note, plan(config))
    fig.tight_layout()
    save(fig, c.output)


# ---- curves

@dataclass
class CurvesConfig:
    logs: str = key("out", "folders with log.csv, or such files, comma separated; the first is "
                    "what the others are compared with")
    output: str = key("out/curves.png", "the file to write")
    smooth: int | None = key(None, "steps over which the training loss is averaged; None: a "
                             "fiftieth of the run, at least 15; 1: not at all")
    tokens_per_step: int | None = key(None, "where no checkpoint beside the log tells; else the "
                                      "axis counts steps")


@dataclass
class Curve:
    """A run's losses in nats per token; x is how many tokens (or steps) it had seen."""

    name: str
    x: np.ndarray
    loss: np.ndarray  # of each step, smoothed
    val_x: np.ndarray
    val_loss: np.ndarray
    in_tokens: bool


def read_log(path: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Training loss of each step and validation loss after so many steps, in order. Lines that are
    cut off, and losses of a run that diverged, are left out."""
    try:
        with warnings.catch_warnings():  # of a line that train.py is just writing
            warnings.simplefilter("ignore")
            steps, *losses = np.genfromtxt(
                path, delimiter=",", names=True, usecols=("step", "loss", "val_loss"), unpack=True,
                ndmin=1, invalid_raise=False, encoding="utf-8")
    except (OSError, ValueError, IndexError) as error:
        raise UserError(f"{path}: no log of train.py, with columns step, loss and val_loss "
                        f"({error})") from None
    there = [np.isfinite(steps + x) for x in losses]
    if not there[0].any():
        raise UserError(f"{path}: not one training step is logged there")
    return tuple(dict(zip(steps[at].astype(int).tolist(), x[at].tolist()))
                 for x, at in zip(losses, there))


def running_mean(x: np.ndarray, width: int) -> np.ndarray:
    """Mean over `width` values around each (an even width counts as one less); at the ends over
    those that there are."""
    half, n = (width - 1) // 2, len(x)
    total, count = (np.convolve(y, np.ones(2 * half + 1))[half:half + n] for y in (x, np.ones(n)))
    return total / count


def read_curve(where: str, c: CurvesConfig) -> Curve:
    """The losses of a folder with log.csv; its checkpoint tells how many tokens a step reads."""
    path = Path(where)
    path = path if path.suffix == ".csv" else path / "log.csv"
    if not path.is_file():
        raise UserError(f"{path}: no such log (python train.py writes one)")
    logs = read_log(path)
    per_step, checkpoint = c.tokens_per_step, path.with_name("ckpt.pt")
    if per_step is None and checkpoint.is_file():
        state = load_checkpoint(checkpoint, "meta")
        per_step = math.prod(state["config"][name] for name in (
            "gradient_accumulation_steps", "batch_size", "block_size"))
        if state.get("tokens_seen", 0) not in (0, per_step * state.get("step", 0)):
            print(f"note: {path}: this run has changed its batch on the way; its tokens are "
                  f"counted by the last one, {per_step:,} a step")
    scale = per_step or 1
    (x, loss), (val_x, val_loss) = (np.reshape(list(log.items()), (-1, 2)).T for log in logs)
    loss = running_mean(loss, c.smooth or max(15, len(loss) // 50))
    return Curve(path.parent.name or where, scale * (x + 1), loss, scale * val_x, val_loss,
                 per_step is not None)


def read_curves(c: CurvesConfig) -> list[Curve]:
    """The runs, named by their folders: by the last part of the path where that is enough."""
    at_least(1, c, "smooth", "tokens_per_step")
    listed = [c.logs] if os.path.exists(c.logs) else c.logs.split(",")  # a comma in a name
    places = [p.strip() for p in listed if p.strip()]
    if not places:
        raise UserError("logs is empty: name folders with a log.csv, comma separated")
    curves = [read_curve(where, c) for where in places]
    if len({curve.name for curve in curves}) < len(curves):
        for where, curve in zip(places, curves):
            curve.name = where
    if len({curve.in_tokens for curve in curves}) > 1:
        missing = next(c.name for c in curves if not c.in_tokens)
        raise UserError(f"{missing}: no ckpt.pt beside the log tells how many tokens a step "
                        "reads; --tokens_per_step= can, for all runs")
    return curves


def relative(curve: Curve, base: Curve) -> Curve:
    """How much the perplexity lies above base's, in per cent, where both have trained.

    Between two steps of `base` its loss is interpolated, validations of the same step are compared.
    """
    both = (curve.x >= base.x[0]) & (curve.x <= base.x[-1])
    x = curve.x[both]
    val_x, i, j = np.intersect1d(curve.val_x, base.val_x, return_indices=True)
    return replace(curve, x=x, val_x=val_x,
                   loss=100 * np.expm1(curve.loss[both] - np.interp(x, base.x, base.loss)),
                   val_loss=100 * np.expm1(curve.val_loss[i] - base.val_loss[j]))


def draw_curve(ax, n: int, curve: Curve):
    """The n-th of some: a line, and dots for the validations."""
    style = STYLES[n % len(STYLES)]
    ax.plot(curve.x, curve.loss, lw=1.3, label=f"run {n}", **style)
    ax.plot(curve.val_x, curve.val_loss, **style | dict(
        ls="", marker="o", ms=5, mec="white", mew=0.8, zorder=3))


def view(runs: list[Curve], share: float, *more: float) -> tuple[float, float]:
    """Limits of an axis that shows, with a margin, some values and all losses of runs but those of
    so large a share at the beginning."""
    values = np.concatenate([more, *(y[x >= share * r.x.max(initial=0)] for r in runs
                                     for x, y in ((r.x, r.loss), (r.val_x, r.val_loss)))])
    margin = 0.06 * np.ptp(values) or 0.1
    return values.min() - margin, values.max() + margin


def curves(c: CurvesConfig):
    """Losses of runs, and beside them how they differ from the first (one run: how it ends)."""
    plt, runs = plot(c.output), read_curves(c)
    from matplotlib.ticker import EngFormatter

    names = [textwrap.fill(show(r.name), WIDTH) for r in runs]
    fig, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.2))
    longest = max(r.x[-1] for r in runs)
    for ax in (left, right):
        ax.set_xlabel("tokens" if runs[0].in_tokens else "steps")
        ax.xaxis.set_major_formatter(EngFormatter())
    for n, r in enumerate(runs):
        draw_curve(left, n, r)
    # the fall from ln(vocabulary) in the first twentieth would leave the rest flat
    left.set(ylabel="loss, nats per token", ylim=view(runs, 0.05), xlim=(0, 1.02 * longest),
             title="line: training, averaged; dots: validation")
    for text, name, r in zip(left.legend(loc="upper right").get_texts(), names, runs):
        # not as a label, which would be left out for an underscore before it
        text.set_text(name + (f"  (validation {r.val_loss[-1]:.3f})" if len(r.val_loss) else ""))
    if len(runs) == 1:
        draw_curve(right, 0, runs[0])
        right.set(title="the end of the run", ylabel=left.get_ylabel(), ylim=view(runs, 0.7),
                  xlim=(0.7 * longest, 1.01 * longest))
    else:
        differences = [relative(r, runs[0]) for r in runs[1:]]
        for n, r in enumerate(differences, 1):
            draw_curve(right, n, r)
        right.axhline(0, lw=1.3, color=COLOURS[0])
        shared = min(runs[0].x[-1], max(r.x[-1] for r in runs[1:]))
        right.set(title=f"perplexity against {names[0]}", ylabel="difference, %",
                  ylim=view(differences, 0.1, 0.0), xlim=(0, 1.02 * shared))
    fig.tight_layout()
    save(fig, c.output)


# ---- convergence

@dataclass
class ConvergenceConfig:
    json: str = key("prefill.json", "what python bench.py prefill --json=FILE has written")
    output: str = key("out/convergence.png", "the file to write")


def read_schedules(path: str) -> dict:
    """The results of `bench.py prefill`; its schedules in order of their groups g."""
    try:
        results = json.loads(Path(path).read_text(encoding="utf-8"))
        for s in results["schedules"]:
            s["g"] = s["g"] if "g" in s else s["n_groups"]
            s["ms"] = 1e3 * s["seconds_per_sequence"] if s["passes"] is not None else None
            s["solver"], s["passes"] and int(s["passes"])
            if len(s.get("perplexities", ())) > 1:
                results["exact_perplexity"]
        results["schedules"].sort(key=lambda s: s["g"])
        results["schedules"][0]
        results["block_size"], results["batch_size"], results["device"], results["dtype"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"json={path}: not what python bench.py prefill --json=FILE, without "
                        f"--systems=, writes ({type(error).__name__}: {error})") from None
    return results


def convergence(c: ConvergenceConfig):
    """Passes to within 1 % of the exact perplexity and time, against the number of groups."""
    plt, results = plot(c.output), read_schedules(c.json)
    schedules = results["schedules"]
    by_pass = [s for s in schedules if len(s.get("perplexities", ())) > 1]
    fig, axes = plt.subplots(1, 2 + bool(by_pass), figsize=(10.5 + 2.5 * bool(by_pass), 4))
    at, names = np.arange(len(schedules)), {"jacobi": "Jacobi", "autoregressive": "token\nby token"}
    ticks = [names.get(s["solver"], f"{s['g']}") for s in schedules]
    if len(set(ticks)) < len(ticks):
        ticks = [f"{tick}:{s['passes']}" for tick, s in zip(ticks, schedules)]
    for ax, what, colour in zip(axes, ("passes", "ms"), COLOURS):
        values = np.array([s[what] for s in schedules], float)  # NaN: not reached
        reached = np.isfinite(values)
        x, y = at[reached], values[reached]
        ax.plot(x, y, "o-", color=colour, ms=6, mec="white", lw=1.3)
        for i, v in zip(x, y):
            ax.annotate(f"{v:.3g}" if v < 100 else f"{v:,.0f}", (i, v), (0, 8), ha="center",
                        textcoords="offset points",
                        bbox=dict(boxstyle="square,pad=0.1", fc="white", ec="none", alpha=0.8))
        if len(y):
            ax.set(yscale="log", ylim=(0.7 * y.min(), 1.6 * y.max()))
            ax.minorticks_off()
            ax.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
            ax.yaxis.set_major_formatter("{x:,g}")
        for i in at[~reached]:
            ax.annotate("not\nreached", (i, 0.97), xycoords=("data", "axes fraction"), ha="center",
                        va="top", color="#777777", fontsize=8)
        ax.set(xlabel="g, groups of the cyclic schedule", xticks=at, xticklabels=ticks,
               xlim=(-0.8, len(at) - 0.5))
        ax.grid(axis="x", visible=False)
    close = "to within 1 % of the exact perplexity" if "exact_perplexity" in results else "as given"
    axes[0].set(ylabel="passes", title=f"passes, {close}")
    axes[1].set(ylabel="ms per sequence",
                title=f"time of so many: {results['device']}, {results['dtype']}")
    if by_pass:
        draw_perplexities(axes[2], by_pass, results["exact_perplexity"])
    fig.suptitle(f"prefill of {results['block_size']:,} tokens, {results['batch_size']} sequences "
                 "at a time", fontsize=10)
    fig.tight_layout()
    save(fig, c.output)


def draw_perplexities(ax, schedules: list[dict], exact: float):
    """How far the perplexity is off after each pass."""
    for n, s in enumerate(schedules):
        off = [100 * abs(p / exact - 1) for p in s["perplexities"]]
        label = "Jacobi" if s["g"] == 1 else f"g={s['g']}"
        ax.plot(range(1, len(off) + 1), off, marker="o", ms=4, lw=1.2, label=label,
                **STYLES[n % len(STYLES)])
    ax.axhline(1, color=INK, lw=0.9, ls=":")
    longest = max(len(s["perplexities"]) for s in schedules)
    ax.set(yscale="log", xlabel="pass", ylabel="perplexity off by, %", xlim=(0.5, longest + 0.5),
           title="after each pass")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_ylim(bottom=0.02)  # far below the line it does not matter any more
    ax.minorticks_off()
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)


# ---- connectome

@dataclass
class ConnectomeConfig:
    out_dir: str = key("out", "folder with ckpt.pt, or a file such as out/best.pt")
    tokenizer: str | None = key(None, "its name or path; None: the copy beside the checkpoint")
    text: str | None = key(None, "a file whose text the model reads; None: rows of its data set")
    split: str = key("val", "train, val or test, of the data set")
    rows: int = key(8, "at most so many rows of block_size tokens")
    exact: bool = key(False, "states iterated until converged, not as in training")
    fibres: int = key(24, "tokens that are drawn, each as one fibre for each connection")
    output: str = key("out/connectome.png", "the file to write")
    json: str | None = key(None, "write the weights to this file, too (-: to stdout)")
    device: str = key("auto", "auto (cuda, else mps, else cpu), or a torch device")


@torch.no_grad()
def mixing_weights(model: Decoder, idx: Tensor, schedule: Schedule) -> Tensor:
    """alpha (2, B, T, k, L) of the keys and the values, as the pool mixes the tokens idx (B, T)
    given the states that the schedule arrives at."""
    pool = model.kv_pool
    h = schedule(model, idx).states[:, :, :pool.n_sources]  # (B, T, L, D)
    unit = rms_norm(h, None)
    return torch.stack([branch.weights(unit * branch.pre_norm)
                        for branch in (pool.key, pool.value)])


def dependence(alpha: Tensor) -> Tensor:
    """(2, k): how much a channel's weights, alpha (2, N, k, L) of N tokens, depend on the token:
    the root mean square over sources of their spread, over that of their mean. 0: not at all."""
    spread, mean = alpha.std(1, correction=0).norm(dim=-1), alpha.mean(1).norm(dim=-1)
    return spread / mean.clamp(min=1e-12)


def connectome_rows(c: ConnectomeConfig, checkpoint: dict) -> list[list[int]]:
    """Rows of at most block_size ids: of the file `text`, or of the data set."""
    T = checkpoint["config"]["block_size"]
    if c.text is None:
        folder, meta = data_of(checkpoint, c.out_dir)
        windows = Windows(folder / f"{c.split}.bin", meta, T, c.rows)
        ids = windows.tokens[:-1].tolist()
    else:
        tokenizer = tokenizer_of(checkpoint["meta"], c.out_dir, c.tokenizer)
        ids = tokenizer.encode(read_text(c.text, f"text={c.text}"))[:c.rows * T]
    if len(ids) < 2:
        raise UserError(f"{len(ids)} tokens (text={c.text}): at least 2 are needed to see how they "
                        "differ")
    return [ids[i:i + T] for i in range(0, len(ids), T)]


def connectome(c: ConnectomeConfig):
    """What the routers have learnt: mean and spread of the mixing weights, and as fibres."""
    check(c, "rows", "fibres")
    if c.split not in SPLITS:
        raise UserError(f"split={c.split}: choose one of {', '.join(SPLITS)}")
    plt, device, schedule = plot(c.output), pick_device(c.device), Schedule("training")
    model, checkpoint = load_model(c.out_dir, device)
    if model.config.kv != "whitematter":
        raise UserError(f"{c.out_dir}: kv={model.config.kv}, but only whitematter's routers are "
                        "drawn")
    if c.exact:
        schedule = Schedule("cyclic", 1, model.config.n_groups, TOLERANCE[torch.float32])
    rows = connectome_rows(c, checkpoint)
    alpha = [mixing_weights(model, torch.tensor([row], device=device), schedule)[:, 0].cpu()
             for row in rows]
    alpha = torch.cat(alpha, 1).float()
    if not alpha.isfinite().all():
        raise UserError(f"{c.out_dir}: mixing weights that are not finite; the checkpoint is "
                        "damaged, or its training diverged")
    print(f"{alpha.size(1):,} tokens. Spread of the mixing weights over tokens, relative to their "
          "mean:")
    table = Table({"channel": "8s"} | {f"{j}": "5.0%" for j in range(alpha.size(2))})
    for name, row in zip(("keys", "values"), dependence(alpha).tolist()):
        table.add(name, *row)
    # of keys and values, each channel and source
    mean, spread = alpha.mean(1).tolist(), alpha.std(1, correction=0).tolist()
    write_results(c, "connectome", device, torch.float32, step=checkpoint.get("step"),
                  tokens=alpha.size(1), mean=mean, spread=spread)
    draw_connectome(plt, alpha, model.config.n_layer, c)


def draw_connectome(plt, alpha: Tensor, n_layer: int, c: ConnectomeConfig):
    """Keys above, values below, of alpha (2, N, k, L): mean, spread, fibres."""
    mean, std, n = alpha.mean(1), alpha.std(1, correction=0), min(c.fibres, alpha.size(1))
    k, L = mean.shape[1:]
    size = 0.75 + 0.17 * max(k, 8)
    fig, axes = plt.subplots(2, 3, figsize=(13, 2 * (size + 0.9)), layout="constrained",
                             width_ratios=(1, 1, 1.15))
    strongest, widest = float(mean.abs().max()), float(std.max()) or 1.0
    for b, name in enumerate(("keys", "values")):
        for ax, values, colours, low, high, title in (
                (axes[b, 0], mean[b], "RdBu_r", -strongest, strongest, "mean weight"),
                (axes[b, 1], std[b], "cividis", 0, widest,
                 "spread over tokens (%: of the mean)")):
            image = ax.imshow(values.numpy(), cmap=colours, vmin=low, vmax=high, aspect="auto",
                              origin="lower")
            out = f" ({n_layer}: final output)" if n_layer < L else ""
            ax.set(title=f"{name}: {title}", xlabel=f"source: state that enters layer{out}",
                   ylabel="channel", xticks=every(L), yticks=every(k))
            ax.grid(visible=False)
            fig.colorbar(image, ax=ax, pad=0.12 if ax is axes[b, 1] else 0.03, fraction=0.06)
        for j, share in enumerate(dependence(alpha)[b].tolist()):
            axes[b, 1].text(L - 0.35, j, f"{100 * share:.0f}%", va="center", fontsize=7.5)
        draw_fibres(axes[b, 2], alpha[b], n_layer, c.fibres)
        axes[b, 2].set_title(f"{name}: a fibre is a weight of one of {n} tokens")
    save(fig, c.output)


def every(n: int) -> range:
    """Ticks for n things, at most about ten of them."""
    return range(0, n, -(-n // 10))


def fibres_of(alpha: Tensor, n_layer: int, n_fibres: int) -> list[tuple[int, int, float, float]]:
    """(source, reading layer, weight, place -1..1 in the bundle) of evenly spread tokens, from
    alpha (N, k, L), the weak ones first; weights below a twentieth of the strongest are left out.
    """
    N, k, L = alpha.shape
    tokens = alpha[torch.linspace(0, N - 1, min(n_fibres, N)).round().long()]
    weakest = float(tokens.abs().max()) / 20
    places = np.linspace(-1, 1, len(tokens)) if len(tokens) > 1 else np.zeros(1)
    fibres = [(source, layer, float(a[layer % k, source]), place)
              for a, place in zip(tokens, places) for layer in range(n_layer)
              for source in range(L) if abs(a[layer % k, source]) > weakest]
    return sorted(fibres, key=lambda f: abs(f[2]))


def draw_fibres(ax, alpha: Tensor, n_layer: int, n_fibres: int):
    """From the layers of past tokens, on the left, to the layers that read them."""
    from matplotlib.collections import LineCollection

    fibres = np.array(fibres_of(alpha, n_layer, n_fibres)).reshape(-1, 4, 1)
    source, layer, weight, place = fibres.swapaxes(0, 1)  # (N, 1) each
    strength = abs(weight[:, 0]) / abs(weight).max(initial=1e-12)
    faint = min(1.0, (2000 / max(len(fibres), 1)) ** 0.5)  # where there are many
    t = np.linspace(0, 1, 40)
    y = source + (layer - source) * t * t * (3 - 2 * t) + 0.3 * place
    ax.add_collection(LineCollection(
        np.stack(np.broadcast_arrays(t, y), -1), linewidths=0.3 + 1.2 * strength,
        colors=[FEEDBACK if up else FORWARD for up in source > layer],
        alpha=faint * (0.04 + 0.5 * strength**1.5)))
    top = max(n_layer, alpha.size(-1))
    for at, n, side in ((-0.02, alpha.size(-1), "right"), (1.02, n_layer, "left")):
        for i in every(n):
            ax.text(at, i, f"{i}", ha=side, va="center", fontsize=8)
    below = -0.6 - 0.06 * top
    ax.text(0, below, "source above the reader: feedback", color=FEEDBACK, fontsize=8)
    ax.text(1, below, "at or below it", color=FORWARD, ha="right", fontsize=8)
    ax.text(-0.12, (top - 1) / 2, "past token, source", rotation=90, va="center", ha="center")
    ax.text(1.12, (top - 1) / 2, "reading layer", rotation=90, va="center", ha="center")
    ax.set(xlim=(-0.15, 1.15), ylim=(below - 0.1, top - 0.4))
    ax.axis("off")


# ---- the command line

COMMANDS = {connections: ConnectionsConfig(), curves: CurvesConfig(),
            convergence: ConvergenceConfig(), connectome: ConnectomeConfig()}


def main(argv: list[str]):
    run_command("python pictures.py", COMMANDS, argv, __doc__)


if __name__ == "__main__":
    run(main)
