"""Triton for the tests of kernels: on a GPU as it is, elsewhere interpreted."""

import os

import pytest
import torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton", reason="the kernels need Triton (pip install triton)")

if not GPU:
    import triton.language as tl
    from triton.runtime import interpreter

    def patch_tensor(tensor, scope, patch=interpreter._patch_lang_tensor):
        """Loop bounds are arrays of one element, which NumPy 2.4 no longer takes for integers."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def reduce_tile(self, kind, desc, value, indices):
        """The copy engine's addition, which the interpreter lacks."""
        a, b = self.create_descriptor_load(desc, indices, None, None).data, value.data
        if value.dtype.is_bf16():  # kept as uint16
            a, b = (torch.from_numpy(x).view(torch.bfloat16) for x in (a, b))
            total = (a + b).view(torch.uint16).numpy()
        else:
            total = a + b
        self.create_descriptor_store(desc, interpreter.TensorHandle(total, value.dtype), indices)

    def dot(self, a, b, *rest, product=interpreter.InterpreterBuilder.create_dot):
        """The interpreter keeps bfloat16 as uint16, and would multiply these."""
        a, b = (interpreter.TensorHandle(
            torch.from_numpy(x.data).view(torch.bfloat16).float().numpy(), tl.float32)
            if x.dtype.scalar.is_bf16() else x for x in (a, b))
        return product(self, a, b, *rest)

    interpreter._patch_lang_tensor = patch_tensor
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter.InterpreterBuilder.create_descriptor_reduce = reduce_tile


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def close(mine, theirs, tol=1e-5):
    assert mine.shape == theirs.shape and mine.isfinite().all()
    assert (mine.double() - theirs.double()).norm() <= tol * theirs.double().norm()
