"""
Continue a text with a trained model.

    python sample.py --out_dir=out/tiny --start="The function returns"
    python sample.py --out_dir=out/tiny --start=FILE:prompt.txt --num_samples=3 --temperature=0
    python sample.py --out_dir=out/tiny --prompts=prompts.txt --stop="."   # a prompt on each line
    python sample.py --out_dir=out/tiny --interactive

The prompt is prefilled by a solver (section 3.3), then every token costs one pass of the stack on
the cache of k channels and one evaluation of the pool (section 3.2). The text goes to stdout,
speed and remarks to stderr. A sample ends at EOS, before the text of --stop or after
max_new_tokens. Sample i (from 0) draws as a run of its prompt alone does with the seed seed + i,
and so is the same text, unless rounding turns a draw, as it may in bfloat16.

Prompt and new tokens together may be more than the block_size of training: nothing is cut off,
positions simply go on, with a note on stderr, as such positions were never trained.
"""

import codecs
import sys
from dataclasses import dataclass

from configurator import UserError, at_least, key, parse, read_text, run


@dataclass
class SampleConfig:
    out_dir: str = key("out", "folder with ckpt.pt, or a checkpoint file")
    tokenizer: str | None = key(None, "its name or path; None: the copy beside the checkpoint")
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
    passes: int | None = key(None, "of the prefill; None: the paper's 3, or as LCKV was trained")
    n_groups: int | None = key(None, "g of the cyclic prefill; None: 8, or as LCKV was trained")
    exact: bool = key(False, "iterate the prefill until it has converged, whatever passes says")
    ignore_eos: bool = key(False, "go on after the end of the document")
    graph: bool = key(True, "on cuda: decode by a CUDA graph")
    device: str = key("auto", "auto (cuda, else mps, else cpu), or a torch device")
    dtype: str = key("auto", "auto (bfloat16 on cuda), float32 or bfloat16")


# torch takes seconds to import: a mistake in the settings is said before
if __name__ == "__main__":
    run(lambda argv: parse(SampleConfig(), argv, __doc__))

from checkpoint import load_model
from decoding import TOLERANCE, Stats, check_choice, check_solver, generate
from kernels import accelerate
from model import Decoder
from running.devices import pick_device, pick_dtype
from solvers import evaluation_schedule
from text.tokenizer import Tokenizer, tokenizer_of

# ---- text


class Printer:
    """Prints the samples one after the other, each as it comes and never half a character.

    A sample ends before the text `stop`, whichever tokens it comes from.
    """

    def __init__(self, tokenizer: Tokenizer, starts: list[str], stop: str | None = None, out=None):
        self.tokenizer, self.stop, self.out = tokenizer, stop or "", out or sys.stdout
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
            if self.ended[b]:
                continue
            data = b"" if i is None else self.tokenizer.decode_bytes([i])
            # at the end, the bytes of an unfinished character become U+FFFD
            text = self.held[b] + self.decoders[b].decode(data, final=i is None)
            end = text.find(self.stop) if self.stop else -1
            self.ended[b] = end >= 0 or i is None
            if end < 0:  # how much of `stop` may have begun?
                begun = max(n for n in range(len(self.stop) + 1) if text.endswith(self.stop[:n]))
                end = len(text) - (0 if self.ended[b] else begun)
            self.waiting[b] += text[:end]
            self.held[b] = text[end:]
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


def read_starts(c: SampleConfig) -> list[str]:
    """The prompts: of the file `prompts`, or `start`, itself or from its file. Raises UserError."""
    sources = [name for name in ("start", "prompts", "interactive")
               if c.given.get(name) and getattr(c, name) not in (None, False)]
    if len(sources) > 1:
        raise UserError(f"{' and '.join(sources)}: prompts come from one of them")
    if c.prompts is not None:
        # not splitlines, which knows a dozen other ends of lines
        text = read_text(c.prompts, f"prompts={c.prompts}")
        if not text:
            raise UserError(f"prompts={c.prompts}: this file is empty, a prompt on each line is "
                            "needed")
        return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    if c.start.startswith("FILE:"):
        return [read_text(c.start[5:], f"start={c.start}")]
    return [c.start]


# ---- the command


class Writer:
    """A model and its tokenizer, ready to continue texts with the settings of a command line."""

    def __init__(self, c: SampleConfig):
        self.c, self.device = c, pick_device(c.device)
        self.dtype = pick_dtype(c.dtype, self.device)
        model, checkpoint = load_model(c.out_dir, self.device)
        self.fast = accelerate(model, self.dtype, graph=c.graph)
        self.tokenizer = tokenizer_of(checkpoint["meta"], c.out_dir, c.tokenizer)
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
        with self.fast.autocast():
            for ids in generate(
                    self.fast.model, [p for p in prompts for _ in range(c.num_samples)],
                    c.max_new_tokens, c.temperature, c.top_k, c.top_p, c.seed, c.solver, c.passes,
                    c.n_groups, TOLERANCE[self.dtype] if c.exact else None,
                    None if c.ignore_eos else self.eos_id, self.tokenizer.vocab_size,
                    self.fast.decoding, stats):
                printer.add(ids)
                if all(printer.ended):
                    break
        printer.close()
        if stats.report is not None:
            remark(f"{self.device}, {self.fast}: {describe(c, self.fast.model, stats)}")

    def converse(self):
        """Continue every line that is typed, on its own; Ctrl-C ends a text, Ctrl-D all."""
        remark("a line is a prompt, Ctrl-C ends its continuation, Ctrl-D (or Ctrl-Z) leaves")
        while True:
            try:
                start = input("> ").removesuffix("\r")
            except (EOFError, KeyboardInterrupt):
                return print()
            try:
                self.write([start])
            except KeyboardInterrupt:
                print()


def main(argv: list[str]):
    """Continue the prompts that the settings name, or those typed in."""
    c = parse(SampleConfig(), argv, __doc__)
    at_least(1, c, "num_samples", "passes", "n_groups")
    at_least(0, c, "max_new_tokens", "seed")
    check_choice(c)
    check_solver(c)
    starts = read_starts(c)
    writer = Writer(c)
    if c.interactive:
        writer.converse()
    else:
        writer.write(starts)


def describe(c: SampleConfig, model: Decoder, s: Stats) -> str:
    """Speed and accuracy in one line."""
    how, accuracy = "one pass", ""
    if model.iterates:
        n_groups = c.n_groups or evaluation_schedule(model.config)["n_groups"]
        groups = f" of {n_groups} groups" if c.solver == "cyclic" else ""
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
