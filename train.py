"""
Train a model of any system: on one CPU, one GPU, or several with torchrun.

    python train.py config/tiny.py
    torchrun --standalone --nproc_per_node=8 train.py config/wm16.py
    python train.py config/tiny.py --init_from=resume --max_iters=2000

A step reads the same tokens whatever the number of processes and accumulation steps. Each
process clips its gradient before the all-reduce, as the paper does. `out_dir` holds ckpt.pt, all
that a resumed run needs, best.pt, the one of them with the lowest validation loss, and log.csv, a
row per step. SIGTERM and Ctrl-C finish the step, save, and exit with 128 + the signal's number.
"""

from __future__ import annotations

import atexit
import contextlib
import csv
import math
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group: see Processes.end
from torch import Tensor

from baselines import build
from checkpoint import damaged, keep_copy, keep_previous, load_checkpoint, save_checkpoint
from configurator import UserError, key, parse, run
from kernels import accelerate
from measure.flops import flops_per_token, peak_flops
from model import SYSTEMS, Decoder, ModelConfig
from muon import Muon
from solvers import solve
from text.rows import TokenRows, load_meta


@dataclass
class TrainConfig:
    """Every setting of train.py. The defaults are the paper's main run on one process."""

    out_dir: str = key("out", "folder for ckpt.pt, best.pt and log.csv")
    init_from: str = key("scratch", "scratch (a run in out_dir moves to out_dir/previous), or "
                         "resume from out_dir/ckpt.pt")
    dataset: str = key("python", "folder under data/; `python` is prepared if it is missing")
    eval_interval: int = key(500, "steps between evaluations, each followed by a checkpoint")
    eval_iters: int = key(50, "batches of batch_size fixed windows in an evaluation; 0: none")
    log_interval: int = key(10, "steps between progress lines")
    batch_size: int = key(16, "rows per process and micro-step")
    block_size: int = key(2048, "tokens per row")
    gradient_accumulation_steps: int = key(8, "micro-steps per step, all processes together")
    max_iters: int = key(30518, "optimizer steps")
    learning_rate: float = key(3e-4, "peak, shared by Muon and AdamW")
    warmup_iters: int | None = key(None, "linear warm-up; None: 2 % of max_iters")
    lr_decay_iters: int | None = key(None, "end of the cosine; None: max_iters")
    min_lr: float | None = key(None, "after the cosine; None: a tenth of learning_rate")
    weight_decay: float = key(0.1, "of matrices and projections, not of embedding and gains")
    momentum: float = key(0.95, "of Muon (Nesterov)")
    beta1: float = key(0.9, "of AdamW")
    beta2: float = key(0.95, "of AdamW")
    grad_clip: float = key(1.0, "gradient norm, on each process before the all-reduce; 0: off")
    n_layer: int = key(16, "L, decoder blocks")
    n_embd: int = key(512, "D, width")
    n_head: int = key(6, "query heads")
    n_kv_head: int = key(3, "key-value heads")
    head_dim: int = key(96, "features of a head")
    n_hidden: int = key(1536, "features inside the MLP")
    kv: str = key("whitematter", "the system: " + ", ".join(SYSTEMS))
    n_channels: int = key(16, "k, cached channels of whitematter, 1 to n_layer")
    router: str = key("dynamic", "dynamic (content-dependent) or static mixing weights")
    router_stride: int = key(2, "p, the router reads every p-th source")
    top_output: bool = key(False, "the final output is a source of the pool, too")
    dummy: bool = key(True, "false: a document's first token attends to nothing, not to a dummy")
    lckv_w: int = key(4, "w, layers of lckv with keys and values of their own")
    n_groups: int | None = key(None, "g, groups of the cyclic schedule; 1 is Jacobi; None: the "
                               "system's own, 8 (lckv: 1)")
    n_nograd: int | None = key(None, "passes without gradients; None: 1 (lckv: 7)")
    n_grad: int | None = key(None, "passes with gradients; None: 2")
    device: str = key("auto", "auto (cuda, else mps, else cpu), or a torch device")
    dtype: str = key("auto", "auto (bfloat16 on cuda), float32 or bfloat16: autocast")
    compile: bool | None = key(None, "torch.compile and, on cuda, a CUDA graph; None: on cuda")
    kernels: bool = key(True, "Triton kernels, on cuda in half precision; false: plain PyTorch")
    seed: int = key(1337, "of weights and row order")
    wandb: bool = key(False, "log to Weights & Biases too (pip install wandb)")
    wandb_project: str = key("whitematter-nano", "its project there; the run is named as out_dir")


# ---- devices and processes

def pick_device(name: str = "auto") -> str:
    """`auto`: cuda, else mps, else cpu. Raises UserError for a device that is not there."""
    if name in ("auto", ""):
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        kind = torch.zeros(1, device=name).device.type
    except (RuntimeError, AssertionError, NotImplementedError):
        kind = "meta"  # which holds no values, so it is of no use either
    if kind == "meta":
        raise UserError(f"device={name}: not available here (auto, cpu, "
                        "cuda or mps where there is one)")
    if kind == "cuda" and ":" in name:
        torch.cuda.set_device(name)  # for what is made on "cuda", too
    return "cpu" if kind == "cpu" else name


def pick_dtype(name: str, device: str, setting: str = "dtype") -> torch.dtype:
    """Compute type on `device`: bfloat16 on cuda unless another is named."""
    names = {"float32": torch.float32, "fp32": torch.float32,
             "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}
    if name in ("auto", ""):
        return torch.bfloat16 if device.startswith("cuda") else torch.float32
    if name not in names:
        raise UserError(f"{setting}={name}: choose auto, {', '.join(names)}")
    return names[name]


@dataclass
class Processes:
    """The processes that torchrun started, or this one alone."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> Processes:
        return cls(*(int(os.environ.get(name, default)) for name, default in
                     (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))))

    def start(self, device: str):
        if self.world > 1:
            # gloo for what the processes agree on, which then does not wait for a GPU
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo")
            if not device.startswith("cuda"):
                # after an error too; NCCL is left alone then, as it may wait for the others
                atexit.register(self.end)

    def end(self):
        """Destroy the group, if there is one, which joins gloo's threads.

        One that lets go of a tensor while Python shuts down would abort the process. They are
        joined only if nothing else holds the group. The functions of torch.distributed.nn, which
        making an optimizer imports, hold the group of that time as a default argument: hence its
        import at the head, before there is one.
        """
        if dist.is_initialized():
            dist.destroy_process_group()

    def sum(self, x: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(x)
        return x

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in one of them."""
        return bool(self.sum(torch.tensor(int(flag)))) if self.world > 1 else flag

    def print(self, *args, **kwargs):
        if self.rank == 0:
            print(*args, **kwargs, flush=True)


class Signals:
    """SIGTERM and Ctrl-C ask for an end after the step at hand; a second one ends at once."""

    def __init__(self):
        self.received = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.receive)

    def receive(self, number: int, _):
        if self.received:
            os._exit(128 + number)
        self.received = number


# ---- optimizers

def make_optimizers(model: Decoder, c: TrainConfig) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' and routers' matrices, AdamW for all else (section 4.1)."""
    muon = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    projections, rest, matrices = [], [], set(map(id, muon))
    for name, p in model.named_parameters():
        if id(p) not in matrices:
            (projections if name.endswith(".proj") else rest).append(p)
    groups = [{"params": projections, "weight_decay": c.weight_decay},
              {"params": rest, "weight_decay": 0.0}]
    on_cuda = rest[0].is_cuda
    # a tensor there, as the step is recorded as a CUDA graph, which reads it anew every time
    lr = torch.tensor(c.learning_rate, device=rest[0].device) if on_cuda else c.learning_rate
    adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, fused=on_cuda,
                              betas=(c.beta1, c.beta2), capturable=on_cuda)
    return [Muon(muon, lr, c.momentum, c.weight_decay), adamw]


def set_rate(group: dict, lr: float):
    """The learning rate of an optimizer's group; a tensor, as a CUDA graph reads it, is kept."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def learning_rate(step: int, c: TrainConfig) -> float:
    """Linear warm-up, cosine to min_lr at lr_decay_iters, constant after it."""
    warmup = round(0.02 * c.max_iters) if c.warmup_iters is None else c.warmup_iters
    end = c.max_iters if c.lr_decay_iters is None else c.lr_decay_iters
    low = c.learning_rate / 10 if c.min_lr is None else c.min_lr
    if step < warmup:
        return c.learning_rate * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, end - warmup))
    return low + 0.5 * (1 + math.cos(math.pi * done)) * (c.learning_rate - low)


def flat_gradient(model: Decoder) -> Tensor:
    """Give every parameter a gradient that is a view into one buffer, and return the buffer."""
    params = list(model.parameters())
    flat = params[0].new_zeros(sum(p.numel() for p in params))
    for p, piece in zip(params, flat.split([p.numel() for p in params])):
        p.grad = piece.view_as(p)
    return flat


def clip_and_reduce(flat: Tensor, grad_clip: float, processes: Processes) -> Tensor:
    """Clip this process's gradient to norm grad_clip, then average over processes (in place).

    Returns the mean over processes of the norms before clipping. Once per step, after all
    micro-steps, as the paper does it: the average need not have norm grad_clip.
    """
    norm = flat.norm()
    if grad_clip > 0:
        flat.mul_((grad_clip / (norm + 1e-6)).clamp(max=1.0))
    if processes.world > 1:
        processes.sum(flat).div_(processes.world)
        norm = processes.sum(norm.clone()) / processes.world
    return norm


# ---- the run

def model_config(c: TrainConfig, meta: dict) -> ModelConfig:
    """Sizes from the settings; the vocabulary, from the data set, is padded to a multiple of 64."""
    names = {f.name for f in fields(ModelConfig)} & {f.name for f in fields(TrainConfig)}
    try:
        return ModelConfig(vocab_size=-(-meta["vocab_size"] // 64) * 64, eos_id=meta["eos_id"],
                           **{name: getattr(c, name) for name in names})
    except ValueError as error:
        raise UserError(str(error)) from None


def check(c: TrainConfig, processes: Processes):
    """Raise UserError for settings that cannot work together."""
    for name in ("batch_size", "block_size", "gradient_accumulation_steps", "eval_interval",
                 "log_interval", "max_iters"):
        if getattr(c, name) < 1:
            raise UserError(f"{name}={getattr(c, name)}: at least 1 is needed")
    for name in ("learning_rate", "min_lr", "weight_decay", "grad_clip", "warmup_iters",
                 "lr_decay_iters", "eval_iters", "seed"):
        value = getattr(c, name)
        if value is not None and not 0 <= value < math.inf:  # also refuses nan
            raise UserError(f"{name}={value}: at least 0 is needed")
    for name in ("momentum", "beta1", "beta2"):
        if not 0 <= getattr(c, name) < 1:
            raise UserError(f"{name}={getattr(c, name)}: at least 0, and less than 1, is needed")
    if processes.rank == 0:
        folder = Path(c.out_dir).absolute()
        there = next(p for p in (folder, *folder.parents) if p.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise UserError(f"out_dir={c.out_dir}: {there} is no folder that can be written to")
    if c.gradient_accumulation_steps % processes.world:
        raise UserError(f"gradient_accumulation_steps={c.gradient_accumulation_steps} counts the "
                        f"micro-steps of all processes: no multiple of the {processes.world} "
                        "processes here")
    if c.init_from not in ("scratch", "resume"):
        raise UserError(f"init_from={c.init_from}: choose scratch or resume")


def import_wandb():
    try:
        import wandb
    except ImportError:
        raise UserError("wandb=True: the package is not installed (pip install wandb)") from None
    return wandb


class Log:
    """log.csv, a row per step, and the progress lines; losses stay on the device in between."""

    columns = ("step", "loss", "val_loss", "lr", "grad_norm", "tokens_per_s")

    def __init__(self, path: Path, step: int, tokens_per_step: int, flops_share: float | None,
                 processes: Processes, c: TrainConfig):
        self.c, self.processes, self.tokens_per_step = c, processes, tokens_per_step
        self.flops_share = flops_share  # of the devices' peak, per token and second; or unknown
        self.waiting: list[tuple] = []
        self.since = time.perf_counter()
        self.last_loss = None
        self.file = self.wandb = None
        if processes.rank == 0:
            if c.wandb:
                self.wandb = import_wandb()
                self.wandb.init(project=c.wandb_project, name=c.out_dir, config=asdict(c))
            with self.written(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                before = self.take(path)  # or another run would be disturbed
                if not step and keep_previous(path.parent):
                    processes.print(f"{path.parent} held a run: it is kept in "
                                    f"{path.parent / 'previous'}")
                self.begin(path, step)
                self.file = self.take(path)
                before.close()
                self.csv = csv.writer(self.file)

    @staticmethod
    def take(path: Path):
        """The file, to append to, and ours alone. Raises UserError if another run has it."""
        file = open(path, "a", newline="", encoding="utf-8")
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"out_dir={path.parent}: another run is writing there") from None
            except OSError:
                pass  # a file system without locks
        return file

    @classmethod
    def begin(cls, path: Path, step: int):
        """The file with the rows up to `step`, which a resumed run does not repeat; whatever
        happens, it has either all old rows or these."""
        kept = []
        if step and path.exists():
            with open(path, newline="", encoding="utf-8", errors="replace") as f:
                rows = [r for r in csv.reader(f) if len(r) == len(cls.columns) and r[0].isdigit()]
                # a validation after n steps is in row n, which has no loss
                kept = [r for r in rows if int(r[0]) < step or int(r[0]) == step and not r[1]]
        temporary = path.with_name(path.name + ".tmp")
        with open(temporary, "w", newline="", encoding="utf-8") as f:
            csv.writer(f).writerows([cls.columns, *kept])
        os.replace(temporary, path)

    @staticmethod
    @contextlib.contextmanager
    def written(path: Path):
        try:
            yield
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror})") from error

    def add(self, step: int, loss: Tensor, lr: float, norm: Tensor):
        self.waiting.append((step, loss, lr, norm))
        if (step + 1) % self.c.log_interval == 0:
            self.flush()

    def flush(self):
        """Fetch what waits, write it, print the last one; stop the run if it is not finite."""
        if not self.waiting:
            return
        losses = self.processes.sum(torch.stack([w[1] for w in self.waiting]).float())
        losses = (losses / self.processes.world).tolist()
        norms = torch.stack([w[3] for w in self.waiting]).tolist()
        seconds = time.perf_counter() - self.since
        speed = self.tokens_per_step * len(self.waiting) / seconds
        for (step, _, lr, _), loss, norm in zip(self.waiting, losses, norms):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise UserError(f"step {step}: loss {loss}, gradient norm {norm}; the last finite "
                                f"loss was {self.last_loss}. The checkpoint is from before; lower "
                                "learning_rate or raise warmup_iters")
            self.last_loss = loss
            self.row(step, f"{loss:.6f}", "", f"{lr:.4g}", f"{norm:.4f}", f"{speed:.0f}")
        left = seconds / len(self.waiting) * (self.c.max_iters - step - 1)
        mfu = "n/a" if self.flops_share is None else f"{100 * self.flops_share * speed:.1f} %"
        self.processes.print(f"step {step}: loss {loss:.4f}, lr {lr:.2e}, norm {norm:.2f}, "
                             f"{speed:,.0f} tokens/s, MFU {mfu}, {left / 60:.1f} min left")
        if self.wandb:
            for (i, _, lr_, _), loss_, norm_ in zip(self.waiting, losses, norms):
                self.wandb.log({"loss": loss_, "lr": lr_, "norm": norm_, "tokens_per_s": speed},
                               step=i)
        self.waiting.clear()
        self.since = time.perf_counter()

    def row(self, *values):
        if self.file:
            with self.written(Path(self.file.name)):
                self.csv.writerow(values)
                self.file.flush()

    def close(self):
        """The run is over, and its folder free for another."""
        if self.file:
            self.file.close()
            self.file = None

    def validation(self, step: int, loss: float, best: bool):
        self.row(step, "", f"{loss:.6f}", "", "", "")
        if self.wandb:
            self.wandb.log({"val_loss": loss}, step=step)
        self.processes.print(f"step {step}: val loss {loss:.4f}{', the best yet' if best else ''}")
        self.since = time.perf_counter()


class Trainer:
    """A model in training: what a checkpoint holds, and the steps between two checkpoints."""

    def __init__(self, c: TrainConfig, processes: Processes):
        self.c, self.processes = c, processes
        self.device = pick_device(c.device)
        if self.device == "cuda" and processes.world > 1:
            self.device = f"cuda:{processes.local_rank}"
            torch.cuda.set_device(self.device)
        self.dtype = pick_dtype(c.dtype, self.device)
        if c.wandb:
            import_wandb()  # before anything takes time
        folder, self.meta = load_meta(c.dataset)
        self.model_config = model_config(c, self.meta)
        self.rows = TokenRows(folder / "train.bin", self.meta, c.block_size, c.seed)
        self.val_rows = None
        if c.eval_iters > 0:
            self.val_rows = TokenRows(folder / "val.bin", self.meta, c.block_size, None)
        self.path = Path(c.out_dir) / "ckpt.pt"
        state = load_checkpoint(self.path) if c.init_from == "resume" else None

        processes.start(self.device)
        torch.manual_seed(c.seed)
        self.model = build(self.model_config).to(self.device)
        self.flat = flat_gradient(self.model)
        self.optimizers = make_optimizers(self.model, c)
        self.step, self.best, self.rows_seen = 0, math.inf, 0
        if state is not None:
            self.restore(state)
        self.fast = accelerate(self.model, self.dtype, c.compile, c.kernels, training=True)
        self.micro_step = self.fast.graphed(self.micro_step)
        self.optimizer_step = self.fast.graphed(self.optimizer_step)
        self.tokens_per_step = c.gradient_accumulation_steps * c.batch_size * c.block_size
        peak, share = peak_flops(self.device), None
        if peak is not None:
            share = flops_per_token(self.model_config, c.block_size, "training", head=True) / (
                peak * processes.world)
        self.log = Log(self.path.with_name("log.csv"), self.step, self.tokens_per_step, share,
                       processes, c)

    def restore(self, state: dict):
        """Continue the run of a checkpoint, by the settings of this one; says so where these mean
        other rows. Raises UserError if it has another model."""
        mine, theirs = (asdict(c) for c in (self.model_config,
                                            ModelConfig(**state["model_config"])))
        wrong = [f"{k}={mine[k]} (there: {theirs[k]})" for k in mine if mine[k] != theirs[k]]
        if wrong:
            raise UserError(f"{self.path} has another model: {', '.join(wrong)}")
        try:
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                # the state is the checkpoint's, the settings (momentum, fused, ...) are ours
                ours = [dict(group) for group in optimizer.param_groups]
                optimizer.load_state_dict(saved)
                for group, our in zip(optimizer.param_groups, ours):
                    group.update(our)
            torch.set_rng_state(state["rng"].cpu())
            self.step, self.rows_seen = int(state["step"]), int(state["rows_seen"])
            self.best = float(state["best_val_loss"])
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise damaged(self.path, error) from None
        before = state["config"]
        changed = [f"{name}={getattr(self.c, name)} (there: {before.get(name)})"
                   for name in ("dataset", "seed", "block_size")
                   if getattr(self.c, name) != before.get(name)]
        if changed:
            self.processes.print(f"note: goes on with {', '.join(changed)}, and so on other rows")
        if self.c.dataset != before.get("dataset"):  # of which none was seen, and no loss is known
            self.best, self.rows_seen = math.inf, 0

    def save(self, best: bool = False):
        """Write ckpt.pt, after a last look that losses and weights are finite."""
        self.log.flush()
        if not torch.stack(torch._foreach_norm(list(self.model.parameters()))).isfinite().all():
            raise UserError(f"step {self.step}: the weights are not finite, so nothing was saved; "
                            "lower learning_rate or raise warmup_iters")
        if self.processes.rank == 0:
            save_checkpoint(self.path, {
                "model": self.model.state_dict(), "model_config": asdict(self.model_config),
                "optimizers": [o.state_dict() for o in self.optimizers], "meta": self.meta,
                "config": asdict(self.c), "step": self.step, "rows_seen": self.rows_seen,
                "best_val_loss": self.best, "rng": torch.get_rng_state()})
            if best:
                keep_copy(self.path, self.path.with_name("best.pt"))

    def micro_step(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the gradient's share of a micro-batch to every .grad; its share of the loss."""
        with self.fast.autocast():
            loss = self.fast.model.loss(solve(self.fast.model, x).final, y)
        loss = loss * (self.processes.world / self.c.gradient_accumulation_steps)
        loss.backward()
        self.fast.after_backward()
        return loss.detach()

    def optimizer_step(self):
        """With what follows it; the learning rate is in the optimizers."""
        for optimizer in self.optimizers:
            optimizer.step()
        self.fast.after_step()

    def gradient(self) -> Tensor:
        """Fill the flat gradient from this process's rows of the next global batch; mean loss."""
        c, p = self.c, self.processes
        micro_steps = c.gradient_accumulation_steps // p.world
        self.flat.zero_()
        total = self.flat.new_zeros(())
        for m in range(micro_steps):
            first = self.rows_seen + (m * p.world + p.rank) * c.batch_size
            x, y = self.rows.batch(first, c.batch_size, self.device)
            total += self.micro_step(x, y)
        self.rows_seen += c.gradient_accumulation_steps * c.batch_size
        return total

    def update(self):
        """One optimizer step."""
        lr = learning_rate(self.step, self.c)
        loss = self.gradient()
        norm = clip_and_reduce(self.flat, self.c.grad_clip, self.processes)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                set_rate(group, lr)
        self.optimizer_step()
        self.log.add(self.step, loss, lr, norm)
        self.step += 1

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss in nats per token over the first eval_iters * batch_size windows (or all)."""
        c, p = self.c, self.processes
        n_windows = min(c.eval_iters * c.batch_size, self.val_rows.n_rows)
        total = torch.zeros(2, device=self.device)  # nats, tokens
        for n in range(p.rank * c.batch_size, n_windows, p.world * c.batch_size):
            x, y = self.val_rows.batch(n, min(c.batch_size, n_windows - n), self.device)
            with self.fast.autocast():
                loss = self.fast.model.loss(solve(self.fast.model, x).final, y)
            total += torch.stack((loss.float() * y.numel(), total.new_tensor(y.numel())))
        nats, tokens = p.sum(total).tolist()
        return nats / tokens

    def run(self, signals: Signals | None = None):
        """Train to max_iters, with an evaluation and a checkpoint every eval_interval steps.

        After a signal: save, and end the process with status 128 + the signal's number.
        """
        c = self.c
        while self.step < c.max_iters:
            self.update()
            stop = signals is not None and self.processes.any(bool(signals.received))
            if stop:  # at once: whoever sent it may not wait for an evaluation
                self.save()
            if self.step % c.eval_interval == 0 or self.step == c.max_iters:
                self.evaluate()  # also before an end: the resumed run begins after it
            if stop:
                self.processes.print(f"{self.path}: stopped by a signal after step {self.step}; "
                                     "--init_from=resume goes on")
                self.processes.end()
                sys.exit(128 + (signals.received or signal.SIGTERM))
        self.log.close()

    def evaluate(self):
        """Validation loss, if there is such data, and a checkpoint."""
        self.log.flush()
        best = False
        if self.val_rows is not None:
            loss = self.validate()
            best = loss < self.best
            self.log.validation(self.step, loss, best)
            self.best = min(self.best, loss)
        self.save(best)


def main(argv: list[str]):
    """Train by the settings; under torchrun, one of its processes."""
    c = parse(TrainConfig(), argv, __doc__)
    processes = Processes.from_environment()
    check(c, processes)
    signals = Signals()
    trainer = Trainer(c, processes)
    processes.print(
        f"{c.kv}, {trainer.model.n_params():,} parameters without the embedding, on "
        f"{processes.world} x {trainer.device.partition(':')[0]}, "
        f"{trainer.fast}; {trainer.tokens_per_step:,} tokens per step")
    if trainer.step >= c.max_iters:
        processes.print(f"step {trainer.step} of {c.max_iters}: nothing left to do")
    try:
        trainer.run(signals)
    except torch.OutOfMemoryError:
        raise UserError(
            f"out of memory on {trainer.device} with batch_size={c.batch_size}, block_size="
            f"{c.block_size}: halve batch_size and double gradient_accumulation_steps "
            f"({c.gradient_accumulation_steps}), which gives the same steps; or lower block_size"
        ) from None
    processes.print(f"{trainer.path}: step {trainer.step}; "
                    f"python sample.py --out_dir={c.out_dir}")
    processes.end()


if __name__ == "__main__":
    run(main)
