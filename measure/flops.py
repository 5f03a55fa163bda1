"""
FLOP per token of every model, by closed form and by running the code, and the peak of GPUs.

A multiplication and an addition are two; matrix products and attention count, nothing else does.

Dimensions: T tokens, L layers, D width, H query heads, d head size, k channels, g groups.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import attention
from baselines import build, plan, projects
from configurator import UserError
from model import Decoder, ModelConfig
from solvers import evaluation_schedule, solve

MODES = ("training", "prefill", "decode")
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

def block_flops(c: ModelConfig) -> tuple[int, int, int]:
    """Of one block for one token, attention apart: queries, own keys and values, and the rest."""
    D, heads = c.n_embd, 2 * c.n_embd * c.head_dim
    return heads * c.n_head, heads * 2 * c.n_kv_head, heads * c.n_head + 2 * D * 3 * c.n_hidden


def store_flops(c: ModelConfig) -> tuple[int, int]:
    """Of what a token leaves in the cache, above what its blocks project on their way up; and the
    part of it that mixes states by weights that do not depend on the token.

    For WhiteMatter that is one evaluation of the pool: router and mixing, K and V projections.
    Raises UserError for a system of one's own that iterates.
    """
    D, kv = c.n_embd, block_flops(c)[1]
    if c.kv in ("whitematter", "nofeedback"):
        total = c.n_channels * kv
        for channel in plan(c).channels:
            n = len(channel.sources)
            inputs = -(-n // c.router_stride) * (channel.mixing == "router")
            # no feedback: a router's rows for its own channel; and a lone source is only scaled
            total += 2 * 2 * n * D * (inputs + (n > 1))
        return total, 0
    mixing = 2 * (c.n_layer + 1) * D if c.kv == "feedback" else 0
    projected = {"lckv": 1, "feedback": 1, "recurrent": c.n_layer}
    if plan(c).iterates and c.kv not in projected:
        raise UserError(f"kv={c.kv}: no formula (measure/flops.py) for what a token leaves behind")
    return projected.get(c.kv, 0) * kv + mixing, mixing


def flops_if_known(*args, **options) -> float | None:
    """`flops_per_token`; None for a system of one's own that has no plan, or no formula."""
    try:
        return flops_per_token(*args, **options)
    except UserError:
        return None


def flops_per_token(config: ModelConfig, block_size: int, mode: str, head: bool = False,
                    passes: int | None = None) -> float:
    """FLOP per token in `mode`, by closed form; matrix products and attention, nothing else.

    training: forward and backward of the config's schedule on rows of block_size tokens;
    prefill: so many passes that leave a cache, the paper's if nothing is said; decode: the last of
    block_size tokens, given the cache of those before it. A token attends to the keys that it can
    see, the dummy and itself included where it reads them, without document masks: (T + 1) / 2 on
    average, T in decode. `head` adds the logits of every token. Compare section "Compute cost".
    """
    c, T, L, p = config, block_size, config.n_layer, plan(config)
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: choose one of {', '.join(MODES)}")
    training, condensed = mode == "training", c.kv == "lckv"
    queries, kv, rest = block_flops(c)
    blocks = [queries + rest + kv * projects(p, layer) for layer in range(L)]
    past = T - 1 if mode == "decode" else (T - 1) / 2
    attended = [4 * (past + (p.dummy or layer.own is not None)) * c.n_head * c.head_dim
                for layer in p.layers]
    store, mixing = store_flops(c)
    dummy = p.dummy * store / T  # once per cache
    total = head * 2 * c.vocab_size * c.n_embd * (3 if training else 1)
    if mode == "decode":  # lckv has written its keys and values on the way up
        return total + sum(blocks) + sum(attended) + store * (not condensed)

    # how often each layer runs, and how often it is differentiated
    one_pass = not p.iterates and c.kv != "whitematter"
    phases = [1] if one_pass else [passes or evaluation_schedule(c)["passes"]]
    if training and not one_pass:
        phases = [m for m in (c.n_nograd, c.n_grad) if m]
    first, end = p.iterated
    inside = [first <= layer < end for layer in range(L)]
    forward = [sum(phases) if i else 1 for i in inside]
    backward = [training * (phases[-1] if i else 1) for i in inside]
    if not one_pass and (condensed or max(max(ch.sources) for ch in p.channels) < end):
        # what the block above all sources puts out is read after the last pass only; before, lckv's
        # runs for its keys and values, which are read
        backward[end - 1] = int(training)
        if not condensed:
            forward[end - 1] = 1
        total += training * condensed * 2 * kv * (phases[-1] - 1)
    total += sum(n * (block + attention) + m * (2 * block + ATTENTION_BACKWARD * attention)
                 for n, m, block, attention in zip(forward, backward, blocks, attended))

    # what tokens leave in the cache: H(0) and each group of each pass, but in training the last
    # group of all, which nobody reads; differentiated is what passes with gradients start from and
    # store. Of lckv: H(0) and, in training, what they start from
    g = min(c.n_groups, T)
    last = len(range(g - 1, T, g)) / T if training else 0
    stored, differentiated = 1 + sum(phases) - last, 1 + phases[-1] - last
    if condensed:
        stored, differentiated = len(phases), 1
    elif one_pass:  # a cache to be kept takes the dummy's channels once more
        stored, differentiated, dummy = 1, 1, dummy * (1 if training else 2)
    total += stored * store + dummy + training * 2 * (differentiated * store + dummy)
    if training and c.n_nograd:  # what the passes with gradients begin with are constants
        total -= mixing
    return total


# ---- FLOP per token by running the code

class Tally:
    """Counts a model's attention in place of computing it: four FLOP per visible pair of query and
    key and feature. A model on the meta device takes real indices, so that its pairs are known.
    """

    def __init__(self, model: Decoder):
        self.flops, self.device = 0.0, model.embed.weight.device
        self.place, self.embed_tokens = model.place, model.embed_tokens
        model.place, model.embed_tokens = self.placed, self.embedded
        self.new_cache, model.new_cache = model.new_cache, self.cache
        model.attention = self.attend
        if model.config.kv == "recurrent":
            model.attend = self.layer

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rows: attention.Rows, sink=None) -> Tensor:
        B, T, H, d = q.shape
        pairs = int((rows.stop - rows.start).sum()) + (B * T if sink is not None else 0)
        self.flops += 4 * pairs * H * d
        out = q + sum(x.sum() for x in (k, v, *(sink or ())))  # of all, but no product
        if out.requires_grad:
            out.register_hook(partial(self.backward, 4 * pairs * H * d))
        return out

    def backward(self, forward: int, _):
        self.flops += ATTENTION_BACKWARD * forward

    def layer(self, layer: int, q: Tensor, h: list, own: list, rows: attention.Rows,
              cache: attention.Cache) -> Tensor:
        """For `Recurrent.attend`: as a sink, the own entry is one key more."""
        return self.attend(q, cache.k[layer], cache.v[layer], rows, own[-1])

    def cache(self, *args, **kwargs) -> "TallyCache":
        cache = self.new_cache(*args, **kwargs)
        cache.__class__, cache.tally = TallyCache, self
        return cache

    def placed(self, *args) -> attention.Rows:
        rows = self.place(*args)
        return replace(rows, cos=rows.cos.to(self.device), sin=rows.sin.to(self.device))

    def embedded(self, idx: Tensor) -> Tensor:
        return self.embed_tokens(idx.to(self.device))


class TallyCache(attention.Cache):
    """A cache of which attention counts."""

    def attend(self, q: Tensor, channel: int, rows: attention.Rows) -> Tensor:
        sink = self.sink and tuple(s[channel] for s in self.sink)
        return self.tally.attend(q, self.k[channel], self.v[channel], rows, sink)


def count_flops(config: ModelConfig, block_size: int, mode: str, device: str = "meta") -> float:
    """FLOP per token in `mode`, without the head, counted while the real code runs.

    All matrix products are counted by PyTorch's FlopCounterMode; on the meta device the code runs
    and the arithmetic does not. Attention is counted by `Tally` in place of the kernel: its
    number of (query, visible key) pairs, from the very intervals that the kernel would get, times
    4 H d; its backward pass, where one runs, is taken as 2.5 forward ones, as PyTorch's formula
    for flash attention does. Norms, RoPE, activations and sums count as nothing.
    """
    from unittest.mock import MagicMock

    from torch.utils.flop_counter import FlopCounterMode

    from decoding import prefill, step

    with torch.device(device):
        model = build(replace(config, eos_id=None))
    idx = torch.zeros(1, block_size, dtype=torch.long)
    tally, counter = Tally(model), FlopCounterMode(display=False)
    # a count per module is not wanted, and its hooks fail on parameters used without gradients
    counter.mod_tracker = MagicMock(parents={"Global"})
    cache = model.new_cache(1, block_size, like=model.embed.weight)  # for decoding, not counted
    with counter, torch.set_grad_enabled(mode == "training"):
        if mode == "training":
            solve(model, idx).final.sum().backward()
        elif mode == "prefill":
            prefill(model, idx)
        else:
            step(model, cache, idx[:, 0], torch.tensor([block_size - 1]), torch.tensor([0]))
    return (counter.get_total_flops() + tally.flops) / (1 if mode == "decode" else block_size)
