"""
The one door to what makes a model fast: `accelerate`, which training, sampling, evaluation and
benches call. Everything else in this folder is behind it; the paper's files know nothing of it.
"""

import contextlib
import copy
import os
import shutil
from collections.abc import Callable

import torch

import decoding
from configurator import UserError
from kernels import graphs
from kernels.recompute import recomputing
from model import Decoder

HALF = torch.bfloat16, torch.float16


def accelerate(model: Decoder, dtype: torch.dtype, compile: bool | None = None,
               kernels: bool = True, training: bool = False, graph: bool | None = None,
               recompute: bool = False) -> "Fast":
    """The model as it runs fastest where it is, computing in dtype; print the result, which says
    what is on.

    On CUDA, unless `compile` is false: the kernels in half precision, unless `kernels` is false,
    and CUDA graphs, unless `graph` is false. Elsewhere: plain PyTorch, compiled if `compile` is
    true. With `training`, parameters stay in float32; otherwise a model without kernels is cast.
    `recompute` saves memory in training, of systems that iterate, for time (recompute.py).
    Raises UserError for compile=True where there is no C compiler, and for recompute=True and a
    system that needs one pass.
    """
    on_cuda = model.embed.weight.is_cuda
    if compile is None:
        compile = on_cuda
    elif compile and not compiler():
        raise UserError("compile=True: there is no C compiler here (cc, gcc or clang), which "
                        "torch.compile needs; --compile=false goes without")
    fast = Fast(model, dtype, on_cuda and compile and graph is not False)
    if not compile:
        fast.remarks.append("not compiled")
    elif not compiler():
        compile = False
        fast.remarks.append("not compiled, as there is no C compiler")
    else:  # a graph for each shape and gradient mode, of several models
        torch._dynamo.config.recompile_limit = 256
    if on_cuda and kernels and compile and dtype in HALF:
        fast.use_kernels(training)
    if fast.twin is None:
        if not training:
            fast.model = model.to(dtype)
        if compile:
            fast.model = compile_pieces(fast.model)
            fast.remarks.insert(0, "compiled")
    if recompute:
        if not model.iterates:
            raise UserError(f"recompute=True: kv={model.config.kv} has no passes to compute again; "
                            "it takes systems that iterate")
        fast.model = recomputing(fast.model, random=not fast.knows_block)
        fast.remarks.append("recomputing")
        if fast.graph and not fast.knows_block:  # in a graph no number is drawn a second time
            fast.graph = False
            fast.remarks.append("no CUDA graph, as the block may draw random numbers")
    return fast


def compiler() -> bool:
    """Is there a C compiler, which torch.compile and Triton need?"""
    return any(map(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang", "cl"))))


class Fast:
    """A model and how it is run."""

    def __init__(self, model: Decoder, dtype: torch.dtype, graph: bool):
        self.model, self.dtype, self.graph = model, dtype, graph
        self.twin = None  # of kernels/twin.py, if that is what runs
        self.plainly = True  # do products need autocast to be in half precision?
        self.knows_block = False  # do kernels stand for it, which draw no random numbers?
        self.remarks: list[str] = []
        self.decoding = graphs.Decoding if graph else decoding.Decoding

    def __str__(self):
        """In one line, what is on."""
        what = ["plain PyTorch" if self.twin is None else "kernels", *self.remarks]
        if self.graph:
            what.append("CUDA graph")
        return f"{str(self.dtype).removeprefix('torch.')}, {', '.join(what)}"

    def use_kernels(self, training: bool):
        """Make a twin, if Triton is here and knows the model; say what it does not know."""
        try:
            from kernels import known, twin
        except ImportError:
            return self.remarks.append("no kernels, as Triton is not installed")
        unknown = known.unknown(self.model)
        if unknown & {"attention", "loss", "recurrent"}:
            return self.remarks.append("no kernels, which do not know this model's "
                                       + ", ".join(sorted(unknown)))
        self.twin = self.model = twin.twin(self.model, self.dtype, training, unknown)
        self.plainly, self.knows_block = self.twin.plainly, "block" not in unknown
        unknown -= {"decoding", "choice"}  # slower, but no other path
        if unknown:
            self.remarks.append(f"plain {', '.join(sorted(unknown))}, which they do not know")

    def autocast(self):
        """The context of a forward pass: half precision where the model itself is in another."""
        weight = self.model.embed.weight
        if self.dtype not in HALF or weight.dtype == self.dtype or not self.plainly:
            return contextlib.nullcontext()
        return torch.autocast(weight.device.type, self.dtype)

    def graphed(self, function: Callable) -> Callable:
        """A function of tensors of fixed shapes, as a CUDA graph where these are on: its first
        calls run as they are, and what later ones return is overwritten by the next."""
        return graphs.Graphed(function) if self.graph else function

    def after_backward(self):
        """Gradients that were added up on the side join .grad; after each backward pass."""
        if self.twin is not None:
            self.twin.collect()

    def after_step(self):
        """Copies of the weights are renewed; after each step of the optimizers."""
        if self.twin is not None:
            self.twin.renew()


# methods that are compiled one by one, by the class that has them: all blocks share their code
PIECES = {"Block": ("queries", "keys_values", "mlp"), "RMSNorm": ("forward",),
          "Pool": ("forward",), "Memory": ("forward",)}


def compile_pieces(model: Decoder) -> Decoder:
    """A copy of the tree of modules that shares all parameters, whose pieces are compiled."""
    other = copy.copy(model)
    other._modules = {name: child and compile_pieces(child)
                      for name, child in model._modules.items()}
    for name in PIECES.get(type(other).__name__, ()):
        setattr(other, name, torch.compile(getattr(other, name), dynamic=False))
    if isinstance(other, Decoder):
        other.nats = torch.compile(other.nats, dynamic=False)
    return other
