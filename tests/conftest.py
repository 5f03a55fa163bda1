"""Before anything imports Triton: without a GPU its kernels are tested in the interpreter."""

import gc
import json
import os

# the shapes are small: threads would only wait for each other, here and in what tests start
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pytest
import torch
from two_processes import pytest_runtestloop  # noqa: F401  a hook

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish():
    """What is imported stays, so no search for garbage need go through all of it again; and among
    so many small tensors, seldom is enough."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)


@pytest.fixture
def folder(tmp_path):
    """A working folder with a small random data set in the documented format."""
    data = tmp_path / "data" / "random"
    data.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for split, n in (("train", 5000), ("val", 700)):
        ids = rng.integers(0, 40, n).astype("<u2")
        ids[rng.random(n) < 0.03] = 256
        ids.tofile(data / f"{split}.bin")
    (data / "meta.json").write_text(json.dumps(
        {"tokenizer": "bytes", "vocab_size": 257, "eos_id": 256, "dtype": "uint16",
         "tokens": {"train": 5000, "val": 700, "test": 0}}))
    return tmp_path
