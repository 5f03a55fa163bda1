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
import math
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import attention
import model as model_module
from configurator import UserError, parse, run
from model import Decoder, ModelConfig
from pool import build
from sample import prefill, step
from solvers import autoregressive, cyclic, interleave, solve
from train import (
    TokenRows,
    TrainConfig,
    load_meta,
    load_model,
    model_config,
    pick_device,
    pick_dtype,
)

MODES = ("training", "prefill", "decode")
PREFILL = dict(passes=3, n_groups=8)  # the paper's evaluation setting
ATTENTION_BACKWARD = 2.5  # of its forward: five products for two, as in flash attention


def key(default, help: str):
    return field(default=default, metadata={"help": help})


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
    # what the last block adds after its attention is read by the loss alone: one pass of it
    return total - 2 * (n - 1) * after


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
    """Makes a model on the meta device take real indices, so that its pairs can be counted."""

    def __init__(self, model: Decoder):
        self.of_model = model.place, model.embed_tokens
        model.place, model.embed_tokens = self.place, self.embed_tokens

    def place(self, *args) -> attention.Rows:
        rows = self.of_model[0](*args)
        return replace(rows, cos=rows.cos.to("meta"), sin=rows.sin.to("meta"))

    def embed_tokens(self, idx: Tensor) -> Tensor:
        return self.of_model[1](idx.to("meta"))


def count_flops(config: ModelConfig, block_size: int, mode: str) -> float:
    """FLOP per token in `mode`, without the head, counted while the real code runs.

    All matrix products are counted by PyTorch's FlopCounterMode, on the meta device: the code
    runs, the arithmetic does not. Attention is counted by `Tally` in place of the kernel: its
    number of (query, visible key) pairs, from the very intervals that the kernel would get, times
    4 H d; its backward pass, where one runs, is taken as 2.5 forward ones, as PyTorch's formula
    for flash attention does. Norms, RoPE, activations and sums count as nothing.
    """
    with torch.device("meta"):
        model = build(replace(config, eos_id=None))
    Weightless(model)
    idx = torch.zeros(1, block_size, dtype=torch.long)
    tally, counter = Tally(), FlopCounterMode(display=False)
    # a count per module is not wanted, and its hooks fail on parameters used without gradients
    counter.mod_tracker = MagicMock(parents={"Global"})
    cache = model.new_cache(1, block_size, like=model.embed)
    with ExitStack() as stack:
        for module in (attention, model_module):
            stack.enter_context(patch.object(module, "attend", tally.attend))
        stack.enter_context(counter)
        if mode == "training":
            total = solve(model, idx).final.sum()
            tally.in_backward = True
            total.backward()
            return (counter.get_total_flops() + tally.flops) / block_size
        with torch.no_grad():
            if mode == "prefill":
                prefill(model, idx, **PREFILL)
                return (counter.get_total_flops() + tally.flops) / block_size
            step(model, cache, idx[:, 0], torch.tensor([block_size - 1]), torch.tensor([0]))
            return counter.get_total_flops() + tally.flops


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
    json: str | None = key(None, "write the results to this file (-: to stdout)")


def flops(argv: list[str]):
    """Count the FLOP per token of the paper's models."""
    c = parse(FlopsConfig(), argv, "python bench.py flops: FLOP per token, without the head")
    at_least_one(c, "block_size")
    results = {}
    for name, (sizes, paper) in PAPER.items():
        config = ModelConfig(**sizes)
        with torch.device("meta"):
            n_params = build(config).n_params()
        results[name] = {"params": n_params, "modes": {mode: {
            "formula": flops_per_token(config, c.block_size, mode) / 1e9,
            "counted": count_flops(config, c.block_size, mode) / 1e9,
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
            print(f"{label:17s} {n_params:>11s}  {mode:8s} {r['counted']:8.4f} "
                  f"{r['formula']:8.4f} {r['formula'] / base[mode]['formula']:5.2f} {paper}")
            label = n_params = ""
    print(FOOTNOTE)
    write_json(c.json, {"command": "flops", "unit": "GFLOP per token", "settings": asdict(c),
                        "torch": torch.__version__, "models": results})


FOOTNOTE = """
Parameters are without the embedding. Attention counts the keys that a token can see.
WhiteMatter's training is 1 % below the paper's: the output of the last block is no source, so
only the last pass backpropagates through its MLP. Its prefill is below the paper's by one
evaluation of the pool: 3 passes that leave a cache need 4 (one of H(0) and one per pass), the
paper's figure equals 3 passes and 5 evaluations."""


# ---- shared by the commands

def at_least_one(c, *names: str):
    """Raise UserError for numbers below 1."""
    for name in names:
        value = getattr(c, name)
        if value is not None and value < 1:
            raise UserError(f"{name}={value}: at least 1 is needed")


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


COMMANDS = {"flops": flops}


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
