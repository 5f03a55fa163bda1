"""
Count and time: `python bench.py COMMAND --key=value ...`, each with --help and --json=FILE.

    python bench.py flops                        # FLOP per token, by counter and by formula
    python bench.py prefill --out_dir=out/tiny   # passes and time of every schedule

GFLOP here are 1e9 operations, a multiplication and an addition being two; a time is the median of
trials after warm-ups, with the device synchronised on either side of each.

Dimensions: T tokens, L layers, D width, H query heads, d head size, k channels, g groups.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import attention
import model as model_module
from configurator import UserError, key, parse, run
from model import Decoder, ModelConfig
from pool import build
from solvers import cyclic, interleave, solve

# train.py and sample.py are imported where they are used, as train.py needs `flops_per_token`

MODES = ("training", "prefill", "decode")
PREFILL = dict(passes=3, n_groups=8)  # the paper's evaluation setting
ATTENTION_BACKWARD = 2.5  # of its forward: five products for two, as in flash attention


# ---- FLOP per token by closed form

def pool_flops(c: ModelConfig) -> int:
    """Of one evaluation of the pool for one token: projections, router and mixing, K and V."""
    k, L, D = c.n_channels, c.n_layer, c.n_embd
    n_inputs = -(-L // c.router_stride) if c.router == "dynamic" else 0
    return 2 * 2 * k * (c.n_kv_head * c.head_dim * D + L * n_inputs * D + L * D)


def block_flops(c: ModelConfig) -> tuple[int, int]:
    """Of one block for one token, attention apart: projections before it, and all after it."""
    heads = c.n_head + (2 * c.n_kv_head if c.kv == "vanilla" else 0)
    return (2 * c.n_embd * heads * c.head_dim,
            2 * c.n_embd * (c.n_head * c.head_dim + 3 * c.n_hidden))


def flops_per_token(config: ModelConfig, block_size: int, mode: str, head: bool = False) -> float:
    """FLOP per token in `mode`, by closed form; matrix products and attention, nothing else.

    training: forward and backward of the config's schedule on rows of block_size tokens;
    prefill: three cyclic passes of 8 groups that leave a cache; decode: the last of block_size
    tokens, given the cache of those before it. A token attends to the keys that it can see, the
    dummy included and without document masks: (T + 1) / 2 on average, T in decode. `head` adds
    the logits of every token. Compare section "Compute cost".
    """
    c, T = config, block_size
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: choose one of {', '.join(MODES)}")
    before, after = block_flops(c)
    stack = c.n_layer * (before + after)
    keys = T if mode == "decode" else (T + 1) / 2
    attended = 4 * keys * c.n_head * c.head_dim * c.n_layer
    total = head * 2 * c.vocab_size * c.n_embd * (3 if mode == "training" else 1)
    if c.kv == "vanilla":
        backward = (2 * stack + ATTENTION_BACKWARD * attended) * (mode == "training")
        return total + stack + attended + backward
    pool, dummy = pool_flops(c), pool_flops(c) / T  # the dummy's, once per cache
    if mode == "decode":
        return total + stack + attended + pool
    if mode == "prefill":
        n = PREFILL["passes"]
        return total + n * (stack + attended) + (1 + n) * pool + dummy
    # training: a phase pools its first states and each group anew, but the last of the last pass
    g = min(c.n_groups, T)
    last = len(range(g - 1, T, g)) / T
    for n in filter(None, (c.n_nograd, c.n_grad)):
        total += n * (stack + attended) + (1 + n - last) * pool + dummy
    n = c.n_grad
    total += n * (2 * stack + ATTENTION_BACKWARD * attended)
    total += 2 * ((1 + n - last) * pool + dummy)
    # the last block's output is no source: its backward runs in the last pass only
    return total - (n - 1) * (2 * stack + ATTENTION_BACKWARD * attended) / c.n_layer


# ---- FLOP per token by running the code

class CountedAttention(torch.autograd.Function):
    """Attention that computes nothing and counts its FLOP."""

    @staticmethod
    def forward(ctx, tally, flops, q, k, v, *sink):
        ctx.tally, ctx.flops = tally, flops
        ctx.save_for_backward(q, k, v, *sink)
        if not tally.in_backward:
            tally.flops += flops
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx, d_out):
        ctx.tally.flops += ATTENTION_BACKWARD * ctx.flops
        return None, None, *(torch.empty_like(t) for t in ctx.saved_tensors)


@dataclass
class Tally:
    """Stands in for `attention.attend`: four FLOP per visible pair of query and key and feature.

    The plain path attends once more inside its backward pass, which the kernels do not; a call
    made `in_backward` is therefore not counted as a forward one.
    """

    flops: float = 0.0
    in_backward: bool = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rows: attention.Rows, sink=None) -> Tensor:
        B, T, H, d = q.shape
        pairs = int((rows.stop - rows.start).sum()) + (B * T if sink is not None else 0)
        return CountedAttention.apply(self, 4 * pairs * H * d, q, k, v, *(sink or ()))


class Weightless:
    """Lets a model on the meta device take real indices, so that its pairs can be counted."""

    def __init__(self, model: Decoder):
        self.device = model.embed.device
        self.place, self.embed_tokens = model.place, model.embed_tokens
        model.place, model.embed_tokens = self.placed, self.embedded

    def placed(self, *args) -> attention.Rows:
        rows = self.place(*args)
        return replace(rows, cos=rows.cos.to(self.device), sin=rows.sin.to(self.device))

    def embedded(self, idx: Tensor) -> Tensor:
        return self.embed_tokens(idx.to(self.device))


def count_flops(config: ModelConfig, block_size: int, mode: str, device: str = "meta") -> float:
    """FLOP per token in `mode`, without the head, counted while the real code runs.

    All matrix products are counted by PyTorch's FlopCounterMode; on the meta device the code runs
    and the arithmetic does not. Attention is counted by `Tally` in place of the kernel: its
    number of (query, visible key) pairs, from the very intervals that the kernel would get, times
    4 H d; its backward pass, where one runs, is taken as 2.5 forward ones, as PyTorch's formula
    for flash attention does. Norms, RoPE, activations and sums count as nothing.
    """
    from sample import prefill, step

    with torch.device(device):
        model = build(replace(config, eos_id=None))
    Weightless(model)
    idx = torch.zeros(1, block_size, dtype=torch.long)
    tally, counter = Tally(), FlopCounterMode(display=False)
    # a count per module is not wanted, and its hooks fail on parameters used without gradients
    counter.mod_tracker = MagicMock(parents={"Global"})
    cache = model.new_cache(1, block_size, like=model.embed)  # for decoding, not counted
    with ExitStack() as stack, torch.set_grad_enabled(mode == "training"):
        for module in (attention, model_module):
            stack.enter_context(patch.object(module, "attend", tally.attend))
        stack.enter_context(counter)
        if mode == "training":
            total = solve(model, idx).final.sum()
            tally.in_backward = True
            total.backward()
        elif mode == "prefill":
            prefill(model, idx, **PREFILL)
        else:
            step(model, cache, idx[:, 0], torch.tensor([block_size - 1]), torch.tensor([0]))
    return (counter.get_total_flops() + tally.flops) / (1 if mode == "decode" else block_size)


PAPER = {  # section "Compute cost", T = 2048: GFLOP per token in training, prefill, decode
    "vanilla L=16": (dict(kv="vanilla"), (0.444, 0.142, 0.179)),
    "vanilla L=24": (dict(kv="vanilla", n_layer=24), (0.665, 0.212, 0.269)),
    "vanilla L=32": (dict(kv="vanilla", n_layer=32), (0.887, 0.283, 0.359)),
    "WhiteMatter k=16": (dict(n_channels=16), (1.111, 0.467, 0.184)),
    "WhiteMatter k=8": (dict(n_channels=8), (1.028, 0.432, 0.177)),
}


@dataclass
class FlopsConfig:
    """What `bench.py flops` takes."""

    block_size: int = key(2048, "T, tokens per row and in the cache; the paper's is 2048")
    count: bool = key(True, "run the code and count too (half a minute), not only the formula")
    json: str | None = key(None, "write the results to this file (-: to stdout)")


def flops(argv: list[str]):
    """Count the FLOP per token of the paper's models."""
    c = parse(FlopsConfig(), argv, "python bench.py flops: FLOP per token, without the head")
    check(c, "block_size")
    results = {}
    for name, (sizes, paper) in PAPER.items():
        config = ModelConfig(**sizes)
        with torch.device("meta"):
            n_params = build(config).n_params()
        results[name] = {"params": n_params, "modes": {mode: {
            "formula": flops_per_token(config, c.block_size, mode) / 1e9,
            "counted": count_flops(config, c.block_size, mode) / 1e9 if c.count else None,
            "paper": printed if c.block_size == 2048 else None}
            for mode, printed in zip(MODES, paper)}}
    base = results["vanilla L=16"]["modes"]
    print(f"GFLOP per token without the head, T={c.block_size}; x: over vanilla L=16\n")
    print(f"{'':17s} {'parameters':>11s}  {'':8s} {'counted':>8s} {'formula':>8s} {'x':>5s} "
          f"{'paper':>6s} {'x':>5s} {'to paper':>8s}")
    for name, result in results.items():
        label, n_params = name, f"{result['params']:,}"
        for mode, r in result["modes"].items():
            paper = "" if r["paper"] is None else (
                f"{r['paper']:6.3f} {r['paper'] / base[mode]['paper']:5.2f} "
                f"{100 * (r['formula'] / r['paper'] - 1):+7.1f}%")
            counted = "-" if r["counted"] is None else f"{r['counted']:.4f}"
            print(f"{label:17s} {n_params:>11s}  {mode:8s} {counted:>8s} "
                  f"{r['formula']:8.4f} {r['formula'] / base[mode]['formula']:5.2f} {paper}")
            label = n_params = ""
    print(FOOTNOTE)
    write_json(c.json, {"command": "flops", "unit": "GFLOP per token", "settings": asdict(c),
                        "torch": torch.__version__, "models": results})


FOOTNOTE = """
Parameters are without the embedding. Attention counts the keys that a token can see.
WhiteMatter's prefill is below the paper's by one evaluation of the pool: 3 passes that leave a
cache take 4 (of H(0), and of each pass), the paper's figures equal 5. Its training figures equal
6 such evaluations forward, we need 4 6/8."""


# ---- prefill: passes and time of every schedule (section "Prefill convergence and runtime")

CLOSE = 0.01  # perplexity counts as converged within 1 % of the exact one
RESIDUALS_OF = (1, 4, 8, 16)  # groups, in the table of residuals


@dataclass
class PrefillConfig:
    """What `bench.py prefill` takes."""

    out_dir: str | None = key(None, "folder with ckpt.pt; None: a random model of tiny.py's sizes")
    block_size: int | None = key(None, "T, tokens per row; None: the checkpoint's")
    rows: int = key(16, "held-out rows that the perplexity is taken on")
    batch_size: int = key(8, "rows at a time, for perplexity and time")
    max_passes: int = key(128, "give up on a schedule after so many (never more than T)")
    trials: int = key(30, "timed runs of each schedule; 10 at most of the autoregressive one")
    warmups: int = key(5, "runs before them; 1 at most of the autoregressive one")
    device: str = key("auto", "auto (cuda, else mps, else cpu), or a torch device")
    dtype: str = key("auto", "of the timed runs: auto (bfloat16 on cuda), float32 or bfloat16")
    seed: int = key(1337, "of the random model and tokens")
    json: str | None = key(None, "write the results to this file (-: to stdout)")


def load(c: PrefillConfig, device: str) -> tuple[Decoder, Tensor, Tensor]:
    """A float32 model, and held-out tokens and targets (rows, T) for it."""
    from train import TokenRows, TrainConfig, load_meta, load_model, model_config

    if c.out_dir is None:
        torch.manual_seed(c.seed)
        settings = parse(TrainConfig(), [str(Path(__file__).parent / "config/tiny.py")], "")
        config = model_config(settings, {"vocab_size": 257, "eos_id": 256})
        T = c.block_size or settings.block_size
        xy = torch.randint(256, (c.rows, T + 1)).to(device)
        model = build(config)
        for branch in (model.kv_pool.key, model.kv_pool.value):
            torch.nn.init.normal_(branch.router, std=0.02)  # at 0, the mixture would be fixed
        return model.to(device).eval(), xy[:, :-1], xy[:, 1:]
    model, checkpoint = load_model(c.out_dir, device)
    if not model.iterates:
        raise UserError(f"{c.out_dir}: kv={model.config.kv} is exact in one pass, there is no "
                        "schedule to compare")
    folder, meta = load_meta(checkpoint["config"]["dataset"])
    if meta["tokenizer"] != checkpoint["meta"]["tokenizer"]:
        raise UserError(f"{folder} holds {meta['tokenizer']} tokens, {c.out_dir} was trained on "
                        f"{checkpoint['meta']['tokenizer']}")
    rows = TokenRows(folder / "val.bin", meta["dtype"],
                     c.block_size or checkpoint["config"]["block_size"], None)
    return model, *rows.batch(0, min(c.rows, rows.n_rows), device)


class PassLosses:
    """Watches `model.states` during a cyclic solve and takes the loss after every pass."""

    def __init__(self, model: Decoder, targets: Tensor, n_groups: int):
        self.model, self.targets = model, targets
        self.n_groups = min(n_groups, targets.size(1))
        self.states, self.parts, self.losses = model.states, [], []

    def __enter__(self) -> PassLosses:
        self.model.states = self
        return self

    def __exit__(self, *_):
        del self.model.states  # back to the method

    def __call__(self, *args) -> list[Tensor]:
        h = self.states(*args)
        self.parts.append(h[-1])
        if len(self.parts) == self.n_groups:
            self.losses.append(self.model.loss(interleave(self.parts, dim=1), self.targets))
            self.parts = []
        return h


def perplexities(model: Decoder, x: Tensor, y: Tensor, batch_size: int, n_groups: int,
                 passes: int) -> list[float]:
    """Perplexity of targets y (rows, T) after each of `passes` cyclic passes over tokens x."""
    total = torch.zeros(passes, dtype=torch.float64)
    for xb, yb in zip(x.split(batch_size), y.split(batch_size)):
        with PassLosses(model, yb, n_groups) as watch:
            cyclic(model, xb, n_groups, passes, 0, keep_cache=False, measure=False)
        total += torch.stack(watch.losses).double().cpu() * yb.numel()
    return (total / y.numel()).exp().tolist()


def passes_needed(model: Decoder, x: Tensor, y: Tensor, batch_size: int, n_groups: int,
                  max_passes: int, exact: float) -> tuple[int | None, list[float]]:
    """Smallest number of passes within 1 % of the exact perplexity (None: more than
    max_passes), and the perplexity after each pass up to it."""
    n = min(4, max_passes)
    while True:
        ppl = perplexities(model, x, y, batch_size, n_groups, n)
        for t, p in enumerate(ppl):
            if abs(p / exact - 1) <= CLOSE:
                return t + 1, ppl[:t + 1]
        if n == max_passes:
            return None, ppl
        n = min(2 * n, max_passes)  # from the start again: the sum stays below four times n


@torch.no_grad()
def prefill_command(argv: list[str]):
    """Passes and time of Jacobi, cyclic and autoregressive prefill."""
    from train import pick_device, pick_dtype

    c = parse(PrefillConfig(), argv, "python bench.py prefill: passes and time of every schedule "
              "to within 1 % of the exact perplexity")
    check(c, "block_size", "rows", "batch_size", "max_passes", "trials", "warmups")
    device = pick_device(c.device)
    dtype = pick_dtype(c.dtype, device)
    model, x, y = load(c, device)
    T = x.size(1)
    print(f"{c.out_dir or 'random weights and tokens'}: L={model.config.n_layer}, "
          f"D={model.config.n_embd}, k={model.config.n_channels}, T={T}; perplexity of {len(x)} "
          f"rows in float32\ntimes: {machine(device, dtype)}, batch {c.batch_size}, not compiled\n")
    timed = copy.deepcopy(model).to(dtype)
    batch = x[torch.arange(c.batch_size, device=device) % len(x)]
    exact = perplexities(model, x, y, c.batch_size, T, 1)[0]
    schedules = []
    print("     g  passes  perplexity  off by   s/sequence     tokens/s")
    for g in [2 ** i for i in range(7) if 2 ** i < T] + [T]:
        limit = min(c.max_passes, T)
        n, ppl = (1, [exact]) if g == T else passes_needed(model, x, y, c.batch_size, g, limit,
                                                           exact)
        result = {"g": g, "solver": {1: "jacobi", T: "autoregressive"}.get(g, "cyclic"),
                  "passes": n, "perplexities": ppl}
        if n is not None:
            few = (1, 10) if g == T else (c.warmups, c.trials)
            run_once = Prefill(timed, batch, result["solver"], n, g)
            result |= measure(run_once, device, min(c.warmups, few[0]), min(c.trials, few[1]),
                              batch.numel())
            result["seconds_per_sequence"] = result["median_seconds"] / len(batch)
        schedules.append(result)
        print(schedule_line(result, exact, limit), flush=True)
    table = residuals(model, x[:c.batch_size], [g for g in RESIDUALS_OF if g < T],
                      min(10, c.max_passes))
    write_json(c.json, {"command": "prefill", "settings": asdict(c), "torch": torch.__version__,
                        "device": device_name(device), "dtype": str(dtype).split(".")[1],
                        "threads": torch.get_num_threads(), "compiled": False,
                        "model": asdict(model.config), "block_size": T, "rows": len(x),
                        "batch_size": len(batch), "exact_perplexity": exact,
                        "schedules": schedules, "residuals": table})


def schedule_line(r: dict, exact: float, limit: int) -> str:
    """A row of the first table."""
    name = {"jacobi": "Jacobi", "autoregressive": "token by token"}.get(r["solver"], "")
    ppl = r["perplexities"][-1]
    passes = r["passes"] or f">{limit}"
    head = f"{r['g']:6d}  {passes:>6}  {ppl:10.3f}  {ppl / exact - 1:+6.2%}"
    if r["passes"] is None:
        return f"{head}   {'-':>10s}   {'-':>10s}  {name}"
    return (f"{head}   {r['seconds_per_sequence']:10.5f}   {r['tokens_per_second']:10,.0f}  "
            f"{name}".rstrip())


def residuals(model: Decoder, x: Tensor, groups: list[int], passes: int) -> dict[int, list[float]]:
    """Relative change of the states in each pass, by number of groups; printed as a table."""
    table = {g: cyclic(model, x, g, passes, 0, keep_cache=False).report.residuals for g in groups}
    if table:
        print("\nrelative residual\n  pass" + "".join(f"{f'g={g}':>10s}" for g in table))
    for t, row in enumerate(zip(*table.values())):
        print(f"{t + 1:6d}" + "".join(f"{r:10.1e}" for r in row))
    return table


# ---- time

@dataclass
class Prefill:
    """One prefill of a batch, to be called again and again."""

    model: Decoder
    idx: Tensor
    solver: str
    passes: int
    n_groups: int

    def __call__(self):
        from sample import prefill

        return prefill(self.model, self.idx, self.solver, self.passes, self.n_groups)


def synchronise(device: str):
    """Wait until the device has done all that it was given."""
    kind = torch.device(device).type
    if kind != "cpu":
        getattr(torch, kind).synchronize()


def measure(run_once: Callable, device: str, warmups: int, trials: int, n_tokens: int) -> dict:
    """Seconds of warm-up and of each trial, their median, and n_tokens over it."""
    began = time.perf_counter()
    for _ in range(warmups):
        run_once()
    synchronise(device)
    warmup_seconds = time.perf_counter() - began
    seconds = []
    for _ in range(trials):
        synchronise(device)
        began = time.perf_counter()
        run_once()
        synchronise(device)
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds)
    return {"warmups": warmups, "warmup_seconds": warmup_seconds, "trials": trials,
            "trial_seconds": seconds, "median_seconds": median,
            "tokens_per_second": n_tokens / median}


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def machine(device: str, dtype: torch.dtype) -> str:
    """What the times were taken with, in words."""
    threads = f", {torch.get_num_threads()} threads" if device == "cpu" else ""
    return (f"{device_name(device)}{threads}, torch {torch.__version__}, "
            f"{str(dtype).removeprefix('torch.')}")


# ---- shared by the commands

def check(c, *at_least_one: str):
    """Raise UserError for numbers below 1, and for a file that cannot be written in the end."""
    for name in at_least_one:
        value = getattr(c, name)
        if value is not None and value < 1:
            raise UserError(f"{name}={value}: at least 1 is needed")
    if c.json not in (None, "-") and not Path(c.json).absolute().parent.is_dir():
        raise UserError(f"json={c.json}: there is no such folder")


def write_json(path: str | None, results: dict):
    """To a file, to stdout (-) or nowhere (None)."""
    if path is None:
        return
    text = json.dumps(results)
    if path == "-":
        print(text)
        return
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"json={path}: cannot write there ({error.strerror})") from None


COMMANDS = {"flops": flops, "prefill": prefill_command}


def main(argv: list[str]):
    if argv and argv[0] in ("-h", "--help"):
        print(__doc__.strip() + "\n\ncommands: " + ", ".join(COMMANDS))
        return
    if not argv or argv[0] not in COMMANDS:
        raise UserError(f"{argv[0] + ': unknown' if argv else 'no'} command; choose one of "
                        f"{', '.join(COMMANDS)}")
    argv = ["--json=-" if a == "--json" else a for a in argv]
    COMMANDS[argv[0]](argv[1:])


if __name__ == "__main__":
    run(main)
