"""
The tokenizer.json of Hugging Face, as far as it is a byte-level BPE, by the library of its format.
"""

import contextlib
import functools
import json
from collections.abc import Callable

import numpy as np

from configurator import UserError, package

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # of a document, not of a chat's turn
NEVER = {0xC0, 0xC1, *range(0xF5, 0x100)}  # bytes that UTF-8 does not use


def read_json(content: str) -> tuple[Callable[[str], np.ndarray], dict[int, bytes], dict[str, int]]:
    """What makes ids of text, the bytes of each id, and the ids of control tokens.

    Raises ValueError for one that is not a byte-level BPE, or adds to the text or takes from it.
    """
    needs = ("a tokenizer.json needs the library of its format, 0.20 or later: pip install "
             "--upgrade tokenizers")
    library = package("tokenizers", needs)
    if not hasattr(library.Tokenizer, "encode_batch_fast"):
        raise UserError(f"{needs} (here: {library.__version__})")
    table = json.loads(content)
    check_parts(table)  # first, as the library may panic at what it does not know
    for token in table.get("added_tokens", []):
        token["special"] = token.get("special") or token["content"] in ENDS
        if not token["special"] and (token.get("lstrip") or token.get("rstrip")):
            raise ValueError(f"its token {token['content']!r} takes white space away")
    table |= {"truncation": None, "padding": None, "post_processor": None}
    table["model"]["dropout"] = None
    try:
        tokenizer = library.Tokenizer.from_str(json.dumps(table))
    except Exception as error:  # of no kind of its own
        raise ValueError(str(error)) from None
    tokenizer.encode_special_tokens = True  # as ordinary text
    added, letters = tokenizer.get_added_tokens_decoder(), byte_letters()
    tokens = {i: token.content.encode() for i, token in added.items()}
    for token, i in tokenizer.get_vocab(False).items():
        with contextlib.suppress(KeyError):  # one of other letters, which never occurs
            tokens.setdefault(i, bytes(map(letters.__getitem__, token)))
    lacking = {bytes([i]) for i in range(256) if i not in NEVER} - set(tokens.values())
    if lacking:
        raise ValueError(f"{len(lacking)} of the bytes of UTF-8 have no token, such as "
                         f"{min(lacking)!r}")
    control = {token.content: i for i, token in added.items() if token.special}
    return functools.partial(encode, tokenizer), tokens, control


def encode(tokenizer, text: str) -> np.ndarray:
    """The ids of a text, control tokens in it being text, the other added ones not."""
    # twice as fast as its encode, since without positions
    (encoded,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return np.array(encoded.ids, np.uint32)


def check_parts(table: dict) -> None:
    """Raise ValueError if a tokenizer.json is of another kind than ours: the true reason."""
    model, normalizer = table["model"], table.get("normalizer") or {"type": None}
    steps = table.get("pre_tokenizer") or {"type": None}
    steps = steps.get("pretokenizers", [steps]) or [{"type": None}]
    for part, value, accepted in (
        ("model", model.get("type", "BPE"), ["BPE"]),
        ("byte_fallback", model.get("byte_fallback", False), [False]),
        ("continuing_subword_prefix", model.get("continuing_subword_prefix"), [None, ""]),
        ("end_of_word_suffix", model.get("end_of_word_suffix"), [None, ""]),
        ("normalizer", normalizer["type"], [None, "NFC"]),
        ("last pre-tokenizer", steps[-1]["type"], ["ByteLevel"]),
        ("add_prefix_space", any(step.get("add_prefix_space") for step in steps), [False]),
    ):
        if value not in accepted:
            raise ValueError(f"its {part} is {value!r}, not {' or '.join(map(repr, accepted))}")


def byte_letters() -> dict[str, int]:
    """GPT-2's letter for each byte: itself where it prints in Latin-1, else from U+0100 on."""
    prints = {i for i in range(256) if chr(i).isprintable() and chr(i) != " "}
    others = [i for i in range(256) if i not in prints]
    return {chr(i): i for i in prints} | {chr(256 + n): i for n, i in enumerate(others)}
