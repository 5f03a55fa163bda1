"""Before anything imports Triton: without a GPU its kernels are tested in the interpreter."""

import os

import torch

# the shapes are small: threads would only wait for each other
torch.set_num_threads(1)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
