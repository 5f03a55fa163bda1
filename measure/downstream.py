"""
The paper's downstream tasks, by the lm-evaluation-harness (pip install lm_eval), zero-shot:
`python evaluate.py downstream`. `Scorer` says how text is cut into context and continuation.

Dimensions: B rows, T tokens.
"""

import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from traceback import walk_tb

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from checkpoint import load_model
from configurator import UserError, at_least, key, package
from decoding import SOLVERS, generate
from kernels import accelerate
from measure.schedules import Schedule, ScoreConfig, schedule_of
from measure.timing import Table, check, machine, write_results
from model import Decoder, upcast
from running.devices import pick_device, pick_dtype
from text.rows import note_if_longer
from text.tokenizer import Tokenizer, tokenizer_of

PAPER_CONTEXT = 1024  # tokens, of its downstream tasks
CHUNK = 1024  # tokens whose logits are held at a time


# ---- log-likelihoods of texts

def pieces(n: int, first: int, max_length: int) -> list[tuple[int, int, int]]:
    """Cut the targets first..n-1 of n ids into pieces (start, first, stop) for a model that reads
    at most max_length: ids start..stop-2 are read, first..stop-1 scored, each id once.

    Every piece has all the context that fits, as loglikelihood_rolling of the harness wants it: a
    long context loses its beginning, and a last, short piece begins earlier.
    """
    stops = [*range(first + max_length, n, max_length), n]
    return [(max(0, stop - 1 - max_length), at, stop)
            for at, stop in zip(range(first, n, max_length), stops)]


class Scorer:
    """Log-probabilities of texts in nats, for the lm-evaluation-harness or by themselves.

    Context and continuation are encoded as one text, and cut where the context alone would end;
    white space at the end of the context goes to the continuation first. At least one id is left
    to every continuation that is not empty; an empty one has log-probability 0. Without a context
    there is exactly one EOS in its place, with one there is none. Rows are padded on the right:
    no token depends on a later one, so that a score depends on the request alone.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer, schedule: Schedule,
                 max_length: int = 1024, batch_size: int = 32):
        self.model, self.tokenizer, self.schedule = model, tokenizer, schedule
        self.max_length, self.batch_size = max_length, batch_size

    def encode(self, context: str, continuation: str) -> tuple[list[int], int]:
        """Ids of both together, and the index of the continuation's first."""
        start = context.rstrip()
        ids = self.tokenizer.encode(context + continuation)
        first = len(self.tokenizer.encode(start))
        if len(start) < len(context + continuation):
            first = min(first, len(ids) - 1)  # a token can span the cut
        return (ids, first) if first else ([self.tokenizer.eos_id, *ids], 1)

    def loglikelihood(self, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Of each continuation, given its context; and whether greedy decoding would yield it."""
        return self.score([self.encode(*pair) for pair in pairs])

    def loglikelihood_rolling(self, texts: list[str]) -> list[float]:
        """Of whole texts, from EOS on; where they are longer than max_length, in pieces."""
        eos = self.tokenizer.eos_id
        return [nats for nats, _ in
                self.score([([eos, *self.tokenizer.encode(text)], 1) for text in texts])]

    @torch.no_grad()
    def score(self, requests: list[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Log-probability of ids[first:] given ids[:first], and whether each is the likeliest."""
        work = [(i, ids[start:stop], at - start) for i, (ids, first) in enumerate(requests)
                for start, at, stop in pieces(len(ids), first, self.max_length)]
        work.sort(key=lambda w: -len(w[1]))  # rows of like length together, the longest first
        totals, greedy = [0.0] * len(requests), [True] * len(requests)
        shown = time.perf_counter()
        for n in range(0, len(work), self.batch_size):
            of, *rows = zip(*work[n:n + self.batch_size])
            for i, nats, likeliest in zip(of, *self.score_rows(*rows)):
                totals[i] += nats
                greedy[i] &= likeliest
            if time.perf_counter() - shown > 30:
                print(f"{n + len(of):,} of {len(work):,} rows", file=sys.stderr, flush=True)
                shown = time.perf_counter()
        return list(zip(totals, greedy))

    def score_rows(self, rows: list[list[int]], firsts: list[int]) -> tuple[list, list]:
        """The same of a batch of rows of ids: all log-probabilities, and all that are likeliest."""
        x = pad_sequence([torch.tensor(ids[:-1]) for ids in rows], batch_first=True)
        targets = [torch.tensor([-1] * (first - 1) + ids[first:])
                   for ids, first in zip(rows, firsts)]
        targets = pad_sequence(targets, batch_first=True, padding_value=-1)
        x, targets = (t.to(self.model.embed.weight.device) for t in (x, targets))
        scored = targets >= 0  # (B, T)
        h, y = self.schedule(self.model, x).final[scored], targets[scored]  # (targets, D)
        nats, right = [], []
        for part, wanted in zip(h.split(CHUNK), y.split(CHUNK)):
            logits = upcast(self.model.logits(part))
            nats.append(-F.cross_entropy(logits, wanted, reduction="none").cpu().double())
            right.append((logits.argmax(-1) == wanted).cpu())
        sizes = scored.sum(1).tolist()
        return ([one.sum().item() for one in torch.cat(nats).split(sizes)],
                [bool(one.all()) for one in torch.cat(right).split(sizes)])

    def generate_until(self, context: str, until: list[str], max_new_tokens: int = 256,
                       temperature: float = 0.0) -> str:
        """Continue a context up to EOS or one of some texts. Of a context that is too long for
        what is to follow its end is read, half of what the model reads at least."""
        s, prompt = self.schedule, self.tokenizer.encode(context) or [self.tokenizer.eos_id]
        n = min(max_new_tokens, max(self.max_length // 2, self.max_length - len(prompt)))
        prompt = prompt[-(self.max_length - n):]
        solver = s.solver if s.solver in SOLVERS else "cyclic"
        ids, text = [], ""
        for (new,) in generate(
                self.model, [prompt], n, temperature, solver=solver,
                passes=s.passes, n_groups=s.n_groups, tol=s.tol, stop_id=self.tokenizer.eos_id,
                n_ids=self.tokenizer.vocab_size):
            ids.append(new)
            text = self.tokenizer.decode(ids)
            if any(stop in text for stop in until):
                break
        return min((text.partition(stop)[0] for stop in until), key=len, default=text)


# ---- downstream tasks

@dataclass
class DownstreamConfig(ScoreConfig):
    tokenizer: str | None = key(None, "its name or path; None: the copy beside the checkpoint")
    tasks: str = key("lambada_openai,wikitext,piqa,winogrande,boolq,hellaswag,arc_easy,"
                     "arc_challenge,openbookqa", "names that the harness knows, comma separated")
    task_dir: str | None = key(None, "a folder with tasks of your own (.yaml), from which "
                               "the paths in them start")
    limit: int | None = key(None, "so many examples of each task only")
    context: int | None = key(None, "tokens that the model reads at most; of a longer text, the "
                              "end; None: as in training, up to the paper's 1,024")
    batch_size: int = key(32, "rows at a time")


COLUMNS = {"lambada_openai": "LAMBADA", "wikitext": "WikiText", "piqa": "PIQA",
           "winogrande": "Wino.", "boolq": "BoolQ", "hellaswag": "Hella.", "arc_easy": "ARC-E",
           "arc_challenge": "ARC-C", "openbookqa": "OBQA"}
# table "Complete zero-shot downstream results", in the order of COLUMNS
PAPER = {"vanilla L=16": (127.47, 49.34, 60.88, 50.04, 48.17, 31.67, 47.39, 25.00, 29.00),
         "vanilla L=24": (97.40, 44.71, 62.73, 50.99, 56.67, 33.21, 47.94, 26.37, 31.80),
         "WhiteMatter k=8": (71.58, 44.40, 62.35, 51.38, 60.40, 33.61, 45.71, 25.26, 29.60),
         "WhiteMatter k=16": (60.73, 43.28, 63.55, 51.38, 61.04, 33.80, 46.21, 25.43, 29.40)}
# the first of these that a task has stands in the table; accuracies in per cent
METRICS = {"word_perplexity": "ppl", "perplexity": "ppl", "acc_norm": "acc norm", "acc": "acc"}


def import_harness():
    """The package lm_eval. Raises UserError where it is not installed."""
    lacking = "downstream tasks need the lm-evaluation-harness: pip install lm_eval datasets"
    package("lm_eval.api.model", lacking)
    package("lm_eval.tasks", lacking)
    return package("lm_eval", lacking)


def harness_model(scorer: Scorer):
    """The scorer as a model of the lm-evaluation-harness, for its simple_evaluate(model=...)."""

    class Model(import_harness().api.model.LM):
        """Answers the harness's three kinds of request, in their order."""

        def loglikelihood(self, requests) -> list[tuple[float, bool]]:
            return self.scorer.loglikelihood([r.args for r in requests])

        def loglikelihood_rolling(self, requests) -> list[float]:
            return self.scorer.loglikelihood_rolling([r.args[0] for r in requests])

        def generate_until(self, requests) -> list[str]:
            return [self.scorer.generate_until(context, *generation(settings))
                    for context, settings in (r.args for r in requests)]

    model = Model()
    model.scorer = scorer
    return model


def generation(settings: dict) -> tuple[list[str], int, float]:
    """Stop texts, number of tokens and temperature from a request's keyword arguments."""
    until, temperature = settings.get("until") or [], settings.get("temperature")
    sampled = settings.get("do_sample", (temperature or 0) > 0)
    return ([t for t in ([until] if isinstance(until, str) else until) if t],
            settings.get("max_gen_toks", 256),
            float(1 if temperature is None else temperature) if sampled else 0.0)


def run_tasks(scorer: Scorer, tasks: list[str], task_dir: str | None, limit: int | None) -> dict:
    """Results of the harness by task, zero-shot: {task: {metric: value}}.

    Relative paths in the tasks of `task_dir` start from there.
    """
    harness, model, here = import_harness(), harness_model(scorer), os.getcwd()
    manager = harness.tasks.TaskManager(include_path=task_dir and os.path.abspath(task_dir))
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise UserError(f"tasks: {', '.join(unknown)}: not known to lm_eval"
                        + (f", nor in {task_dir}" if task_dir else "; --task_dir= names a folder "
                           "with tasks of your own"))
    try:
        os.chdir(task_dir or here)
        found = harness.simple_evaluate(
            model=model, tasks=tasks, num_fewshot=0, limit=limit, task_manager=manager,
            bootstrap_iters=0, log_samples=False)
    except Exception as error:  # the task's or the data set's own, of any kind; or ours
        if __file__ in [f.f_code.co_filename for f, _ in walk_tb(error.__traceback__)][1:]:
            raise
        said = str(error) if isinstance(error, OSError | ValueError) else \
            f"{type(error).__name__}: {error.__cause__ or error}"
        raise UserError(f"tasks={','.join(tasks)}: the harness could not run them "
                        f"({' '.join(said.split())[:300]}); their data are downloaded once, "
                        "--task_dir= takes tasks with local data") from None
    finally:
        os.chdir(here)
    # as "acc,none": the name of a filter follows the comma
    results = {}
    for task, metrics in found["results"].items():
        values = {name.partition(",")[0]: value for name, value in metrics.items()
                  if isinstance(value, (int, float)) and "stderr" not in name}
        examples = values.pop("sample_len", None)
        if values:  # a group of tasks may have none of its own
            results[task] = values | {"examples": examples}
    return results


def show(name: str, results: dict[str, dict]):
    """Print our figure of each task and, for the paper's tasks, the paper's below."""
    metrics = [next(m for m in (*METRICS, *r) if m in r) for r in results.values()]
    ours = [r[m] * (100 if m.startswith("acc") else 1) for m, r in zip(metrics, results.values())]
    names = [COLUMNS.get(task, task) for task in results]
    table = Table({"": f"{max(len(name), 23)}s"} | {n: f">{max(len(n), 8)}s" for n in names})
    table.add("", *(METRICS.get(m, m) for m in metrics))
    table.add(name, *(f"{x:.2f}" for x in ours))
    for model, figures in PAPER.items() if any(task in COLUMNS for task in results) else ():
        paper = dict(zip(COLUMNS, figures))
        table.add(f"paper: {model}", *(f"{paper[t]:.2f}" if t in paper else None for t in results))


def downstream_command(c: DownstreamConfig):
    """Tasks of the lm-evaluation-harness, zero-shot."""
    check(c, "limit", "batch_size", "passes", "n_groups")
    at_least(2, c, "context")
    tasks = [t.strip() for t in c.tasks.split(",") if t.strip()]
    if not tasks:
        raise UserError(f"tasks={c.tasks}: name at least one")
    if c.task_dir is not None and not Path(c.task_dir).is_dir():
        raise UserError(f"task_dir={c.task_dir}: there is no such folder")
    import_harness()
    device = pick_device(c.device)
    dtype = pick_dtype(c.dtype, device)
    model, checkpoint = load_model(c.out_dir, device)
    schedule = schedule_of(c, model, dtype)
    tokenizer = tokenizer_of(checkpoint["meta"], c.out_dir, c.tokenizer)
    fast = accelerate(model, dtype, graph=False)
    trained = checkpoint["config"]["block_size"]
    context = min(trained, PAPER_CONTEXT) if c.context is None else c.context
    note_if_longer("context", context, trained)
    scorer = Scorer(fast.model, tokenizer, schedule, context, c.batch_size)
    print(f"{c.out_dir}: {model.config.kv}, {schedule}; {machine(device)}, {fast}", flush=True)
    began = time.perf_counter()
    with fast.autocast():
        results = run_tasks(scorer, tasks, c.task_dir, c.limit)
    seconds = time.perf_counter() - began
    show(c.out_dir, results)
    print(f"{seconds:.1f} s")
    write_results(c, "downstream", device, dtype, model=asdict(model.config),
                  step=checkpoint.get("step"), context=context, schedule=asdict(schedule),
                  seconds=seconds, results=results)
