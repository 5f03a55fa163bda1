"""
Continue a text with a trained model.

    python sample.py --out_dir=out/tiny --start="The function returns"
    python sample.py --out_dir=out/tiny --start=FILE:prompt.txt --num_samples=3 --temperature=0

The prompt is prefilled by a solver (section 3.3), then every token costs one pass of the stack on
the cache of k channels and one evaluation of the pool (section 3.2). The text goes to stdout,
speed and remarks to stderr. A sample ends at EOS or after max_new_tokens.

Prompt and new tokens together may be more than the block_size of training: nothing is cut off,
positions simply go on, with a note on stderr, as such positions were never trained.
"""

from __future__ import annotations

import codecs
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from attention import Cache
from configurator import UserError, key, parse, run
from model import Decoder
from prepare_data import Tokenizer, get_tokenizer
from solvers import Report, Solution, autoregressive, cyclic, jacobi, one_pass
from train import load_model, pick_device, pick_dtype

SOLVERS = ("cyclic", "jacobi", "autoregressive")
# --exact ends at these relative residuals: about where rounding takes over
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass
class SampleConfig:
    """What the command line takes."""

    out_dir: str = key("out", "folder with ckpt.pt, or a checkpoint file")
    start: str = key("\n", "the prompt, or FILE:path; default a line feed, empty: a new document")
    num_samples: int = key(1, "continuations, decoded as one batch")
    max_new_tokens: int = key(500, "at most, per sample; 0 prints the prompt")
    temperature: float = key(0.8, "0 is greedy")
    top_k: int | None = key(200, "sample among the k likeliest tokens; None or 0: all")
    top_p: float = key(1.0, "sample among the likeliest tokens that make up this probability")
    seed: int = key(1337, "of the random choices")
    solver: str = key("cyclic", "of the prefill: cyclic, jacobi or autoregressive")
    passes: int = key(3, "of the prefill")
    n_groups: int = key(8, "g of the cyclic prefill")
    exact: bool = key(False, "iterate the prefill until it has converged, whatever passes says")
    ignore_eos: bool = key(False, "go on after the end of the document")
    device: str = key("auto", "auto (cuda, else mps, else cpu), or a torch device")
    dtype: str = key("auto", "auto (bfloat16 on cuda), float32 or bfloat16")


@dataclass
class Stats:
    """What `generate` did; the first token of each sample belongs to the prefill."""

    report: Report | None = None  # of the prefill's solver
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    def add(self, n_tokens: int, seconds: float):
        if not self.prefill_seconds:
            self.prefill_seconds = seconds
        else:
            self.decode_tokens += n_tokens
            self.decode_seconds += seconds


# ---- prefill, one token, one choice


def prefill(model: Decoder, idx: Tensor, solver: str = "cyclic", passes: int = 3,
            n_groups: int = 8, tol: float | None = None) -> Solution:
    """States and cache of prompts idx (B, T), right padded: causality keeps padding harmless.

    With `tol`, passes go on until the relative residual is at most tol; T passes are exact.
    """
    if not model.iterates:
        return one_pass(model, idx)
    if solver == "autoregressive":
        return autoregressive(model, idx)
    limits = dict(n_nograd=passes if tol is None else idx.size(1), n_grad=0, tol=tol,
                  measure=False)
    if solver == "jacobi":
        return jacobi(model, idx, **limits)
    return cyclic(model, idx, n_groups, **limits)


def step(model: Decoder, cache: Cache, token: Tensor, index: Tensor, start: Tensor) -> Tensor:
    """Decode one token per row (section 3.2) and append it to the cache; returns h[L] (B, D).

    token, index, start (B,): its id, its column in the cache, its document's first column.
    """
    rows = model.place(index[:, None], index[:, None], start[:, None])
    h = model.states(model.embed_tokens(token[:, None]), rows, cache)
    if model.iterates:  # other systems write their keys and values on the way up
        model.store(h, rows, cache)
    return h[-1][:, 0]


def choose(logits: Tensor, temperature: float, top_k: int | None, top_p: float,
           generator: torch.Generator | None = None) -> Tensor:
    """Draw an id (B,) from each row of logits (B, V). Raises UserError if one is not finite."""
    if not torch.isfinite(logits).all():
        raise UserError("non-finite logits (NaN or infinity): the checkpoint's weights are "
                        "damaged, or its training diverged")
    logits = logits.float()
    if temperature < 1e-6:  # 0; and below this a division would overflow
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k:
        least = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probs = logits.softmax(-1)
    if top_p < 1:
        ranked, order = probs.sort(-1, descending=True)
        beyond = ranked.cumsum(-1) - ranked >= top_p  # the likeliest token always stays
        probs = probs.masked_fill(beyond.gather(-1, order.argsort(-1)), 0)
    return torch.multinomial(probs, 1, generator=generator)[:, 0]


# ---- generation


@torch.no_grad()
def generate(model: Decoder, prompts: list[list[int]], max_new_tokens: int,
             temperature: float = 0.8, top_k: int | None = None, top_p: float = 1.0,
             seed: int = 1337, solver: str = "cyclic", passes: int = 3, n_groups: int = 8,
             tol: float | None = None, stop_id: int | None = None, n_ids: int | None = None,
             stats: Stats | None = None) -> Iterator[list[int | None]]:
    """Continue a batch of prompts (token ids, each at least one, of any lengths).

    Yields, step by step, one new id per row; None for a row that has ended. A row ends at
    `stop_id`, which is not part of the result; the generator ends when all rows have. Ids from
    `n_ids` on (padding of the vocabulary) are never drawn. `stats` is filled along the way.
    """
    stats = stats or Stats()
    if max_new_tokens < 1:
        return
    began = time.perf_counter()
    generator = torch.Generator(model.embed.device).manual_seed(seed)
    h, cache, index, start, stats.report = begin(
        model, prompts, max_new_tokens, solver, passes, n_groups, tol)
    alive = [True] * len(prompts)
    for filled in range(cache.k.size(2) - max_new_tokens, cache.k.size(2)):
        token = choose(model.logits(h)[:, :n_ids], temperature, top_k, top_p, generator)
        ids = token.tolist()  # waits for the device, so the times are true
        alive = [a and i != stop_id for a, i in zip(alive, ids)]
        stats.add(sum(alive), time.perf_counter() - began)
        if not any(alive):
            return
        yield [i if a else None for a, i in zip(alive, ids)]
        began = time.perf_counter()
        if filled + 1 < cache.k.size(2):  # nobody asks what follows the last token
            view = Cache(cache.k[:, :, :filled + 1], cache.v[:, :, :filled + 1], cache.sink)
            h = step(model, view, token, index, start)
            start = next_start(model, token, index, start)
            index = index + 1


def begin(model: Decoder, prompts: list[list[int]], max_new_tokens: int, *how):
    """Prefill: the final state (B, D) of each prompt's last token, a cache with room for all new
    tokens, column and document start (B,) of the next token, and the solver's report."""
    device = model.embed.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    longest = max(map(len, prompts))
    idx = torch.tensor([p + [0] * (longest - len(p)) for p in prompts], device=device)
    solution = prefill(model, idx, *how)
    rows, last = torch.arange(len(prompts), device=device), lengths - 1
    h = solution.final[rows, last]
    cache = model.new_cache(len(prompts), longest + max_new_tokens, like=h)
    cache.put(slice(0, longest), solution.cache.k, solution.cache.v)
    start = model.document_starts(idx)[rows, last]
    return h, cache, lengths, next_start(model, idx[rows, last], last, start), solution.report


def next_start(model: Decoder, token: Tensor, index: Tensor, start: Tensor) -> Tensor:
    """Document start of the token after `token` (B,), which stands at column `index`."""
    eos_id = model.config.eos_id
    return start if eos_id is None else torch.where(token == eos_id, index + 1, start)


# ---- text


class Printer:
    """Prints the samples one after the other, each as it comes and never half a character."""

    def __init__(self, tokenizer: Tokenizer, start: str, n: int, out=None):
        self.tokenizer, self.out = tokenizer, out or sys.stdout
        utf8 = codecs.getincrementaldecoder("utf-8")
        self.decoders = [utf8(errors="replace") for _ in range(n)]
        self.waiting = [start if n == 1 else f"{chr(10) * (b > 0)}--- sample {b + 1} of {n} ---\n"
                        + start for b in range(n)]  # text that is not printed yet
        self.ended = [False] * n
        self.current = 0  # the sample on show; those after it wait
        self.show()

    def add(self, ids: list[int | None]):
        """Take the next id of every sample; None for one that has ended."""
        for b, i in enumerate(ids):
            data = b"" if i is None else self.tokenizer.decode_bytes([i])
            # at the end, the bytes of an unfinished character become U+FFFD
            self.waiting[b] += self.decoders[b].decode(data, final=i is None)
            self.ended[b] = i is None
        self.show()

    def show(self):
        while self.current < len(self.waiting):
            self.out.write(self.waiting[self.current])
            self.waiting[self.current] = ""
            if not self.ended[self.current]:
                break
            self.current += 1
        self.out.flush()

    def close(self):
        self.add([None] * len(self.waiting))
        self.out.write("\n")
        self.out.flush()


def read_start(start: str) -> str:
    """The prompt, read from its file where it says FILE:path."""
    if not start.startswith("FILE:"):
        return start
    try:
        return Path(start[5:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"start={start}: cannot read this file as UTF-8 text ({error})") from None


# ---- the command


def check(c: SampleConfig):
    """Raise UserError for values that mean nothing."""
    for name, least in (("num_samples", 1), ("max_new_tokens", 0), ("temperature", 0),
                        ("passes", 1), ("n_groups", 1), ("seed", 0)):
        if not getattr(c, name) >= least:  # also refuses nan
            raise UserError(f"{name}={getattr(c, name)}: at least {least} is needed")
    if c.top_k is not None and c.top_k < 0:
        raise UserError(f"top_k={c.top_k}: a positive number, or 0 for all tokens")
    if not 0 < c.top_p <= 1:
        raise UserError(f"top_p={c.top_p}: a number above 0 and up to 1")
    if c.solver not in SOLVERS:
        raise UserError(f"solver={c.solver}: choose one of {', '.join(SOLVERS)}")


def main(argv: list[str]):
    c = parse(SampleConfig(), argv, __doc__)
    check(c)
    start = read_start(c.start)
    device = pick_device(c.device)
    dtype = pick_dtype(c.dtype, device)
    model, checkpoint = load_model(c.out_dir, device)
    model = model.to(dtype)  # RoPE and norms still compute in float32
    tokenizer = get_tokenizer(checkpoint["meta"]["tokenizer"])
    eos_id = checkpoint["meta"]["eos_id"]
    # an empty prompt: the end of a document before it is all that there is to go by
    prompt = tokenizer.encode(start) or [eos_id]
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows ASCII only prints ?
    total, block_size = len(prompt) + c.max_new_tokens, checkpoint["config"]["block_size"]
    if total > block_size:
        remark(f"note: {len(prompt)} prompt and {c.max_new_tokens} new tokens are more than the "
               f"block_size={block_size} of training; positions beyond it were never trained")
    stats = Stats()
    printer = Printer(tokenizer, start, c.num_samples)
    for ids in generate(
            model, [prompt] * c.num_samples, c.max_new_tokens, c.temperature, c.top_k, c.top_p,
            c.seed, c.solver, c.passes, c.n_groups, TOLERANCE[dtype] if c.exact else None,
            None if c.ignore_eos else eos_id, tokenizer.vocab_size, stats):
        printer.add(ids)
    printer.close()
    if stats.report is not None:
        n_prompt = len(prompt) * c.num_samples
        remark(f"{device}, {str(dtype).removeprefix('torch.')}: "
               + describe(c, model, n_prompt, stats))


def describe(c: SampleConfig, model: Decoder, n_prompt: int, s: Stats) -> str:
    """Speed and accuracy in one line; n_prompt tokens were prefilled."""
    how, accuracy = "one pass", ""
    if model.iterates:
        groups = f" of {c.n_groups} groups" if c.solver == "cyclic" else ""
        how = f"{s.report.passes} {c.solver} pass{'es' * (s.report.passes > 1)}{groups}"
        if s.report.converged is not None:
            accuracy = (f" ({'converged' if s.report.converged else 'not converged'}, "
                        f"residual {s.report.residual:.1e})")
    text = (f"prefill of {n_prompt:,} tokens in {s.prefill_seconds:.3f} s "
            f"({n_prompt / s.prefill_seconds:,.0f} tokens/s) by {how}{accuracy}")
    if s.decode_tokens:
        text += (f"; decoding of {s.decode_tokens:,} tokens in {s.decode_seconds:.3f} s "
                 f"({s.decode_tokens / s.decode_seconds:,.0f} tokens/s)")
    return text


def remark(text: str):
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run(main)
