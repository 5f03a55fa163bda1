"""
Continue a text with a trained model.

    python sample.py --out_dir=out/tiny --start="The function returns"
    python sample.py --out_dir=out/tiny --start=FILE:prompt.txt --num_samples=3 --temperature=0
    python sample.py --out_dir=out/tiny --prompts=prompts.txt --stop="."   # a prompt on each line
    python sample.py --out_dir=out/tiny --interactive

The prompt is prefilled by a solver (section 3.3), then every token costs one pass of the stack on
the cache of k channels and one evaluation of the pool (section 3.2). The text goes to stdout,
speed and remarks to stderr. A sample ends at EOS, before the text of --stop or after
max_new_tokens. Sample i (from 0) is what a run of its prompt alone gives with the seed seed + i.

Prompt and new tokens together may be more than the block_size of training: nothing is cut off,
positions simply go on, with a note on stderr, as such positions were never trained.
"""

from __future__ import annotations

import codecs
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from attention import Cache, is_fast
from configurator import UserError, key, parse, run
from model import Decoder, set_compute_copies
from prepare_data import Tokenizer, get_tokenizer
from solvers import Report, Solution, autoregressive, cyclic, jacobi, one_pass
from train import load_model, pick_device, pick_dtype

try:  # the fast path; Triton comes with PyTorch's CUDA builds
    import decode_kernels
except ImportError:
    decode_kernels = None

SIDE_BY_SIDE = 32  # rows from which on a batch is decoded in two parts at the same time
SOLVERS = ("cyclic", "jacobi", "autoregressive")
# --exact ends at these relative residuals: about where rounding takes over
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass
class SampleConfig:
    """What the command line takes."""

    out_dir: str = key("out", "folder with ckpt.pt, or a checkpoint file")
    start: str = key("\n", "the prompt, or FILE:path; default a line feed, empty: a new document")
    prompts: str | None = key(None, "a file with a prompt on each line, in place of start")
    interactive: bool = key(False, "continue one line after the other, as they are typed")
    num_samples: int = key(1, "continuations of each prompt; all are decoded as one batch")
    max_new_tokens: int = key(500, "at most, per sample; 0 prints the prompt")
    temperature: float = key(0.8, "0 is greedy")
    top_k: int | None = key(200, "sample among the k likeliest tokens; None or 0: all")
    top_p: float = key(1.0, "sample among the likeliest tokens that make up this probability")
    seed: int = key(1337, "of the first sample's random choices, the next has seed + 1")
    stop: str | None = key(None, "a sample also ends before this text")
    solver: str = key("cyclic", "of the prefill: cyclic, jacobi or autoregressive")
    passes: int = key(3, "of the prefill")
    n_groups: int = key(8, "g of the cyclic prefill")
    exact: bool = key(False, "iterate the prefill until it has converged, whatever passes says")
    ignore_eos: bool = key(False, "go on after the end of the document")
    graph: bool = key(True, "on cuda: decode by a CUDA graph")
    device: str = key("auto", "auto (cuda, else mps, else cpu), or a torch device")
    dtype: str = key("auto", "auto (bfloat16 on cuda), float32 or bfloat16")


@dataclass
class Stats:
    """What `generate` did; the first token of each sample belongs to the prefill."""

    report: Report | None = None  # of the prefill's solver
    prefill_tokens: int = 0  # every prompt is prefilled once, however many samples it has
    prefill_seconds: float = 0.0
    capture_seconds: float = 0.0  # to record the CUDA graph, if there is one
    decode_tokens: int = 0
    decode_seconds: float = 0.0  # as the clock on the wall: with what the caller does meanwhile


# ---- prefill, one token, one choice


def ready(model: Decoder, dtype: torch.dtype) -> Decoder:
    """The model computing in dtype; RoPE and norms still compute in float32."""
    if model.embed.is_cuda and dtype in (torch.bfloat16, torch.float16):
        set_compute_copies(model, dtype)  # weights that are used as one lie side by side
        return model
    return model.to(dtype)


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


def next_start(model: Decoder, token: Tensor, index: Tensor, start: Tensor) -> Tensor:
    """Document start of the token after `token` (B,), which stands at column `index`."""
    eos_id = model.config.eos_id
    return start if eos_id is None else torch.where(token == eos_id, index + 1, start)


def fast_steps(model: Decoder, cache: Cache, like: Tensor):
    """`decode_kernels.Steps` on a cache of fixed size, if they serve states like these, or None."""
    if decode_kernels is None or not decode_kernels.serve(model, like):
        return None
    return decode_kernels.Steps(model, cache)


def move_on(model: Decoder, cache: Cache, fast, token: Tensor, index: Tensor, start: Tensor,
            count: Tensor) -> Tensor:
    """A step, by `fast` or as it stands above; index, start and count are the next token's then."""
    if fast is not None:
        return fast(token, index, start, count)
    h = step(model, cache, token, index, start)
    start.copy_(next_start(model, token, index, start))
    index += 1
    count += 1
    return h


def choose(logits: Tensor, u: Tensor, temperature: float, top_k: int | None = None,
           top_p: float = 1.0) -> Tensor:
    """Draw an id (B,) from each row of logits (B, V), by one number u (B,) in [0, 1) for each.

    Where a row has a logit that is not finite, the id is -1. Nothing here waits for the device.
    """
    logits = logits.float()
    finite = logits.sum(-1).isfinite()
    if temperature < 1e-6:  # 0; and below this a division would overflow
        ids = logits.argmax(-1)
    else:
        order, n_ids = None, logits.size(-1)
        if top_k or top_p < 1:
            logits, order = logits.topk(min(top_k or n_ids, n_ids))
        probs = (logits / temperature).softmax(-1)
        total = probs.cumsum(-1)
        mass = total[:, -1]
        if top_p < 1:  # up to the token that completes it: the likeliest always stays
            mass = torch.where(total - probs < top_p, total, 0).amax(-1)
        ids = (total <= (u * mass)[:, None]).sum(-1)
        if order is not None:
            ids = order.gather(-1, ids[:, None])[:, 0]
    return torch.where(finite, ids, -1)


@dataclass
class Choice:
    """How tokens are drawn: the settings of `choose`, and all random numbers beforehand."""

    u: Tensor  # (n, B), a row for each token
    temperature: float
    top_k: int | None
    top_p: float
    n_ids: int | None  # ids from here on (padding of the vocabulary) are never drawn

    def of(self, rows: slice) -> Choice:
        return replace(self, u=self.u[:, rows].contiguous())

    def __call__(self, logits: Tensor, n: Tensor) -> Tensor:
        """The n-th ids (B,), n (1,), from logits (B, V)."""
        if decode_kernels is not None and is_fast(logits) and (self.temperature < 1e-6
                                                               or self.top_k):
            greedy = self.temperature < 1e-6
            return decode_kernels.choose(logits[:, :self.n_ids], self.u, n,
                                         1.0 if greedy else self.temperature,
                                         1 if greedy else self.top_k, self.top_p)
        u = self.u.index_select(0, n)[0]
        return choose(logits[:, :self.n_ids], u, self.temperature, self.top_k, self.top_p)


def draws(seed: int, n_tokens: int, n_rows: int) -> Tensor:
    """Numbers (n_tokens, n_rows) in [0, 1), the same on every device; row i has seed + i."""
    rows = [torch.rand(n_tokens, generator=torch.Generator().manual_seed(seed + i))
            for i in range(n_rows)]
    return torch.stack(rows, 1) * (1 - 1e-6)  # so that no rounding reaches 1


# ---- generation


def record(function: Callable, undo: Callable = lambda: None) -> torch.cuda.CUDAGraph:
    """function() as a CUDA graph, after two calls that compile its kernels, each undone."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
            undo()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        function()
    return graph


class Part:
    """Rows in the middle of being decoded: their cache, and what a step needs and renews.

    A step changes tensors in place, no shape, and waits for nothing. Attention knows from the
    device which columns to read; unless `static`, it gets a view up to the newest column.
    """

    def __init__(self, model: Decoder, h: Tensor, cache: Cache, index: Tensor, start: Tensor,
                 choice: Callable[[Tensor, Tensor], Tensor], filled: int = 0,
                 static: bool | None = None):
        """h (B, D), final states of the last tokens, yield the first ids; these will stand at
        columns index (B,) < filled + 1 of documents that begin at start (B,)."""
        self.model, self.cache, self.choice = model, cache, choice
        self.fast = fast_steps(model, cache, h)
        self.logits = model.logits if self.fast is None else self.fast.logits
        self.index, self.start = index.clone(), start.clone()
        self.n = torch.zeros(1, dtype=torch.long, device=h.device)  # ids chosen before
        ids = self.choice(self.logits(h), self.n)
        self.ids = ids.clone(memory_format=torch.contiguous_format)
        self.filled, self.static = filled, h.is_cuda if static is None else static

    def step(self):
        """Run the newest ids through the model and choose the next."""
        token = self.ids.clamp(min=0)  # a mark of bad logits is no token
        h = move_on(self.model, self.visible(), self.fast, token, self.index, self.start, self.n)
        self.ids.copy_(self.choice(self.logits(h), self.n))

    def visible(self) -> Cache:
        """The cache; where there is no need for a fixed size, up to the newest column."""
        if self.static:
            return self.cache
        self.filled += 1
        return Cache(self.cache.k[:, :, :self.filled], self.cache.v[:, :, :self.filled],
                     self.cache.sink, self.cache.weights)


class Decoding:
    """Steps of one or several parts of a batch; on CUDA recorded once, as a CUDA graph.

    Several parts step side by side, on streams of their own: while one reads its keys and values,
    which keeps the memory busy, another has its many small kernels.
    """

    def __init__(self, parts: list[Part]):
        self.parts, self.graph = parts, None
        self.static = parts[0].static
        self.streams = [torch.cuda.Stream() for p in parts[1:] if p.ids.is_cuda]

    def step(self):
        for stream, part in zip(self.streams, self.parts[1:]):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                part.step()
        for part in self.parts[:1] if self.streams else self.parts:
            part.step()
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)

    def capture(self):
        """Record a step as a CUDA graph; nothing has changed afterwards."""
        state = [t for p in self.parts for t in (p.ids, p.index, p.start, p.n)]
        saved = [t.clone() for t in state]

        def undo():
            for t, before in zip(state, saved):
                t.copy_(before)

        self.graph = record(self.step, undo)

    def advance(self):
        if self.graph is None:
            self.step()
        else:
            self.graph.replay()

    def fetch(self) -> Callable[[], list[int]]:
        """Have the newest ids copied to the host; call the result to wait for them."""
        ids = torch.cat([p.ids for p in self.parts])
        if not ids.is_cuda:
            return ids.tolist
        copy, done = ids.to("cpu", non_blocking=True), torch.cuda.Event()
        done.record()

        def wait() -> list[int]:
            done.synchronize()
            return copy.tolist()

        return wait

    def tokens(self, n: int) -> Iterator[list[int]]:
        """The next n ids of every row; where it can, the device is a step ahead of the caller."""
        waiting = deque([self.fetch()])
        for _ in range(1, n):
            if self.static:
                self.advance()
                waiting.append(self.fetch())
            yield waiting.popleft()()
            if not self.static:
                self.advance()
                waiting.append(self.fetch())
        yield waiting.popleft()()


@torch.no_grad()
def generate(model: Decoder, prompts: list[list[int]], max_new_tokens: int,
             temperature: float = 0.8, top_k: int | None = None, top_p: float = 1.0,
             seed: int = 1337, solver: str = "cyclic", passes: int = 3, n_groups: int = 8,
             tol: float | None = None, stop_id: int | None = None, n_ids: int | None = None,
             graph: bool = True, stats: Stats | None = None) -> Iterator[list[int | None]]:
    """Continue a batch of prompts (token ids, each at least one, of any lengths).

    Yields, step by step, one new id per row; None for a row that has ended. A row ends at
    `stop_id`, which is not part of the result; the generator ends when all rows have. Ids from
    `n_ids` on are never drawn. `stats` is filled along the way. Raises UserError if a logit is
    not finite.
    """
    stats = stats or Stats()
    if max_new_tokens < 1:
        return
    began = time.perf_counter()
    u = draws(seed, max_new_tokens, len(prompts)).to(model.embed.device)
    decoding, stats.report = begin(model, prompts, max_new_tokens,
                                   Choice(u, temperature, top_k, top_p, n_ids),
                                   solver, passes, n_groups, tol)
    decoding.fetch()()  # waits for the device, so that the times are true
    stats.prefill_tokens = sum(map(len, {tuple(p) for p in prompts}))
    stats.prefill_seconds = time.perf_counter() - began
    if graph and decoding.static and max_new_tokens > 1:
        decoding.capture()
        stats.capture_seconds = time.perf_counter() - began - stats.prefill_seconds
    began, alive = time.perf_counter(), [True] * len(prompts)
    for n, ids in enumerate(decoding.tokens(max_new_tokens)):
        if min(ids) < 0:
            raise UserError("non-finite logits (NaN or infinity): the checkpoint's weights are "
                            "damaged, or its training diverged")
        alive = [a and i != stop_id for a, i in zip(alive, ids)]
        if n:
            stats.decode_tokens += sum(alive)
            stats.decode_seconds = time.perf_counter() - began
        if not any(alive):
            return
        yield [i if a else None for a, i in zip(alive, ids)]


def begin(model: Decoder, prompts: list[list[int]], max_new_tokens: int, choice: Callable,
          *how, static: bool | None = None,
          n_parts: int | None = None) -> tuple[Decoding, Report]:
    """Prefill the prompts, each different one once, into caches with room for all new tokens."""
    device = model.embed.device
    place = {tuple(p): i for i, p in enumerate(dict.fromkeys(map(tuple, prompts)))}
    which = torch.tensor([place[tuple(p)] for p in prompts], device=device)
    lengths = torch.tensor([len(p) for p in place], device=device)
    longest = max(map(len, place))
    idx = torch.tensor([[*p] + [0] * (longest - len(p)) for p in place], device=device)
    solution = prefill(model, idx, *how)
    rows, last = torch.arange(len(place), device=device), lengths - 1
    h = solution.final[rows, last]
    start = model.document_starts(idx)[rows, last]
    start = next_start(model, idx[rows, last], last, start)
    parts = []
    for rows in split(len(prompts), n_parts if n_parts else parts_of(len(prompts), device)):
        of = which[rows]
        cache = model.new_cache(len(of), longest + max_new_tokens, like=h)
        cache.put(slice(0, longest), solution.cache.k[:, of], solution.cache.v[:, of])
        parts.append(Part(model, h[of], cache, lengths[of], start[of], choice.of(rows)
                          if len(of) < len(prompts) else choice, longest, static))
    return Decoding(parts), solution.report


def parts_of(B: int, device: torch.device) -> int:
    """How many parts of B rows step side by side."""
    return 2 if device.type == "cuda" and B >= SIDE_BY_SIDE else 1


def split(B: int, n: int) -> list[slice]:
    """B rows in n parts, as equal as they can be."""
    ends = [B * i // n for i in range(n + 1)]
    return [slice(a, b) for a, b in zip(ends, ends[1:])]


# ---- text


class Printer:
    """Prints the samples one after the other, each as it comes and never half a character.

    A sample ends before the text `stop`, whichever tokens it comes from.
    """

    def __init__(self, tokenizer: Tokenizer, starts: list[str], stop: str | None = None, out=None):
        self.tokenizer, self.stop, self.out = tokenizer, stop, out or sys.stdout
        utf8, n = codecs.getincrementaldecoder("utf-8"), len(starts)
        self.decoders = [utf8(errors="replace") for _ in starts]
        self.held = [""] * n  # it may be the beginning of `stop`
        self.waiting = starts if n == 1 else [  # text that is not printed yet
            f"{chr(10) * (b > 0)}--- sample {b + 1} of {n} ---\n{start}"
            for b, start in enumerate(starts)]
        self.ended = [False] * n
        self.current = 0  # the sample on show; those after it wait
        self.show()

    def add(self, ids: list[int | None]):
        """Take the next id of every sample; None for one that has ended."""
        for b, i in enumerate(ids):
            if not self.ended[b]:
                data = b"" if i is None else self.tokenizer.decode_bytes([i])
                # at the end, the bytes of an unfinished character become U+FFFD
                self.extend(b, self.decoders[b].decode(data, final=i is None), final=i is None)
        self.show()

    def extend(self, b: int, text: str, final: bool):
        text, held = self.held[b] + text, 0
        if self.stop:
            at = text.find(self.stop)
            if at >= 0:
                text, final = text[:at], True
            elif not final:
                held = next(n for n in range(min(len(self.stop), len(text)), -1, -1)
                            if text.endswith(self.stop[:n]))
        self.waiting[b] += text[:len(text) - held]
        self.held[b] = text[len(text) - held:]
        self.ended[b] = final

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


def read_text(path: str, setting: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{setting}: cannot read this file as UTF-8 text ({error})") from None


def read_starts(c: SampleConfig) -> list[str]:
    """The prompts: of the file `prompts`, or `start`, itself or from its file."""
    if c.prompts is not None:
        starts = read_text(c.prompts, f"prompts={c.prompts}").splitlines()
        if not starts:
            raise UserError(f"prompts={c.prompts}: this file is empty, a prompt on each line is "
                            "needed")
        return starts
    if c.start.startswith("FILE:"):
        return [read_text(c.start[5:], f"start={c.start}")]
    return [c.start]


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


class Writer:
    """A model and its tokenizer, ready to continue texts with the settings of a command line."""

    def __init__(self, c: SampleConfig):
        self.c, self.device = c, pick_device(c.device)
        self.dtype = pick_dtype(c.dtype, self.device)
        model, checkpoint = load_model(c.out_dir, self.device)
        self.model = ready(model, self.dtype)
        self.tokenizer = get_tokenizer(checkpoint["meta"]["tokenizer"])
        self.eos_id = checkpoint["meta"]["eos_id"]
        self.block_size = checkpoint["config"]["block_size"]

    def write(self, starts: list[str]):
        """Print num_samples continuations of every prompt, and then the speed."""
        c, stats = self.c, Stats()
        # an empty prompt: the end of a document before it is all that there is to go by
        prompts = [self.tokenizer.encode(s) or [self.eos_id] for s in starts]
        longest = max(map(len, prompts))
        if longest + c.max_new_tokens > self.block_size:
            remark(f"note: {longest} prompt and {c.max_new_tokens} new tokens are more than the "
                   f"block_size={self.block_size} of training; positions beyond it were never "
                   "trained")
        printer = Printer(self.tokenizer, [s for s in starts for _ in range(c.num_samples)], c.stop)
        for ids in generate(
                self.model, [p for p in prompts for _ in range(c.num_samples)], c.max_new_tokens,
                c.temperature, c.top_k, c.top_p, c.seed, c.solver, c.passes, c.n_groups,
                TOLERANCE[self.dtype] if c.exact else None, None if c.ignore_eos else self.eos_id,
                self.tokenizer.vocab_size, c.graph, stats):
            printer.add(ids)
            if all(printer.ended):
                break
        printer.close()
        if stats.report is not None:
            remark(f"{self.device}, {str(self.dtype).removeprefix('torch.')}: "
                   + describe(c, self.model, stats))

    def converse(self):
        """Continue every line that is typed, on its own; Ctrl-C ends a text, Ctrl-D all."""
        remark("a line is a prompt, Ctrl-C ends its continuation, Ctrl-D (or Ctrl-Z) leaves")
        while True:
            try:
                start = input("> ")
            except (EOFError, KeyboardInterrupt):
                return print()
            try:
                self.write([start])
            except KeyboardInterrupt:
                print()


def main(argv: list[str]):
    c = parse(SampleConfig(), argv, __doc__)
    check(c)
    starts = read_starts(c)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows ASCII only prints ?
    writer = Writer(c)
    if c.interactive:
        writer.converse()
    else:
        writer.write(starts)


def describe(c: SampleConfig, model: Decoder, s: Stats) -> str:
    """Speed and accuracy in one line."""
    how, accuracy = "one pass", ""
    if model.iterates:
        groups = f" of {c.n_groups} groups" if c.solver == "cyclic" else ""
        how = f"{s.report.passes} {c.solver} pass{'es' * (s.report.passes > 1)}{groups}"
        if s.report.converged is not None:
            accuracy = (f" ({'converged' if s.report.converged else 'not converged'}, "
                        f"residual {s.report.residual:.1e})")
    text = (f"prefill of {s.prefill_tokens:,} tokens in {s.prefill_seconds:.3f} s "
            f"({s.prefill_tokens / s.prefill_seconds:,.0f} tokens/s) by {how}{accuracy}")
    if s.capture_seconds:
        text += f"; CUDA graph recorded in {s.capture_seconds:.2f} s"
    if s.decode_tokens:
        text += (f"; decoding of {s.decode_tokens:,} tokens in {s.decode_seconds:.3f} s "
                 f"({s.decode_tokens / s.decode_seconds:,.0f} tokens/s)")
    return text


def remark(text: str):
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run(main)
