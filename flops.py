"""
FLOP per token of every model, by closed form and by running the code, and the peak of GPUs.

A multiplication and an addition are two; matrix products and attention count, nothing else does.

Dimensions: T tokens, L layers, D width, H query heads, d head size, k channels, g groups.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import attention
import model as model_module
from model import Decoder, ModelConfig
from pool import build
from solvers import solve

MODES = ("training", "prefill", "decode")
PREFILL = dict(passes=3, n_groups=8)  # the paper's evaluation setting
ATTENTION_BACKWARD = 2.5  # of its forward: five products for two, as in flash attention

# dense bfloat16 FLOP/s by what torch.cuda.get_device_name says; the first that occurs in it
PEAK = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989.4e12, "H200": 989.4e12,
        "B200": 2250e12, "A100": 312e12, "RTX A6000": 154.8e12, "RTX 4090": 165.2e12,
        "RTX 3090": 71e12, "L40S": 362e12}


def peak_flops(device: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device; None where it is not known, and for a CPU."""
    if not device.startswith("cuda"):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK.items() if part in name), None)


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


def flops_per_token(config: ModelConfig, block_size: int, mode: str, head: bool = False,
                    passes: int = PREFILL["passes"]) -> float:
    """FLOP per token in `mode`, by closed form; matrix products and attention, nothing else.

    training: forward and backward of the config's schedule on rows of block_size tokens;
    prefill: so many passes, three if nothing is said, that leave a cache; decode: the last of
    block_size tokens, given the cache of those before it. A token attends to the keys that it can
    see, the dummy included and without document masks: (T + 1) / 2 on average, T in decode.
    `head` adds the logits of every token. Compare section "Compute cost".
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
        return total + passes * (stack + attended) + (1 + passes) * pool + dummy
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
    from unittest.mock import MagicMock, patch

    from torch.utils.flop_counter import FlopCounterMode

    from decoding import prefill, step

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
