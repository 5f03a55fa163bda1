"""
The files of token ids of a data set that is being prepared, and how val and test get theirs.
"""

import hashlib
import itertools
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from configurator import UserError
from text.tokenizer import Tokenizer

SPLITS = ("train", "val", "test")
ROW = 2048  # tokens in a row of test.bin, as in the paper
LONG = 10_000  # tokens of a document, of which a part is something to measure on
NEAR = 2**18  # tokens among which a place to cut a document is looked for


def read_ids(path: Path, tokenizer: Tokenizer, start: int, stop: int) -> np.ndarray:
    """Tokens `start` to `stop` of a file; a map of it would count as memory."""
    dtype = tokenizer.dtype
    return np.fromfile(path, dtype, stop - start, offset=start * dtype.itemsize)


def move(folder: Path, start: int, stop: int, split: str, dtype: np.dtype) -> None:
    """Move the tokens start..stop of train.bin to the end of another split's file."""
    train, left = folder / "train.bin", (stop - start) * dtype.itemsize
    with open(train, "rb") as source, open(folder / f"{split}.bin", "ab") as target:
        source.seek(start * dtype.itemsize)
        while data := source.read(min(2**24, left)):
            target.write(data)
            left -= len(data)
        with open(train, "r+b") as rest:  # what is behind them follows up
            rest.seek(start * dtype.itemsize)
            shutil.copyfileobj(source, rest)
            rest.truncate()


def document_start(path: Path, tokenizer: Tokenizer, position: int) -> int:
    """Where the document begins that holds the token at `position` of a file."""
    while position > 0:
        low = max(0, position - 2**20)
        ends = np.flatnonzero(read_ids(path, tokenizer, low, position) == tokenizer.eos_id)
        if len(ends):
            return low + int(ends[-1]) + 1
        position = low
    return 0


def take_rows(folder: Path, tokenizer: Tokenizer, split: str, rows: int) -> int:
    """Move the last rows of train.bin to another split; the tokens dropped of a cut document."""
    train = folder / "train.bin"
    count = train.stat().st_size // tokenizer.dtype.itemsize
    start = count - rows * ROW
    if start <= 0:
        raise UserError(f"--{split}_rows={rows} needs more than {rows * ROW} tokens, not {count}")
    whole = document_start(train, tokenizer, start)
    move(folder, start, count, split, tokenizer.dtype)
    if whole == 0:
        raise UserError(f"--{split}_rows={rows} leaves no whole document to train on")
    os.truncate(train, whole * tokenizer.dtype.itemsize)
    return start - whole


def spans(path: Path, tokenizer: Tokenizer) -> Iterator[tuple[int, int, bytes]]:
    """Start, end and a digest of each document of a file."""
    start, at, digest = 0, 0, hashlib.blake2b(digest_size=16)
    while len(ids := read_ids(path, tokenizer, at, at + 2**22)):
        first = 0
        for end in np.flatnonzero(ids == tokenizer.eos_id) + 1:
            digest.update(ids[first:end])
            yield start, at + int(end), digest.digest()
            start, first, digest = at + int(end), end, hashlib.blake2b(digest_size=16)
        digest.update(ids[first:])
        at += len(ids)


def take_val(folder: Path, tokenizer: Tokenizer, fraction: float) -> None:
    """Where chance gave val next to nothing, or more than train, give it about `fraction` of the
    tokens: a document of which there is no copy, or the end of a long one."""
    train, val = (folder / f"{split}.bin" for split in SPLITS[:2])
    n_train, n_val = (path.stat().st_size // tokenizer.dtype.itemsize for path in (train, val))
    count = n_train + n_val
    wanted = count - max(1, int(count * (1 - fraction)))
    if wanted / 4 <= n_val <= max(n_train, 1.5 * wanted):
        return
    with open(val, "rb") as source, open(train, "ab") as target:
        shutil.copyfileobj(source, target)
    texts = list(spans(train, tokenizer))
    times = Counter(digest for _, _, digest in texts)
    alone = [(start, stop) for start, stop, digest in texts if times[digest] == 1]
    if not alone:  # copies are where chance has put them, all on one side
        os.truncate(train, n_train * tokenizer.dtype.itemsize)
        if n_val > n_train:
            os.replace(train, folder / "smaller.bin")
            os.replace(val, train)
            os.replace(folder / "smaller.bin", val)
        return
    os.truncate(val, 0)
    fit = [(start, stop) for start, stop in alone if stop - start <= max(count / 2, wanted)]
    start, stop = min(reversed(fit), key=lambda at: abs(at[1] - at[0] - wanted), default=(0, 0))
    first, last = max(alone, key=lambda at: at[1] - at[0])
    if last - first >= LONG and stop - start < max(1, wanted / 4):
        cut_end(folder, tokenizer, first, last, max(2, wanted))
    elif stop:
        move(folder, start, stop, "val", tokenizer.dtype)


def cut_end(folder: Path, tokenizer: Tokenizer, first: int, last: int, wanted: int) -> None:
    """Move about `wanted` tokens to val from the end of train.bin's document first..last: from
    behind white space on, or from where a character begins."""
    start = max(first + 1, last - wanted)
    # not beyond its last token but EOS: val would have EOS alone
    near = read_ids(folder / "train.bin", tokenizer, start - 1, min(start + NEAR, last - 2))
    cuts = itertools.chain(
        (cut for cut, token in enumerate(near, start)
         if tokenizer.decode_bytes([token])[-1:].isspace()),
        (cut for cut, token in enumerate(near[1:], start)
         if not b"\x80" <= tokenizer.decode_bytes([token])[:1] < b"\xc0"))
    move(folder, next(cuts, start), last - 1, "val", tokenizer.dtype)  # both end by an EOS
    with open(folder / "val.bin", "ab") as file:
        file.write(np.array([tokenizer.eos_id], tokenizer.dtype).tobytes())
