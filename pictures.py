"""
All drawing, through matplotlib (an optional package): `python pictures.py PICTURE --key=value ...`

    python pictures.py connections                    # what each system connects
    python pictures.py curves --logs=out/a,out/b      # losses of several runs

Each writes one file, --output, whose ending (.png, .svg, .pdf) says in which format.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configurator import UserError, key, parse, run
from train import load_checkpoint

PINK, BLUE, GREY, INK = "#b36680", "#4d78a8", "#d9d9d9", "#222222"
# Okabe and Ito's colours, which all can tell apart; then the same with another dash
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("-", "--", ":", "-.")


def plot():
    """matplotlib.pyplot without a screen. Raises UserError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("pictures need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    plt.rcParams.update({
        "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
        "axes.edgecolor": "#8a8a8a", "axes.labelcolor": INK, "text.color": INK,
        "xtick.color": "#555555", "ytick.color": "#555555", "axes.titlesize": 10,
        "axes.grid": True, "grid.color": "#e6e6e6", "legend.frameon": False})
    return plt


def save(fig, output: str):
    """Write the picture and say where. Raises UserError if that is not possible."""
    path = Path(output)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(path, dpi=130)
    except (OSError, ValueError) as error:  # ValueError: no such format
        raise UserError(f"output={output}: cannot write it ({error})") from None
    print(path)


# ---- connections

@dataclass
class ConnectionsConfig:
    """What `pictures.py connections` takes."""

    output: str = key("docs/connections.png", "the file to write")
    n_layer: int = key(6, "layers")
    n_channels: int = key(3, "channels of the third panel, 2 to n_layer - 1")


def draw_connections(ax, title: str, note: str, n_layer: int, produce: list, consume: list):
    """One system: the layers of a past token, its cached channels, the layers that read them.

    produce: (source layer, channel, weight in 0..1); consume: (channel, layer).
    """
    n_channels = 1 + max(j for _, j, _ in produce)
    heights = [(j + 0.5) * n_layer / n_channels - 0.5 for j in range(n_channels)]
    for x, name in ((0, "past token"), (2, "current token")):
        for layer in range(n_layer):
            ax.add_patch(_box(x - 0.26, layer - 0.22, 0.52, 0.44))
            ax.text(x, layer, f"{layer}", ha="center", va="center", fontsize=7, color=INK)
            if layer:
                ax.annotate("", (x, layer - 0.24), (x, layer - 0.76),
                            arrowprops={"arrowstyle": "->", "color": "#9a9a9a", "lw": 0.8})
        ax.text(x, -0.85, name, ha="center", fontsize=8, color=INK)
    for j, y in enumerate(heights):
        ax.plot(1, y, "o", ms=11, mfc="#f3e6ea", mec=PINK, mew=1, zorder=3)
        ax.text(1, y, f"{j}", ha="center", va="center", fontsize=6.5, color=PINK, zorder=4)
    for layer, j, weight in produce:
        ax.annotate("", (0.88, heights[j]), (0.28, layer), arrowprops={
            "arrowstyle": "->", "color": PINK, "lw": 0.5 + 1.3 * weight,
            "alpha": 0.25 + 0.75 * weight})
    for j, layer in consume:
        ax.annotate("", (1.72, layer), (1.12, heights[j]),
                    arrowprops={"arrowstyle": "->", "color": BLUE, "lw": 1.2})
    ax.text(1, n_layer - 0.1, title, ha="center", fontsize=10, fontweight="bold", color=INK)
    ax.text(1, n_layer - 0.45, note, ha="center", fontsize=7.5, style="italic", color="#555555")
    ax.set(xlim=(-0.5, 2.5), ylim=(-1.1, n_layer + 0.25))
    ax.axis("off")


def _box(x: float, y: float, width: float, height: float):
    from matplotlib.patches import FancyBboxPatch
    return FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.02,rounding_size=0.08",
                          fc=GREY, ec="#8a8a8a", lw=0.8, zorder=3)


def connections(c: ConnectionsConfig):
    """Vanilla beside WhiteMatter with k = L, 1 < k < L and k = 1, at the start of training.

    Bold: the source that the router's bias selects at the start; thin: the other sources, whose
    weights the router sets token by token.
    """
    from pool import initial_sources

    plt = plot()
    L, k = c.n_layer, c.n_channels
    if not 1 < k < L:
        raise UserError(f"n_channels={k}: 2 to n_layer-1={L - 1} make a picture")
    fig, axes = plt.subplots(1, 4, figsize=(13, 4.1))
    own = [(layer, layer, 1.0) for layer in range(L)]
    draw_connections(axes[0], "Vanilla", "a layer reads its own depth", L, own,
                     [(layer, layer) for layer in range(L)])
    for ax, n in zip(axes[1:], (L, k, 1)):
        start = initial_sources(n, L)
        produce = [(layer, j, float(start[j, layer])) for j in range(n) for layer in range(L)]
        cache = "full cache" if n == L else f"{n}/{L} of the cache"
        draw_connections(ax, f"WhiteMatter, k = {n}", f"all depths, per token; {cache}", L, produce,
                         [(layer % n, layer) for layer in range(L)])
    fig.tight_layout()
    save(fig, c.output)


# ---- curves

@dataclass
class CurvesConfig:
    """What `pictures.py curves` takes."""

    logs: str = key("out", "folders with log.csv, or such files, comma separated; the first is "
                    "what the others are compared with")
    output: str = key("docs/curves.png", "the file to write")
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
    """Training loss of each step and validation loss after so many steps, in order.

    Where a resumed run repeats steps, what was logged for them and beyond them before does not
    count. Lines that are cut off are left out.
    """
    loss: dict[int, float] = {}
    val: dict[int, float] = {}
    try:
        with open(path, newline="", encoding="utf-8") as f:
            rows = list(csv.DictReader(f))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot read this log ({error})") from None
    if rows and not {"step", "loss", "val_loss"} <= set(rows[0]):
        raise UserError(f"{path}: no log of train.py, its columns are {', '.join(rows[0])}")
    for row in rows:
        try:
            step = int(row["step"])
            value = float(row["loss"] or row["val_loss"])
        except (ValueError, TypeError):
            continue
        if row["loss"]:
            if loss and step <= next(reversed(loss)):
                loss = {n: x for n, x in loss.items() if n < step}
                val = {n: x for n, x in val.items() if n <= step}
            loss[step] = value
        else:
            val[step] = value
    if not loss:
        raise UserError(f"{path}: not one training step is logged there")
    return loss, val


def running_mean(x: np.ndarray, width: int) -> np.ndarray:
    """Mean over `width` values around each (an even width counts as one less); at the ends over
    those that there are."""
    at, half = np.arange(len(x)), (width - 1) // 2
    first, last = np.maximum(at - half, 0), np.minimum(at + half + 1, len(x))
    total = np.concatenate([[0.0], np.cumsum(x)])
    return (total[last] - total[first]) / (last - first)


def read_curve(where: str, c: CurvesConfig) -> Curve:
    """The losses of a folder with log.csv; its checkpoint tells how many tokens a step reads."""
    path = Path(where)
    path = path if path.suffix == ".csv" else path / "log.csv"
    if not path.is_file():
        raise UserError(f"{path}: no such log (python train.py writes one)")
    loss, val = read_log(path)
    per_step, checkpoint = c.tokens_per_step, path.with_name("ckpt.pt")
    if per_step is None and checkpoint.is_file():
        settings = load_checkpoint(checkpoint, "meta")["config"]
        per_step = math.prod(settings[name] for name in (
            "gradient_accumulation_steps", "batch_size", "block_size"))
    scale = per_step or 1
    smooth = c.smooth or max(15, len(loss) // 50)
    return Curve(path.parent.name or where, scale * (1.0 + np.array(list(loss))),
                 running_mean(np.array(list(loss.values())), smooth),
                 scale * np.array(list(val), float), np.array(list(val.values())),
                 per_step is not None)


def read_curves(c: CurvesConfig) -> list[Curve]:
    """The runs, named by their folders: by the last part of the path where that is enough."""
    if c.smooth is not None and c.smooth < 1:
        raise UserError(f"smooth={c.smooth}: at least 1 is needed")
    if c.tokens_per_step is not None and c.tokens_per_step < 1:
        raise UserError(f"tokens_per_step={c.tokens_per_step}: at least 1 is needed")
    places = [p.strip() for p in c.logs.split(",") if p.strip()]
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


def relative(curve: Curve, base: Curve) -> tuple[np.ndarray, np.ndarray]:
    """Where both have trained: x, and how much curve's perplexity lies above base's, in per cent.

    Between two steps of `base` its loss is interpolated.
    """
    both = (curve.x >= base.x[0]) & (curve.x <= base.x[-1])
    x = curve.x[both]
    return x, 100 * np.expm1(curve.loss[both] - np.interp(x, base.x, base.loss))


def relative_validation(curve: Curve, base: Curve) -> tuple[np.ndarray, np.ndarray]:
    """The same of the validation losses, where both have one."""
    x, i, j = np.intersect1d(curve.val_x, base.val_x, return_indices=True)
    return x, 100 * np.expm1(curve.val_loss[i] - base.val_loss[j])


def view(parts: list[np.ndarray]) -> tuple[float, float]:
    """Limits of an axis that shows all of some values, with a margin."""
    values = np.concatenate(parts)
    low, high = values.min(), values.max()
    margin = 0.06 * (high - low) or 0.1
    return low - margin, high + margin


def curves(c: CurvesConfig):
    """Losses of runs, and beside them how they differ from the first (one run: how it ends)."""
    runs = read_curves(c)
    plt = plot()
    fig, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.2))
    longest = max(r.x[-1] for r in runs)
    unit, name = next((u, n) for u, n in ((1e9, "billion "), (1e6, "million "), (1e3, "thousand "),
                                          (1, "")) if longest >= u)
    for n, r in enumerate(runs):
        style = dict(color=COLOURS[n % len(COLOURS)], ls=DASHES[n // len(COLOURS) % len(DASHES)])
        marks = style | dict(ls="", marker="o", ms=5, mec="white", mew=0.8, zorder=3)
        label = r.name + (f"  (validation {r.val_loss[-1]:.3f})" if len(r.val_loss) else "")
        left.plot(r.x / unit, r.loss, lw=1.3, label=label, **style)
        left.plot(r.val_x / unit, r.val_loss, **marks)
        if len(runs) == 1:
            right.plot(r.x / unit, r.loss, lw=1.3, **style)
            right.plot(r.val_x / unit, r.val_loss, **marks)
        elif n:
            x, y = relative(r, runs[0])
            right.plot(x / unit, y, lw=1.3, **style)
            x, y = relative_validation(r, runs[0])
            right.plot(x / unit, y, **marks)
    # the fall from ln(vocabulary) in the first twentieth would leave the rest flat
    shown = [part for r in runs for part in (r.loss[r.x > 0.05 * r.x[-1]],
                                             r.val_loss[r.val_x > 0.05 * r.x[-1]])]
    left.set(xlabel=f"{name}{'tokens' if runs[0].in_tokens else 'steps'}",
             ylabel="loss, nats per token", ylim=view(shown), xlim=(0, 1.02 * longest / unit),
             title="line: training, averaged; dots: validation")
    left.legend(loc="upper right")
    right.set(xlabel=left.get_xlabel())
    if len(runs) == 1:
        tail = 0.7 * longest
        right.set(title="the end of the run", ylabel=left.get_ylabel(),
                  xlim=(tail / unit, 1.01 * longest / unit),
                  ylim=view([runs[0].loss[runs[0].x >= tail],
                             runs[0].val_loss[runs[0].val_x >= tail]]))
    else:
        right.axhline(0, lw=1.3, color=COLOURS[0])
        ends = [relative(r, runs[0])[1] for r in runs[1:]]
        ends = [y[len(y) // 10:] for y in ends] + [np.zeros(1)]
        right.set(title=f"perplexity against {runs[0].name}", ylabel="difference, %",
                  xlim=left.get_xlim(), ylim=view(ends))
    fig.tight_layout()
    save(fig, c.output)


# ---- the command line

PICTURES = {"connections": (connections, ConnectionsConfig), "curves": (curves, CurvesConfig)}


def main(argv: list[str]):
    name, *rest = argv or [""]
    if name in ("-h", "--help"):
        print(__doc__.strip() + "\n\npictures: " + ", ".join(PICTURES))
        return
    if name not in PICTURES:
        raise UserError(f"{name or 'no picture named'}: choose one of {', '.join(PICTURES)}")
    draw, settings = PICTURES[name]
    draw(parse(settings(), rest, f"python pictures.py {name}: {draw.__doc__}"))


if __name__ == "__main__":
    run(main)
