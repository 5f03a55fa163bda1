"""
Prepared token files as rows to train on, in an order that a seed and a row's number determine.
"""

import json
import os
from pathlib import Path
from types import NoneType

import numpy as np
import torch
from torch import Tensor

from configurator import UserError
from text.splits import SPLITS
from text.tokenizer import other_ids


class TokenRows:
    """Rows of block_size tokens with their targets, each epoch in a random order of its own.

    Row n of the run is a function of (seed, n) alone, so that a position is all that a resumed
    run needs. The tokens that fill no row are left out at either end, as the epoch's dice fall.
    """

    def __init__(self, path: Path, meta: dict, block_size: int, seed: int | None):
        self.tokens = open_tokens(path, meta)
        self.path, self.block_size, self.seed = path, block_size, seed
        self.vocab_size, n = meta["vocab_size"], len(self.tokens)
        if n < block_size + 1:
            raise UserError(f"{path}: {n} tokens, but block_size={block_size} needs at least "
                            f"{block_size + 1}")
        self.n_rows = (n - 1) // block_size
        self.slack = n - 1 - self.n_rows * block_size
        self.epoch = None

    def start(self, n: int) -> int:
        """Index of the first token of row n."""
        epoch, i = divmod(n, self.n_rows)
        if self.seed is None:  # evaluation: the windows as they lie
            return i * self.block_size
        if self.epoch != epoch:
            rng = np.random.default_rng((self.seed, epoch))
            self.offset = int(rng.integers(self.slack + 1))
            self.order = rng.permutation(self.n_rows)
            self.epoch = epoch
        return self.offset + int(self.order[i]) * self.block_size

    def batch(self, n: int, rows: int, device: str) -> tuple[Tensor, Tensor]:
        """Rows n..n+rows-1: tokens and targets (rows, block_size), int64. Does not wait for the
        device."""
        starts = [self.start(m) for m in range(n, n + rows)]
        xy = np.stack([self.tokens[s:s + self.block_size + 1].astype(np.int64) for s in starts])
        if xy.max() >= self.vocab_size:
            raise UserError(f"{self.path}: holds the id {xy.max()}, but the vocabulary of "
                            f"meta.json has {self.vocab_size}; prepare the data set again")
        xy = to_device(xy, device)
        return xy[:, :-1], xy[:, 1:]


def open_tokens(path: Path, meta: dict) -> np.ndarray:
    """The ids of a file, mapped. Raises UserError if it is missing, empty, or not what meta.json
    says."""
    size = path.stat().st_size if path.is_file() else None
    if not size:
        without = {"val": ", or train without it: --eval_rows=0",
                   "test": ", or take another one: --split=val"}
        raise UserError(f"{path}: {'no such data file' if size is None else 'it is empty'}; "
                        "prepare the data set with such a split (python prepare_data.py --help)"
                        + without.get(path.stem, ""))
    dtype = np.dtype(meta["dtype"]).newbyteorder("<")
    n, promised = size / dtype.itemsize, meta["tokens"].get(path.stem)
    if n != (int(n) if promised is None else promised):
        raise UserError(f"{path}: {n:.12g} tokens of {dtype.name}, but meta.json says {promised}; "
                        "the file is cut off or from another preparation, prepare the data set "
                        "again")
    return np.memmap(path, dtype, "r")


def to_device(ids: np.ndarray, device: str) -> Tensor:
    """A tensor of some ids; on CUDA the host does not wait for the copy."""
    x = torch.from_numpy(ids)
    if device.startswith("cuda"):
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def load_meta(dataset: str) -> tuple[Path, dict]:
    """Folder and meta.json of a data set. Raises UserError if it is not there, or damaged."""
    folder = Path("data") / dataset
    if not (folder / "meta.json").is_file():
        if (Path(dataset) / "meta.json").is_file():
            name = os.path.relpath(dataset, "data")
            name = os.path.abspath(dataset) if name.startswith(os.pardir) else name
            raise UserError(f"dataset={dataset}: the name of a folder under data/ is needed, or a "
                            f"whole path; here {name}")
        how = "" if dataset == "python" else " --help"
        raise UserError(f"{folder}/meta.json: no such file; prepare the data set first "
                        f"(python prepare_data.py{how})")
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        for name, kinds in (("tokenizer", str), ("vocab_size", int), ("eos_id", (int, NoneType)),
                            ("dtype", str), ("tokens", dict)):
            if not isinstance(meta[name], kinds):
                raise ValueError(f"{name}: {meta[name]!r}")
        if np.dtype(meta["dtype"]).kind != "u":
            raise ValueError(f"dtype: {meta['dtype']!r}")
        meta.pop("input", None)  # a path on the machine that prepared it is nobody's business
        return folder, meta
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}/meta.json is damaged ({error}); prepare it again") from None


def prepared_again(now: dict, then: dict) -> str | None:
    """Which splits differ in two meta data of a data set, in words, or None; what either does not
    say counts as equal."""
    said = []
    for split in SPLITS:
        n, m = ((meta.get("tokens") or {}).get(split) for meta in (now, then))
        a, b = (meta.get(f"{split}_digest") for meta in (now, then))
        if None not in (n, m) and n != m:
            said.append(f"{split}.bin of {n:,} tokens (there: {m:,})")
        elif None not in (a, b) and a != b:
            said.append(f"another {split}.bin")
    return ", ".join(said) or None


def prepared_since(meta: dict, checkpoint: dict) -> str | None:
    """When a checkpoint's data set, whose meta data are these now, was prepared again, or None."""
    if said := prepared_again(meta, checkpoint["meta"]):
        return f"since the training: {said}"
    return "between parts of the training" if checkpoint.get("prepared_again") else None


def note_if_longer(setting: str, n: int, trained: int):
    """Say so where a model reads longer rows than in its training."""
    if n > trained:
        print(f"note: {setting}={n} is more than the block_size={trained} of training; positions "
              "beyond it were never trained")


def data_of(checkpoint: dict, out_dir: str, dataset: str | None = None) -> tuple[Path, dict]:
    """`load_meta` of the data set to score a checkpoint on: that of its training, or another.

    Says so where it has changed since, or in, the training. Raises UserError if its ids are not
    the checkpoint's.
    """
    trained = checkpoint["config"]["dataset"]
    folder, meta = load_meta(dataset or trained)
    if said := other_ids(meta, checkpoint["meta"]):
        raise UserError(f"{folder} has {said[0]}, {out_dir} was trained with {said[1]}: figures of "
                        "other tokens mean nothing")
    when = prepared_since(meta, checkpoint)
    if dataset in (None, trained) and when:
        print(f"note: {folder} was prepared again {when}; what is scored may have been trained on")
    return folder, meta
