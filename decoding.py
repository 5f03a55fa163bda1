"""
Decoding (section 3.2): prompts are prefilled by a solver, then every token costs one pass of the
stack on the cache of k channels and one evaluation of the pool.

Dimensions: B rows, T tokens, D width, V vocabulary, C channels, S columns of the cache.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attention import Cache
from configurator import UserError
from model import Decoder
from solvers import (
    Report,
    Solution,
    autoregressive,
    cyclic,
    evaluation_schedule,
    jacobi,
    one_pass,
)

SOLVERS = ("cyclic", "jacobi", "autoregressive")
# --exact ends at these relative residuals: about where rounding takes over
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2}


# ---- prefill


def prefill(model: Decoder, idx: Tensor, solver: str = "cyclic", passes: int | None = None,
            n_groups: int | None = None, tol: float | None = None,
            keep_cache: bool = True) -> Solution:
    """States and cache of prompts idx (B, T), right padded: causality keeps padding harmless.

    Passes and groups that are not given are the paper's. With `tol`, passes go on until the
    relative residual is at most tol; T passes are exact, and one more shows it.
    """
    if not model.iterates:
        return one_pass(model, idx, keep_cache=keep_cache)
    usual = evaluation_schedule(model.config)
    passes = usual["passes"] if passes is None else passes
    n_groups = usual["n_groups"] if n_groups is None else n_groups
    if solver == "autoregressive":
        return autoregressive(model, idx, keep_cache=keep_cache)
    limits = dict(n_nograd=passes if tol is None else idx.size(1) + 1, n_grad=0, tol=tol,
                  keep_cache=keep_cache, measure=False)
    if solver == "jacobi":
        return jacobi(model, idx, **limits)
    return cyclic(model, idx, n_groups, **limits)


# ---- a token


def step(model: Decoder, cache: Cache, token: Tensor, index: Tensor, start: Tensor) -> Tensor:
    """Decode one token per row (section 3.2) and append it to the cache; returns h[L] (B, D).

    token, index, start (B,): the ids, their columns in the cache, and where their documents begin.
    """
    # the columns are a tensor, as rows may differ in length
    rows = model.place(index[:, None], index[:, None], start[:, None])
    h = model.states(model.embed_tokens(token[:, None]), rows, cache)
    if model.iterates:  # other systems write their keys and values on the way up
        model.store(h, rows, cache)
    return h[-1][:, 0]


def next_start(model: Decoder, token: Tensor, index: Tensor, start: Tensor) -> Tensor:
    """Document start of the token after `token` (B,), which stands at column `index`."""
    eos_id = model.config.eos_id
    return start if eos_id is None else torch.where(token == eos_id, index + 1, start)


class Steps:
    """`step` for the same rows again and again, and what comes with it."""

    def __init__(self, model: Decoder, cache: Cache, filled: int | None):
        """filled: columns in use before the first step; attention then gets a view up to the newest
        one. None: it gets all, and knows from the rows which ones to read."""
        self.model, self.cache, self.filled = model, cache, filled

    def __call__(self, ids: Tensor, index: Tensor, start: Tensor, count: Tensor) -> Tensor:
        """`step`; index, start and count become the next token's. An id of -1, the mark of logits
        that are not finite, at which `generate` stops, is decoded as 0."""
        cache, ids = self.cache, ids.clamp(min=0)
        if self.filled is not None:
            self.filled += 1
            cache = cache.first(self.filled)
        h = step(self.model, cache, ids, index, start)
        start.copy_(next_start(self.model, ids, index, start))
        index += 1
        count += 1
        return h

    def logits(self, h: Tensor) -> Tensor:
        """Logits (B, V) of final states h (B, D)."""
        return self.model.logits(h)

    def finish(self):
        """Wait for what goes on beside the step: nothing here."""


# ---- the choice of a token


def choose(logits: Tensor, u: Tensor, temperature: float, top_k: int | None = None,
           top_p: float = 1.0) -> Tensor:
    """Draw an id (B,) from each row of logits (B, V), by one number u (B,) in [0, 1) for each.

    Exactly top_k ids stay, of equal logits the lowest ids. Where a row has a logit that is not
    finite, the id is -1. Nothing here waits for the device.
    """
    logits = logits.float()
    finite = logits.sum(-1).isfinite()
    if temperature < 1e-6:  # 0; and below this a division would overflow
        return torch.where(finite, logits.argmax(-1), -1)
    scaled = logits / temperature  # 0 where that is infinite: every id that is kept is as likely
    if top_k or top_p < 1:
        likeliest = logits.topk(min(top_k or logits.size(-1), logits.size(-1))).values
        n = likeliest.size(-1)
        if top_p < 1:  # up to the token that completes it: the likeliest always stays
            probs = (likeliest / temperature).softmax(-1)
            n = (probs.cumsum(-1) - probs < top_p).sum(-1, keepdim=True).clamp(min=1)
            least = likeliest.gather(-1, n - 1)
        else:
            least = likeliest[:, -1:]
        above, equal = logits > least, logits == least
        kept = above | equal & (equal.cumsum(-1) <= n - above.sum(-1, keepdim=True))
        scaled = scaled.masked_fill(~kept, -torch.inf)
    total = scaled.softmax(-1).cumsum(-1)
    ids = (total <= u[:, None] * total[:, -1:]).sum(-1)
    return torch.where(finite, ids, -1)


@dataclass
class Choice:
    """How tokens are drawn: the settings of `choose`, and all random numbers beforehand."""

    u: Tensor  # (n, B), a row for each token
    temperature: float
    top_k: int | None
    top_p: float
    n_ids: int | None  # ids from here on (padding of the vocabulary) are never drawn

    def __call__(self, logits: Tensor, n: Tensor, out: Tensor):
        """The n-th ids, n (1,), from logits (B, V), to out (B,)."""
        u = self.u.index_select(0, n)[0]
        out.copy_(choose(logits[:, :self.n_ids], u, self.temperature, self.top_k, self.top_p))


def check_choice(c):
    """Raise UserError for a temperature, top_k or top_p of settings c that means nothing."""
    if not c.temperature >= 0:  # also refuses nan
        raise UserError(f"temperature={c.temperature}: at least 0 is needed")
    if c.top_k is not None and c.top_k < 0:
        raise UserError(f"top_k={c.top_k}: a positive number, or 0 for all tokens")
    if not 0 < c.top_p <= 1:
        raise UserError(f"top_p={c.top_p}: a number above 0 and up to 1")


def check_solver(c, *more: str):
    """Raise UserError for a solver of settings c that is neither one of SOLVERS nor of `more`, and
    for groups of Jacobi."""
    if c.solver not in (None, *SOLVERS, *more):
        raise UserError(f"solver={c.solver}: choose one of {', '.join((*SOLVERS, *more))}")
    if c.solver == "jacobi" and c.n_groups not in (None, 1):
        raise UserError(f"n_groups={c.n_groups}: jacobi has one group; solver=cyclic takes several")


def draws(seed: int, n_tokens: int, n_rows: int) -> Tensor:
    """Numbers (n_tokens, n_rows) in [0, 1), the same on every device; row i has seed + i."""
    rows = [torch.rand(n_tokens, generator=torch.Generator().manual_seed(seed + i))
            for i in range(n_rows)]
    return torch.stack(rows, 1) * (1 - 1e-6)  # so that no rounding reaches 1


# ---- generation


@dataclass
class Stats:
    """What `generate` did; the first token of each sample belongs to the prefill."""

    report: Report | None = None  # of the prefill's solver
    prefill_tokens: int = 0  # every prompt is prefilled once, however many samples it has
    prefill_seconds: float = 0.0
    capture_seconds: float = 0.0  # of what is made ready for many steps, such as a CUDA graph
    decode_tokens: int = 0
    decode_seconds: float = 0.0  # as the clock on the wall: with what the caller does meanwhile


class Decoding:
    """A batch in the middle of being decoded: its cache, and what a step needs and renews.

    (kernels/graphs.py has one with the same methods for CUDA, where a step is a CUDA graph.)
    """

    def __init__(self, model: Decoder, h: Tensor, cache: Cache, index: Tensor, start: Tensor,
                 choice: Callable[[Tensor, Tensor, Tensor], None], filled: int):
        """h (B, D), final states of the last tokens, yield the first ids; these will stand at
        columns index (B,) < filled + 1 of documents that begin at start (B,)."""
        self.steps, self.choice = Steps(model, cache, filled), choice
        self.index, self.start = index.clone(), start.clone()
        self.n = torch.zeros(1, dtype=torch.long, device=h.device)  # ids chosen before
        self.ids = torch.zeros_like(index)
        choice(self.steps.logits(h), self.n, self.ids)

    def prepare(self, n: int) -> bool:
        """Whatever makes n tokens faster: nothing here."""
        return False

    def tokens(self, n: int) -> Iterator[list[int]]:
        """The next n ids of every row."""
        yield self.ids.tolist()
        for _ in range(1, n):
            h = self.steps(self.ids, self.index, self.start, self.n)
            self.choice(self.steps.logits(h), self.n, self.ids)
            yield self.ids.tolist()


@torch.no_grad()
def generate(model: Decoder, prompts: list[list[int]], max_new_tokens: int,
             temperature: float = 0.8, top_k: int | None = None, top_p: float = 1.0,
             seed: int = 1337, solver: str = "cyclic", passes: int | None = None,
             n_groups: int | None = None, tol: float | None = None, stop_id: int | None = None,
             n_ids: int | None = None, decoding: type = Decoding,
             stats: Stats | None = None) -> Iterator[list[int | None]]:
    """Continue a batch of prompts: lists of ids, each at least one, of any lengths; or (B, T).

    Yields, step by step, one new id per row; None for a row that has ended. A row ends at
    `stop_id`, which is not part of the result; the generator ends when all rows have. Ids from
    `n_ids` on are never drawn. `stats` is filled along the way. Raises UserError if a logit is
    not finite.
    """
    stats = stats or Stats()
    prompts = [[int(i) for i in prompt] for prompt in prompts]
    if not all(prompts):
        raise ValueError("an empty prompt: it needs an id to begin with, such as that of EOS")
    if max_new_tokens < 1:
        return
    began = time.perf_counter()
    u = draws(seed, max_new_tokens, len(prompts)).to(model.embed.weight.device)
    state, stats.report = begin(model, prompts, max_new_tokens,
                                Choice(u, temperature, top_k, top_p, n_ids),
                                solver, passes, n_groups, tol, decoding=decoding)
    state.ids.tolist()  # waits for the device, so that the times are true
    stats.prefill_tokens = sum(map(len, {tuple(p) for p in prompts}))
    stats.prefill_seconds = time.perf_counter() - began
    if state.prepare(max_new_tokens):
        stats.capture_seconds = time.perf_counter() - began - stats.prefill_seconds
    began, alive = time.perf_counter(), [True] * len(prompts)
    for n, ids in enumerate(state.tokens(max_new_tokens)):
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
          *how, decoding: type = Decoding) -> tuple[Decoding, Report]:
    """Prefill the prompts, each different one once, into a cache with room for all new tokens."""
    device = model.embed.weight.device
    place = {tuple(p): i for i, p in enumerate(dict.fromkeys(map(tuple, prompts)))}
    of = torch.tensor([place[tuple(p)] for p in prompts], device=device)
    lengths = torch.tensor([len(p) for p in place], device=device)
    longest = max(map(len, place))
    idx = torch.tensor([[*p] + [0] * (longest - len(p)) for p in place], device=device)
    solution = prefill(model, idx, *how)
    rows, last = torch.arange(len(place), device=device), lengths - 1
    h = solution.final[rows, last]
    start = model.document_starts(idx)[rows, last]
    start = next_start(model, idx[rows, last], last, start)
    cache = model.new_cache(len(of), longest + max_new_tokens, like=h)
    for j, (k, v) in enumerate(zip(solution.cache.k, solution.cache.v)):
        cache.put(slice(0, longest), k[of][None], v[of][None], j)
    state = decoding(model, h[of], cache, lengths[of], start[of], choice, longest)
    return state, solution.report
