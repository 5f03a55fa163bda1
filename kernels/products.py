"""
Products of matrices by cuBLAS, in two ways that PyTorch has none of.

`matmul` takes the fastest of the algorithms that cuBLAS names for a product, where PyTorch takes
the first: gate and up of a group step of 4,096 tokens 19.7 us for 25.3, of 32,768 tokens 141 for
173 (H200). They are timed when a product of new shapes is first met while gradients are recorded.
Only those take part that give the same bits as PyTorch's, as all do that sum in one go, so that no
result depends on what was measured.

`add_products` adds products of one shape to as many sums by one call (see linear.py).
"""

import ctypes
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

# of cuBLAS: cudaDataType; CUBLAS_OP_N and _T, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT
TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
AS_IT_IS, TRANSPOSED, IN_FLOAT32, ANY_WAY = 0, 1, 68, -1
# of cuBLASLt: CUBLASLT_MATMUL_DESC_TRANSA and _TRANSB; CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT and
# _STRIDED_BATCH_OFFSET; the alignment in bytes that its heuristic takes for granted
TRANSPOSE_A, TRANSPOSE_B, BATCH, BATCH_STRIDE, ALIGNMENT = 3, 4, 5, 6, 256

MOST = 16  # algorithms that are tried
TIMES, ROUNDS = 10, 3  # calls that are timed at once; the best of so many counts
DELAY = 1_000_000  # cycles of the GPU in which these are launched

Way = Callable[[Tensor, Tensor, Tensor], None]  # of computing the third = first @ second
ways: dict[tuple, Way] = {}  # by shapes and strides


@cache
def library() -> ctypes.CDLL | None:
    """PyTorch's own, in which the names of those that it needs are found, too; None without a GPU
    or in another build."""
    try:
        functions = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
        functions.cublasGemmBatchedEx, functions.cublasLtMatmulAlgoGetHeuristic  # noqa: B018
    except (OSError, AttributeError):
        return None
    return functions if torch.cuda.is_available() else None


# ---- the fastest algorithm ----------------------------------------------------------------------


class Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [("data", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t),
                ("status", ctypes.c_int), ("waves", ctypes.c_float), ("unused", ctypes.c_int * 4)]


def matmul(a: Tensor, b: Tensor, measure: bool) -> Tensor:
    """a @ b, of a (..., K) by a matrix, or of two equal batches of matrices. An algorithm that was
    found is taken; one is looked for if `measure`, unless a CUDA graph is being recorded."""
    if a.dim() != b.dim():
        return matmul(a.flatten(0, -2), b, measure).unflatten(0, a.shape[:-1])
    if (a.data_ptr() | b.data_ptr()) % ALIGNMENT:
        return a @ b
    key = a.dtype, b.dtype, a.device, a.shape, a.stride(), b.shape, b.stride()
    way = ways.get(key)
    if way is None and not (measure and fits(a, b)):
        return a @ b
    out = a.new_empty(*a.shape[:-1], b.size(-1))
    if way is None:
        try:
            way = fastest([into, *algorithms(a, b, out)], like(a), like(b), out)
        except torch.OutOfMemoryError:  # which later calls need not
            way = into
        ways[key] = way
    way(a, b, out)
    return out


def fits(*operands: Tensor) -> bool:
    """Does cuBLASLt take these as they are, and may it be timed now?"""
    return library() is not None and not torch.cuda.is_current_stream_capturing() and all(
        x.is_cuda and x.dtype == operands[0].dtype and x.dtype in (torch.bfloat16, torch.float16)
        and x.dim() in (2, 3) and x.numel() > 0 and 0 not in x.stride()
        and min(x.stride()[-2:]) == 1
        and max(x.stride()[-2:]) >= x.size(-1 if x.stride(-1) == 1 else -2) for x in operands)


def into(a: Tensor, b: Tensor, out: Tensor):
    torch.matmul(a, b, out=out)


def like(x: Tensor) -> Tensor:
    """Random numbers in its place: where weights begin as zeros, all products are the same."""
    numbers = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return numbers.normal_(generator=torch.Generator(x.device).manual_seed(0))


def fastest(candidates: list[Way], a: Tensor, b: Tensor, out: Tensor) -> Way:
    """The fastest of those whose a @ b has the bits of the first one's, by some of its rows; a
    refusal is the first one's alone."""
    alike, sample = [], out[..., ::out.size(-2) // 64 | 1, :]
    for way in candidates:
        out.fill_(float("nan"))
        try:
            way(a, b, out)
        except RuntimeError:
            if not alike:
                raise
            continue
        if not alike:
            expected = sample.clone()
        if torch.equal(sample, expected):
            alike.append(way)
    times = [min(time_of(partial(way, a, b, out)) for _ in range(ROUNDS)) for way in alike]
    return alike[times.index(min(times))]


def time_of(run: Callable[[], None]) -> float:
    """Milliseconds of TIMES calls, behind each other on the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(DELAY)
    begin.record()
    for _ in range(TIMES):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def algorithms(a: Tensor, b: Tensor, out: Tensor) -> list[Way]:
    """Those that need no memory of their own."""
    # it takes rows for columns: out^T = b^T @ a^T
    product = made("MatmulDescCreate", IN_FLOAT32, TYPES[torch.float32])
    for name, x in ((TRANSPOSE_A, b), (TRANSPOSE_B, a)):
        how = ctypes.c_int32(AS_IT_IS if x.stride(-1) == 1 else TRANSPOSED)
        call("MatmulDescSetAttribute", product, name, ctypes.byref(how), ctypes.c_size_t(4))
    of_a, of_b, of_out = (layout(x) for x in (a, b, out))
    wishes = made("MatmulPreferenceCreate")
    found, n = (Algorithm * MOST)(), ctypes.c_int()
    library().cublasLtMatmulAlgoGetHeuristic(  # whose status says what n does
        handle(), product, of_b, of_a, of_out, of_out, wishes, MOST, found, ctypes.byref(n))
    one, zero = (ctypes.byref(ctypes.c_float(x)) for x in (1, 0))

    def multiply(algorithm, a, b, out):
        to_a, to_b, to_out = (ctypes.c_void_p(x.data_ptr()) for x in (a, b, out))
        call("Matmul", handle(), product, one, to_b, of_b, to_a, of_a, zero, to_out, of_out,
             to_out, of_out, algorithm, None, ctypes.c_size_t(0),
             ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))

    return [partial(multiply, ctypes.byref(it)) for it in found[:n.value] if it.status == 0]


def layout(x: Tensor) -> ctypes.c_void_p:
    """How cuBLAS finds a matrix, or equal ones in a batch, column by column."""
    inner, outer = (-1, -2) if x.stride(-1) == 1 else (-2, -1)
    its = made("MatrixLayoutCreate", TYPES[x.dtype], ctypes.c_uint64(x.size(inner)),
               ctypes.c_uint64(x.size(outer)), ctypes.c_int64(x.stride(outer)))
    if x.dim() == 3:
        for name, value in ((BATCH, ctypes.c_int32(len(x))),
                            (BATCH_STRIDE, ctypes.c_int64(x.stride(0)))):
            size = ctypes.c_size_t(ctypes.sizeof(value))
            call("MatrixLayoutSetAttribute", its, name, ctypes.byref(value), size)
    return its


def handle() -> ctypes.c_void_p:
    """PyTorch's handle of cuBLAS, which is one of cuBLASLt, too."""
    return ctypes.c_void_p(torch.cuda.current_blas_handle())


def made(what: str, *arguments) -> ctypes.c_void_p:
    """What cuBLASLt creates, for as long as the process lives."""
    it = ctypes.c_void_p()
    call(what, ctypes.byref(it), *arguments)
    return it


def call(name: str, *arguments):
    status = getattr(library(), "cublasLt" + name)(*arguments)
    if status:
        raise RuntimeError(f"cublasLt{name} failed with status {status}")


# ---- sums of products ---------------------------------------------------------------------------


def add_product(total: Tensor, a: Tensor, b: Tensor):
    """total += a @ b, summed in total's precision; matrices or batches of them."""
    add = torch.addmm if a.dim() == 2 else torch.baddbmm
    if a.dtype == total.dtype:
        add(total, a, b, out=total)
    elif total.is_cuda:
        add(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a.to(total.dtype) @ b.to(total.dtype)


def add_products(products: list[tuple[Tensor, Tensor, Tensor]]):
    """total += dy^T @ x for all (total (E, D), dy (N, E), x (N, D)), whose types, shapes
    and strides are equal. Raises RuntimeError if cuBLAS refuses."""
    total, dy, x = products[0]
    # cuBLAS reads 16 bytes at a time, and does not see which addresses are no multiple of that
    fit = total.dtype == torch.float32 and x.dtype in TYPES and all(
        m.stride(1) == 1 and m.stride(0) >= m.size(1) and m.data_ptr() % 16 == 0
        for m in (total, dy, x))
    gemm = batched_gemm() if fit and len(products) > 1 else None
    if gemm is None:
        for total, dy, x in products:
            add_product(total, dy.mT, x)
        return
    totals, dys, xs = zip(*products)
    at = torch.empty(3, len(products), dtype=torch.int64, device=x.device)
    addresses_kernel[1,](xs + dys + totals, at, num_warps=1)
    a, b, c = (row.data_ptr() for row in at)
    one = ctypes.byref(ctypes.c_float(1))
    # it takes rows for columns: total^T (D, E) += x^T (D, N) @ dy (N, E), of which dy is transposed
    status = gemm(torch.cuda.current_blas_handle(), AS_IT_IS, TRANSPOSED, *total.mT.shape, len(x),
                  one, a, TYPES[x.dtype], x.stride(0), b, TYPES[dy.dtype], dy.stride(0),
                  one, c, TYPES[total.dtype], total.stride(0), len(products), IN_FLOAT32, ANY_WAY)
    if status:
        raise RuntimeError(f"cublasGemmBatchedEx failed with status {status}")


@triton.jit
def addresses_kernel(tensors, out):
    """out[i] = where tensor i is. A CUDA graph keeps a kernel's arguments; of a copy from the host
    it would keep where to read at each replay."""
    for i in tl.static_range(len(tensors)):
        tl.store(out + i, tensors[i].to(tl.int64))


@cache
def batched_gemm():
    """cublasGemmBatchedEx; None, so that products go one by one, without the library."""
    if library() is None:
        return None
    gemm, i, p = library().cublasGemmBatchedEx, ctypes.c_int, ctypes.c_void_p
    gemm.restype = i
    gemm.argtypes = p, i, i, i, i, i, p, p, i, i, p, i, i, p, p, i, i, i, i, i
    return gemm
