"""
Turn text into files of token ids: `data/NAME/{train,val,test}.bin` and `meta.json`.

    python prepare_data.py                                # the English that every Python carries
    python prepare_data.py --input=my.txt                 # your own files, folders and globs
    python prepare_data.py --input=a.jsonl,more/,'b/*.gz' --tokenizer=gpt2 --out_dir=data/mine
    python prepare_data.py fineweb-edu --tokenizer=qwen3  # the paper's: 16 GB are downloaded

A .txt file is one document; a .jsonl file holds one per line, in its "text", a .parquet file one
per row, in its column "text" (needs pyarrow). .txt.gz and .jsonl.gz are read, too; what is hidden
in a folder (.git, ._x.txt) is not. What is no text (a byte that is zero or not UTF-8, half a
surrogate pair) becomes U+FFFD, a null is an empty document, and empty ones are skipped; all are
counted, and said at the end. Tokenizers are those of text/tokenizer.py: bytes, gpt2, qwen3, ..., or
the path of a tokenizer.json or .tiktoken file.

The ids are little endian, uint16 where the vocabulary fits and uint32 where not, with one EOS after
every document; OUT_DIR/tokenizer has a copy of the tokenizer's files, or gpt2's or cl100k_base's
table. No document is in two splits, unless one is nearly all: val.bin gets whole ones, chosen by
their text, so that copies stay on the same side; or, as in the paper, test.bin is the last rows of
the corpus and val.bin the rows before, and what they cut off is dropped.
"""

import errno
import hashlib
import itertools
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np

from configurator import UserError, at_least, joined, key, no_tilde, parse, run
from running.lock import LOCK, Lock, Taken
from running.signals import REQUESTS, UNFINISHED, held, say
from text.documents import (
    FORMATS,
    Documents,
    find_files,
    fineweb_edu,
    import_parquet,
    python_documents,
)
from text.splits import ROW, SPLITS, take_rows, take_val
from text.tokenizer import CARRIED, Tokenizer, carry, get_tokenizer, pieces

PART = 2**18  # characters of a document that are handled at a time
BATCH = 2**20  # characters that a thread gets at a time
UNDER_WAY = ".prepare_data-"  # how the name of a folder begins that is not finished
POOL_BYTES = 2**25  # of input, below which one thread is enough


@dataclass
class PrepareConfig:
    input: str = key("", "files, folders and globs, comma separated; empty: Python's own English")
    tokenizer: str = key("bytes", "bytes, gpt2, qwen3, another name of tiktoken's, or a path")
    out_dir: str = key("", "empty: data/NAME, after the input")
    min_chars: int = key(0, "strip documents, each of which then has to fit into memory, and drop "
                             "those under so many characters; 0: neither")
    val_fraction: float = key(0.05, "of the documents, for val.bin")
    val_rows: int = key(0, f"instead, as many last rows of {ROW} tokens, before those of test.bin")
    test_rows: int = key(0, f"as many last rows of {ROW} tokens become test.bin; paper: 5000")
    processes: int = key(0, "threads, 0: one a core for large inputs; the bytes are the same")
    seed: int = key(1337, "of the choice of val.bin and of the default corpus's order")
    shards: int = key(160, "of fineweb-edu, of 100 MB and 50 M Qwen tokens each, at most 1823")
    shard_dir: str = key("", "where they are kept; empty: OUT_DIR/shards")
    base_url: str = key(
        "https://huggingface.co/datasets/karpathy/fineweb-edu-100b-shuffle/resolve/main",
        "where they are downloaded from",
    )


PAPER = PrepareConfig(
    tokenizer="qwen3", min_chars=100, val_fraction=0, val_rows=1000, test_rows=5000,
)
CORPORA = {"python": PrepareConfig(), "fineweb-edu": PAPER}


# --- from documents to ids


def batches(documents: Iterable[Iterable[str]], config: PrepareConfig,
            counts: Counter) -> Iterator[list[tuple[str, float | None]]]:
    """Lists of parts of documents, about BATCH characters each; with a document's last part comes
    its number, see `draw`.

    Counts `documents`, their `bytes` of UTF-8, and what is left out: `empty` ones (nothing but
    white space) and `short` ones. White space that fills the first part of a longer document is
    left out, too.
    """
    batch, size, text = [], 0, ""
    for document in documents:
        if config.min_chars:
            document = [text := "".join(document).strip()]  # noqa: PLW2901
        parts = pieces(document, PART)
        head = next((part for part in parts if not part.isspace()), "")
        kind = ("empty" if not head else
                "short" if len(text) < config.min_chars else "documents")
        counts[kind] += 1
        if kind != "documents":
            continue
        number = draw(head, config.seed)
        for part, following in itertools.pairwise(itertools.chain([head], parts, [""])):
            batch.append((part, None if following else number))
            size += len(part)
            counts["bytes"] += len(part.encode("utf-8", "replace"))
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    yield batch


def draw(text: str, seed: int) -> float:
    """A number in [0, 1) that depends on the text and the seed only, so that copies share it."""
    digest = hashlib.blake2b(f"{seed} {text}".encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def encode(tokenizer: Tokenizer, batch: list) -> list[tuple[np.ndarray, float | None]]:
    """The ids of a batch's parts, and what comes with them."""
    return [(tokenizer.encode_array(part).astype(tokenizer.dtype), number)
            for part, number in batch]


def encode_batches(source: Iterable[list], tokenizer: Tokenizer, threads: int) -> Iterator[list]:
    """The batches encoded, in their order; a few per thread are under way, never all."""
    waiting: deque = deque()
    with ThreadPoolExecutor(threads) as pool:  # the libraries let go of Python's lock meanwhile
        for batch in source:
            waiting.append(pool.submit(encode, tokenizer, batch))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def write_documents(documents: Iterable[Iterable[str]], tokenizer: Tokenizer, folder: Path,
                    config: PrepareConfig) -> Counter:
    """Write the files of all splits in `folder`; counts of what came. Raises UserError."""
    counts = Counter(documents=0, empty=0, short=0, bytes=0)
    total = getattr(documents, "size", 0)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = config.processes or (total > POOL_BYTES and min(cores or 1, 32)) or 1
    # of each document, what the splits need to know: its tokens, and its number
    tokens, draws = array("q"), array("d")
    eos, size = np.array([tokenizer.eos_id], tokenizer.dtype), 0
    with open(folder / "train.bin", "wb") as file, Progress("tokenise") as progress:
        for batch in encode_batches(batches(documents, config, counts), tokenizer, threads):
            for ids, number in batch:
                file.write(ids)
                size += len(ids)
                if number is not None:
                    file.write(eos)
                    tokens.append(size + 1)
                    draws.append(number)
                    size = 0
            progress.show(documents.done() / total if total else 0, counts["bytes"])
    if not counts["documents"]:
        raise UserError(f"no text in the input ({skipped(counts, config)})")
    sizes = np.array(tokens)
    if config.val_fraction and not config.val_rows:
        sizes = take_val(folder, tokenizer, sizes, np.array(draws), config.val_fraction)
    for split, rows in (("test", config.test_rows), ("val", config.val_rows)):
        if rows:
            sizes, cut = take_rows(folder, tokenizer.dtype, sizes, split, rows)
            counts["cut"] += cut
    return counts


class Progress(AbstractContextManager):
    """One line on stderr: a bar, MB, MB/s and the time left.

    It is drawn again and again on a terminal; elsewhere there is a line every minute.
    """

    def __init__(self, what: str, stream=None):
        self.what, self.stream = what, stream or sys.stderr
        self.begin, self.end, self.pause = ("\r", "\033[K", 0.2) if self.stream.isatty() else (
            "", "\n", 60)
        self.start = self.shown = time.monotonic()

    def __exit__(self, *error) -> None:
        if self.begin:
            print(self.begin, end=self.end, file=self.stream, flush=True)

    def show(self, share: float, size: int) -> None:
        """`share` in [0, 1] of the work is done, 0 if nobody knows; that is `size` bytes."""
        now = time.monotonic()
        if now - self.shown < self.pause:
            return
        self.shown, seconds = now, now - self.start
        line = f"{size / 1e6:,.0f} MB, {size / 1e6 / seconds:.1f} MB/s"
        if share:
            left = timedelta(seconds=int(seconds * (1 - share) / share))
            line = f"[{'#' * int(20 * share):20s}] {share:4.0%}, {line}, {left} left"
        print(f"{self.begin}{self.what} {line}", end=self.end, file=self.stream, flush=True)


# --- all of it


def prepare(documents: Iterable[Iterable[str]], tokenizer: Tokenizer, out_dir: str,
            config: PrepareConfig) -> tuple[Counter, dict]:
    """Write a data set into `out_dir`, all or nothing (killed while files are moved there, none);
    counts of what came, and the meta data.

    Raises UserError, also for a corpus without text or another preparation that is writing there;
    then nothing in `out_dir` has changed.
    """
    out, itemsize = Path(out_dir), tokenizer.dtype.itemsize
    new, state = not out.exists(), "as it was"
    lock = Lock(out)
    try:
        for left in out.glob(f"{UNDER_WAY}*") if lock.sure else ():  # by one that was killed
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix=UNDER_WAY, dir=out) as name:
            folder = Path(name)
            UNFINISHED.add(name)
            counts = write_documents(documents, tokenizer, folder, config)
            files = {split: folder / f"{split}.bin" for split in SPLITS}
            for file in files.values():
                file.touch()
            tokens = {split: file.stat().st_size // itemsize for split, file in files.items()}
            meta = {
                "tokenizer": carry(tokenizer, folder),
                "fingerprint": tokenizer.fingerprint(),
                "vocab_size": tokenizer.model_rows,
                "eos_id": tokenizer.eos_id,
                "dtype": tokenizer.dtype.name,
                "tokens": tokens,
                **{f"{split}_digest": digest_of(file) for split, file in files.items()},
                "input": config.input,
            }
            (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
            with held():
                publish(folder, out, tokens)
                state = "complete"
            UNFINISHED.remove(name)
    except KeyboardInterrupt:
        raise UserError(f"interrupted; {out_dir} is {state}") from None
    except OSError as error:  # no such rights, disk full
        raise UserError(f"{error.filename or out}: {error.strerror or error}") from None
    finally:
        lock.close()
        if new and out.is_dir() and os.listdir(out) == [LOCK]:
            shutil.rmtree(out)
    return counts, meta


def digest_of(path: Path) -> str:
    """A digest of a file; empty for one without a byte."""
    digest = hashlib.blake2b(digest_size=8)
    with open(path, "rb") as file:
        while data := file.read(2**20):
            digest.update(data)
    return digest.hexdigest() if path.stat().st_size else ""


def publish(folder: Path, out: Path, tokens: dict[str, int]) -> None:
    """Move the finished files into place; meta.json last, so that it never describes old ones."""
    if (folder / CARRIED).exists():
        (out / CARRIED).mkdir(exist_ok=True)
    for path in (out / f"{split}.bin" for split in SPLITS):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))
    (out / "meta.json").unlink(missing_ok=True)
    for split in SPLITS:
        if tokens[split]:
            os.replace(folder / f"{split}.bin", out / f"{split}.bin")
        else:
            (out / f"{split}.bin").unlink(missing_ok=True)
    for path in (folder / CARRIED).glob("*"):  # what else is in OUT/tokenizer is not ours
        os.replace(path, out / CARRIED / path.name)
    os.replace(folder / "meta.json", out / "meta.json")


def skipped(counts: Counter, config: PrepareConfig) -> str:
    """What was left out, in words."""
    text = f"{counts['empty']:,} empty ones skipped"
    if config.min_chars:
        text += f", {counts['short']:,} under {config.min_chars} characters skipped"
    return text


# --- command line


def prepare_python(out_dir: str = "data/python") -> None:
    """Prepare the default data set, as the command without arguments does: no network, seconds.
    Raises Taken if another run does."""
    config = PrepareConfig()
    _, meta = prepare(python_documents(config.seed), get_tokenizer("bytes"), out_dir, config)
    print(f"wrote {out_dir}, Python's own documentation: "
          + ", ".join(f"{n:,} {s} tokens" for s, n in meta["tokens"].items()))


def ensure_python(rank: int = 0, seconds: float = 120) -> None:
    """The default data set where train.py looks for it: if it is missing, the process of rank 0
    prepares it and the others wait. Raises UserError after `seconds`."""
    meta = Path("data/python/meta.json")
    start = time.monotonic()
    while not meta.exists():
        with suppress(Taken):  # another run does, and may be ended
            if rank == 0:
                prepare_python()
                return
        if time.monotonic() - start > seconds:
            raise UserError(f"{meta}: not there after {seconds} s")
        time.sleep(0.1)


def read_command(argv: list[str]) -> tuple[str, PrepareConfig]:
    """The corpus that the command line names, and its settings. Raises UserError."""
    argv = joined(argv, PrepareConfig())  # so that values are no corpora
    names = [arg for arg in argv if not arg.startswith("-") and not arg.endswith(".py")]
    if unknown := [name for name in names if name not in CORPORA]:
        raise UserError(f"{unknown[0]}: no such corpus, there are {' and '.join(CORPORA)}; your "
                        "own text: --input takes one list, --input=a.txt,b.txt, or a pattern in "
                        "quotes, --input='*.txt'")
    corpus = names[0] if names else "python"
    config = parse(CORPORA[corpus], [arg for arg in argv if arg not in names], __doc__)
    given = names + [arg for arg in argv if arg.startswith("--input=")]
    if len(given) > 1 or given == ["--input="] or names and config.input:
        raise UserError(f"{' '.join(given)}: names no file, or more than one corpus at a time; "
                        "--input takes one list, and Python's own English comes without it")
    at_least(0, config, "val_fraction", "val_rows", "test_rows", "min_chars", "processes")
    at_least(1, config, "shards")
    if config.val_fraction >= 1:
        raise UserError(f"val_fraction={config.val_fraction}: less than 1 is needed")
    if config.shards > 1823:
        raise UserError(f"shards={config.shards}: there are 1823")
    return corpus, config


def main(argv: list[str]) -> None:
    """Run the command line. Raises UserError."""
    for number in REQUESTS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, stop)
    corpus, config = read_command(argv)
    no_tilde(config)
    name, documents = corpus, None  # the default corpus needs no reading
    if config.input:
        files = find_files(config.input)
        name, documents = dataset_name(config.input, files[0]), Documents(files)
    out_dir = config.out_dir or f"data/{name}"
    if any(Path(out_dir, file).exists() for file in ("ckpt.pt", "best.pt")):
        raise UserError(f"out_dir={out_dir}: a run is there; a data set needs another folder")
    if not config.out_dir:
        check_free(Path(out_dir), config.input)
    tokenizer = get_tokenizer(config.tokenizer)
    if corpus == "fineweb-edu":
        documents = Documents(download(config, Path(config.shard_dir or f"{out_dir}/shards")))
    start = time.perf_counter()
    counts, meta = prepare(
        documents or python_documents(config.seed), tokenizer, out_dir, config
    )
    report(out_dir, config, counts, meta, time.perf_counter() - start)
    if getattr(documents, "replaced", 0):
        print(f"note: {documents.replaced:,} characters were no text and became U+FFFD, the first "
              f"in {documents.first}")


def stop(number: int, _) -> None:
    """End by a signal; on the way out what is half written is removed."""
    say(f"{signal.Signals(number).name}: ends; a data set is written as a whole, or not at all")
    sys.exit(128 + number)


def download(config: PrepareConfig, folder: Path) -> list[Path]:
    """The shards of the paper's corpus. Raises UserError for a network or disk that fails, or if
    another run downloads them."""
    import_parquet()  # rather now than after gigabytes
    try:
        with closing(Lock(folder)), Progress("download") as progress:
            return fineweb_edu(folder, config.shards, config.base_url, progress.show)
    except KeyboardInterrupt:
        raise UserError("interrupted; the same command goes on with the download") from None
    except OSError as error:
        raise UserError(f"{error.filename or folder}: {error.strerror or error}") from None


def dataset_name(names: str, first: Path) -> str:
    """A name for a data set: that of the first folder or file of --input."""
    path = Path(names if os.path.exists(names) else names.split(",")[0]).resolve()
    if path.is_dir():
        return path.name
    path = path if path.exists() else first.resolve().parent  # a glob goes by its folder
    ending = next((ending for ending in FORMATS if path.name.lower().endswith(ending)), "")
    return path.name[:len(path.name) - len(ending)]


def check_free(folder: Path, given: str) -> None:
    """Raise UserError for a folder that nobody asked for, if it has, or is for, the data set of
    another input."""
    def files(text: str) -> list[str]:
        return [os.path.realpath(part) for part in text.split(",") if part]

    of = "" if folder.name in CORPORA else given  # if nothing is there
    with suppress(OSError, ValueError, AttributeError):
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        of = meta.get("input", of)
    if files(of) != files(given):
        theirs, ours = (f"--input={text}" if text else "a corpus" for text in (of, given))
        raise UserError(f"{folder} belongs to the data set of {theirs}, not of {ours}; "
                        f"--out_dir=data/NAME gives it another name, --out_dir={folder} means "
                        "this one")


def report(out_dir: str, config: PrepareConfig, counts: Counter, meta: dict,
           seconds: float) -> None:
    """Print what came of it, and what to do next."""
    print(f"{counts['documents']:,} documents, {skipped(counts, config)}")
    print(f"{counts['bytes'] / 1e6:.2f} MB of text in {seconds:.1f} s, "
          f"{counts['bytes'] / 1e6 / seconds:.1f} MB/s")
    if counts["cut"]:
        print(f"{counts['cut']:,} tokens dropped, of documents that the rows of test or val cut")
    for split, tokens in meta["tokens"].items():
        if tokens:
            print(f"{split:5s} {tokens:13,} tokens in {out_dir}/{split}.bin")
    if config.val_fraction and not meta["tokens"]["val"]:
        print("no val.bin: nothing that train would not have, too, is long enough for it")
    dataset = os.path.relpath(out_dir, "data")
    if dataset.startswith(os.pardir):
        dataset = os.path.abspath(out_dir)
    settings, row = ("wm16", 2048) if config.test_rows == PAPER.test_rows else ("tiny", 256)
    command = ["python", "train.py", f"config/{settings}.py", f"--dataset={dataset}"]
    shortest = min((n for split, n in meta["tokens"].items() if n and split != "test"), default=0)
    if 1 < shortest <= row:
        command.append(f"--block_size={shortest - 1}")
    if not meta["tokens"].get("val"):
        command.append("--eval_rows=0")
    print("next: " + shlex.join(command))


if __name__ == "__main__":
    run(main)
