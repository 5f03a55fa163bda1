"""
Where documents come from: files, Python's own documentation, a data set on the network.

A source yields documents, and a document yields its text in strings, so that neither a file nor,
if it is no line of JSON, a document need fit into memory.
"""

import ast
import codecs
import contextlib
import glob
import gzip
import itertools
import json
import os
import random
import re
import sysconfig
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from configurator import UserError, package

FORMATS = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")
CHUNK = 2**18  # bytes that are read at a time
# half a surrogate, or what stands for a byte, or a zero: see `clean`
NO_TEXT = re.compile(r"[\0\ud800-\udfff]")
PAUSE = 1  # seconds, doubled with every try of a download

# --- files


def find_files(names: str) -> list[Path]:
    """The files named by a comma-separated list of files, folders and globs, in order.

    What is hidden in a folder, by a dot before its name, is left out; a file that has several
    names, by links, comes once. Raises UserError for a name without a file of one of our FORMATS.
    """
    files: dict[str, Path] = {}
    listed = [names] if os.path.exists(names) else names.split(",")  # a comma in a file's name
    for name in filter(None, map(str.strip, listed)):
        # a Path raises an error for too long a name
        paths = [name] if os.path.exists(name) else sorted(glob.glob(name, recursive=True))
        inside = itertools.chain(*(files_in(p) if os.path.isdir(p) else [Path(p)] for p in paths))
        found = [path for path in inside if path.name.lower().endswith(FORMATS)]
        if not found:
            raise UserError(f"--input: {name} " + (
                f"is or holds no {', '.join(FORMATS)} file" if paths else "does not exist"))
        for path in found:
            if not path.exists():
                raise UserError(f"--input: {path} is a link to a file that is not there")
            files.setdefault(os.path.realpath(path), path)
    if not files:
        raise UserError(f"--input={names}: names no file")
    if any(path.suffix.lower() == ".parquet" for path in files.values()):
        import_parquet()  # now, not when the others have been read
    return list(files.values())


def files_in(folder: Path) -> list[Path]:
    """All files in a folder and those in it, also where links lead, but what is hidden there.
    Raises UserError for a folder that cannot be read."""
    def refuse(error: OSError):
        raise UserError(f"--input: {error.filename}: {error.strerror}")

    found, seen = [], set()
    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(place)
        # a link that leads upwards would never end
        folders[:] = [] if real in seen else sorted(f for f in folders if not f.startswith("."))
        if real not in seen:
            found += [Path(place, name) for name in names if not name.startswith(".")]
        seen.add(real)
    return sorted(found)


class Documents:
    """The documents of some files, in order, and how far the reading of them has come.

    What is no text, a byte that is not UTF-8 or is zero, or half a surrogate pair in JSON, becomes
    U+FFFD and is counted in `replaced`; `first` says where. A null is an empty document.
    """

    def __init__(self, files: Iterable[Path]):
        self.files = list(files)
        self.size = sum(path.stat().st_size for path in self.files)  # bytes on disk
        self.before = 0  # bytes of the files that have been read
        self.raw = None  # the file that is being read
        self.replaced, self.first = 0, ""

    def done(self) -> int:
        """Bytes on disk that have been read."""
        return self.before + (self.raw.tell() if self.raw else 0)

    def __iter__(self) -> Iterator[Iterable[str]]:
        for path in self.files:
            with open(path, "rb") as self.raw:
                yield from self.read(path)
            self.raw = None
            self.before += path.stat().st_size

    def read(self, path: Path) -> Iterator[Iterable[str]]:
        """The documents of the open file. Raises UserError with its name if something is wrong.

        A byte that is not UTF-8 is half a surrogate until `clean` has replaced it.
        """
        name, file = path.name.lower(), self.raw
        if name.endswith(".gz"):
            file = gzip.open(file)
        kind = name.removesuffix(".gz").rpartition(".")[2]
        with unpacking(path):
            if file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise UserError(f"{path} is UTF-16 or UTF-32, not UTF-8")
            if kind == "txt":
                yield self.read_text(file, path)
            else:
                yield from (self.read_parquet if kind == "parquet" else self.read_jsonl)(file, path)

    def clean(self, text: str, where: str) -> str:
        """A string in which what is no text has become U+FFFD."""
        if no_text(text):
            self.first = self.first or where
            text, n = NO_TEXT.subn("\ufffd", text)
            self.replaced += n
        return text

    def read_text(self, file, path: Path) -> Iterator[str]:
        """A text file in pieces, its line ends untouched."""
        line = 1
        with unpacking(path):  # its pieces are read by whoever it is given to
            chunks = iter(lambda: file.read(CHUNK), b"")
            for text in codecs.iterdecode(chunks, "utf-8-sig", "surrogateescape"):
                bad = no_text(text)
                before = text.count("\n", 0, bad.start()) if bad else 0
                yield self.clean(text, f"{path}, line {line + before}")
                line += text.count("\n")

    def read_jsonl(self, file, path: Path) -> Iterator[list[str]]:
        """The "text" of each line; a line without one stops the run with file and line number."""
        for number, line in enumerate(file, 1):  # as bytes: only \n ends a line
            if not line.strip():
                continue
            line = line.decode("utf-8", "surrogateescape")  # noqa: PLW2901
            where = f"{path}, line {number}"
            try:
                text = json.loads(line.removeprefix("\ufeff"))["text"]
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: not JSON: {error}") from None
            except (KeyError, TypeError, IndexError):
                text = 0
            if not isinstance(text, str | None):
                raise UserError(f'{where}: wanted an object with a string "text"')
            yield [self.clean(text or "", where)]

    def read_parquet(self, file, path: Path) -> Iterator[list[str]]:
        """The column "text" of a parquet file, row by row."""
        parquet = import_parquet()
        import pyarrow

        try:
            table = parquet.ParquetFile(file)
            kinds = [str(field.type) for field in table.schema_arrow if field.name == "text"]
            if kinds not in (["string"], ["large_string"]):
                found = ", ".join(f"{field.name}: {field.type}" for field in table.schema_arrow)
                raise UserError(f'{path}: wanted one column "text" of strings, not {found}')
            number = itertools.count(1)
            for batch in table.iter_batches(256, columns=["text"], use_threads=False):
                for data in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                    text = (data or b"").decode("utf-8", "surrogateescape")
                    yield [self.clean(text, f"{path}, row {next(number)}")]
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{path} is no parquet file or damaged: {error}") from None


def no_text(text: str) -> re.Match | None:
    """The first character that is no text; quick where there is none."""
    return None if text.isascii() and "\0" not in text else NO_TEXT.search(text)


@contextlib.contextmanager
def unpacking(path: Path):
    """Name the file if what gzip finds in it is damaged or cut off."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is damaged: {error}") from None


def import_parquet():
    return package("pyarrow.parquet", "parquet files need pyarrow: pip install pyarrow")


# --- the network


def fineweb_edu(folder: Path, shards: int, base_url: str, show: Callable) -> list[Path]:
    """The first shards of the paper's data set, downloaded to `folder` unless they are there.

    `show(share, size)` is told the share of what was missing that has come, and its bytes. Raises
    UserError when the network gives up; another run goes on with the shard that is missing.
    """
    paths = [folder / f"shard_{i:05d}.parquet" for i in range(shards)]
    missing = [path for path in paths if not path.exists()]
    received = 0
    for i, path in enumerate(missing):
        for new, share in fetch(f"{base_url.rstrip('/')}/{path.name}", path, b"PAR1", b"PAR1"):
            received += new
            show((i + share) / len(missing), received)
    return paths


def fetch(url: str, path: Path, first: bytes, last: bytes, tries: int = 6,
          timeout: float = 30) -> Iterator[tuple[int, float]]:
    """Download a file; yields the bytes that are new, and the share had by now, as they come.

    Written to PATH.part, and renamed when it is whole, with these first and last bytes. A network
    that fails is tried again, ever longer apart. Raises UserError where it does so `tries` times,
    for a refusal, and for something else than was asked for (as of one that wants a login first).
    """
    import requests  # which tiktoken needs, too

    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    for n in range(1, tries + 1):
        try:
            with requests.get(url, stream=True, timeout=timeout) as response:
                response.raise_for_status()
                total = int(response.headers.get("Content-Length", 0))
                with open(part, "wb") as file:
                    for data in response.iter_content(CHUNK):
                        file.write(data)
                        yield len(data), file.tell() / max(total, file.tell())
            break
        except requests.RequestException as error:
            status = getattr(error.response, "status_code", 500)
            wrong_url = isinstance(error, ValueError)  # which no further try mends
            if wrong_url or n == tries or status < 500 and status not in (408, 429):
                raise UserError(f"{url}: {error}; gave up") from None
        time.sleep(PAUSE * 2**n)
    data = part.read_bytes()
    if not (data.startswith(first) and data[-9:].rstrip().endswith(last)):
        part.unlink()
        raise UserError(f"{url}: {len(data):,} bytes came, but of no {path.suffix[1:]} file; "
                        "not kept")
    os.replace(part, path)


# --- Python's own documentation

# no English, or English of somebody else
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings",
                   "site-packages", "dist-packages", "__pycache__"}
LEGAL = re.compile(r"copyright|licen[sc]e|warranty|rights reserved|written by|\w@\w", re.IGNORECASE)
RULER = re.compile(r"^[ \t]*([^\w\s])\1{3,}[ \t]*(\n|$)", re.MULTILINE)  # the line under a heading


def python_documents(seed: int) -> Iterator[list[str]]:
    """Python's English: a document per pydoc topic, per module and per class, in random order.

    Keeps the paragraphs of prose that have not occurred before, so nothing of val is in train.
    """
    seen: set[str] = set()
    documents = []
    for text in itertools.chain(pydoc_topics(), stdlib_docstrings()):
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
    letters = sum(map(str.isalpha, paragraph)) + sum(map(str.isspace, paragraph))
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
