"""
All drawing, through matplotlib (an optional package).

    python pictures.py connections      # what each system connects, as docs/connections.png
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from configurator import UserError, key, parse, run

PINK, BLUE, GREY, INK = "#b36680", "#4d78a8", "#d9d9d9", "#222222"


@dataclass
class PictureConfig:
    """Settings of every picture."""

    out: str = key("docs", "folder for the pictures")
    n_layer: int = key(6, "layers that `connections` draws")
    n_channels: int = key(3, "channels of WhiteMatter that `connections` draws")


def plot():
    """matplotlib.pyplot without a screen. Raises UserError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("pictures need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


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


def connections(c: PictureConfig):
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
    path = Path(c.out) / "connections.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.tight_layout()
    fig.savefig(path, dpi=130)
    print(path)


PICTURES = {"connections": connections}


def main(argv: list[str]):
    name, *rest = argv or [""]
    if name in ("-h", "--help"):
        parse(PictureConfig(), ["--help"], __doc__)
    if name not in PICTURES:
        raise UserError(f"{name or 'no picture named'}: choose one of {', '.join(PICTURES)}")
    PICTURES[name](parse(PictureConfig(), rest, __doc__))


if __name__ == "__main__":
    run(main)
