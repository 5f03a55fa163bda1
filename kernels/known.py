"""
What the kernels stand in for, so that a changed model never gets wrong results from them.

For each part there is the code that it computes the same as, by a fingerprint of its source
(comments, docstrings and layout do not count). Where that has changed, or a model is of classes
with other methods, the part runs as it is written, in plain PyTorch. Whoever changes a kernel along
with the model prints the new fingerprints by `python -m kernels.known`.
"""

import functools
import hashlib
import importlib
import inspect
import io
import operator
import tokenize
from types import FunctionType

import torch
import torch.nn as nn

import model as plain
from baselines import NoFeedback, Recurrent
from model import Block, Decoder
from pool import Pool, WhiteMatter

PARTS = {
    "attention": ["attention.Rows", "attention.attend", "attention.in_blocks",
                  "attention.attend_block", "attention.Cache", "attention.write",
                  "model.rotary_tables", "model.Decoder.new_cache", "model.Decoder.place"],
    "loss": ["model.upcast", "model.rms_norm", "model.RMSNorm", "model.Decoder.embed_tokens",
             "model.Decoder.logits", "model.Decoder.loss", "model.Decoder.nats"],
    "block": ["model.rotate", "model.Block", "model.Decoder.states"],
    "pool": ["pool.Branch", "pool.Pool", "pool.WhiteMatter.pool", "pool.WhiteMatter.new_cache",
             "pool.WhiteMatter.dummy_channels", "model.Decoder.store"],
    "no feedback": ["pool.Branch", "pool.Pool", "baselines.NoFeedback", "baselines.mix_up_to"],
    "recurrent": ["baselines.Recurrent.attend", "baselines.attend_with_own"],
    "decoding": ["decoding.step", "decoding.next_start", "decoding.Steps", "model.Decoder.attend",
                 "model.Decoder.write_and_attend", "pool.WhiteMatter.attend"],
    "choice": ["decoding.choose", "decoding.Choice"],
}
FINGERPRINTS = {
    "attention": "2c7ce5a26383ada5",
    "loss": "ebd6da25efcd67a2",
    "block": "53758f679a0f7053",
    "pool": "b75fe919a0e4b8e7",
    "no feedback": "f68869cd52a161df",
    "recurrent": "b0e7b242fe31f206",
    "decoding": "cb9d81087ee73d75",
    "choice": "e7910c5a8155a47b",
}


def fingerprint(names: list[str]) -> str:
    """Of the source of functions and classes as they are now: of a class what stands in its file,
    and its methods, which somebody may have replaced since."""
    text = ""
    for module, _, name in (name.partition(".") for name in names):
        found = operator.attrgetter(name)(importlib.import_module(module))
        text += essence_of(found)
        for key, value in vars(found).items() if isinstance(found, type) else ():
            f = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value)))
            made = key.startswith("__") and key not in ("__init__", "__call__")
            if isinstance(f, FunctionType) and f.__code__.co_filename != "<string>" and not made:
                text += essence_of(f)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache  # half a second for all, at each start of a bench's systems
def essence_of(x) -> str:
    return essence(inspect.getsource(x))


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
        return {part for part, names in PARTS.items() if fingerprint(names) != FINGERPRINTS[part]}
    except (OSError, tokenize.TokenError):  # no source to look at
        return set(PARTS)


def hooked(module: nn.Module) -> bool:
    """Does anything else run when this module is called?"""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
                or module._backward_pre_hooks)


def alike(module: nn.Module | None, fresh: nn.Module | None) -> bool:
    """Is a tree of modules as `fresh` is but for its weights: classes, sizes, no method replaced,
    no hook?"""
    if module is None or fresh is None:
        return module is fresh
    shapes, expected = ({name: p is not None and p.shape for name, p in m._parameters.items()}
                        for m in (module, fresh))
    return (type(module) is type(fresh) and vars(module).keys() == vars(fresh).keys()
            and not hooked(module) and module._modules.keys() == fresh._modules.keys()
            and shapes == expected
            and all(map(alike, module._modules.values(), fresh._modules.values())))


def split_head(d: int) -> tuple[int, int]:
    """d columns as the largest power of two and the rest, which may be 0."""
    d0 = 1 << (d.bit_length() - 1)
    return d0, d - d0


def of_size(table: dict, d: int):
    """The entry of a table by head size: each serves the sizes up to its own."""
    return table[min(n for n in table if n >= min(d, max(table)))]


def head_fits(d: int) -> bool:
    """Is there attention for heads of d: a power of two from 16 on, or a sum of two of them?"""
    _, rest = split_head(d)
    return d >= 16 and not rest & (rest - 1) and not 0 < rest < 16


def pool_fits(L: int, D: int) -> bool:
    """Is there a pool for L sources of width D?"""
    return L <= 32 and D <= 2048 and D % 16 == 0


def unknown(model: Decoder) -> set[str]:
    """Parts of this model that the kernels do not know: of other code, or of sizes that they do
    not take."""
    found, kind, c = changed(), type(model), model.config
    with torch.device("meta"):
        norm = plain.RMSNorm(c.n_embd)
        # to draw its weights there would import the compiler
        embed = nn.utils.skip_init(nn.Embedding, c.vocab_size, c.n_embd, device="meta")
        blocks = [] if "block" in found else [
            Block(c, model.has_kv(layer)) for layer in range(c.n_layer)]
        pool = Pool(c) if isinstance(model, WhiteMatter) else None

    def check(part: str, owner: type, *names: str):
        if any(getattr(kind, name) is not getattr(owner, name) or name in vars(model)
               for name in names):
            found.add(part)

    check("loss", Decoder, "embed_tokens", "logits", "loss", "nats")
    check("block", Decoder, "states")
    check("attention", Decoder, "place", "attention")
    if hooked(model) or not alike(model.norm, norm) or not alike(model.embed, embed):
        found.add("loss")
    if not head_fits(c.head_dim) or c.n_head // c.n_kv_head > 16:
        found.add("attention")
    if isinstance(model, Recurrent):
        check("recurrent", Recurrent, "attend")
    if not isinstance(model, WhiteMatter):
        check("attention", Decoder, "new_cache")
    if len(model.blocks) != c.n_layer or not all(map(alike, model.blocks, blocks)):
        found.add("block")
    mixing, owner, *methods = (
        ("no feedback", NoFeedback, "attend", "source", "channel", "dummy_channel")
        if isinstance(model, NoFeedback) else
        ("pool", WhiteMatter, "pool", "new_cache", "dummy_channels", "store", "refill"))
    if pool is not None:
        check(mixing, owner, *methods)
        if not alike(model.kv_pool, pool) or not pool_fits(pool.n_sources, c.n_embd):
            found.add(mixing)
    check("decoding", kind, "attend", "write_and_attend")
    if kind not in (Decoder, WhiteMatter):
        found.add("decoding")
    its = {mixing} if pool is not None else {"recurrent"} if isinstance(model, Recurrent) else set()
    return found - ({"recurrent", "pool", "no feedback"} - its)  # less what other systems have


if __name__ == "__main__":
    for part, names in PARTS.items():
        print(f'    "{part}": "{fingerprint(names)}",')
