"""
Count and time: `python bench.py COMMAND --key=value ...`, each with --help and --json=FILE.

    python bench.py flops                        # FLOP per token, by counter and by formula
    python bench.py train                        # a micro-step, the optimizers, the loss
    python bench.py decode                       # a token, by batch size
    python bench.py prefill --out_dir=out/tiny   # passes and time of every schedule
    python bench.py prefill --random=paper --schedules=jacobi:75,cyclic16:4,autoregressive

GFLOP here are 1e9 operations, a multiplication and an addition being two; a time is the median of
trials after warm-ups, with the device synchronised on either side of each. Where two systems are
compared, one run measures both.

Dimensions: B rows, T tokens, L layers, D width, d head size, k channels, g groups.
"""

from __future__ import annotations

import copy
import gc
import json
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

import train
from configurator import UserError, key, parse, run
from flops import MODES, count_flops, flops_per_token, peak_flops, pool_flops
from model import Decoder, ModelConfig, set_compute_copies
from pool import build
from sample import Choice, Decoding, draws, fast_steps, move_on, prefill, ready, record
from solvers import cyclic, interleave

# ---- flops

PAPER = {  # section "Compute cost", T = 2048: GFLOP per token in training, prefill, decode
    "vanilla L=16": (dict(kv="vanilla"), (0.444, 0.142, 0.179)),
    "vanilla L=24": (dict(kv="vanilla", n_layer=24), (0.665, 0.212, 0.269)),
    "vanilla L=32": (dict(kv="vanilla", n_layer=32), (0.887, 0.283, 0.359)),
    "WhiteMatter k=16": (dict(n_channels=16), (1.111, 0.467, 0.184)),
    "WhiteMatter k=8": (dict(n_channels=8), (1.028, 0.432, 0.177)),
}


@dataclass
class FlopsConfig:
    """What `bench.py flops` takes."""

    block_size: int = key(2048, "T, tokens per row and in the cache; the paper's is 2048")
    count: bool = key(True, "run the code and count too (half a minute), not only the formula")
    json: str | None = key(None, "write the results to this file (-: to stdout)")


def flops_command(argv: list[str]):
    """Count the FLOP per token of the paper's models."""
    c = parse(FlopsConfig(), argv, "python bench.py flops: FLOP per token, without the head")
    check(c, "block_size")
    results = {}
    for name, (sizes, paper) in PAPER.items():
        config = ModelConfig(**sizes)
        with torch.device("meta"):
            n_params = build(config).n_params()
        results[name] = {"params": n_params, "modes": {mode: {
            "formula": flops_per_token(config, c.block_size, mode) / 1e9,
            "counted": count_flops(config, c.block_size, mode) / 1e9 if c.count else None,
            "paper": printed if c.block_size == 2048 else None}
            for mode, printed in zip(MODES, paper)}}
    base = results["vanilla L=16"]["modes"]
    print(f"GFLOP per token without the head, T={c.block_size}; x: over vanilla L=16\n")
    print(f"{'':17s} {'parameters':>11s}  {'':8s} {'counted':>8s} {'formula':>8s} {'x':>5s} "
          f"{'paper':>6s} {'x':>5s} {'to paper':>8s}")
    for name, result in results.items():
        label, n_params = name, f"{result['params']:,}"
        for mode, r in result["modes"].items():
            paper = "" if r["paper"] is None else (
                f"{r['paper']:6.3f} {r['paper'] / base[mode]['paper']:5.2f} "
                f"{100 * (r['formula'] / r['paper'] - 1):+7.1f}%")
            counted = "-" if r["counted"] is None else f"{r['counted']:.4f}"
            print(f"{label:17s} {n_params:>11s}  {mode:8s} {counted:>8s} "
                  f"{r['formula']:8.4f} {r['formula'] / base[mode]['formula']:5.2f} {paper}")
            label = n_params = ""
    print(FOOTNOTE)
    write_json(c.json, {"command": "flops", "unit": "GFLOP per token", "settings": asdict(c),
                        "torch": torch.__version__, "models": results})


FOOTNOTE = """
Parameters are without the embedding. Attention counts the keys that a token can see.
WhiteMatter's prefill is below the paper's by one evaluation of the pool: 3 passes that leave a
cache take 4 (of H(0), and of each pass), the paper's figures equal 5. Its training figures equal
6 such evaluations forward, we need 4 6/8."""


# ---- systems: the models that `train` and `decode` compare

@dataclass
class SystemsConfig:
    """What `bench.py train` and `bench.py decode` both take; the sizes are the paper's."""

    systems: str = key("vanilla,k16,k8", "vanilla, or k and the number of channels; the first is "
                       "what the others are compared with")
    vocab_size: int = key(50304, "rows of the embedding, which is also the head")
    n_layer: int = key(16, "L, decoder blocks")
    n_embd: int = key(512, "D, width")
    n_head: int = key(6, "query heads")
    n_kv_head: int = key(3, "key-value heads")
    head_dim: int = key(96, "features of a head")
    n_hidden: int = key(1536, "features inside the MLP")
    device: str = key("auto", "auto (cuda, else mps, else cpu), or a torch device")
    dtype: str = key("auto", "auto (bfloat16 on cuda), float32 or bfloat16")
    graph: bool = key(True, "on cuda: a CUDA graph, as train.py and sample.py run it")
    trials: int = key(20, "timed runs")
    warmups: int = key(3, "runs before them")
    seed: int = key(1337, "of weights and tokens")
    json: str | None = key(None, "write the results to this file (-: to stdout)")

    def models(self) -> dict[str, ModelConfig]:
        """The configs by name. Raises UserError for a name that is no system's."""
        names = {f.name for f in fields(ModelConfig)} & {f.name for f in fields(self)}
        sizes = {name: getattr(self, name) for name in names} | {"eos_id": self.vocab_size - 1}
        models = {}
        for name in self.systems.split(","):
            if name == "vanilla":
                system = {"kv": "vanilla"}
            elif re.fullmatch("k[0-9]+", name):
                system = {"n_channels": int(name[1:])}
            else:
                raise UserError(f"systems={self.systems}: {name!r} is neither vanilla nor k with "
                                "a number of channels, such as k16")
            try:
                models[name] = ModelConfig(**sizes, **system)
            except ValueError as error:
                raise UserError(f"systems={self.systems}, {name}: {error}") from None
        return models


def random_model(config: ModelConfig, device: str, seed: int) -> Decoder:
    torch.manual_seed(seed)
    model = build(config).to(device)
    if model.iterates:  # at 0, the mixture would be fixed
        for branch in (model.kv_pool.key, model.kv_pool.value):
            torch.nn.init.normal_(branch.router, std=0.02)
    return model


# ---- train: a micro-step, the optimizers, the loss

@dataclass
class TrainBenchConfig(SystemsConfig):
    """What `bench.py train` takes."""

    batch_size: int = key(16, "rows of a micro-step")
    block_size: int = key(2048, "T, tokens per row")
    document: int = key(1000, "tokens of a document on average; 0: a row is one document")
    compile: bool | None = key(None, "torch.compile small pieces; None: on cuda")
    profile: bool = key(False, "GPU time of a micro-step by kind of kernel")


def train_command(argv: list[str]):
    """Time and memory of training."""
    c = parse(TrainBenchConfig(), argv, "python bench.py train: a micro-step (forward and backward "
              "as train.py runs it),\nthe optimizer step and the loss on its own")
    check(c, "batch_size", "block_size", "trials", "warmups")
    models, device = c.models(), train.pick_device(c.device)
    dtype, on_cuda = train.pick_dtype(c.dtype, device), device.startswith("cuda")
    compiled = on_cuda if c.compile is None else c.compile
    if compiled:
        train.compile_pieces()
    peak = peak_flops(device)
    how = {"compiled": compiled, "cuda_graph": on_cuda and c.graph,
           "peak_flops": peak, **environment(device, dtype)}
    print(f"{machine(device, dtype)}, {'' if compiled else 'not '}compiled, "
          f"{'CUDA graph' if how['cuda_graph'] else 'eager'}\n{c.batch_size} x {c.block_size} "
          f"tokens, vocabulary {c.vocab_size:,}, L={c.n_layer}, D={c.n_embd}; MFU of "
          f"{'n/a' if peak is None else f'{peak / 1e12:.0f} TFLOP/s'}; share: of optimizer in one "
          "micro-step and it\n")
    print(f"{'':10s} {'passes':>6s} {'ms':>9s} {'tokens/s':>10s} {'x':>6s} {'MFU':>6s} {'GiB':>6s} "
          f"{'optimizer ms':>13s} {'share':>6s} {'loss ms':>8s} {'GiB':>6s} {'first s':>8s}")
    results = {}
    for name, config in models.items():
        r = results[name] = time_training(config, c, device, dtype)
        seconds = r["micro_step"]["median_seconds"]
        first = next(iter(results.values()))["micro_step"]["median_seconds"]
        r["ratio"] = seconds / first
        r["flops_per_token"] = flops_per_token(config, c.block_size, "training", head=True)
        speed = r["micro_step"]["tokens_per_second"]
        r["mfu"] = None if peak is None else r["flops_per_token"] * speed / peak
        update = r["optimizer"]["median_seconds"]
        r["optimizer_share"] = update / (update + seconds)
        print(f"{name:10s} {passes_of(config):>6s} {1e3 * seconds:9.2f} {speed:10,.0f} "
              f"{r['ratio']:6.2f} {percent(r['mfu'])} {gib(r['peak_bytes'])} {1e3 * update:13.2f} "
              f"{percent(r['optimizer_share'])} {1e3 * r['loss']['median_seconds']:8.2f} "
              f"{gib(r['loss_peak_bytes'])} {r['first_seconds']:8.1f}", flush=True)
    for name, r in results.items():
        if r["kernels"]:
            print(f"\n{name}: GPU time of a micro-step, ms, and number of kernels")
            for kind, (ms, count) in r["kernels"].items():
                print(f"  {kind:24s} {ms:9.2f} {count:7,d}")
    write_json(c.json, {"command": "train", "settings": asdict(c), **how, "systems": results})


def time_training(config: ModelConfig, c: TrainBenchConfig, device: str,
                  dtype: torch.dtype) -> dict:
    """Figures of one system; what they needed is free again afterwards."""
    on_cuda = device.startswith("cuda")
    empty(device)
    model = random_model(config, device, c.seed)
    flat = train.flat_gradient(model)
    optimizers = train.make_optimizers(model, train.TrainConfig())

    def renew_copies():
        if on_cuda and dtype != torch.float32:
            set_compute_copies(model, dtype)

    def update():
        train.clip_and_reduce(flat, 1.0, train.Processes())
        for optimizer in optimizers:
            optimizer.step()
        renew_copies()
        flat.zero_()

    renew_copies()
    x, y = random_rows(c, device)
    r = time_micro_step(train.MicroStep(model, 1.0, dtype, graph=on_cuda and c.graph), x, y, c,
                        device)
    r["optimizer"] = measure(update, device, c.warmups, c.trials, x.numel())
    r["peak_bytes"] = torch.cuda.max_memory_allocated() if on_cuda else None
    return r | time_loss(model, y, c, device, dtype)


def time_micro_step(micro_step: train.MicroStep, x: Tensor, y: Tensor, c: TrainBenchConfig,
                    device: str) -> dict:
    def run_once():
        micro_step(x, y)

    began = time.perf_counter()
    run_once()
    synchronise(device)
    return {"first_seconds": time.perf_counter() - began,
            "micro_step": measure(run_once, device, c.warmups, c.trials, x.numel()),
            "kernels": kernel_times(run_once, device) if c.profile else None}


def time_loss(model: Decoder, y: Tensor, c: TrainBenchConfig, device: str,
              dtype: torch.dtype) -> dict:
    """Head and cross-entropy, forward and backward, and the memory that they need at their peak."""
    before = empty(device)
    h = torch.randn(*y.shape, model.config.n_embd, device=device).to(dtype).requires_grad_()

    def run_once():
        with train.autocast(device, dtype):
            loss = model.loss(h, y)
        loss.backward()

    r = {"loss": measure(run_once, device, c.warmups, c.trials, y.numel())}
    on_cuda = device.startswith("cuda")
    return r | {"loss_peak_bytes": torch.cuda.max_memory_allocated() - before if on_cuda else None}


def random_rows(c: TrainBenchConfig, device: str) -> tuple[Tensor, Tensor]:
    """Tokens and targets (B, T), with the ends of documents among them."""
    generator = torch.Generator().manual_seed(c.seed)
    shape = c.batch_size, c.block_size + 1
    xy = torch.randint(c.vocab_size - 1, shape, generator=generator)
    if c.document:
        ends = torch.rand(shape, generator=generator) < 1 / c.document
        xy = xy.masked_fill(ends, c.vocab_size - 1)
    xy = xy.to(device)
    return xy[:, :-1], xy[:, 1:]


def passes_of(c: ModelConfig) -> str:
    return "1" if c.kv == "vanilla" else f"{c.n_nograd}+{c.n_grad}"


# the first that occurs in a kernel's (or, on a CPU, an operation's) name
KINDS = (
    ("attention", r"^(forward|dq|dkv|merge)_kernel|attention|flash|fmha"),
    ("pool", r"^(unit|mix|weights|radial|states|store|take)_kernel"),
    ("norms and residuals", r"^(add_norm|heads|norm)|rms|rsqrt"),
    ("cross-entropy", r"cross_entropy|logsumexp|nll|softmax"),
    ("matrix products", r"gemm|gemv|cutlass|nvjet|cublas|splitK|::(mm|bmm|addmm|baddbmm)$"),
    ("copies", r"memcpy|memset|copy|CatArray|::(cat|stack|zero_|fill_)$"),
    ("other element-wise", ""),
)


def kernel_times(function: Callable, device: str) -> dict[str, tuple[float, int]]:
    """Milliseconds and number of kernels of one call, by kind."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_cuda = device.startswith("cuda")
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_cuda
    with profile(activities=activities) as profiler:
        function()
        synchronise(device)
    table = {kind: (0.0, 0) for kind, _ in KINDS}
    for event in profiler.key_averages():
        if (event.device_type == DeviceType.CPU) == on_cuda:
            continue
        us = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        kind = next(kind for kind, names in KINDS if re.search(names, event.key, re.IGNORECASE))
        table[kind] = table[kind][0] + us / 1e3, table[kind][1] + event.count
    total = [sum(column) for column in zip(*table.values())]
    return dict(sorted(table.items(), key=lambda row: -row[1][0])) | {"sum": tuple(total)}


# ---- decode: a token

@dataclass
class DecodeConfig(SystemsConfig):
    """What `bench.py decode` takes."""

    batch_sizes: str = key("1,8,64", "rows that are decoded together, one number or several")
    context: int = key(2048, "tokens in the cache before the first timed one")
    steps: int = key(32, "tokens of a trial")
    temperature: float = key(0.8, "as for sample.py; 0 is greedy")
    top_k: int | None = key(200, "as for sample.py")
    top_p: float = key(1.0, "as for sample.py")


@torch.no_grad()
def decode_command(argv: list[str]):
    """Time of a token."""
    c = parse(DecodeConfig(), argv, "python bench.py decode: time of a token as sample.py decodes "
              "it,\nwith the choice of the token and its way to the host")
    check(c, "context", "steps", "trials", "warmups")
    models, device = c.models(), train.pick_device(c.device)
    dtype, on_cuda = train.pick_dtype(c.dtype, device), device.startswith("cuda")
    batch_sizes = [whole_number("batch_sizes", part) for part in c.batch_sizes.split(",")]
    print(f"{machine(device, dtype)}, {'CUDA graph' if on_cuda and c.graph else 'eager'}, not "
          f"compiled\ncontext {c.context}, L={c.n_layer}, D={c.n_embd}, vocabulary "
          f"{c.vocab_size:,}, temperature {c.temperature}, top_k {c.top_k}; GB/s: keys and values "
          "that attention reads, over the whole time\n")
    print(f"{'':10s} {'batch':>5s} {'us/token':>9s} {'tokens/s':>9s} {'x':>6s} {'GB/s':>7s} "
          f"{'cache MiB':>9s} {'first s':>8s}")
    results = []
    for B in batch_sizes:
        for name, config in models.items():
            r = {"system": name, "batch_size": B} | time_decoding(config, c, B, device, dtype)
            results.append(r)
            first = next(other for other in results if other["batch_size"] == B)
            r["ratio"] = r["seconds_per_step"] / first["seconds_per_step"]
            print(f"{name:10s} {B:5d} {1e6 * r['seconds_per_step']:9.1f} "
                  f"{r['tokens_per_second']:9,.0f} {r['ratio']:6.3f} "
                  f"{r['bytes_per_second'] / 1e9:7.1f} {r['cache_bytes'] / 2**20:9.1f} "
                  f"{r['first_seconds']:8.1f}", flush=True)
    write_json(c.json, {"command": "decode", "settings": asdict(c), "compiled": False,
                        "cuda_graph": on_cuda and c.graph, **environment(device, dtype),
                        "results": results})


def time_decoding(config: ModelConfig, c: DecodeConfig, B: int, device: str,
                  dtype: torch.dtype) -> dict:
    """Figures of one system at batch B."""
    empty(device)
    model = ready(random_model(config, device, c.seed), dtype)
    token = torch.zeros(B, dtype=torch.long, device=device)
    h = model.embed_tokens(token)
    cache = model.new_cache(B, c.context + c.steps + 1, like=h)
    cache.k.normal_()
    cache.v.normal_()
    # the last id, which ends documents, is never drawn: the context stays as long as it is
    choice = Choice(draws(c.seed, c.steps + 1, B).to(device), c.temperature, c.top_k, c.top_p,
                    config.vocab_size - 1)
    decoding = Decoding(model, h, cache, token + c.context, token, choice, c.context)
    began = time.perf_counter()
    if device.startswith("cuda") and c.graph:
        decoding.capture()
    synchronise(device)
    first_seconds = time.perf_counter() - began

    def run_once():
        decoding.index.fill_(c.context)
        decoding.n.zero_()
        decoding.filled = c.context
        for _ in decoding.tokens(c.steps + 1):
            pass

    r = measure(run_once, device, c.warmups, c.trials, B * c.steps)
    seconds = r["median_seconds"] / c.steps
    per_token = 2 * config.n_kv_head * config.head_dim * cache.k.element_size()
    return r | {"first_seconds": first_seconds, "seconds_per_step": seconds,
                "cache_bytes": per_token * B * c.context * model.n_channels,
                "bytes_per_second": per_token * B * c.context * config.n_layer / seconds}


# ---- prefill: passes and time of every schedule (section "Prefill convergence and runtime")

CLOSE = 0.01  # perplexity counts as converged within 1 % of the exact one
RESIDUALS_OF = (1, 4, 8, 16)  # groups, in the table of residuals


@dataclass
class PrefillConfig:
    """What `bench.py prefill` takes."""

    out_dir: str | None = key(None, "folder with ckpt.pt; None: a random model")
    random: str = key("tiny", "the random model: tiny (config/tiny.py), or paper (4 layers, D 512)")
    schedules: str | None = key(None, "time these only, without perplexities: names like "
                                "jacobi:75,cyclic16:4,autoregressive, with groups and passes")
    block_size: int | None = key(None, "T, tokens per row; None: the model's (paper: 2048)")
    rows: int = key(16, "held-out rows that the perplexity is taken on")
    batch_size: int | None = key(None, "rows at a time; None: 8 (paper: 64)")
    max_passes: int = key(128, "give up on a schedule after so many (never more than T)")
    trials: int = key(30, "timed runs of each schedule; 10 at most of the autoregressive one")
    warmups: int = key(5, "runs before them; 1 at most of the autoregressive one")
    device: str = key("auto", "auto (cuda, else mps, else cpu), or a torch device")
    dtype: str = key("auto", "of the timed runs: auto (bfloat16 on cuda), float32 or bfloat16")
    compile: bool | None = key(None, "torch.compile small pieces; None: of given schedules on cuda")
    graph: bool = key(True, "on cuda: a CUDA graph of the whole prefill, or of a token's step")
    seed: int = key(1337, "of the random model and tokens")
    json: str | None = key(None, "write the results to this file (-: to stdout)")


# section "Prefill convergence and runtime": sizes, and on an RTX A6000 seconds a sequence
PAPER_MODEL = ModelConfig(n_layer=4, n_channels=4)
PAPER_T, PAPER_BATCH = 2048, 64
PAPER_SECONDS = {"jacobi": 0.1393, "autoregressive": 0.1729, "cyclic16": 0.01245}


def load(c: PrefillConfig, device: str) -> tuple[Decoder, Tensor, Tensor]:
    """A float32 model, and held-out tokens and targets (rows, T) for it."""
    if c.out_dir is None:
        config, T = PAPER_MODEL, PAPER_T
        if c.random == "tiny":
            settings = parse(train.TrainConfig(), [str(Path(__file__).parent / "config/tiny.py")],
                             "")
            config = train.model_config(settings, {"vocab_size": 257, "eos_id": 256})
            T = settings.block_size
        model = random_model(config, device, c.seed)
        xy = torch.randint(config.vocab_size - 64, (c.rows, (c.block_size or T) + 1)).to(device)
        return model.eval(), xy[:, :-1], xy[:, 1:]
    model, checkpoint = train.load_model(c.out_dir, device)
    if not model.iterates:
        raise UserError(f"{c.out_dir}: kv={model.config.kv} is exact in one pass, there is no "
                        "schedule to compare")
    folder, meta = train.load_meta(checkpoint["config"]["dataset"])
    if meta["tokenizer"] != checkpoint["meta"]["tokenizer"]:
        raise UserError(f"{folder} holds {meta['tokenizer']} tokens, {c.out_dir} was trained on "
                        f"{checkpoint['meta']['tokenizer']}")
    rows = train.TokenRows(folder / "val.bin", meta,
                           c.block_size or checkpoint["config"]["block_size"], None)
    return model, *rows.batch(0, min(c.rows, rows.n_rows), device)


class PassLosses:
    """Watches `model.states` during a cyclic solve and takes the loss after every pass."""

    def __init__(self, model: Decoder, targets: Tensor, n_groups: int):
        self.model, self.targets = model, targets
        self.n_groups = min(n_groups, targets.size(1))
        self.states, self.parts, self.losses = model.states, [], []

    def __enter__(self) -> PassLosses:
        self.model.states = self
        return self

    def __exit__(self, *_):
        del self.model.states  # back to the method

    def __call__(self, *args) -> list[Tensor]:
        h = self.states(*args)
        self.parts.append(h[-1])
        if len(self.parts) == self.n_groups:
            self.losses.append(self.model.loss(interleave(self.parts, dim=1), self.targets))
            self.parts = []
        return h


def perplexities(model: Decoder, x: Tensor, y: Tensor, batch_size: int, n_groups: int,
                 passes: int) -> list[float]:
    """Perplexity of targets y (rows, T) after each of `passes` cyclic passes over tokens x."""
    total = torch.zeros(passes, dtype=torch.float64)
    for xb, yb in zip(x.split(batch_size), y.split(batch_size)):
        with PassLosses(model, yb, n_groups) as watch:
            cyclic(model, xb, n_groups, passes, 0, keep_cache=False, measure=False)
        total += torch.stack(watch.losses).double().cpu() * yb.numel()
    return (total / y.numel()).exp().tolist()


def passes_needed(model: Decoder, x: Tensor, y: Tensor, batch_size: int, n_groups: int,
                  max_passes: int, exact: float) -> tuple[int | None, list[float]]:
    """Smallest number of passes within 1 % of the exact perplexity (None: more than
    max_passes), and the perplexity after each pass up to it."""
    n = min(4, max_passes)
    while True:
        ppl = perplexities(model, x, y, batch_size, n_groups, n)
        for t, p in enumerate(ppl):
            if abs(p / exact - 1) <= CLOSE:
                return t + 1, ppl[:t + 1]
        if n == max_passes:
            return None, ppl
        n = min(2 * n, max_passes)  # from the start again: the sum stays below four times n


@dataclass
class Schedule:
    """A way to prefill; `passes` None: as many as it needs."""

    solver: str
    n_groups: int
    passes: int | None

    @classmethod
    def parse(cls, text: str, T: int) -> Schedule:
        match = re.fullmatch("(jacobi|cyclic([0-9]+)):([0-9]+)|(autoregressive)", text)
        if not match or "0" in match.groups():
            raise UserError(f"schedules: {text!r} is none of jacobi:PASSES, cyclicGROUPS:PASSES "
                            "and autoregressive")
        if match[4]:
            return cls("autoregressive", T, 1)
        return cls("cyclic" if match[2] else "jacobi", int(match[2] or 1), int(match[3]))

    @property
    def name(self) -> str:
        return f"cyclic{self.n_groups}" if self.solver == "cyclic" else self.solver

    def flops(self, config: ModelConfig, T: int) -> float:
        """FLOP per token without the head; token by token, as decoding, on T / 2 keys."""
        total = flops_per_token(config, T, "prefill", passes=self.passes)
        return total - (self.solver == "autoregressive") * pool_flops(config)


@torch.no_grad()
def prefill_command(argv: list[str]):
    """Passes and time of Jacobi, cyclic and autoregressive prefill."""
    c = parse(PrefillConfig(), argv, "python bench.py prefill: passes and time of every schedule "
              "to within 1 % of the exact perplexity,\nor time of the given schedules")
    check(c, "block_size", "rows", "batch_size", "max_passes", "trials", "warmups")
    if c.random not in ("tiny", "paper"):
        raise UserError(f"random={c.random}: choose tiny or paper")
    if c.batch_size is None:
        c.batch_size = PAPER_BATCH if c.out_dir is None and c.random == "paper" else 8
    device = train.pick_device(c.device)
    dtype, on_cuda = train.pick_dtype(c.dtype, device), device.startswith("cuda")
    compiled = bool(on_cuda and c.schedules) if c.compile is None else c.compile
    if compiled:
        train.compile_pieces()
    model, x, y = load(c, device)
    T = x.size(1)
    given = c.schedules and [Schedule.parse(text, T) for text in c.schedules.split(",")]
    what = "times only" if given else f"perplexity of {len(x)} rows in float32"
    print(f"{c.out_dir or 'random weights and tokens'}: L={model.config.n_layer}, "
          f"D={model.config.n_embd}, k={model.config.n_channels}, T={T}; {what}\n"
          f"times: {machine(device, dtype)}, batch {c.batch_size}, "
          f"{'' if compiled else 'not '}compiled, "
          f"{'CUDA graph' if on_cuda and c.graph else 'eager'}\n")
    batch = x[torch.arange(c.batch_size, device=device) % len(x)]
    timed = Timer(c, ready(copy.deepcopy(model), dtype), batch, device)
    results = {"command": "prefill", "settings": asdict(c), "compiled": compiled,
               "cuda_graph": on_cuda and c.graph, **environment(device, dtype),
               "model": asdict(model.config), "block_size": T, "rows": len(x),
               "batch_size": len(batch)}
    if given:
        results["schedules"] = time_schedules(given, timed, model.config, T)
    else:
        results |= study(c, model, x, y, timed)
    write_json(c.json, results)


def study(c: PrefillConfig, model: Decoder, x: Tensor, y: Tensor, timed: Timer) -> dict:
    """Passes, perplexities, times and residuals of groups from 1 to T."""
    T = x.size(1)
    exact = perplexities(model, x, y, c.batch_size, T, 1)[0]
    schedules, limit = [], min(c.max_passes, T)
    print("     g  passes  perplexity  off by   s/sequence     tokens/s")
    for g in [2 ** i for i in range(7) if 2 ** i < T] + [T]:
        n, ppl = (1, [exact]) if g == T else passes_needed(model, x, y, c.batch_size, g, limit,
                                                           exact)
        solver = {1: "jacobi", T: "autoregressive"}.get(g, "cyclic")
        result = {"g": g, "solver": solver, "passes": n, "perplexities": ppl}
        if n is not None:
            result |= timed(Schedule(solver, g, n))
        schedules.append(result)
        print(schedule_line(result, exact, limit), flush=True)
    table = residuals(model, x[:c.batch_size], [g for g in RESIDUALS_OF if g < T],
                      min(10, c.max_passes))
    return {"exact_perplexity": exact, "schedules": schedules, "residuals": table}


def time_schedules(schedules: list[Schedule], timed: Timer, config: ModelConfig,
                   T: int) -> list[dict]:
    """Times of given schedules, and what each takes of the last cyclic one."""
    rows = []
    for s in schedules:
        flops = s.flops(config, T)
        rows.append({"schedule": s.name, **asdict(s), "flops_per_token": flops, **timed(s)})
    base = next((r for r in reversed(rows) if r["solver"] == "cyclic"), rows[-1])
    print(f"{'':15s} {'passes':>6s} {'GFLOP/token':>11s} {'ms/sequence':>11s} {'tokens/s':>10s} "
          f"{'first s':>8s} {'x':>6s} {'paper':>6s}   (x: over {base['schedule']})")
    for r in rows:
        r["ratio"] = r["seconds_per_sequence"] / base["seconds_per_sequence"]
        paper = [PAPER_SECONDS.get(name) for name in (r["schedule"], base["schedule"])]
        r["paper_ratio"] = paper[0] / paper[1] if all(paper) else None
        printed = f"{r['paper_ratio']:6.1f}" if r["paper_ratio"] else f"{'-':>6s}"
        print(f"{r['schedule']:15s} {r['passes']:6d} {r['flops_per_token'] / 1e9:11.3f} "
              f"{1e3 * r['seconds_per_sequence']:11.3f} {r['tokens_per_second']:10,.0f} "
              f"{r['first_seconds']:8.1f} {r['ratio']:6.2f} {printed}")
    return rows


def schedule_line(r: dict, exact: float, limit: int) -> str:
    """A row of the first table."""
    name = {"jacobi": "Jacobi", "autoregressive": "token by token"}.get(r["solver"], "")
    ppl = r["perplexities"][-1]
    passes = r["passes"] or f">{limit}"
    head = f"{r['g']:6d}  {passes:>6}  {ppl:10.3f}  {ppl / exact - 1:+6.2%}"
    if r["passes"] is None:
        return f"{head}   {'-':>10s}   {'-':>10s}  {name}"
    return (f"{head}   {r['seconds_per_sequence']:10.5f}   {r['tokens_per_second']:10,.0f}  "
            f"{name}".rstrip())


def residuals(model: Decoder, x: Tensor, groups: list[int], passes: int) -> dict[int, list[float]]:
    """Relative change of the states in each pass, by number of groups; printed as a table."""
    table = {g: cyclic(model, x, g, passes, 0, keep_cache=False).report.residuals for g in groups}
    if table:
        print("\nrelative residual\n  pass" + "".join(f"{f'g={g}':>10s}" for g in table))
    for t, row in enumerate(zip(*table.values())):
        print(f"{t + 1:6d}" + "".join(f"{r:10.1e}" for r in row))
    return table


# ---- time

@dataclass
class Timer:
    """Times schedules on a batch of tokens (B, T)."""

    c: PrefillConfig
    model: Decoder
    idx: Tensor
    device: str

    def __call__(self, s: Schedule) -> dict:
        c, graph = self.c, self.device.startswith("cuda") and self.c.graph
        few = (1, 10) if s.solver == "autoregressive" else (c.warmups, c.trials)
        empty(self.device)
        began = time.perf_counter()
        run_once = Prefill(self.model, self.idx, s, graph)
        synchronise(self.device)
        first_seconds = time.perf_counter() - began
        r = measure(run_once, self.device, min(c.warmups, few[0]), min(c.trials, few[1]),
                    self.idx.numel())
        return r | {"first_seconds": first_seconds,
                    "seconds_per_sequence": r["median_seconds"] / len(self.idx)}


class Prefill:
    """A prefill of a batch, to be called again and again; a CUDA graph, if it is to be one.

    Token by token, the graph is that of a decoding step on a cache of fixed size.
    """

    def __init__(self, model: Decoder, idx: Tensor, schedule: Schedule, graph: bool):
        self.model, self.idx, self.schedule, self.graph = model, idx, schedule, None
        self.steps = 1
        if graph and schedule.solver == "autoregressive":
            self.prepare_steps()
            self.graph = record(self.step, self.rewind)
        elif graph:
            self.graph = record(self.run)

    def run(self):
        s = self.schedule
        prefill(self.model, self.idx, s.solver, s.passes, s.n_groups)

    def prepare_steps(self):
        B, self.steps = self.idx.shape
        self.column = self.idx.new_zeros(1)
        self.index, self.start = self.idx.new_zeros(B), self.idx.new_zeros(B)
        like = self.model.embed_tokens(self.idx[:, 0])
        self.cache = self.model.new_cache(B, self.steps, like=like)
        self.fast = fast_steps(self.model, self.cache, like)

    def step(self):
        token = self.idx.index_select(1, self.column)[:, 0]
        move_on(self.model, self.cache, self.fast, token, self.index, self.start, self.column)

    def rewind(self):
        if self.steps > 1:
            for t in (self.column, self.index, self.start):
                t.zero_()

    def __call__(self):
        if self.graph is None:
            return self.run()
        self.rewind()
        for _ in range(self.steps):
            self.graph.replay()


def synchronise(device: str):
    """Wait until the device has done all that it was given."""
    kind = torch.device(device).type
    if kind != "cpu":
        getattr(torch, kind).synchronize()


def measure(run_once: Callable, device: str, warmups: int, trials: int, n_tokens: int) -> dict:
    """Seconds of warm-up and of each trial, their median, and n_tokens over it."""
    began = time.perf_counter()
    for _ in range(warmups):
        run_once()
    synchronise(device)
    warmup_seconds = time.perf_counter() - began
    seconds = []
    for _ in range(trials):
        synchronise(device)
        began = time.perf_counter()
        run_once()
        synchronise(device)
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds)
    return {"warmups": warmups, "warmup_seconds": warmup_seconds, "trials": trials,
            "trial_seconds": seconds, "median_seconds": median,
            "tokens_per_second": n_tokens / median}


def empty(device: str) -> int:
    """Give back all memory that nothing uses, and count its peak anew; bytes still in use."""
    gc.collect()
    if not device.startswith("cuda"):
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def environment(device: str, dtype: torch.dtype) -> dict:
    """What times depend on, for the JSON file."""
    return {"device": device_name(device), "dtype": str(dtype).removeprefix("torch."),
            "torch": torch.__version__, "threads": torch.get_num_threads()}


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def machine(device: str, dtype: torch.dtype) -> str:
    """What the times were taken with, in words."""
    threads = f", {torch.get_num_threads()} threads" if device == "cpu" else ""
    return (f"{device_name(device)}{threads}, torch {torch.__version__}, "
            f"{str(dtype).removeprefix('torch.')}")


# ---- shared by the commands

def check(c, *at_least_one: str):
    """Raise UserError for numbers below 1, and for a file that cannot be written in the end."""
    for name in at_least_one:
        value = getattr(c, name)
        if value is not None and value < 1:
            raise UserError(f"{name}={value}: at least 1 is needed")
    if c.json not in (None, "-") and not Path(c.json).absolute().parent.is_dir():
        raise UserError(f"json={c.json}: there is no such folder")


def whole_number(setting: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise UserError(f"{setting}: {text!r} is no number of at least 1")
    return int(text)


def percent(x: float | None) -> str:
    return f"{'n/a':>6s}" if x is None else f"{100 * x:5.1f}%"


def gib(x: int | None) -> str:
    return f"{'n/a':>6s}" if x is None else f"{x / 2**30:6.2f}"


def write_json(path: str | None, results: dict):
    """To a file, to stdout (-) or nowhere (None)."""
    if path is None:
        return
    text = json.dumps(results)
    if path == "-":
        print(text)
        return
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"json={path}: cannot write there ({error.strerror})") from None


COMMANDS = {"flops": flops_command, "train": train_command, "decode": decode_command,
            "prefill": prefill_command}


def main(argv: list[str]):
    if argv and argv[0] in ("-h", "--help"):
        print(__doc__.strip() + "\n\ncommands: " + ", ".join(COMMANDS))
        return
    if not argv or argv[0] not in COMMANDS:
        raise UserError(f"{argv[0] + ': unknown' if argv else 'no'} command; choose one of "
                        f"{', '.join(COMMANDS)}")
    argv = ["--json=-" if a == "--json" else a for a in argv]
    COMMANDS[argv[0]](argv[1:])


if __name__ == "__main__":
    run(main)
