"""The choice among cuBLAS's algorithms (kernels/products.py): it changes no bit."""

from types import SimpleNamespace

import pytest
import torch
from interpreted import DEVICE, GPU, randn

from kernels import products

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="no CUDA device")]
gpu = lambda test: on_gpu[0](on_gpu[1](test))  # noqa: E731
M, K, N = 256, 64, 192


def matrix(*shape, seed=0):
    return randn(*shape, seed=seed).to(torch.bfloat16)


@pytest.fixture(autouse=True)
def none_found(monkeypatch):
    monkeypatch.setattr(products, "ways", {})


def test_the_fastest_of_those_with_the_same_bits(monkeypatch):
    a, b = matrix(M, K), matrix(K, N, seed=1)
    out = torch.empty(M, N, dtype=a.dtype, device=a.device)
    took = {}

    def way(name, milliseconds, change=lambda out: None):
        def multiply(a, b, out):
            products.into(a, b, out)
            change(out)
            took["last"] = milliseconds
        multiply.name = name
        return multiply

    def time_of(run):
        run()
        return took["last"]

    def one_bit(out):
        out.view(torch.int16)[-4:] += 1

    monkeypatch.setattr(products, "time_of", time_of)
    ways = [way("first", 3), way("fast", 1), way("other bits", 0.5, one_bit), way("slow", 4),
            way("nothing", 0.1, lambda out: out.fill_(float("nan")))]
    assert products.fastest(ways, a, b, out).name == "fast"
    assert products.fastest(ways[2:], a, b, out).name == "other bits"


@pytest.mark.parametrize("measure", [True, False])
def test_any_operands(measure):
    """Rows in more than one dimension, batches, views; on a CPU, and where nothing is measured, as
    PyTorch does."""
    a, b = matrix(2, 3, M, K), matrix(N, K, seed=1)
    assert torch.equal(products.matmul(a, b.mT, measure), a @ b.mT)
    batch = matrix(6, K, N, seed=2)
    assert torch.equal(products.matmul(a.flatten(0, 1), batch, measure), a.flatten(0, 1) @ batch)
    odd = matrix(1 + M * K)[1:].view(M, K)
    assert torch.equal(products.matmul(odd, b.mT, measure), odd @ b.mT)
    wide = torch.randn(M, K, device=DEVICE)
    assert torch.equal(products.matmul(wide, wide.mT, measure), wide @ wide.mT)
    none = a[0, 0, :0]
    assert products.matmul(none, b.mT, measure).shape == (0, N)
    assert len(products.ways) == (2 if GPU and measure else 0)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(4096, 512, 3072), (4096, 3072, 512), (4096, 576, 512),
                                   (32, 4096, 512, 288), (4096, 512, 50257), (1000, 96, 40)],
                         ids=str)
def test_algorithms_have_the_bits_of_torch(shape, dtype):
    """Of all ways that are found, by rows or by columns in memory, in a graph, too."""
    *batch, m, k, n = shape
    a = torch.randn(*batch, m, k, device=DEVICE).to(dtype)
    for b in (torch.randn(*batch, k, n, device=DEVICE).to(dtype),
              torch.randn(*batch, n, k, device=DEVICE).to(dtype).mT):
        expected = torch.matmul(a, b)
        assert torch.equal(products.matmul(a, b, True), expected)
        out = torch.empty_like(expected)
        close = [way(a, b, out.fill_(float("nan"))) or
                 ((out - expected).float().norm() / expected.float().norm()).item()
                 for way in products.algorithms(a, b, out)]
        assert len(close) > 1 and max(close) < 5e-3, close
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = products.matmul(a, b, True)
        graph.replay()
        assert torch.equal(again, expected)
    assert len(products.ways) == 2


@gpu
def test_none_is_looked_for_in_a_graph_or_for_a_stranger():
    a, b = matrix(M, K), matrix(K, N, seed=1)
    torch.matmul(a, b)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        products.matmul(a, b, True)
    products.matmul(a, b, False)
    assert products.ways == {}
    products.matmul(a, b, True)
    assert len(products.ways) == 1
    products.matmul(a + 1, b + 1, False)
    assert len(products.ways) == 1


@gpu
def test_what_cublas_refuses_is_an_error(monkeypatch):
    refuses = SimpleNamespace(cublasLtMatmulDescCreate=lambda *arguments: 7)
    monkeypatch.setattr(products, "library", lambda: refuses)
    with pytest.raises(RuntimeError, match="cublasLtMatmulDescCreate failed with status 7"):
        products.matmul(matrix(M, K), matrix(K, N), True)


@pytest.mark.parametrize("has, gpu", [(True, True), (True, False), (False, True)])
def test_without_the_library_or_a_gpu_there_is_none(has, gpu, monkeypatch):
    assert (products.library() is not None) == (products.batched_gemm() is not None) == GPU
    names = ("cublasGemmBatchedEx", "cublasLtMatmulAlgoGetHeuristic") if has else ()
    functions = SimpleNamespace(**{name: SimpleNamespace() for name in names})
    monkeypatch.setattr(products.ctypes, "CDLL", lambda path: functions)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    found = products.library.__wrapped__()
    assert (found is not None) == (has and gpu)
    monkeypatch.setattr(products, "library", lambda: found)
    assert (products.batched_gemm.__wrapped__() is not None) == (has and gpu)
