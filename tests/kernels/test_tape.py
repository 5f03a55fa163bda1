"""Writes and reads of a cache that remembers what it overwrote (kernels/tape.py)."""

import pytest
import torch
from exact import norm_rotate
from interpreted import DEVICE, GPU, close, randn

from attention import Rows, attend
from kernels.norms import Gain
from kernels.tape import TapeCache
from model import rotary_tables

TOL = 5e-3 if GPU else 1e-4  # a GPU multiplies float32 as tf32
B, S, d = 2, 12, 16
# (group, of so many) that is written, or None for a read; and the writes that are known to be the
# first where they are
ORDERS = {
    "groups": ([(0, 2), (1, 2), None, (0, 2), None, (1, 2), None], [0, 1]),
    "twice before a read": ([(0, 2), (0, 2), (1, 2), None], [0]),
    "another partition": ([(0, 2), (0, 1), None], [0]),
    "finer, then whole": ([(0, 3), (1, 3), (2, 3), (0, 1), (0, 3), None], [0, 1, 2]),
    "after a read": ([(0, 2), None, (1, 2), None], [0]),
}


@pytest.mark.parametrize("order, first", ORDERS.values(), ids=ORDERS)
def test_gradients_of_writes_and_reads(order, first):
    gain = 1 + 0.3 * randn(1, d)
    index = torch.arange(S, device=DEVICE)[None].expand(B, S)
    rows = Rows(slice(0, None, 1), torch.zeros_like(index).int(), (index + 1).int(),
                *rotary_tables(index, d))
    writes = [None if it is None else rows.at(slice(it[0], None, it[1])) for it in order]
    inputs = [randn(B, S, 1, d, seed=i) if at is None else
              randn(2, 1, B, at.start.size(1), d, seed=i) for i, at in enumerate(writes)]

    cache = TapeCache(*torch.zeros(2, 1, B, S, 1, d, device=DEVICE))
    mine, of_first, write = [x.clone().requires_grad_() for x in inputs], [], cache.tape.write

    def remembered(*arguments):
        n, is_first = write(*arguments)
        of_first.extend([n - 1] * is_first)
        return n, is_first

    cache.tape.write = remembered
    k, v = torch.zeros(2, B, S, 1, d, device=DEVICE, dtype=torch.float64)
    theirs, outs, expected = [x.double().requires_grad_() for x in inputs], [], []
    for at, x, y in zip(writes, mine, theirs):
        if at is None:
            outs.append(cache.attend(x, 0, rows))
            expected.append(attend(y, k, v, rows))
        else:
            cache.put_projected(at, x, Gain(gain))
            new_k, new_v = y[:, 0].unflatten(-1, (1, d))
            k, v = k.clone(), v.clone()
            k[:, at.columns] = norm_rotate(new_k, gain[0].double(), at.cos.double(),
                                           at.sin.double())
            v[:, at.columns] = new_v
    assert of_first == first
    for a, b in zip(outs, expected):
        close(a, b, TOL)
    total = [sum((i + 1) * o.square().sum() for i, o in enumerate(x)) for x in (outs, expected)]
    grads = torch.autograd.grad(total[1], theirs, allow_unused=True)
    for a, b in zip(torch.autograd.grad(total[0], mine), grads):
        if b is None:  # overwritten before anybody read it
            assert not a.any()
        else:
            close(a, b, TOL)
