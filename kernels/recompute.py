"""
Less memory for more time: what a group step computes on its way up the stack is not kept for the
backward pass, which runs the step again. Kept are the states, which the pool is made of.
"""

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attention import Cache, Rows
from model import Decoder


def recomputing(model: Decoder, random: bool = True) -> Decoder:
    """A copy of a model that iterates, or of its twin, which shares all parameters. `random`: it
    may draw random numbers on its way up, as dropout does, and must draw them again."""
    other = copy.copy(model)
    other.states = partial(states, model.states, random)
    return other


def states(up: Callable, random: bool, x: Tensor, rows: Rows, cache: Cache | None = None,
           first: int = 0, end: int | None = None) -> list[Tensor]:
    """`Decoder.states`, made by `up`.

    The second run reads the cache as it was at the first: of a plain one all keys and values are
    still there, and a tape (tape.py) is rewound, past what `up` itself has written (LCKV), too.
    """
    if not torch.is_grad_enabled() or cache is None:
        return up(x, rows, cache, first, end)
    # not cache.fork(), which of a tape is a new tape
    caches, before = [cache], Cache.fork(cache)
    tape = getattr(cache, "tape", None)
    n_writes = len(tape.undo) if tape else 0

    def run(x: Tensor) -> list[Tensor]:
        if tape and not caches:
            tape.rewind(n_writes)
        return up(x, rows, caches.pop() if caches else Cache.fork(before), first, end)

    return checkpoint(run, x, use_reentrant=False, preserve_rng_state=random)
