"""
Turn text into files of token ids: `data/NAME/{train,val}.bin` and `meta.json`.

    python prepare_data.py                                # the English that every Python carries
    python prepare_data.py --input=my.txt                 # your own: .txt, .jsonl, folders of them
    python prepare_data.py --input=a.jsonl,more/ --tokenizer=gpt2 --out_dir=data/mine

A .txt file is one document, a .jsonl file holds one per line, in its "text". The ids are little
endian, uint16 where the vocabulary fits and uint32 where not, with one EOS after every document.
Whole documents go to one split, chosen by their text, so that copies stay on the same side.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import os
import queue
import random
import re
import sysconfig
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import tiktoken

from configurator import UserError, key, parse, run

SPLITS = ("train", "val", "test")
FORMATS = (".txt", ".jsonl")
ROW = 2048  # tokens in a row of test.bin, as in the paper
PIECE = 2**18  # characters that are tokenised at a time: bounds memory, and time on odd text
LOAD_SECONDS = 20  # tiktoken's own download waits for ever


@dataclass
class PrepareConfig:
    """What the command line takes."""

    input: str = key("", "files and folders, comma separated; empty: Python's own English")
    tokenizer: str = key("bytes", "bytes, gpt2 or another name that tiktoken knows")
    out_dir: str = key("", "empty: data/NAME, after the input")
    val_fraction: float = key(0.05, "of the documents, for val.bin")
    test_rows: int = key(0, f"as many last rows of {ROW} tokens become test.bin; paper: 5000")
    seed: int = key(1337, "of the choice of val.bin and of the default corpus's order")


# --- tokenizers


class Tokenizer:
    """Text to ids and back. Text is always ordinary: it can never spell a control token."""

    def __init__(self, name: str, encoding: tiktoken.Encoding):
        self.name = name
        self.encoding = encoding
        self.vocab_size: int = encoding.n_vocab
        self.eos_id: int = encoding.eot_token
        # uint16 holds 65,536 ids; a larger vocabulary would wrap silently
        self.dtype = np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without EOS."""
        return self.encoding.encode_ordinary(text)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of some ids; EOS gives nothing, an id of no token gives U+FFFD."""
        return b"".join(map(self._token_bytes, ids))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; bytes that are not UTF-8 give U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def _token_bytes(self, token: int) -> bytes:
        if token == self.eos_id:
            return b""
        try:
            return self.encoding.decode_single_token_bytes(int(token))
        except (KeyError, OverflowError):  # padding of the vocabulary, or a negative id
            return b"\xef\xbf\xbd"


def get_tokenizer(name: str) -> Tokenizer:
    """A tokenizer by name: `bytes` (256 bytes and EOS, offline) or one of tiktoken's.

    Raises UserError for an unknown name and for a table that cannot be downloaded.
    """
    if name == "bytes":
        return Tokenizer(name, byte_encoding())
    known = ["bytes", *tiktoken.list_encoding_names()]
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(f"unknown tokenizer {name!r}{hint}; known are {', '.join(known)}")
    # tiktoken sets no time limit, so a network that swallows packets would hang us: wait outside
    box: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_load_encoding, args=(name, box), daemon=True).start()
    try:
        encoding = box.get(timeout=LOAD_SECONDS)
    except queue.Empty:
        encoding = TimeoutError(f"no answer in {LOAD_SECONDS} s")
    if isinstance(encoding, Exception):
        reason = str(encoding).partition("(Caused by")[0].strip()
        raise UserError(
            f"could not load tokenizer {name!r} ({type(encoding).__name__}: {reason[:200]}); "
            "tiktoken downloads its tables once: without a network, set TIKTOKEN_CACHE_DIR to a "
            "folder that holds them, or use --tokenizer=bytes, which needs no download"
        )
    return Tokenizer(name, encoding)


def byte_encoding() -> tiktoken.Encoding:
    """Every byte is a token, and 256 is EOS."""
    return tiktoken.Encoding(
        "bytes",
        pat_str=r"(?s:.{1,64})",  # nothing merges, so any split will do; short runs are fastest
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={"<|endoftext|>": 256},
    )


def _load_encoding(name: str, box: queue.SimpleQueue) -> None:
    try:
        box.put(tiktoken.get_encoding(name))
    except (OSError, ValueError, ImportError) as error:  # requests' errors are OSErrors
        box.put(error)


# --- documents: each source yields documents, each document yields its text in strings


def find_files(names: str) -> list[Path]:
    """The .txt and .jsonl files named by a comma-separated list of files and folders, in order."""
    files: list[Path] = []
    for name in filter(None, names.split(",")):
        path = Path(name)
        if not path.exists():
            raise UserError(f"--input: {name} does not exist")
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        found = [p for p in inside if p.suffix in FORMATS and p.is_file()]
        if not found:
            raise UserError(f"--input: {name} is or holds no {' or '.join(FORMATS)} file")
        files += found
    return list(dict.fromkeys(files))


def read_documents(files: Iterable[Path]) -> Iterator[Iterable[str]]:
    """The documents of the files, in order, without holding a file in memory."""
    for path in files:
        if path.suffix == ".txt":
            yield read_text(path)
        else:
            for text in read_jsonl(path):
                yield [text]


def read_text(path: Path) -> Iterator[str]:
    """A text file in pieces, its line ends untouched."""
    try:
        with open(path, encoding="utf-8-sig", newline="\n") as file:
            while text := file.read(PIECE):
                yield text
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {error.reason}") from None


def read_jsonl(path: Path) -> Iterator[str]:
    """The "text" of each line; a line without one stops the run with file and line number."""
    with open(path, "rb") as file:  # as bytes: only \n ends a line
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}, line {number}: not JSON: {error}") from None
            except (KeyError, TypeError, IndexError):
                text = None
            if not isinstance(text, str):
                raise UserError(f'{path}, line {number}: wanted an object with a string "text"')
            yield text


# --- the default corpus

# no English, or English of somebody else
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings",
                   "site-packages", "dist-packages", "__pycache__"}  # fmt: skip
LEGAL = re.compile(r"copyright|licen[sc]e|warranty|rights reserved|written by|\w@\w", re.IGNORECASE)
RULER = re.compile(r"^[ \t]*([^\w\s])\1{3,}[ \t]*(\n|$)", re.MULTILINE)  # the line under a heading


def python_documents(seed: int) -> Iterator[list[str]]:
    """Python's English: a document per pydoc topic, per module and per class, in random order.

    Keeps the paragraphs of prose that have not occurred before, so nothing of val is in train.
    """
    seen: set[str] = set()
    documents = []
    for text in chain(pydoc_topics(), stdlib_docstrings()):
        kept = []
        for paragraph in re.split(r"\n\s*\n", RULER.sub("", text)):
            key = " ".join(paragraph.split())
            repeated = len(key) > 40 and key in seen  # but "Return value:" may come again
            if key and not repeated and is_prose(key):
                kept.append(paragraph.strip("\n"))
                seen.add(key)
        document = "\n\n".join(kept)
        if len(document) >= 200:
            documents.append([document])
    random.Random(seed).shuffle(documents)
    yield from documents


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph is mostly letters: no grammar, doctest, table or legal notice."""
    letters = sum(c.isalpha() or c.isspace() for c in paragraph)
    code = ">>>" in paragraph or LEGAL.search(paragraph)
    return not code and letters >= 0.75 * len(paragraph)


def pydoc_topics() -> list[str]:
    """The chapters of the language reference behind help(), long ones first: they hold others."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return []
    return sorted(topics.values(), key=lambda text: (-len(text), text))


def stdlib_docstrings() -> Iterator[str]:
    """The docstrings of the standard library, read from its sources: nothing is imported."""
    for folder, subfolders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        for name in sorted(names):
            if name.endswith(".py"):
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # old escapes in other people's strings
                        tree = ast.parse(Path(folder, name).read_bytes())
                except (OSError, SyntaxError, ValueError):
                    continue
                yield from docstrings(tree)


def docstrings(node: ast.Module | ast.ClassDef) -> Iterator[str]:
    """The docstrings of a module or class and its functions as one text; then of each class."""
    functions = [f for f in node.body if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef))]
    texts = [ast.get_docstring(n) or "" for n in (node, *functions)]
    yield "\n\n".join(text for text in texts if len(text) >= 60)
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            yield from docstrings(child)


# --- writing


CUT = re.compile(r"(?s:.*)\S(?:(?= \S)|\n(?=\w))")


def pieces(document: Iterable[str], size: int = PIECE) -> Iterator[str]:
    """Cut a document into pieces of at most `size` characters that encode like the whole.

    No pattern of tiktoken's lets a token span the cuts: before a single space between two
    words, and between a single line end and a word. Text without such a place is cut anywhere.
    """
    rest = ""
    for text in document:
        rest, start = rest + text, 0
        while len(rest) - start > size:
            cut = CUT.match(rest, start, start + size)
            end = cut.end() if cut else start + size
            yield rest[start:end]
            start = end
        rest = rest[start:]
    if rest:
        yield rest


def write_documents(
    documents: Iterable[Iterable[str]], tokenizer: Tokenizer, folder: Path, val: float, seed: int
) -> Counter:
    """Append each document and an EOS to train.bin or val.bin in `folder`; counts of what came."""
    counts = Counter(documents=0, skipped=0, bytes=0)
    eos = np.array([tokenizer.eos_id], tokenizer.dtype).tobytes()
    with open(folder / "train.bin", "wb") as train_file, open(folder / "val.bin", "wb") as val_file:
        for document in documents:
            parts = pieces(document)
            head = next(parts, "")
            # by text and not by number, so that a copy cannot leak from train into val
            number = draw(head, seed)
            if not counts["documents"]:
                first = number  # train must have something, so it has this one
            file = val_file if number < val and number != first else train_file
            start, has_text = file.tell(), False
            for part in chain([head], parts):
                ids = np.array(tokenizer.encode(part), tokenizer.dtype)
                file.write(ids.tobytes())
                has_text |= bool(part) and not part.isspace()
                counts["bytes"] += len(part.encode("utf-8", "replace"))
            if has_text:
                file.write(eos)
                counts["documents"] += 1
            else:
                file.seek(start)
                file.truncate()
                counts["skipped"] += 1
    return counts


def draw(text: str, seed: int) -> float:
    """A number in [0, 1) that depends on the text and the seed only."""
    digest = hashlib.blake2b(f"{seed} {text}".encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def read_ids(path: Path, tokenizer: Tokenizer, start: int, stop: int) -> np.ndarray:
    """Tokens `start` to `stop` of a file; a map of it would count as memory."""
    dtype = tokenizer.dtype
    return np.fromfile(path, dtype, stop - start, offset=start * dtype.itemsize)


def move_tail(folder: Path, start: int, split: str, dtype: np.dtype) -> None:
    """Move the tokens of train.bin from `start` on to the end of another split's file."""
    with open(folder / "train.bin", "r+b") as source, open(folder / f"{split}.bin", "ab") as target:
        source.seek(start * dtype.itemsize)
        while data := source.read(2**24):
            target.write(data)
        source.truncate(start * dtype.itemsize)


def document_start(path: Path, tokenizer: Tokenizer, position: int) -> int:
    """Where the document begins that holds the token at `position` of a file."""
    while position > 0:
        low = max(0, position - 2**20)
        ends = np.flatnonzero(read_ids(path, tokenizer, low, position) == tokenizer.eos_id)
        if len(ends):
            return low + int(ends[-1]) + 1
        position = low
    return 0


def take_test(folder: Path, tokenizer: Tokenizer, rows: int) -> None:
    """Make the last rows of train.bin test.bin, and drop what they cut off of a document."""
    train = folder / "train.bin"
    count = train.stat().st_size // tokenizer.dtype.itemsize
    start = count - rows * ROW
    if start <= 0:
        raise UserError(f"--test_rows={rows} needs more than {rows * ROW} tokens, not {count}")
    whole = document_start(train, tokenizer, start)
    move_tail(folder, start, "test", tokenizer.dtype)
    if whole == 0:
        raise UserError(f"--test_rows={rows} leaves no whole document to train on")
    os.truncate(train, whole * tokenizer.dtype.itemsize)


def take_val(folder: Path, tokenizer: Tokenizer, fraction: float) -> None:
    """Give val something where chance did not: the last document, or the end of a lone long one."""
    train = folder / "train.bin"
    count = train.stat().st_size // tokenizer.dtype.itemsize
    start = document_start(train, tokenizer, count - 1)
    if start > 0:
        move_tail(folder, start, "val", tokenizer.dtype)
    elif count >= 10_000:  # a few pages are nothing to measure on: they stay whole
        start = max(1, int(count * (1 - fraction)))
        # cut behind white space, and leave val more than the EOS
        near = read_ids(train, tokenizer, start - 1, min(start + PIECE, count - 2))
        for cut, token in enumerate(near, start):
            if tokenizer.decode_bytes([token])[-1:].isspace():
                move_tail(folder, cut, "val", tokenizer.dtype)
                with open(train, "ab") as file:
                    file.write(np.array([tokenizer.eos_id], tokenizer.dtype).tobytes())
                return


def prepare(
    documents: Iterable[Iterable[str]], tokenizer: Tokenizer, out_dir: str, config: PrepareConfig
) -> tuple[Counter, dict]:
    """Write a data set into `out_dir`, all or nothing; counts of what came, and the meta data.

    Raises UserError, also for a corpus without text; then nothing in `out_dir` has changed.
    """
    out, itemsize = Path(out_dir), tokenizer.dtype.itemsize
    new = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="partial-", dir=out) as name:
            folder = Path(name)
            counts = write_documents(
                documents, tokenizer, folder, config.val_fraction, config.seed
            )
            if not counts["documents"]:
                raise UserError(f"no text in the input ({counts['skipped']} empty documents)")
            if config.test_rows:
                take_test(folder, tokenizer, config.test_rows)
            if config.val_fraction and not (folder / "val.bin").stat().st_size:
                take_val(folder, tokenizer, config.val_fraction)
            files = {split: folder / f"{split}.bin" for split in SPLITS}
            sizes = {s: f.stat().st_size if f.exists() else 0 for s, f in files.items()}
            tokens = {split: size // itemsize for split, size in sizes.items()}
            meta = {
                "tokenizer": tokenizer.name,
                "vocab_size": tokenizer.vocab_size,
                "eos_id": tokenizer.eos_id,
                "dtype": tokenizer.dtype.name,
                "tokens": tokens,
            }
            (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
            publish(folder, out, tokens)
    except OSError as error:  # no such rights, disk full
        raise UserError(f"{error.filename or out}: {error.strerror or error}") from None
    finally:
        if new and out.is_dir() and not any(out.iterdir()):
            out.rmdir()
    return counts, meta


def publish(folder: Path, out: Path, tokens: dict[str, int]) -> None:
    """Move the finished files into place; meta.json last, so that it never describes old ones."""
    (out / "meta.json").unlink(missing_ok=True)
    for split in SPLITS:
        if tokens[split]:
            os.replace(folder / f"{split}.bin", out / f"{split}.bin")
        else:
            (out / f"{split}.bin").unlink(missing_ok=True)
    os.replace(folder / "meta.json", out / "meta.json")


# --- command line


def prepare_python(out_dir: str = "data/python") -> None:
    """Prepare the default data set, as the command without arguments does: no network, seconds."""
    print(f"preparing {out_dir} from Python's own documentation", flush=True)
    config = PrepareConfig()
    _, meta = prepare(python_documents(config.seed), get_tokenizer("bytes"), out_dir, config)
    print(f"wrote {out_dir}: " + ", ".join(f"{n:,} {s} tokens" for s, n in meta["tokens"].items()))


def main(argv: list[str]) -> None:
    """Run the command line. Raises UserError."""
    config = parse(PrepareConfig(), argv, __doc__)
    if not 0 <= config.val_fraction < 1:
        raise UserError(f"--val_fraction={config.val_fraction}: at least 0 and less than 1")
    if config.test_rows < 0:
        raise UserError(f"--test_rows={config.test_rows}: at least 0")
    name = "python"
    if config.input:
        documents = read_documents(find_files(config.input))
        first = Path(config.input.strip(",").split(",")[0]).resolve()
        name = first.name if first.is_dir() else first.stem
    else:
        documents = python_documents(config.seed)
    out_dir = config.out_dir or f"data/{name}"
    tokenizer = get_tokenizer(config.tokenizer)
    start = time.perf_counter()
    counts, meta = prepare(documents, tokenizer, out_dir, config)
    seconds = time.perf_counter() - start
    print(f"{counts['documents']:,} documents, {counts['skipped']:,} empty ones skipped")
    print(f"{counts['bytes'] / 1e6:.2f} MB of text in {seconds:.1f} s, "
          f"{counts['bytes'] / 1e6 / seconds:.1f} MB/s")  # fmt: skip
    for split, tokens in meta["tokens"].items():
        if tokens:
            print(f"{split:5s} {tokens:13,} tokens in {out_dir}/{split}.bin")
    if config.val_fraction and not meta["tokens"]["val"]:
        print("no val.bin: the only document is too short to be cut")
    dataset = os.path.relpath(out_dir, "data")
    if dataset.startswith(os.pardir):
        dataset = os.path.abspath(out_dir)
    print(f"next: python train.py config/tiny.py --dataset={dataset}")


if __name__ == "__main__":
    run(main)
