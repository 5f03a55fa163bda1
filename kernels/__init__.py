"""
The one door to what makes a model fast: `accelerate`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch


class Fast:
    """A model as it is run: what `accelerate` returns."""

    def __init__(self, model, dtype: torch.dtype):
        self.model, self.dtype = model, dtype

    def __str__(self):
        return f"plain PyTorch, {str(self.dtype).removeprefix('torch.')}"

    def autocast(self):
        """Context of a forward pass."""
        kind = next(self.model.parameters()).device.type
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(kind, self.dtype)

    def graphed(self, function: Callable) -> Callable:
        return function

    def after_backward(self):
        pass

    def after_step(self):
        pass


def accelerate(model, dtype: torch.dtype, compile: bool | None = None, kernels: bool = True,
               training: bool = False) -> Fast:
    """The model, made fast where the hardware has it."""
    return Fast(model, dtype)
