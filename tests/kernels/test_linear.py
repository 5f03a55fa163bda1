"""Gradients of weights that wait for each other (kernels/linear.py) against those of autograd."""

import ctypes

import pytest
import torch
from interpreted import DEVICE, GPU, close, randn
from small import random_tokens

from baselines import build
from kernels import graphs, known, linear, products, twin
from model import ModelConfig
from running.optimizers import flat_gradient
from solvers import solve

HALF = torch.bfloat16, torch.float16
D, E, N = 16, 24, 6  # of most products


def in_memory(address, rows, columns, ld, dtype):
    """The matrix (rows, columns) whose columns, ld elements from one to the next, are there."""
    count = (columns - 1) * ld + rows
    memory = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count).as_strided((rows, columns), (1, ld))


def as_documented(handle, transpose_a, transpose_b, m, n, k, alpha, a, a_type, lda, b, b_type, ldb,
                  beta, c, c_type, ldc, count, compute, algorithm):
    """cublasGemmBatchedEx of this machine's memory: C = A B^T + C, column by column."""
    assert (transpose_a, transpose_b, compute, algorithm) == (0, 1, 68, -1)
    assert alpha._obj.value == beta._obj.value == 1
    of = {0: torch.float32, 2: torch.float16, 14: torch.bfloat16}
    a, b, c = (in_memory(x, count, 1, count, torch.int64)[:, 0].tolist() for x in (a, b, c))
    assert len(set(c)) == count  # of two sums into one place at a time, one is lost
    for to_a, to_b, to_c in zip(a, b, c):
        left, right = in_memory(to_a, m, k, lda, of[a_type]), in_memory(to_b, n, k, ldb, of[b_type])
        in_memory(to_c, m, n, ldc, of[c_type]).add_(left.float() @ right.float().mT)
    return 0


@pytest.fixture
def calls(monkeypatch):
    """What is called in one: (E, rows, how many)."""
    made, gemm = [], products.batched_gemm() or as_documented

    def call(*arguments):
        made.append((arguments[4], arguments[5], arguments[17]))
        return gemm(*arguments)

    monkeypatch.setattr(products, "batched_gemm", lambda: call)
    if not GPU:
        monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 0)
    return made


def weights(count, rows=E, columns=D, dtype=torch.bfloat16, waiting=None):
    """Linears (rows, columns), which are neighbours in memory, and where they wait."""
    waiting = waiting or linear.Waiting()
    layers = [linear.Linear(torch.nn.Linear(columns, rows, bias=False).to(DEVICE))
              for _ in range(count)]
    flat_gradient(torch.nn.ModuleList(layers))
    for seed, layer in enumerate(layers):
        layer.weight.grad.copy_(randn(rows, columns, seed=seed + 99))  # to which is added
        layer.copy, layer.waiting = layer.weight.detach().to(dtype), waiting
    return layers, waiting


def matrix(rows, columns, seed, dtype=torch.bfloat16):
    return randn(rows, columns, seed=seed).to(dtype)


def check(sums, flush):
    """After `flush` a weight's gradient has become more by dy^T @ x: sums of (weights, dy, x)."""
    expected = {}
    for parts, dy, x in sums:
        more = (dy.double().mT @ x.double()).split([len(part.weight) for part in parts])
        for part, its in zip(parts, more):
            expected[part.weight] = expected.get(part.weight, part.weight.grad.double()) + its
    for parts, dy, x in sums:
        parts[0].waiting.add(parts, dy, x)
    flush()
    for weight, total in expected.items():
        close(weight.grad, total)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_products_of_equal_shape_are_one_call(dtype, calls):
    layers, waiting = weights(3, dtype=dtype)
    down, _ = weights(2, D, E, dtype, waiting)
    check([*(((a,), matrix(N, E, i, dtype), matrix(N, D, i + 5, dtype))
             for i, a in enumerate(layers)),
           *(((a,), matrix(N, D, i, dtype), matrix(N, E, i + 5, dtype))
             for i, a in enumerate(down)),
           ((down[0], down[1]), matrix(N, 2 * D, 3, dtype), matrix(N, E, 4, dtype))],
          waiting.flush)
    assert calls == [(E, N, 3), (D, N, 2)]  # and one that is alone


@pytest.mark.parametrize("of_dy, of_x", [(64, D), (E, 64), (35, 37)])
def test_rows_may_lie_apart(of_dy, of_x, calls):
    """Those of dy and x, and also of the gradient, are parts of longer ones."""
    layers, waiting = weights(2)
    for layer in layers:
        layer.weight.grad = torch.zeros(E, of_x + 3, device=DEVICE)[:, :D]
    check([((a,), matrix(N, of_dy, i)[:, min(8, of_dy - E):][:, :E],
            matrix(N, of_x, i + 5)[:, min(8, of_x - D):][:, :D])
           for i, a in enumerate(layers)], waiting.flush)
    assert calls == [(E, N, 2)]


def views_of(x):
    """Matrices of the same shape that cuBLAS cannot read, or could read wrongly."""
    rows, columns = x.shape
    yield matrix(rows, 64, 1)[:, 1:1 + columns]  # not aligned
    yield x[:1].expand(rows, columns)
    yield x[:, :1].expand(rows, columns)
    yield matrix(columns, rows, 2).mT


@pytest.mark.parametrize("view", range(4), ids=["odd address", "one row", "one column", "columns"])
@pytest.mark.parametrize("which", ["dy", "x"])
def test_others_go_one_by_one(which, view, calls):
    layers, waiting = weights(2)
    check([((a,), *(list(views_of(m))[view] if which == name else m
                    for name, m in (("dy", matrix(N, E, i)), ("x", matrix(N, D, i + 5)))))
           for i, a in enumerate(layers)], waiting.flush)
    assert calls == []


def test_unlike_products_are_not_one_call(calls):
    """Of other strides, or of other addresses, or of other gradients."""
    layers, waiting = weights(6)
    dy, x = matrix(N, E, 1), [matrix(N, D, i) for i in range(3)]
    x += [matrix(N, 64, 3)[:, 8:8 + D], matrix(N, 64, 4)[:, 9:9 + D], matrix(N, D, 5)]
    layers[2].weight.grad = torch.empty(E, 64, device=DEVICE)[:, :D].copy_(layers[2].weight.grad)
    check([((a,), dy, x_) for a, x_ in zip(layers, x)], waiting.flush)
    assert calls == [(E, N, 3)]


def test_a_step_goes_when_the_next_begins(calls, monkeypatch):
    monkeypatch.setattr(linear, "FEW_ROWS", N)
    layers, waiting = weights(3)
    step = [((a,), matrix(N, E, i), matrix(N, D, i + 5)) for i, a in enumerate(layers)]
    seen = []

    def flush():
        seen.extend(calls)
        waiting.flush()

    check([*step, *step, step[0]], flush)
    assert seen == [(E, N, 3), (E, N, 3)] and calls == seen
    assert not waiting.pairs


def test_few_rows_wait_for_those_of_the_next_steps(calls, monkeypatch):
    monkeypatch.setattr(linear, "FEW_ROWS", 2 * N + 1)
    layers, waiting = weights(3)
    step = [((a,), matrix(N, E, i), matrix(N, D, i + 5)) for i, a in enumerate(layers)]
    check(4 * step, waiting.flush)
    assert calls == [(E, 3 * N, 3), (E, N, 3)]


def test_many_rows_do_not_wait(calls, monkeypatch):
    monkeypatch.setattr(linear, "MANY_ROWS", N - 1)
    layers, _ = weights(2)
    check([((a,), matrix(N, E, i), matrix(N, D, i + 5)) for i, a in enumerate(layers)],
          lambda: None)
    assert calls == []


@pytest.mark.parametrize("neighbours", [True, False])
def test_weights_that_count_as_one(neighbours, calls):
    parts, waiting = weights(4)
    if not neighbours:
        for part in parts:
            part.weight.grad = torch.cat([part.weight.grad, part.weight.grad[:1]])[:E]
    check([((a, b), matrix(N, 2 * E, i), matrix(N, D, i + 5))
           for i, (a, b) in enumerate((parts[:2], parts[2:]))], waiting.flush)
    assert calls == ([(2 * E, N, 2)] if neighbours else [(E, N, 4)])


def test_no_gradient_is_twice_in_a_call(calls):
    """Where modules share a weight, alone or with others."""
    (a, b, c), waiting = weights(3)
    again = linear.Linear(a)
    again.waiting = waiting
    check([((part,), matrix(N, E, i), matrix(N, D, i + 5))
           for i, part in enumerate((a, b, again, c))], waiting.flush)
    assert calls == [(E, N, 3)]
    calls.clear()
    check([((b, c), matrix(N, 2 * E, 1), matrix(N, D, 2)),
           ((a, b), matrix(N, 2 * E, 3), matrix(N, D, 4))], waiting.flush)
    assert calls == []


def test_a_weight_without_a_gradient_gets_one(calls):
    layers, waiting = weights(2)
    for layer in layers:
        layer.weight.grad = None
        linear.linear(matrix(N, D, 1), layer).sum().backward()
    assert layers[0].weight.grad is None
    waiting.flush()
    for layer in layers:
        close(layer.weight.grad, matrix(N, D, 1).double().sum(0).expand(E, D))


def test_frozen_weights_get_none(calls):
    layers, waiting = weights(2)
    frozen = layers[0].weight.requires_grad_(False)
    frozen.grad = None
    x = matrix(N, D, 1).requires_grad_()
    sum(linear.linear(x, layer).sum() for layer in layers).backward()
    assert list(waiting.pairs) == [(layers[1],)]
    with torch.no_grad():
        waiting.flush()
    assert frozen.grad is None and x.grad.any()


def test_what_cublas_refuses_is_an_error(monkeypatch):
    monkeypatch.setattr(products, "batched_gemm", lambda: lambda *arguments: 7)
    if not GPU:
        monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 0)
    layers, waiting = weights(2)
    for layer in layers:
        waiting.add((layer,), matrix(N, E, 1), matrix(N, D, 2))
    with pytest.raises(RuntimeError, match="status 7"):
        waiting.flush()


@pytest.mark.skipif(GPU, reason="on a GPU in bfloat16: test_twins_in_bfloat16")
def test_all_layers_of_a_twin_wait_together(calls):
    torch.manual_seed(1)
    model = build(ModelConfig(vocab_size=24, eos_id=0, n_layer=3, n_embd=16, n_head=4, n_kv_head=2,
                              head_dim=16, n_hidden=32, kv="vanilla"))
    idx, targets = random_tokens(1, N, 1, vocab_size=24), random_tokens(1, N, 2, vocab_size=24)
    flat = flat_gradient(model)
    model.loss(solve(model, idx).final, targets).backward()
    expected = flat.clone()
    flat.zero_()
    other = twin.twin(model, torch.float32, True, known.unknown(model))
    other.loss(solve(other, idx).final, targets).backward()
    assert calls == []
    other.collect()
    close(flat, expected, tol=1e-4)
    # down, gate and up, out, queries; and keys and values, which are no neighbours of these
    assert calls == [(16, N, 3), (64, N, 3), (16, N, 3), (64, N, 3), (32, N, 6)]


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_in_a_graph_of_other_contents(dtype, calls):
    """The addresses are the graph's: what it reads there is each replay's."""
    layers, waiting = weights(4, 576, 512, dtype)

    def step(*inputs):
        for _ in range(2):
            for layer, dy, x in zip(layers, inputs[::2], inputs[1::2]):
                waiting.add((layer,), 2 * dy, x + 1)  # tensors of the graph's own memory
        waiting.flush()

    run = graphs.Graphed(step)
    for turn in range(5):
        inputs = [matrix(4096, n, 10 * turn + i, dtype) for i, n in enumerate(4 * (576, 512))]
        expected = [torch.addmm(a.weight.grad, 2 * (2 * dy).mT, x + 1, out_dtype=torch.float32)
                    for a, dy, x in zip(layers, inputs[::2], inputs[1::2])]
        run(*inputs)
        for layer, total in zip(layers, expected):
            close(layer.weight.grad, total, tol=1e-4)
    assert run.graph is not None and calls == 6 * [(576, 4096, 4)]
