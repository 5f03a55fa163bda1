"""
Count and time: `python bench.py COMMAND --key=value ...`, each with --help and --json=FILE.

    python bench.py flops                        # FLOP per token, by counter and by formula
    python bench.py train                        # a micro-step, the optimizers, the loss
    python bench.py decode                       # a token, by batch size
    python bench.py prefill --out_dir=out/tiny   # passes and time of every schedule
    python bench.py prefill --random=paper --schedules=jacobi:75,cyclic16:4,autoregressive
    python bench.py systems                      # small versions of all systems, trained

GFLOP here are 1e9 operations, a multiplication and an addition being two; a time is the median of
trials after warm-ups, with the device synchronised on either side of each. Where two systems are
compared, one run measures both.

Dimensions: B rows, T tokens, L layers, D width, d head size, k channels, g groups.
"""

import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial

# before torch, which reads what it tells OpenMP
from configurator import UserError, at_least, key, parse, run, run_command

# isort: split
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import train
from baselines import build, plan
from decoding import Choice, check_choice, draws
from kernels import Fast, accelerate
from measure.convergence import PrefillConfig, prefill_command, random_model
from measure.flops import MODES, count_flops, flops_if_known, flops_per_token, peak_flops
from measure.systems import named, named_configs
from measure.timing import Table, check, empty, machine, measure, timed, write_json, write_results
from model import Decoder, ModelConfig
from running.devices import pick_device, pick_dtype
from running.settings import check as check_settings
from running.start import model_config

# ---- flops

PAPER = {  # section "Compute cost", T = 2048: GFLOP per token in training, prefill, decode
    "vanilla L=16": (dict(kv="vanilla"), (0.444, 0.142, 0.179)),
    "vanilla L=24": (dict(kv="vanilla", n_layer=24), (0.665, 0.212, 0.269)),
    "vanilla L=32": (dict(kv="vanilla", n_layer=32), (0.887, 0.283, 0.359)),
    "LCKV w=4": (named("lckv4", 16), (1.421, 0.935, 0.173)),
    "LCKV w=7": (named("lckv7", 16), (1.174, 0.738, 0.175)),
    "WhiteMatter k=16": (dict(n_channels=16), (1.111, 0.467, 0.184)),
    "WhiteMatter k=8": (dict(n_channels=8), (1.028, 0.432, 0.177)),
}
OTHERS = {  # not in the paper's table
    "WhiteMatter k=1": dict(n_channels=1),
    "static k=16": dict(router="static"),
    "static k=1": dict(router="static", n_channels=1),
    "no feedback": dict(kv="nofeedback"),
    "Feedback": dict(kv="feedback"),
    "Recurrent": dict(kv="recurrent"),
    "FusedKV": dict(kv="fusedkv"),
    "FusedKV-Lite": dict(kv="fusedkv_lite"),
}


@dataclass
class FlopsConfig:
    block_size: int = key(2048, "T, tokens per row and in the cache; the paper's is 2048")
    count: bool = key(True, "run the code and count too (minutes), not only the formula")
    json: str | None = key(None, "write the results to this file (-: to stdout)")


def flops_command(c: FlopsConfig):
    """FLOP per token of all systems, without the head."""
    check(c, "block_size")
    rows = PAPER | {name: (sizes, (None,) * len(MODES)) for name, sizes in OTHERS.items()}
    print(f"GFLOP per token without the head, T={c.block_size}; x: over vanilla L=16\n")
    table = Table({"": "17s", "parameters": "11,d", "mode": ">8s", "counted": "8.4f",
                   "formula": "8.4f", "x": "5.2f", "paper": "6.3f", "its x": "5.2f",
                   "to paper": "+8.1%"})
    results = {}
    for name, (sizes, figures) in rows.items():
        config = ModelConfig(**sizes)
        with torch.device("meta"):
            n_params = build(config).n_params()
        results[name] = {"params": n_params, "modes": {}}
        for mode, figure in zip(MODES, figures):
            formula = flops_per_token(config, c.block_size, mode) / 1e9
            counted = count_flops(config, c.block_size, mode) / 1e9 if c.count else None
            paper = figure if c.block_size == 2048 else None
            results[name]["modes"][mode] = {
                "formula": formula, "counted": counted, "paper": paper}
            base = results["vanilla L=16"]["modes"][mode]
            table.add(name, n_params, mode, counted, formula, formula / base["formula"], paper,
                      paper and paper / base["paper"], paper and formula / paper - 1)
    print(FOOTNOTE)
    write_json(c.json, {"command": "flops", "unit": "GFLOP per token", "settings": asdict(c),
                        "torch": torch.__version__, "models": results})


FOOTNOTE = """
Parameters are without the embedding. Attention counts the keys that a token can see.
WhiteMatter's last block, which no channel is made of, runs in the last pass only, the paper's in
all. In prefill, 3 passes that leave a cache take 4 evaluations of the pool (of H(0), and of each
pass), the paper's figures equal 5; in training 3 7/8 forward, the paper's 6. LCKV's prefill is
0.2 % below the paper's, by what three more projections of keys and values cost; the paper does not
say for what. Feedback and Recurrent are trained here by WhiteMatter's schedule, 1 + 2 passes of 8
groups. FusedKV's mixing of keys and values is element by element, which does not count."""


# ---- systems: the models that `train` and `decode` compare

@dataclass
class SystemsConfig:
    """What `bench.py train` and `bench.py decode` both take; the sizes are the paper's."""

    systems: str = key("vanilla,k16,k8", "any of vanilla, k and the number of channels, static and "
                       "it, lckv and w, nofeedback, feedback, recurrent, fusedkv, fusedkv_lite; "
                       "the others are compared with the first")
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
        sizes = {f.name: getattr(self, f.name) for f in fields(ModelConfig)
                 if hasattr(self, f.name)}
        if self.vocab_size < 2:
            raise UserError(f"vocab_size={self.vocab_size}: at least 2 are needed")
        try:
            config = ModelConfig(**sizes, eos_id=self.vocab_size - 1, n_channels=self.n_layer)
        except ValueError as error:
            raise UserError(str(error)) from None
        return named_configs(self.systems, config)


# ---- train: a micro-step, the optimizers, the loss

@dataclass
class TrainBenchConfig(SystemsConfig):
    batch_size: int = key(16, "rows of a micro-step")
    n_groups: int = key(8, "g of 1 + 2 passes; LCKV has its own")
    block_size: int = key(2048, "T, tokens per row")
    document: int = key(1000, "tokens of a document on average; 0: a row is one document")
    compile: bool | None = key(None, "as for train.py")
    kernels: bool = key(True, "as for train.py; false: plain PyTorch")
    recompute: bool = key(False, "as for train.py; of systems that iterate")
    profile: bool = key(False, "time of a micro-step by kind of kernel")


def train_command(c: TrainBenchConfig):
    """Time and memory of a micro-step (forward and backward as train.py runs it), of the optimizer
    step, and of the loss on its own."""
    check(c, "batch_size", "block_size", "n_groups", "trials", "warmups")
    if c.document < 0:
        raise UserError(f"document={c.document}: a length, or 0 for rows of one document")
    models, device = c.models(), pick_device(c.device)
    dtype, peak = pick_dtype(c.dtype, device), peak_flops(device)
    print(f"{machine(device)}\n{c.batch_size} x {c.block_size} tokens, "
          f"vocabulary {c.vocab_size:,}, L={c.n_layer}, D={c.n_embd}; MFU of "
          f"{'n/a' if peak is None else f'{peak / 1e12:.0f} TFLOP/s'}, as if a row were one "
          "document; share: of optimizer in one micro-step and it\n")
    table = Table({"": "10s", "passes": ">6s", "ms": "9.2f", "tokens/s": "10,.0f", "x": "6.2f",
                   "MFU": "6.1%", "GiB": "6.2f", "optimizer ms": "13.2f", "share": "6.1%",
                   "loss ms": "8.2f", "its GiB": "7.2f", "first s": "8.1f"})
    results = {}
    for name, config in models.items():
        r = results[name] = time_training(config, c, device, dtype)
        seconds = r["micro_step"]["median_seconds"]
        first = next(iter(results.values()))["micro_step"]["median_seconds"]
        r["ratio"] = seconds / first
        flops = flops_if_known(config, c.block_size, "training", head=True)
        r["flops_per_token"] = flops
        speed = r["micro_step"]["tokens_per_second"]
        r["mfu"] = flops and peak and flops * speed / peak
        update = r["optimizer"]["median_seconds"]
        r["optimizer_share"] = update / (update + seconds)
        gib, loss_gib = (r[name] and r[name] / 2**30 for name in ("peak_bytes", "loss_peak_bytes"))
        table.add(name, r["passes"], 1e3 * seconds, speed, r["ratio"], r["mfu"], gib, 1e3 * update,
                  r["optimizer_share"], 1e3 * r["loss"]["median_seconds"], loss_gib,
                  r["first_seconds"], remark=r["runs"])
    for name, r in results.items():
        if r["kernels"]:
            where, what = ("GPU", "kernels") if device.startswith("cuda") else ("CPU", "operations")
            print(f"\n{name}: {where} time of a micro-step, and number of {what}")
            table = Table({"": "24s", "ms": "9.2f", "number": "7,d"})
            for kind, (ms, count) in r["kernels"].items():
                table.add(kind, ms, count)
    write_results(c, "train", device, dtype, peak_flops=peak, systems=results)


def time_training(config: ModelConfig, c: TrainBenchConfig, device: str,
                  dtype: torch.dtype) -> dict:
    """Figures of one system; what they needed is free again afterwards."""
    before = empty(device)
    model = random_model(config, device, c.seed)
    flat = train.flat_gradient(model)
    optimizers = train.make_optimizers(model, train.TrainConfig())
    fast = accelerate(model, dtype, c.compile, c.kernels, training=True, graph=c.graph,
                      recompute=c.recompute and model.iterates)
    update = train.make_optimizer_step(fast, optimizers)

    def step():
        update(train.clip_and_reduce(flat, 1.0, train.Processes()))
        flat.zero_()

    x, y = random_rows(c, device)
    micro_step = partial(train.make_micro_step(fast, 1.0), x, y)
    r = {"runs": str(fast), "passes": passes_of(model),
         # of the calls that compile and capture
         "first_seconds": timed(micro_step, device, 3 if fast.graph else 1),
         "micro_step": measure(micro_step, device, c.warmups, c.trials, x.numel()),
         "kernels": kernel_times(micro_step, device) if c.profile else None}
    del micro_step  # and with it the memory of its graph
    timed(step, device, 3 if fast.graph else 0)
    r["optimizer"] = measure(step, device, c.warmups, c.trials, x.numel())
    r["peak_bytes"] = torch.cuda.max_memory_allocated() - before \
        if device.startswith("cuda") else None
    return r | time_loss(fast, y, c, device)


def time_loss(fast: Fast, y: Tensor, c: TrainBenchConfig, device: str) -> dict:
    """Head and cross-entropy, forward and backward, and the memory that they need at their peak."""
    before, D = empty(device), fast.model.config.n_embd
    h = torch.randn(*y.shape, D, device=device)
    h = (h.to(fast.dtype) if fast.twin is not None else h).requires_grad_()

    def run_once():
        with fast.autocast():
            loss = fast.model.loss(h, y)
        loss.backward()

    return {"loss": measure(run_once, device, c.warmups, c.trials, y.numel()),
            "loss_peak_bytes": torch.cuda.max_memory_allocated() - before
            if device.startswith("cuda") else None}


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


def passes_of(model: Decoder) -> str:
    c = model.config
    return f"{c.n_nograd}+{c.n_grad}" if model.iterates else "1"


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


def kind_of(name: str) -> str:
    return next(kind for kind, names in KINDS if re.search(names, name, re.IGNORECASE))


def kernel_times(function: Callable, device: str) -> dict[str, tuple[float, int]]:
    """Milliseconds and number of kernels of one call, by kind."""
    on_cuda = device.startswith("cuda")
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_cuda
    with profile(activities=activities) as profiler:
        timed(function, device)
    ms, number = Counter(), Counter()
    for event in profiler.key_averages():
        if (event.device_type == DeviceType.CPU) == on_cuda:
            continue
        us = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        kind = kind_of(event.key)
        ms[kind] += us / 1e3
        number[kind] += event.count
    table = {kind: (total, number[kind]) for kind, total in ms.most_common()}
    return table | {"sum": (ms.total(), number.total())}


# ---- decode: a token

@dataclass
class DecodeConfig(SystemsConfig):
    batch_sizes: str = key("1,8,64", "rows that are decoded together, one number or several")
    context: int = key(2048, "tokens in the cache before the first timed one")
    steps: int = key(32, "tokens of a trial")
    temperature: float = key(0.8, "as for sample.py; 0 is greedy")
    top_k: int | None = key(200, "as for sample.py")
    top_p: float = key(1.0, "as for sample.py")


@torch.no_grad()
def decode_command(c: DecodeConfig):
    """Time of a token as sample.py decodes it, with the choice of the token and its way to the
    host."""
    check(c, "context", "steps", "trials", "warmups")
    check_choice(c)
    models, device = c.models(), pick_device(c.device)
    dtype = pick_dtype(c.dtype, device)
    batch_sizes = c.batch_sizes.split(",")
    for text in batch_sizes:
        if not text.isdecimal() or int(text) < 1:
            raise UserError(f"batch_sizes: {text!r} is no number of at least 1")
    print(f"{machine(device)}\ncontext {c.context}, L={c.n_layer}, D={c.n_embd}, vocabulary "
          f"{c.vocab_size:,}, temperature {c.temperature}, top_k {c.top_k}; GB/s: keys and values "
          "that attention reads, over the whole time\n")
    table = Table({"": "10s", "batch": "5d", "us/step": "9.1f", "tokens/s": "9,.0f", "x": "6.3f",
                   "GB/s": "7.1f", "cache MiB": "9.1f", "first s": "8.1f"})
    results = []
    for B in map(int, batch_sizes):
        for name, config in models.items():
            r = {"system": name, "batch_size": B} | time_decoding(config, c, B, device, dtype)
            results.append(r)
            first = next(other for other in results if other["batch_size"] == B)
            r["ratio"] = r["seconds_per_step"] / first["seconds_per_step"]
            table.add(name, B, 1e6 * r["seconds_per_step"], r["tokens_per_second"], r["ratio"],
                      r["bytes_per_second"] and r["bytes_per_second"] / 1e9,
                      r["cache_bytes"] / 2**20, r["first_seconds"], remark=r["runs"])
    write_results(c, "decode", device, dtype, results=results)


def time_decoding(config: ModelConfig, c: DecodeConfig, B: int, device: str,
                  dtype: torch.dtype) -> dict:
    """Figures of one system at batch B."""
    empty(device)
    fast = accelerate(random_model(config, device, c.seed), dtype, graph=c.graph)
    model = fast.model
    # the last id, which ends documents, is never drawn: the context stays as long as it is
    choice = Choice(draws(c.seed, c.steps + 1, B).to(device), c.temperature, c.top_k, c.top_p,
                    config.vocab_size - 1)
    token = torch.zeros(B, dtype=torch.long, device=device)
    with fast.autocast():
        h = model.embed_tokens(token)
        cache = model.new_cache(B, c.context + c.steps + 1, like=h)
        for x in (*cache.k, *cache.v):
            x.normal_()
        decoding = fast.decoding(model, h, cache, token + c.context, token, choice, c.context)
        first_seconds = timed(partial(decoding.prepare, c.steps + 1), device)

    def run_once():
        decoding.index.fill_(c.context)
        decoding.n.zero_()
        if not fast.graph:
            decoding.steps.filled = c.context
        with fast.autocast():
            for _ in decoding.tokens(c.steps + 1):
                pass

    r = measure(run_once, device, c.warmups, c.trials, B * c.steps)
    seconds = r["median_seconds"] / c.steps
    per_token = 2 * config.n_kv_head * config.head_dim * cache.k[0].element_size()
    try:
        read = sum(len(layer.keys) + len(layer.values) for layer in plan(config).layers) / 2
    except UserError:  # a system of one's own
        read = None
    return r | {"runs": str(fast), "first_seconds": first_seconds, "seconds_per_step": seconds,
                "cache_bytes": per_token * B * c.context * model.n_channels,
                "bytes_per_second": read and per_token * B * c.context * read / seconds}


# ---- systems: all of them, small and trained

@dataclass
class ComparisonConfig:
    systems: str = key("vanilla,k4,k2,k1,static4,static1,nofeedback,lckv2,lckv1,feedback,recurrent,"
                       "fusedkv,fusedkv_lite", "names as for bench.py train")
    config: str = key("config/tiny.py", "sizes, data and all else")
    max_iters: int = key(200, "steps of each; fewer than config/tiny.py has, for all to end soon")
    out_dir: str = key("out/systems", "a folder for each system is made there")
    device: str = key("auto", "auto (cuda, else mps, else cpu), or a torch device")
    seed: int = key(1337, "of weights and row order")
    json: str | None = key(None, "write the results to this file (-: to stdout)")


def systems_command(c: ComparisonConfig):
    """Small versions of all systems, trained by train.py on the same tokens."""
    check(c, "max_iters")
    results, same = {}, replace(
        parse(train.TrainConfig(), [c.config], ""), max_iters=c.max_iters, init_from="scratch",
        eval_interval=c.max_iters, device=c.device, seed=c.seed)
    systems = {name: replace(settings, out_dir=f"{c.out_dir}/{name}")
               for name, settings in named_configs(c.systems, same).items()}
    for name, settings in systems.items():  # before the first one takes its time
        if settings.kv not in (same.kv, "lckv"):  # the file's schedule is of its own system
            settings.n_groups = settings.n_nograd = settings.n_grad = None
        try:
            check_settings(settings)
            at_least(1, settings, "eval_rows")  # the loss that is compared
            model_config(settings, {"vocab_size": 64, "eos_id": None})
        except UserError as error:
            raise UserError(f"systems={c.systems}, {name}: {error}") from None
    for name, settings in systems.items():
        alone = train.Processes()
        alone.print = lambda *_: None  # no progress lines
        trainer = train.Trainer(settings, alone)
        if not results:
            tokens = trainer.tokens_per_step
            print(f"{machine(trainer.device)}, {trainer.fast}; {settings.dataset}, {c.max_iters} "
                  f"steps of {tokens:,} tokens each\ncache: over vanilla's; s: steps and the "
                  "validation after them; loss: of validation, nats per token\n")
            table = Table({"": "12s", "parameters": "10,d", "cache": "6.3g", "passes": ">6s",
                           "s": "7.1f", "loss": "7.4f"})
        began = time.perf_counter()
        trainer.run()
        config = trainer.model_config
        r = results[name] = {
            "params": trainer.model.n_params(), "passes": passes_of(trainer.model),
            "cache": trainer.model.n_channels / config.n_layer,
            "seconds": time.perf_counter() - began, "val_loss": trainer.best}
        table.add(name, r["params"], r["cache"], r["passes"], r["seconds"], r["val_loss"])
        if c.json != "-" or len(results) == len(systems):  # at once, as the next may be stopped
            write_results(c, "systems", trainer.device, trainer.dtype, tokens_per_step=tokens,
                          systems=results)


COMMANDS = {flops_command: FlopsConfig(), train_command: TrainBenchConfig(),
            decode_command: DecodeConfig(), prefill_command: PrefillConfig(),
            systems_command: ComparisonConfig()}


def main(argv: list[str]):
    run_command("python bench.py", COMMANDS, argv, __doc__)


if __name__ == "__main__":
    run(main)
