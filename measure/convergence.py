"""
`python bench.py prefill`: how many passes each schedule takes, and how long (section "Prefill
convergence and runtime").

Dimensions: B rows, T tokens, L layers, D width, k channels, g groups.
"""

import copy
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from baselines import build
from checkpoint import load_model
from configurator import UserError, key, parse
from kernels import Fast, accelerate
from kernels.graphs import record, steps_of
from measure.flops import flops_if_known, store_flops
from measure.schedules import Losses, Schedule, first_within, until
from measure.systems import named_configs
from measure.timing import Table, check, empty, machine, measure, synchronise, write_results
from model import Decoder, ModelConfig
from running.devices import pick_device, pick_dtype
from running.settings import TrainConfig
from running.start import model_config
from solvers import cyclic, evaluation_schedule
from text.rows import TokenRows, data_of

RESIDUALS_OF = (1, 4, 8, 16)  # groups, in the table of residuals


@dataclass
class PrefillConfig:
    out_dir: str | None = key(None, "folder with ckpt.pt; None: a random model")
    random: str = key("tiny", "the random model: tiny (config/tiny.py), or paper (4 layers, D 512)")
    schedules: str | None = key(None, "time these only, without perplexities: names like "
                                "jacobi:75,cyclic16:4,autoregressive, with groups and passes")
    systems: str | None = key(None, "time the paper's prefill of these instead, names as for "
                              "bench.py train, such as vanilla,k4,nofeedback; random weights")
    n_layer: int | None = key(None, "L of random models, with as many channels; None: their own, 4")
    block_size: int | None = key(None, "T, tokens per row; None: the model's (paper: 2048)")
    rows: int = key(16, "held-out rows that the perplexity is taken on")
    batch_size: int | None = key(None, "rows at a time; None: 8 (paper: 64)")
    max_passes: int = key(128, "give up on a schedule after so many (never more than T)")
    trials: int = key(30, "timed runs of each schedule; 10 at most of the autoregressive one")
    warmups: int = key(5, "runs before them; 1 at most of the autoregressive one")
    device: str = key("auto", "auto (cuda, else mps, else cpu), or a torch device")
    dtype: str = key("auto", "of the timed runs: auto (bfloat16 on cuda), float32 or bfloat16")
    passes_dtype: str = key("float32", "of the runs whose passes are counted; bfloat16 is faster "
                            "on cuda, but Jacobi's rounding errors grow in it")
    compile: bool | None = key(None, "as for train.py")
    graph: bool = key(True, "on cuda: a CUDA graph of the whole prefill, or of a token's step")
    seed: int = key(1337, "of the random model and tokens")
    json: str | None = key(None, "write the results to this file (-: to stdout)")


# section "Prefill convergence and runtime": sizes, and on an RTX A6000 seconds a sequence
PAPER_MODEL = ModelConfig(n_layer=4, n_channels=4)
PAPER_T, PAPER_BATCH = 2048, 64
PAPER_SECONDS = {("jacobi", 75): 0.1393, ("autoregressive", 1): 0.1729, ("cyclic16", 4): 0.01245}


def load(c: PrefillConfig, device: str) -> tuple[Decoder, Tensor, Tensor]:
    """A float32 model, and held-out tokens and targets (rows, T) for it."""
    if c.out_dir is None:
        config, T = random_sizes(c)
        model = random_model(config, device, c.seed)
        return model.eval(), *random_tokens(c.rows, config, T, device)
    model, checkpoint = load_model(c.out_dir, device)
    if not model.iterates:
        raise UserError(f"{c.out_dir}: kv={model.config.kv} is exact in one pass, there is no "
                        "schedule to compare")
    folder, meta = data_of(checkpoint, c.out_dir)
    rows = TokenRows(folder / "val.bin", meta,
                     c.block_size or checkpoint["config"]["block_size"], None)
    return model, *rows.batch(0, min(c.rows, rows.n_rows), device)


def random_sizes(c: PrefillConfig) -> tuple[ModelConfig, int]:
    """Of the random model, and T."""
    config, T = PAPER_MODEL, PAPER_T
    if c.random == "tiny":
        tiny = Path(__file__).parent.parent / "config/tiny.py"
        settings = parse(TrainConfig(), [str(tiny)], "")
        config = model_config(settings, {"vocab_size": 257, "eos_id": 256})
        T = settings.block_size
    if c.n_layer is not None:
        config = replace(config, n_layer=c.n_layer, n_channels=c.n_layer)
    return config, c.block_size or T


def random_tokens(rows: int, config: ModelConfig, T: int, device: str) -> tuple[Tensor, Tensor]:
    """Tokens and targets (rows, T)."""
    xy = torch.randint(config.vocab_size - 64, (rows, T + 1)).to(device)
    return xy[:, :-1], xy[:, 1:]


def random_model(config: ModelConfig, device: str, seed: int) -> Decoder:
    torch.manual_seed(seed)
    model = build(config).to(device)
    for name, p in model.named_parameters():
        if ".router." in name:  # at 0, the mixture would be fixed
            torch.nn.init.normal_(p, std=0.02)
    return model


def perplexities(model: Decoder, x: Tensor, y: Tensor, batch_size: int, n_groups: int,
                 passes: int) -> list[float]:
    """Perplexity of targets y (rows, T) after each of `passes` cyclic passes over tokens x."""
    losses = Losses(model, Schedule("cyclic", passes, n_groups), every_pass=True)
    total = sum(map(losses, x.split(batch_size), y.split(batch_size)))
    return (total.cpu() / y.numel()).exp().tolist()


def passes_needed(model: Decoder, x: Tensor, y: Tensor, batch_size: int, n_groups: int,
                  guess: int, limit: int, exact: float) -> tuple[int | None, list[float]]:
    """Smallest number of passes within 1 % of the exact perplexity (None: more than the limit), and
    the perplexity after each pass up to it."""
    ppl = until(partial(perplexities, model, x, y, batch_size, n_groups), guess, limit,
                lambda found: first_within(found, exact, lower_too=False))
    n = first_within(ppl, exact, lower_too=False)
    return n, ppl[:n]


def schedule_named(text: str, T: int) -> Schedule:
    """jacobi:PASSES, cyclicGROUPS:PASSES or autoregressive, on T tokens."""
    match = re.fullmatch("(jacobi|cyclic([0-9]+)):([0-9]+)|(autoregressive)", text)
    if not match or any(int(n) < 1 for n in match.groups()[1:3] if n):
        raise UserError(f"schedules: {text!r} is none of jacobi:PASSES, cyclicGROUPS:PASSES "
                        "and autoregressive")
    if match[4]:
        return Schedule("autoregressive", 1, T)
    return Schedule("cyclic" if match[2] else "jacobi", int(match[3]), int(match[2] or 1))


def short_name(s: Schedule) -> str:
    return f"cyclic{s.n_groups}" if s.solver == "cyclic" else s.solver


@torch.no_grad()
def prefill_command(c: PrefillConfig):
    """Passes and time of every schedule to within 1 % of the exact perplexity, or time of the given
    schedules."""
    check(c, "n_layer", "block_size", "rows", "batch_size", "max_passes", "trials", "warmups")
    if c.random not in ("tiny", "paper"):
        raise UserError(f"random={c.random}: choose tiny or paper")
    if c.out_dir is not None and (c.systems or c.n_layer):
        raise UserError("systems and n_layer are for random models: without out_dir")
    if c.systems and c.schedules:
        raise UserError("systems have the paper's schedules: without schedules")
    if c.batch_size is None:
        c.batch_size = PAPER_BATCH if c.out_dir is None and c.random == "paper" else 8
    device = pick_device(c.device)
    dtype = pick_dtype(c.dtype, device)
    if c.systems:
        return time_systems(c, device, dtype)
    model, x, y = load(c, device)
    T = x.size(1)
    given = c.schedules and [schedule_named(text, T) for text in c.schedules.split(",")]
    counted = pick_dtype(c.passes_dtype, device, "passes_dtype")
    what = "times only" if given else \
        f"perplexity of {len(x)} rows in {str(counted).removeprefix('torch.')}"
    fast = accelerate(copy.deepcopy(model), dtype, c.compile, graph=c.graph)
    print(f"{c.out_dir or 'random weights and tokens'}: L={model.config.n_layer}, "
          f"D={model.config.n_embd}, {model.n_channels} cached channels, T={T}; {what}\n"
          f"times: {machine(device)}, batch {c.batch_size}, {fast}\n")
    batch = x[torch.arange(c.batch_size, device=device) % len(x)]
    if given:
        results = {"schedules": time_schedules(c, given, fast, batch)}
    else:
        results = study(c, accelerate(model, counted, c.compile).model, x, y, fast, batch)
    write_results(c, "prefill", device, dtype, runs=str(fast), model=asdict(model.config),
                  block_size=T, rows=len(x), batch_size=len(batch), **results)


def study(c: PrefillConfig, model: Decoder, x: Tensor, y: Tensor, fast: Fast,
          batch: Tensor) -> dict:
    """Passes, perplexities, times and residuals of groups from 1 to T."""
    T = x.size(1)
    exact = perplexities(model, x, y, c.batch_size, T, 1)[0]
    schedules, limit, guess = [], min(c.max_passes, T), 16
    table = Table({"g": "6d", "passes": ">7s", "perplexity": "11.3f", "off by": "+7.2%",
                   "s/sequence": "11.5f", "tokens/s": "12,.0f"})
    names = {"jacobi": "Jacobi", "autoregressive": "token by token"}
    for g in [2 ** i for i in range(7) if 2 ** i < T] + [T]:
        n, ppl = 1, [exact]
        if g < T:
            n, ppl = passes_needed(model, x, y, c.batch_size, g, guess, limit, exact)
            guess = n or limit  # more groups seldom need more passes
        solver = {1: "jacobi", T: "autoregressive"}.get(g, "cyclic")
        result = {"g": g, "solver": solver, "passes": n, "perplexities": ppl}
        if n is not None:
            result |= figures(c, fast, batch, Schedule(solver, n, g))
        schedules.append(result)
        table.add(g, f"{n or f'>{limit}'}", ppl[-1], ppl[-1] / exact - 1,
                  result.get("seconds_per_sequence"), result.get("tokens_per_second"),
                  remark=names.get(solver, ""))
    found = residuals(model, x[:c.batch_size], [g for g in RESIDUALS_OF if g < T],
                      min(10, c.max_passes))
    return {"exact_perplexity": exact, "schedules": schedules, "residuals": found}


def time_schedules(c: PrefillConfig, schedules: list[Schedule], fast: Fast,
                   batch: Tensor) -> list[dict]:
    """Times of given schedules, and what each takes of the last cyclic one."""
    rows = [figures(c, fast, batch, s) for s in schedules]
    base = next((r for r in reversed(rows) if r["solver"] == "cyclic"), rows[-1])
    print(f"x: over {base['schedule']}")
    table = Table({"": "15s", "passes": "6d", **FIGURES, "paper": "6.1f"})
    for r in rows:
        r["ratio"] = r["seconds_per_sequence"] / base["seconds_per_sequence"]
        paper = [PAPER_SECONDS.get((s["schedule"], s["passes"])) for s in (r, base)]
        same = batch.size(1) == PAPER_T and all(paper)
        r["paper_ratio"] = paper[0] / paper[1] if same else None
        table.add(r["schedule"], r["passes"], *shown(r), r["paper_ratio"])
    return rows


def time_systems(c: PrefillConfig, device: str, dtype: torch.dtype):
    """Times of the paper's prefill of several systems; the first is what others are compared to."""
    sizes, T = random_sizes(c)
    print(f"random weights and tokens: L={sizes.n_layer}, D={sizes.n_embd}, T={T}, batch "
          f"{c.batch_size}; {machine(device)}\n")
    table, results = Table({"": "12s", "schedule": ">15s", **FIGURES}), {}
    for name, config in named_configs(c.systems, sizes).items():
        model = random_model(config, device, c.seed).eval()
        x, _ = random_tokens(c.batch_size, config, T, device)
        fast = accelerate(model, dtype, c.compile, graph=c.graph)
        schedule, passes = Schedule("one pass", 1, 1), ""
        if model.iterates:
            how = evaluation_schedule(config)
            schedule = Schedule("jacobi" if how["n_groups"] == 1 else "cyclic", **how)
            passes = f":{schedule.passes}"
        r = results[name] = figures(c, fast, x, schedule) | {"runs": str(fast)}
        first = next(iter(results.values()))
        r["ratio"] = r["seconds_per_sequence"] / first["seconds_per_sequence"]
        table.add(name, r["schedule"] + passes, *shown(r))
    write_results(c, "prefill", device, dtype, block_size=T, batch_size=c.batch_size,
                  systems=results)


FIGURES = {"GFLOP/token": "11.3f", "ms/sequence": "11.3f", "tokens/s": "10,.0f",
           "first s": "8.1f", "x": "6.2f"}


def figures(c: PrefillConfig, fast: Fast, idx: Tensor, s: Schedule) -> dict:
    """A schedule, its FLOP per token without the head (token by token, as decoding, on T / 2 keys)
    and its times on tokens idx (B, T)."""
    device, config = str(idx.device), fast.model.config
    flops = flops_if_known(config, idx.size(1), "prefill", passes=s.passes)
    warmups, trials = c.warmups, c.trials
    if s.solver == "autoregressive":
        flops = flops and flops - store_flops(config)[0]
        warmups, trials = min(warmups, 1), min(trials, 10)
    empty(device)
    began = time.perf_counter()
    with fast.autocast():
        run_once = make_prefill(fast, idx, s)
        synchronise(device)
        first_seconds = time.perf_counter() - began
        r = measure(run_once, device, warmups, trials, idx.numel())
    return {"schedule": short_name(s), **asdict(s), "flops_per_token": flops, **r,
            "first_seconds": first_seconds, "seconds_per_sequence": r["median_seconds"] / len(idx)}


def shown(r: dict) -> tuple:
    """These, in the order of FIGURES."""
    return (r["flops_per_token"] and r["flops_per_token"] / 1e9, 1e3 * r["seconds_per_sequence"],
            r["tokens_per_second"], r["first_seconds"], r["ratio"])


def residuals(model: Decoder, x: Tensor, groups: list[int], passes: int) -> dict[int, list[float]]:
    """Relative change of the states in each pass, by number of groups; printed as a table."""
    found = {g: cyclic(model, x, g, passes, 0, keep_cache=False).report.residuals for g in groups}
    if found:
        print("\nrelative residual")
        table = Table({"pass": "6d"} | {f"g={g}": "9.1e" for g in found})
        for t, row in enumerate(zip(*found.values()), 1):
            table.add(t, *row)
    return found


# ---- time

def make_prefill(fast: Fast, idx: Tensor, s: Schedule) -> Callable:
    """A prefill of tokens idx (B, T), to be called again and again; a CUDA graph, if it is to be
    one, and token by token that of a step."""
    run_once = partial(s, fast.model, idx, keep_cache=True)
    if not fast.graph:
        return run_once
    if s.solver == "autoregressive":
        return TokenByToken(fast.model, idx)
    return record(run_once, ()).replay


class TokenByToken:
    """Decoding steps on an empty cache of fixed size, from the first column of idx (B, T) on, each
    the same CUDA graph."""

    def __init__(self, model: Decoder, idx: Tensor):
        B, T = idx.shape
        self.idx, self.column = idx, idx.new_zeros(1)
        self.index, self.start = idx.new_zeros(B), idx.new_zeros(B)
        self.state = self.column, self.index, self.start
        self.steps = steps_of(model, model.new_cache(B, T, like=model.embed_tokens(idx[:, 0])))
        self.graph = record(self.step, self.state)

    def step(self):
        token = self.idx.index_select(1, self.column)[:, 0]
        self.steps(token, self.index, self.start, self.column)
        self.steps.finish()

    def __call__(self):
        for t in self.state:
            t.zero_()
        for _ in range(self.idx.size(1)):
            self.graph.replay()
