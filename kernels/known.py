"""
What the kernels stand in for, so that a changed model never gets wrong results from them.

For each part there is the code that it computes the same as, by a fingerprint of its source
(comments, docstrings and layout do not count). Where that has changed, or a model is of classes
with other methods, the part runs as it is written, in plain PyTorch. Whoever changes a kernel along
with the model prints the new fingerprints by `python -m kernels.known`.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import tokenize

import torch.nn as nn

import attention
import baselines
import decoding
import model as plain
from model import Block, Decoder
from pool import Branch, Pool, WhiteMatter

PARTS = {
    "attention": (attention.Rows, attention.attend, attention.in_blocks, attention.attend_block,
                  attention.Cache, attention.write, plain.rotary_tables, Decoder.new_cache,
                  Decoder.place),
    "loss": (plain.upcast, plain.rms_norm, plain.RMSNorm, Decoder.embed_tokens, Decoder.logits,
             Decoder.loss, Decoder.nats),
    "block": (plain.rotate, Block, Decoder.states),
    "pool": (Branch, Pool, WhiteMatter.pool, WhiteMatter.new_cache, Decoder.store),
    "recurrent": (baselines.Recurrent.attend, baselines.attend_with_own),
    "decoding": (decoding.step, decoding.next_start, decoding.Steps, Decoder.attend,
                 WhiteMatter.attend),
    "choice": (decoding.choose, decoding.Choice),
}
FINGERPRINTS = {
    "attention": "0117c24bd8cc4eb6",
    "loss": "f687515e517e3ee2",
    "block": "cda6a8e6eb33b819",
    "pool": "745b0e67e80a0c15",
    "recurrent": "b0e7b242fe31f206",
    "decoding": "7e9733723e18ef7b",
    "choice": "ce0efa5c22c32ac0",
}


def fingerprint(objects) -> str:
    """Of the source of functions and classes."""
    text = "".join(essence(inspect.getsource(x)) for x in objects)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def essence(source: str) -> str:
    """Source without comments, docstrings and blanks."""
    blocks = {tokenize.INDENT: "{", tokenize.DEDENT: "}"}
    out, begins = [], True  # does a statement begin here?
    lines = inspect.cleandoc("\n" + source) + "\n"
    for token in tokenize.generate_tokens(io.StringIO(lines).readline):
        if token.type in blocks:
            out.append(blocks[token.type])
        elif token.type not in (tokenize.COMMENT, tokenize.NL) and not (
                begins and token.type == tokenize.STRING):
            begins = token.type == tokenize.NEWLINE
            out.append("".join(token.string.split()) + ";" * begins)
    return "".join(out)


def changed() -> set[str]:
    """Parts whose code is not what the kernels stand in for."""
    try:
        return {part for part, objects in PARTS.items()
                if fingerprint(objects) != FINGERPRINTS[part]}
    except (OSError, tokenize.TokenError):  # no source to look at
        return set(PARTS)


def unknown(model: Decoder) -> set[str]:
    """Parts of this model that the kernels do not know."""
    found, kind = changed(), type(model)

    def check(part: str, owner: type, *names: str):
        if any(getattr(kind, name) is not getattr(owner, name) or name in vars(model)
               for name in names):
            found.add(part)

    check("loss", Decoder, "embed_tokens", "logits", "loss", "nats")
    check("block", Decoder, "states")
    check("attention", Decoder, "place", "attention")
    if type(model.norm) is not plain.RMSNorm:
        found.add("loss")
    if isinstance(model, baselines.Recurrent):
        check("recurrent", baselines.Recurrent, "attend")
    if not isinstance(model, WhiteMatter):
        check("attention", Decoder, "new_cache")
    if any(type(block) is not Block for block in model.blocks):
        found.add("block")
    if isinstance(model, WhiteMatter) and model.iterates:
        pool = model.kv_pool
        check("pool", WhiteMatter, "pool", "new_cache", "store", "refill")
        if type(pool) is not Pool or any(
                type(branch) is not Branch or type(branch.router) not in (nn.Linear, type(None))
                for branch in (pool.key, pool.value)):
            found.add("pool")
    if kind not in (Decoder, WhiteMatter):
        found.add("decoding")
    if not isinstance(model, baselines.Recurrent):
        found.discard("recurrent")
    return found


if __name__ == "__main__":
    for part, objects in PARTS.items():
        print(f'    "{part}": "{fingerprint(objects)}",')
