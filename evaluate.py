"""
Scores of a checkpoint: `python evaluate.py COMMAND --key=value ...`, with --help and --json=FILE.

    python evaluate.py perplexity --out_dir=out/wm16                 # on all of test.bin
    python evaluate.py perplexity --out_dir=out/tiny --split=val --exact
    python evaluate.py perplexity --out_dir=out/wm16 --solver=paper  # section "Iteration schedules"
    python evaluate.py downstream --out_dir=out/wm16                 # the paper's tasks

Perplexity is exp of the mean loss in nats per token. The tokens of the file lie in windows of
block_size that do not overlap, and the last one, which may be shorter, counts too: so every token
but the first of the file is a target exactly once. Each token counts the same, so the batch size
changes nothing but the time (with --exact no more than the tolerance, as a batch ends together).

Downstream tasks are in measure/downstream.py.

Dimensions: B rows, T tokens, g groups.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

# before torch, which reads what it tells OpenMP
from configurator import UserError, key, run, run_command

# isort: split
import numpy as np
import torch
from torch import Tensor

from checkpoint import load_model
from kernels import Fast, accelerate
from measure.downstream import DownstreamConfig, downstream_command
from measure.schedules import CLOSE, Losses, Schedule, ScoreConfig, first_within, schedule_of, until
from measure.timing import check, machine, write_results
from running.devices import pick_device, pick_dtype
from text.rows import data_of, note_if_longer, open_tokens, to_device
from text.splits import SPLITS

REFERENCE = (16, 32)  # groups and passes that stand in for decoding there
GAIN = 0.001  # a pass that lowers the perplexity by so much is not the last one to look at


# ---- data

class Windows:
    """The tokens of a file in windows of block_size, one behind the other, with their targets.

    The last window may hold fewer; it is filled up with token 0 and target -1, which does not
    count. Raises UserError for a file that is missing, damaged, too short or of a larger
    vocabulary than the tokenizer's own (the model's is padded).
    """

    def __init__(self, path: Path, meta: dict, block_size: int, limit_rows: int | None = None):
        self.tokens = open_tokens(path, meta)[:limit_rows and limit_rows * block_size + 1]
        if len(self.tokens) < 2:
            raise UserError(f"{path}: 1 token, but a target needs one before it")
        largest = int(self.tokens.max())
        if largest >= meta["vocab_size"]:
            raise UserError(f"{path}: it holds id {largest}, the model has a vocabulary of "
                            f"{meta['vocab_size']} ids; it was prepared with another tokenizer")
        self.n_targets = len(self.tokens) - 1
        self.block_size = min(block_size, self.n_targets)  # a longer window would be padding

    def __len__(self) -> int:
        return -(-self.n_targets // self.block_size)

    def batches(self, batch_size: int, device: str, full: bool = False
                ) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens and targets (B, T), int64; with `full`, the last batch too has batch_size rows."""
        T = self.block_size
        for n in range(0, len(self), batch_size):
            rows = batch_size if full else min(batch_size, len(self) - n)
            tokens = self.tokens[n * T:(n + rows) * T + 1].astype(np.int64)
            missing = 0, rows * T + 1 - len(tokens)
            xy = np.stack((np.pad(tokens[:-1], missing),
                           np.pad(tokens[1:], missing, constant_values=-1)))
            yield tuple(to_device(xy, device).view(2, rows, T))


# ---- losses

@torch.no_grad()
def mean_losses(losses: Losses, windows: Windows, batch_size: int, fast: Fast) -> list[float]:
    """Nats per token of all targets, after the last pass or after each; they add up on the device.

    Where `fast` has them, a batch is a CUDA graph. Not where a tolerance decides when to end, nor
    token by token, which would be hundreds of thousands of kernels.
    """
    device, s = str(losses.model.embed.weight.device), losses.schedule
    graph = fast.graph and s.tol is None and s.solver != "autoregressive"
    batch_size = min(batch_size, len(windows))
    function, total = fast.graphed(losses) if graph else losses, 0
    with fast.autocast():
        for x, y in windows.batches(batch_size, device, full=graph):
            total = total + function(x, y)
    means = [nats / windows.n_targets for nats in total.tolist()]
    if not all(map(math.isfinite, means)):
        raise UserError(f"loss {means[-1]}: logits that are not finite; the checkpoint's weights "
                        "are damaged, or its training diverged")
    return means


def perplexity_of(loss: float) -> float:
    """exp of nats per token; infinite where that is too large for a number."""
    return math.exp(loss) if loss < 700 else math.inf


# ---- perplexity

@dataclass
class PerplexityConfig(ScoreConfig):
    dataset: str | None = key(None, "folder under data/; None: that of the training")
    split: str = key("test", "train, val or test")
    block_size: int | None = key(None, "tokens per window; None: as in training")
    batch_size: int = key(16, "windows at a time")
    limit_rows: int | None = key(None, "so many windows only; None: the whole file")
    solver: str | None = key(None, "cyclic, jacobi, autoregressive, or paper: all that its section "
                             "on schedules reports; None: as in training")
    passes: int | None = key(None, "of cyclic and jacobi; None: as in training (paper: from 1 "
                             "on while they gain, at most 32)")
    max_passes: int = key(128, "of Jacobi with solver=paper")
    graph: bool = key(True, "on cuda: a batch as a CUDA graph")


def perplexity_command(c: PerplexityConfig):
    """Perplexity of a checkpoint, on every token of a file but the first."""
    check(c, "block_size", "batch_size", "limit_rows", "passes", "n_groups", "max_passes")
    if c.split not in SPLITS:
        raise UserError(f"split={c.split}: choose one of {', '.join(SPLITS)}")
    device = pick_device(c.device)
    dtype = pick_dtype(c.dtype, device)
    model, checkpoint = load_model(c.out_dir, device)
    study = c.solver == "paper"
    if study and not model.iterates:
        raise UserError(f"solver=paper: kv={model.config.kv} is exact in one pass, there are no "
                        "schedules to compare")
    if study and (c.exact or c.tol is not None):
        raise UserError("solver=paper has schedules of its own: without exact and tol")
    schedule = None if study else schedule_of(c, model, dtype, "paper")
    folder, meta = data_of(checkpoint, c.out_dir, c.dataset)
    path, trained = folder / f"{c.split}.bin", checkpoint["config"]["block_size"]
    windows = Windows(path, meta, c.block_size or trained, c.limit_rows)
    note_if_longer("block_size", c.block_size or trained, trained)
    fast = accelerate(model, dtype, graph=c.graph)
    step = checkpoint.get("step")
    print(f"{c.out_dir}: {model.config.kv}, {model.n_params():,} parameters without the "
          f"embedding{f', step {step}' if step else ''}; {machine(device)}, {fast}\n{path}: "
          f"{windows.n_targets:,} targets in {len(windows):,} windows of {windows.block_size}")
    began = time.perf_counter()
    results = paper_study(c, fast, windows) if study else one_score(c, fast, windows, schedule)
    seconds = time.perf_counter() - began
    print(f"{seconds:.1f} s" + ("" if study else f", {windows.n_targets / seconds:,.0f} tokens/s"))
    write_results(c, "perplexity", device, dtype, model=asdict(model.config), step=step,
                  file=str(path), block_size=windows.block_size, windows=len(windows),
                  targets=windows.n_targets, seconds=seconds, **results)


def one_score(c: PerplexityConfig, fast: Fast, windows: Windows, schedule: Schedule) -> dict:
    """Loss and perplexity under a schedule, printed."""
    losses = Losses(fast.model, schedule)
    (loss,) = mean_losses(losses, windows, c.batch_size, fast)
    report = ""
    if losses.converged is not None:
        report = f" ({'all' if losses.converged else 'not all'} batches converged, " \
                 f"after up to {losses.passes} passes)"
    print(f"{schedule}{report}: loss {loss:.5f} nats per token, perplexity "
          f"{perplexity_of(loss):.4f}")
    return {**asdict(schedule), "passes": losses.passes, "converged": losses.converged,
            "loss": loss, "perplexity": perplexity_of(loss)}


def paper_study(c: PerplexityConfig, fast: Fast, windows: Windows) -> dict:
    """The three figures of section "Iteration schedules in training", printed as they come."""
    mc = fast.model.config
    g, passes = REFERENCE
    own = c.n_groups or mc.n_groups
    by_pass = until(
        lambda n: perplexities(c, fast, windows, Schedule("cyclic", n, own)),
        c.passes or max(6, mc.n_nograd + mc.n_grad), c.passes or passes,
        lambda found: len(found) > 1 and found[-1] > (1 - GAIN) * min(found[:-1]))
    best = min(by_pass)
    n_best = 1 + by_pass.index(best)
    print(f"perplexity after 1 to {len(by_pass)} cyclic passes, g={own}: "
          + ", ".join(f"{p:.3f}" for p in by_pass))
    print(f"(1) best, with {f'g={own}' if c.n_groups else 'the groups of training'}: {best:.4f} "
          f"after {n_best} pass{'es' * (n_best > 1)} (training: {mc.n_nograd + mc.n_grad})",
          flush=True)
    decoding = perplexities(c, fast, windows, Schedule("cyclic", passes, g), every_pass=False)[-1]
    print(f"(2) {passes} passes of g={g}, in place of decoding: {decoding:.4f} "
          f"({decoding / best - 1:+.2%})", flush=True)

    def needed(tp: list[float]) -> tuple[int | None, int | None]:
        return first_within(tp, best), first_within(tp, decoding, lower_too=False)

    tp = until(lambda n: perplexities(c, fast, windows, Schedule("jacobi", n)), 16,
               min(c.max_passes, windows.block_size), lambda tp: all(needed(tp)))
    (to_best, to_decoding), more = needed(tp), f"more than {len(tp)}"
    print(f"(3) Jacobi passes to within {CLOSE:.0%} of (1): {to_best or more}; of (2): "
          f"{to_decoding or more}")
    return {"training_schedule": {"n_groups": own, "perplexities": by_pass,
                                  "best": best, "best_passes": n_best},
            "decoding": {"n_groups": g, "passes": passes, "perplexity": decoding},
            "jacobi": {"perplexities": tp, "passes_to_best": to_best,
                       "passes_to_decoding": to_decoding}}


def perplexities(c: PerplexityConfig, fast: Fast, windows: Windows, schedule: Schedule,
                 every_pass: bool = True) -> list[float]:
    losses = Losses(fast.model, schedule, every_pass)
    return [perplexity_of(x) for x in mean_losses(losses, windows, c.batch_size, fast)]


# ---- the command line

COMMANDS = {perplexity_command: PerplexityConfig(), downstream_command: DownstreamConfig()}


def main(argv: list[str]):
    run_command("python evaluate.py", COMMANDS, argv, __doc__)


if __name__ == "__main__":
    run(main)
