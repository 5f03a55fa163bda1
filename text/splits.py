"""
How val and test get their tokens from train.bin, in which a data set is written first.
"""

import itertools
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from configurator import UserError
from text.tokenizer import Tokenizer

SPLITS = ("train", "val", "test")
ROW = 2048  # tokens in a row of test.bin, as in the paper
LONG = 10_000  # tokens of a document, of which a part is something to measure on
NEAR = 2**18  # tokens among which a place to cut a document is looked for


def move(folder: Path, spans: Iterable[tuple[int, int]], split: str, dtype: np.dtype) -> None:
    """Move tokens of train.bin, start..stop of each span in turn, to the end of another file."""
    train, at = folder / "train.bin", None
    with (open(train, "rb") as source, open(train, "r+b") as rest,
          open(folder / f"{split}.bin", "ab") as target):
        for start, stop in spans:
            if at is None:  # what is before the first one stays in its place
                at = start
                rest.seek(source.seek(start * dtype.itemsize))
            copy(source, rest, (start - at) * dtype.itemsize)
            copy(source, target, (stop - start) * dtype.itemsize)
            at = stop
        shutil.copyfileobj(source, rest)  # what is behind them follows up
        rest.truncate()


def copy(source, target, size: int) -> None:
    """The next `size` bytes of a file to another one."""
    while size > 0:
        size -= target.write(source.read(min(2**24, size)))


def take_rows(folder: Path, dtype: np.dtype, sizes: np.ndarray, split: str,
              rows: int) -> tuple[np.ndarray, int]:
    """Move the last rows of train.bin, whose documents have these sizes in tokens, to another
    split; the sizes of those left, and the tokens dropped of the one that is cut."""
    count = int(sizes.sum())
    start = count - rows * ROW
    left = sizes[sizes.cumsum() <= start]
    if not len(left):
        raise UserError(f"--{split}_rows={rows}: the last {rows * ROW} of {count} tokens leave no "
                        "whole document to train on")
    move(folder, [(start, count)], split, dtype)
    os.truncate(folder / "train.bin", int(left.sum()) * dtype.itemsize)
    return left, start - int(left.sum())


def take_val(folder: Path, tokenizer: Tokenizer, sizes: np.ndarray, draws: np.ndarray,
             fraction: float) -> np.ndarray:
    """Move documents of train.bin to val, of whose tokens they are about `fraction`; the sizes of
    those left. `sizes` are those of all in tokens, `draws` their numbers, which copies share.

    Chance chooses, by the numbers. Where this gives val next to nothing, or more than train, it
    gets a document of which there is no copy, or the end of a long one.
    """
    count = int(sizes.sum())
    wanted = count - max(1, int(count * (1 - fraction)))
    ends = sizes.cumsum()
    chosen = (draws < fraction) & (draws != draws[0])  # train must have something: the first
    n_val = sizes[chosen].sum()
    if not wanted / 4 <= n_val <= max(count - n_val, 1.5 * wanted):
        _, copy_of, copies = np.unique(draws, return_inverse=True, return_counts=True)
        alone = np.flatnonzero(copies[copy_of] == 1)
        fit = alone[sizes[alone] <= max(count / 2, wanted)]
        best = min(fit[::-1], key=lambda i: abs(sizes[i] - wanted), default=-1)
        longest = max(alone, key=lambda i: sizes[i], default=-1)
        if longest < 0:  # copies are where chance has put them, all on one side
            chosen = chosen if n_val <= count - n_val else ~chosen
        elif sizes[longest] >= LONG and (best < 0 or sizes[best] < max(1, wanted / 4)):
            end = int(ends[longest])
            start = cut(folder, tokenizer, end - int(sizes[longest]), end, max(2, wanted))
            move(folder, [(start, end - 1)], "val", tokenizer.dtype)  # both end by an EOS
            with open(folder / "val.bin", "ab") as file:
                file.write(np.array([tokenizer.eos_id], tokenizer.dtype))
            return sizes - (end - 1 - start) * (np.arange(len(sizes)) == longest)
        else:
            chosen = np.arange(len(sizes)) == best
    if chosen.any():  # else all of train.bin would be copied onto itself
        move(folder, zip((ends - sizes)[chosen].tolist(), ends[chosen].tolist()), "val",
             tokenizer.dtype)
    return sizes[~chosen]


def cut(folder: Path, tokenizer: Tokenizer, first: int, last: int, wanted: int) -> int:
    """Where the last tokens, about `wanted`, of train.bin's document first..last begin: behind
    white space, or where a character begins."""
    start = max(first + 1, last - wanted)
    # not beyond its last token but EOS: val would have EOS alone
    dtype, stop = tokenizer.dtype, min(start + NEAR, last - 2)
    near = np.fromfile(folder / "train.bin", dtype, stop - start + 1,
                       offset=(start - 1) * dtype.itemsize)  # a map of it would count as memory
    texts = [tokenizer.decode_bytes([token]) for token in near]
    behind = (i for i, text in enumerate(texts, start) if text[-1:].isspace())
    begins = (i for i, text in enumerate(texts[1:], start) if not b"\x80" <= text[:1] < b"\xc0")
    return next(itertools.chain(behind, begins), start)
