"""The choice among cuBLAS's algorithms (kernels/products.py): it changes no bit."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from interpreted import DEVICE, GPU, randn

from kernels import products

HALF = torch.bfloat16, torch.float16
M, K, N = 256, 64, 192


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not GPU, reason="no CUDA device")(test))


def matrix(*shape, seed=0):
    return randn(*shape, seed=seed).to(torch.bfloat16)


class AsDocumented:
    """What products.py calls of cuBLASLt, on this machine's memory: three algorithms for whatever
    comes, of which the second is none."""

    STATUS = 0, 15, 0

    def __init__(self):
        self.made, self.calls = {}, 0

    def add(self, it, **what):
        it._obj.value = len(self.made) + 1
        self.made[it._obj.value] = what
        return 0

    def cublasLtMatmulDescCreate(self, it, compute, scale):
        assert (compute, scale) == (68, 0)  # CUBLAS_COMPUTE_32F, CUDA_R_32F
        return self.add(it, kind="product")

    def cublasLtMatmulPreferenceCreate(self, it):
        return self.add(it, kind="wishes")

    def cublasLtMatrixLayoutCreate(self, it, dtype, rows, columns, ld):
        dtype = {2: torch.float16, 14: torch.bfloat16}[dtype]
        sizes = dict(rows=rows.value, columns=columns.value, ld=ld.value)
        assert (type(rows), type(ld)) == (ctypes.c_uint64, ctypes.c_int64)
        return self.add(it, kind="layout", dtype=dtype, batch=1, apart=0, **sizes)

    def cublasLtMatmulDescSetAttribute(self, product, name, value, size):
        assert size.value == ctypes.sizeof(value._obj) == 4
        self.made[product.value][{3: "a", 4: "b"}[name]] = value._obj.value
        return 0

    def cublasLtMatrixLayoutSetAttribute(self, layout, name, value, size):
        assert size.value == ctypes.sizeof(value._obj) == {5: 4, 6: 8}[name]
        self.made[layout.value][{5: "batch", 6: "apart"}[name]] = value._obj.value
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, handle, product, a, b, c, d, wishes, most, found, n):
        assert self.made[wishes.value]["kind"] == "wishes" and c is d and most >= 3
        for i, status in enumerate(self.STATUS):
            found[i].status, found[i].data[0] = status, i
        n._obj.value = len(self.STATUS)
        return 0

    def matrices(self, address, layout):
        """A layout's (batch, rows, columns), column by column, at an address."""
        it = SimpleNamespace(**self.made[layout.value])
        count = (it.batch - 1) * it.apart + (it.columns - 1) * it.ld + it.rows
        memory = (ctypes.c_byte * (count * it.dtype.itemsize)).from_address(address.value)
        return torch.frombuffer(memory, dtype=it.dtype, count=count).as_strided(
            (it.batch, it.rows, it.columns), (it.apart, 1, it.ld))

    def cublasLtMatmul(self, handle, product, alpha, a, of_a, b, of_b, beta, c, of_c, d, of_d,
                       algorithm, workspace, size, stream):
        assert (alpha._obj.value, beta._obj.value, workspace, size.value) == (1, 0, None, 0)
        assert c.value == d.value and of_c is of_d and algorithm._obj.data[0] in (0, 2)
        how = self.made[product.value]
        a, b, d = (self.matrices(*pair) for pair in ((a, of_a), (b, of_b), (d, of_d)))
        a, b = a.mT if how["a"] else a, b.mT if how["b"] else b
        d.copy_(a.float() @ b.float())
        self.calls += 1
        return 0


@pytest.mark.skipif(GPU, reason="on a GPU: test_algorithms_have_the_bits_of_torch")
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("batch, m, k, n", [((), 4, 6, 5), ((3,), 4, 6, 5), ((), 1, 6, 5),
                                            ((2,), 4, 1, 1)], ids=str)
def test_arguments_are_as_documented(batch, m, k, n, dtype, monkeypatch):
    """Rows or columns in memory, and rows that lie apart."""
    stand_in = AsDocumented()
    monkeypatch.setattr(products, "library", lambda: stand_in)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))

    def forms(rows, columns):
        x = randn(*batch, rows, columns).to(dtype)
        yield x
        yield x.mT.contiguous().mT
        yield randn(*batch, rows, columns + 3).to(dtype)[..., :columns]

    for a in forms(m, k):
        for b in forms(k, n):
            out = torch.empty(*batch, m, n, dtype=dtype)
            ways = products.algorithms(a, b, out)
            for way in ways:
                way(a, b, out.fill_(float("nan")))
                assert (out - a.float() @ b.float()).abs().max() < 0.05
    assert len(ways) == 2 and stand_in.calls == 18


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
    def refuses(a, b, out):
        raise RuntimeError("status 15")

    ways = [way("first", 3), way("fast", 1), way("other bits", 0.5, one_bit), way("slow", 4),
            way("nothing", 0.1, lambda out: out.fill_(float("nan"))), refuses]
    assert products.fastest(ways, a, b, out).name == "fast"
    assert products.fastest(ways[2:], a, b, out).name == "other bits"
    with pytest.raises(RuntimeError, match="status 15"):
        products.fastest(ways[::-1], a, b, out)


@pytest.mark.parametrize("measure", [True, False])
def test_any_operands(measure):
    """Rows in more than one dimension, batches, views; on a CPU, and where nothing is measured, as
    PyTorch does."""
    a, b = matrix(2, 3, M, K), matrix(N, K, seed=1)
    assert torch.equal(products.matmul(a, b.mT, measure), a @ b.mT)
    for batch in (matrix(6, K, N, seed=2), b.mT.expand(6, K, N)):
        expected = a.flatten(0, 1) @ batch
        assert torch.equal(products.matmul(a.flatten(0, 1), batch, measure), expected)
    odd = matrix(1 + M * K)[1:].view(M, K)
    assert torch.equal(products.matmul(odd, b.mT, measure), odd @ b.mT)
    wide = torch.randn(M, K, device=DEVICE)
    assert torch.equal(products.matmul(wide, wide.mT, measure), wide @ wide.mT)
    none = a[0, 0, :0]
    assert products.matmul(none, b.mT, measure).shape == (0, N)
    assert len(products.ways) == (2 if GPU and measure else 0)


@on_gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
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
        assert close and max(close) < 5e-3, close
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = products.matmul(a, b, True)
        graph.replay()
        assert torch.equal(again, expected)
    assert len(products.ways) == 2


@on_gpu
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


@on_gpu
def test_without_room_to_look_for_one_there_is_torchs(monkeypatch):
    def no_room(x):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(products, "like", no_room)
    a, b = matrix(M, K), matrix(K, N, seed=1)
    assert torch.equal(products.matmul(a, b, True), a @ b)
    assert list(products.ways.values()) == [products.into]


@on_gpu
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
