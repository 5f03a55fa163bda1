"""
Three ways to resolve the feedback (section 3.3): H = States(X; Pool(H)).

`autoregressive` is exact and sequential in T, `jacobi` updates all tokens at once, `cyclic` runs
g strided groups in order, each reading what the groups before it have just computed. All three
are causal for any schedule: no output depends on a later token. `one_pass` serves the systems
that need no iteration, whichever is called; `solve` picks by the model's config. Where only some
layers depend on what they produce (LCKV), those below and above them run once, on whole rows; and
a block whose output feeds no channel (WhiteMatter's last) runs in the last pass only.

In `cyclic`:

    P = Pool(H)                            # refill
    for each pass, for each group q:
        H[q] = States(X[q]; P)             # states
        P[q] = Pool(H[q])                  # store; the groups after q read it

Truncated backpropagation: only the last `n_grad` passes carry gradients. They start from states
that are constants (with `n_nograd = 0`: from the embeddings, which are not), and the pool of these
carries gradients, so that its parameters get some there too: the pass before records its stores.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from attention import Cache
from model import Decoder, ModelConfig

# h[0..L] of some tokens, (B, T, D) each; between passes without what feeds no channel, and only
# those of the layers that are iterated
States = list[Tensor]


@dataclass
class Report:
    """What a solver did."""

    passes: int = 0
    residuals: list[float] = field(default_factory=list)  # a relative one per pass, if measured
    tol: float | None = None

    def add(self, new: list[States], old: list[States], sources: slice, measure: bool):
        """Count a pass; measure its relative change if asked to, or if a tolerance waits for it."""
        self.passes += 1
        if measure or self.tol is not None:
            self.residuals.append(difference(new, old, sources))

    @property
    def residual(self) -> float | None:
        return self.residuals[-1] if self.residuals else None

    @property
    def converged(self) -> bool | None:
        """Whether the last residual is within `tol`; None without a tolerance, or a pass."""
        return None if self.tol is None or not self.passes else self.residual <= self.tol


@dataclass
class Solution:
    """States of all tokens, the cache for decoding (None if not asked for) and the report."""

    parts: list[States]  # of each group
    cache: Cache | None
    report: Report
    columns: list[slice] | None = None  # where the groups stand; None: strided ones, in order

    @property
    def states(self) -> Tensor:
        """h (B, T, L + 1, D): the states entering each layer, then the final output."""
        return interleave([torch.stack(h, 2) for h in self.parts], self.columns)

    @property
    def final(self) -> Tensor:
        """h[L] (B, T, D), the input of `Decoder.logits` and `Decoder.loss`."""
        return interleave([h[-1] for h in self.parts], self.columns)


def interleave(parts: list[Tensor], columns: list[slice] | None = None) -> Tensor:
    """Put groups (B, T/g, ...) back into token order: those of `columns`, or strided ones."""
    if len(parts) == 1:
        return parts[0]
    strided = [slice(q, None, len(parts)) for q in range(len(parts))]
    columns = columns or strided
    if columns == strided and parts[0].size(1) == parts[-1].size(1):
        return torch.stack(parts, 2).flatten(1, 2)
    B, _, *rest = parts[0].shape
    out = parts[0].new_empty(B, sum(p.size(1) for p in parts), *rest)
    for at, part in zip(columns, parts):
        out[:, at] = part
    return out


@torch.no_grad()
def difference(new: list[States], old: list[States], sources: slice) -> float:
    """||new - old|| / ||new|| over the source states, all tokens together (Frobenius)."""
    pairs = [(a, b) for p, q in zip(new, old) for a, b in zip(p[sources], q[sources])]
    change = sum((a - b).double().square().sum() for a, b in pairs)
    return (change / sum(a.double().square().sum() for a, _ in pairs)).sqrt().item()


def recorded(n_nograd: int, n_grad: int) -> list[bool]:
    """Whether each pass records gradients; none does where autograd is off."""
    if n_nograd < 0 or n_grad < 0 or n_nograd + n_grad < 1:
        raise ValueError(f"n_nograd={n_nograd}, n_grad={n_grad}: at least one pass is needed")
    return [torch.is_grad_enabled() and t >= n_nograd for t in range(n_nograd + n_grad)]


def jacobi(model: Decoder, idx: Tensor, n_nograd: int = 1, n_grad: int = 2,
           tol: float | None = None, doc: Tensor | None = None, keep_cache: bool = True,
           measure: bool = True) -> Solution:
    """Passes over all tokens of idx (B, T) at once; after t of them the first t tokens are exact.

    Runs n_nograd + n_grad passes, the last n_grad with gradients. With `tol`, the passes without
    gradients end once the relative change of the states is at most tol. `doc` are document ids
    (B, T), by default read off the EOS tokens. `measure=False` leaves out the residuals.
    """
    return cyclic(model, idx, 1, n_nograd, n_grad, tol, doc, keep_cache, measure)


def cyclic(model: Decoder, idx: Tensor, n_groups: int = 8, n_nograd: int = 1, n_grad: int = 2,
           tol: float | None = None, doc: Tensor | None = None, keep_cache: bool = True,
           measure: bool = True) -> Solution:
    """Gauss-Seidel passes: the groups {i : i mod g = q} of the row in order, q = 0..g-1.

    Group q reads the states of groups < q from this pass and of the others from the pass before.
    One pass with n_groups = T is the autoregressive solution, n_groups = 1 is Jacobi. The other
    arguments are those of `jacobi`.
    """
    if n_groups < 1:
        raise ValueError(f"n_groups={n_groups}: at least 1 is needed")
    if not model.iterates:
        return one_pass(model, idx, doc, keep_cache)
    rows = model.rows(idx, doc)
    groups = rows.split(n_groups)
    columns = [group.columns for group in groups]
    first, end = model.iterated
    x = model.embed_tokens(idx)  # (B, T, D)
    # LCKV: layers below `first` and from `end` on run once, and write to a cache of their own
    partial = end - first < len(model.blocks)
    whole = model.new_cache(*idx.shape, like=x) if partial and keep_cache else None
    below = model.states(x, rows, whole, 0, first) if partial else [x]
    xs = [below[-1][:, at].contiguous() for at in columns]  # (B, T/g, D) each
    parts = [[x] * (end - first + 1) for x in xs]  # H(0): the embedding as every state
    report, plan = Report(tol=tol), recorded(n_nograd, n_grad)
    with torch.set_grad_enabled(plan[-1]):
        cache = whole.fork() if whole is not None else model.new_cache(*idx.shape, like=x)
    filled = None  # does P record gradients? None: it is not there yet
    for t, records in enumerate(plan):
        if report.converged and not records:
            continue
        if filled != records:  # at the start, and where a tolerance has left out passes
            with torch.set_grad_enabled(records):
                for q, group in enumerate(groups):
                    model.refill(parts[q], group, cache)
        last = t + 1 == len(plan)
        filled = records if last else plan[t + 1]  # as the next pass, which starts from it, needs
        fill = model.store if filled == records else model.refill  # lckv's store does nothing
        old = list(parts) if measure or tol is not None else parts  # unless compared, they may go
        whole_stack = last or tol is not None and not plan[-1]  # then any pass may be the last
        top = end if whole_stack else end - model.n_top
        for q, group in enumerate(groups):
            with torch.set_grad_enabled(records):
                entering = xs[q] if records else xs[q].detach()  # here gradients end
                parts[q] = model.states(entering, group, cache, first, top)
            # the last group of all is read by nobody but the caller
            if not last or q + 1 < len(groups) or keep_cache:
                with torch.set_grad_enabled(filled):
                    fill(parts[q], group, cache)
        report.add(parts, old, model.sources, measure)
    if partial:
        h = [interleave(list(states), columns) for states in zip(*parts)]
        above = model.states(h[-1], rows, whole, end)  # in place: `cache`, a fork, has it, too
        parts = [[*below[:-1], *h, *above[1:]]]
    return Solution(parts, cache if keep_cache else None, report, columns)


def autoregressive(model: Decoder, idx: Tensor, doc: Tensor | None = None,
                   keep_cache: bool = True) -> Solution:
    """Token by token, as decoding does; exact, with gradients through the whole sequence."""
    if not model.iterates:
        return one_pass(model, idx, doc, keep_cache)
    rows = model.rows(idx, doc)
    x = model.embed_tokens(idx)
    cache = model.new_cache(*idx.shape, like=x)
    parts = []
    for i in range(idx.size(1)):
        at = rows.at(slice(i, i + 1))
        parts.append(model.states(x[:, at.columns], at, cache))
        model.store(parts[-1], at, cache)
    return Solution(parts, cache if keep_cache else None, Report(passes=1, residuals=[0.0]))


def one_pass(model: Decoder, idx: Tensor, doc: Tensor | None = None,
             keep_cache: bool = True) -> Solution:
    """The whole computation of a system that needs no iteration."""
    rows = model.rows(idx, doc)
    x = model.embed_tokens(idx)
    cache = model.new_cache(*idx.shape, like=x) if keep_cache else None
    h = model.states(x, rows, cache)
    return Solution([h], cache, Report(passes=1, residuals=[0.0]))


def solve(model: Decoder, idx: Tensor, doc: Tensor | None = None, keep_cache: bool = False,
          measure: bool = False) -> Solution:
    """States of idx (B, T) by the schedule that the model's config trains with."""
    c = model.config
    if not model.iterates:
        return one_pass(model, idx, doc, keep_cache)
    return cyclic(model, idx, c.n_groups, c.n_nograd, c.n_grad, None, doc, keep_cache, measure)


def evaluation_schedule(c: ModelConfig) -> dict[str, int]:
    """Passes and groups of the paper's prefill: three cyclic passes of eight groups. LCKV's is as
    its training, nine Jacobi passes (section "Compute cost")."""
    if c.kv == "lckv":
        return dict(passes=c.n_nograd + c.n_grad, n_groups=c.n_groups)
    return dict(passes=3, n_groups=8)
