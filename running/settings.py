"""
The settings of train.py, and the learning rate, without torch, whose import takes seconds.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from configurator import UserError, at_least, key, no_tilde, parse, ranks

SCHEDULE = ("n_groups", "n_nograd", "n_grad")
SYSTEMS = "whitematter, vanilla, nofeedback, lckv, feedback, fusedkv, fusedkv_lite, recurrent"


@dataclass
class TrainConfig:
    """Every setting of train.py. The defaults are the paper's main run on one process."""

    given = {}  # names of those that a command line or its file gave: configurator.parse
    out_dir: str = key("out", "folder for ckpt.pt, best.pt and log.csv")
    init_from: str = key("scratch", "scratch, resume (out_dir/ckpt.pt), auto (resume if it is "
                         "there, else scratch), PATH or auto:PATH (scratch, with the weights of a "
                         "checkpoint)")
    dataset: str = key("python", "folder under data/; `python` is prepared if it is missing")
    eval_interval: int = key(500, "steps between checkpoints, each followed by an evaluation")
    eval_rows: int = key(800, "fixed rows of val.bin in an evaluation, not batches; 0: none",
                         was="eval_iters")
    log_interval: int = key(10, "steps between progress lines")
    batch_size: int = key(16, "rows per process and micro-step")
    block_size: int = key(2048, "tokens per row")
    gradient_accumulation_steps: int = key(8, "micro-steps per step, all processes together")
    max_iters: int = key(30518, "optimizer steps")
    learning_rate: float = key(3e-4, "peak, shared by Muon and AdamW")
    warmup_iters: int | None = key(None, "linear warm-up; None: 2 % of max_iters")
    lr_decay_iters: int | None = key(None, "end of the cosine; None: max_iters")
    min_lr: float | None = key(None, "after the cosine; None: a tenth of learning_rate")
    weight_decay: float = key(0.1, "of matrices and projections, not of embedding and gains")
    momentum: float = key(0.95, "of Muon (Nesterov)")
    beta1: float = key(0.9, "of AdamW")
    beta2: float = key(0.95, "of AdamW")
    grad_clip: float = key(1.0, "gradient norm, on each process before the all-reduce; 0: off")
    n_layer: int = key(16, "L, decoder blocks")
    n_embd: int = key(512, "D, width")
    n_head: int = key(6, "query heads")
    n_kv_head: int = key(3, "key-value heads")
    head_dim: int = key(96, "features of a head")
    n_hidden: int = key(1536, "features inside the MLP")
    kv: str = key("whitematter", f"the system: {SYSTEMS}")
    n_channels: int = key(16, "k, cached channels of whitematter, 1 to n_layer")
    router: str = key("dynamic", "dynamic (content-dependent) or static mixing weights")
    router_stride: int = key(2, "p, the router reads every p-th source")
    top_output: bool = key(False, "the final output is a source of the pool, too")
    dummy: bool = key(True, "false: a document's first token attends to nothing, not to a dummy")
    lckv_w: int = key(4, "w, layers of lckv with keys and values of their own")
    n_groups: int | None = key(None, "g, groups of the cyclic schedule, 1 is Jacobi; None: 8, or 1 "
                               "for lckv", of=("kv", "lckv"))
    n_nograd: int | None = key(None, "passes without gradients; None: 1, or 7 for lckv",
                               of=("kv", "lckv"))
    n_grad: int | None = key(None, "passes with gradients; None: 2", of=("kv", "lckv"))
    device: str = key("auto", "auto (cuda, else mps, else cpu), or a torch device")
    dtype: str = key("auto", "auto (bfloat16 on cuda), float32 or bfloat16: autocast")
    compile: bool | None = key(None, "torch.compile and, on cuda, kernels and a CUDA "
                              "graph; None: on cuda")
    kernels: bool = key(True, "Triton kernels, on cuda in half precision; false: plain PyTorch")
    recompute: bool = key(False, "keep less for the backward pass and compute it again: systems "
                          "that iterate then need far less memory, and more time")
    seed: int = key(1337, "of weights and row order")
    wandb: bool = key(False, "log to Weights & Biases too (pip install wandb)")
    wandb_project: str = key("whitematter-nano", "its project there; the run is named as out_dir")

    def __post_init__(self):
        self.dataset = os.path.normpath(self.dataset)  # a slash behind it makes no other one of it


def settings(argv: list[str], usage: str) -> TrainConfig:
    """The settings of a command line. Raises UserError for what cannot work together."""
    c = parse(TrainConfig(), argv, usage)
    rank, world, _ = ranks()
    check(c, rank, world)
    return c


def check(c: TrainConfig, rank: int = 0, world: int = 1):
    """Raise UserError for settings that cannot work together, in so many processes."""
    at_least(1, c, "batch_size", "block_size", "gradient_accumulation_steps", "eval_interval",
             "log_interval", "max_iters")
    at_least(0, c, "learning_rate", "min_lr", "weight_decay", "grad_clip", "warmup_iters",
             "lr_decay_iters", "eval_rows", "seed")
    for name in ("momentum", "beta1", "beta2"):
        if not 0 <= getattr(c, name) < 1:
            raise UserError(f"{name}={getattr(c, name)}: at least 0, and less than 1, is needed")
    warmup, end, low = rate_schedule(c)
    if low > c.learning_rate:
        raise UserError(f"min_lr={low}: more than learning_rate={c.learning_rate}")
    if warmup >= min(end, c.max_iters) and (warmup, end) != (0, 0):
        raise UserError(f"warmup_iters={warmup}: fewer than max_iters={c.max_iters} and than "
                        f"lr_decay_iters={end} are needed, or the rate never falls")
    if c.gradient_accumulation_steps % world:
        raise UserError(f"gradient_accumulation_steps={c.gradient_accumulation_steps} counts the "
                        f"micro-steps of all processes: no multiple of the {world} processes here")
    no_tilde(c)
    if not c.out_dir:
        raise UserError("out_dir= is empty: the name of a folder for this run is needed")
    if (Path(c.out_dir) / "meta.json").is_file():
        raise UserError(f"out_dir={c.out_dir}: a data set is there; a run needs another folder")
    starting_point(c)
    if rank:
        return
    folder = Path(c.out_dir).absolute()
    there = next(p for p in (folder, *folder.parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"out_dir={c.out_dir}: {there} is no folder that can be written to")


def starting_point(c: TrainConfig) -> tuple[Path | None, bool]:
    """The checkpoint that init_from names, if any, and whether its run goes on. UserError."""
    own, weights = Path(c.out_dir) / "ckpt.pt", c.init_from.removeprefix("auto:")
    auto = c.init_from == "auto" or weights != c.init_from
    if c.init_from == "resume" or auto and weights and own.exists():
        return own, True
    if c.init_from in ("scratch", "auto"):
        return None, False
    if weights and (auto or Path(weights).exists()):
        return Path(weights), False
    raise UserError(f"init_from={c.init_from}: choose scratch, resume, auto, or the path of a "
                    "checkpoint, which auto: may stand before")


def rate_schedule(c: TrainConfig) -> tuple[int, int, float]:
    """Steps of warm-up, the step at which the cosine ends, and the rate there."""
    return (round(0.02 * c.max_iters) if c.warmup_iters is None else c.warmup_iters,
            c.max_iters if c.lr_decay_iters is None else c.lr_decay_iters,
            c.learning_rate / 10 if c.min_lr is None else c.min_lr)


def learning_rate(step: int, c: TrainConfig) -> float:
    """Linear warm-up, cosine to min_lr at lr_decay_iters, constant after it."""
    warmup, end, low = rate_schedule(c)
    if step < warmup:
        return c.learning_rate * (step + 1) / warmup
    done = min(1.0, (step - warmup) / (end - warmup)) if step < end else 1.0
    return low + 0.5 * (1 + math.cos(math.pi * done)) * (c.learning_rate - low)
