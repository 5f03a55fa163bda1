"""
Where a run begins: from nothing, from a checkpoint's weights, or where an earlier start stopped.
"""

import math
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import damaged, set_aside
from configurator import UserError
from model import ModelConfig
from running.settings import SCHEDULE, TrainConfig, learning_rate
from text.rows import prepared_again
from text.tokenizer import other_ids


def differing(names: Iterable[str], mine, theirs) -> str:
    """What two settings say under names where they differ; empty where they do not."""
    return ", ".join(f"{name}={getattr(mine, name)} (there: {getattr(theirs, name)})"
                     for name in names if getattr(mine, name) != getattr(theirs, name))


def model_config(c: TrainConfig, meta: dict, weights: dict | None = None,
                 path: str | Path = "") -> ModelConfig:
    """Sizes from the settings; the vocabulary, from the data set, is padded to a multiple of 64.

    With a checkpoint's `weights`, from `path`, to begin with, the sizes are its own. Raises
    UserError for settings that were given and say otherwise, and for what cannot work together.
    """
    names = {f.name for f in fields(ModelConfig)} & {f.name for f in fields(TrainConfig)}
    given = {name: getattr(c, name) for name in names}
    if weights is not None:
        theirs = ModelConfig(**weights["model_config"])
        chosen = [name for name in sorted(names.difference(SCHEDULE))
                  if name in c.given or given[name] != getattr(TrainConfig, name)]
        if wrong := differing(chosen, c, theirs):
            raise UserError(f"{path} has another model: {wrong}")
        for name in SCHEDULE if theirs.kv != c.kv else ():
            if not c.given.get(name):  # of a config file, which means its own system
                given[name] = None
        given |= {name: value for name, value in vars(theirs).items()
                  if name not in SCHEDULE or given[name] is None}
    given |= {"vocab_size": -(-meta["vocab_size"] // 64) * 64, "eos_id": meta["eos_id"]}
    try:
        return ModelConfig(**given)
    except ValueError as error:
        raise UserError(str(error)) from None


def same_data(c: TrainConfig, meta: dict, state: dict) -> bool:
    """Is the data set that of a checkpoint: by its name, or by what is in train.bin, as it may have
    moved?"""
    now, then = (m.get("train_digest") for m in (meta, state["meta"]))
    return (c.dataset == os.path.normpath(state["config"].get("dataset") or "")
            or now is not None and now == then)


def check_data(c: TrainConfig, meta: dict, state: dict, say: Callable = print) -> bool:
    """Raise UserError if a checkpoint reads other ids than the data set has.

    Where the data set has other text by now, it says so, by `say`.
    """
    theirs = state["meta"]
    if said := other_ids(meta, theirs):
        raise UserError(f"data/{c.dataset} has {said[0]}, the checkpoint {said[1]}: its weights "
                        "mean nothing for other ids; prepare the data set with the checkpoint's "
                        "tokenizer")
    if not same_data(c, meta, state):
        return False
    said = prepared_again(meta, theirs)
    if said:
        rows = "; other rows follow" if "train.bin" in said else ""
        say(f"note: data/{c.dataset} was prepared again: {said}{rows}")
    return bool(said or state.get("prepared_again"))


def restore(trainer, state: dict):
    """Continue the run of a checkpoint, whose weights the model has, by the settings of this one;
    says so where these mean other rows or another rate. Raises UserError if the optimizers are of
    other parameters."""
    t = trainer
    if not state.get("optimizers"):
        raise UserError(f"{t.path} has weights, but no state of the optimizers: "
                        f"--init_from={t.path} begins a new run with them")
    try:
        for optimizer, saved in zip(t.optimizers, state["optimizers"], strict=True):
            ours = optimizer.state_dict()["param_groups"]
            if [g["params"] for g in saved["param_groups"]] != [g["params"] for g in ours]:
                raise UserError(f"{t.path}: its optimizers have other groups of parameters than "
                                f"this version's: --init_from={t.path} begins a new run with its "
                                "weights")
            # the state is the checkpoint's, the settings (momentum, fused, ...) are ours
            optimizer.load_state_dict({"state": saved["state"], "param_groups": ours})
            for p, its in optimizer.state.items():
                if any(isinstance(x, Tensor) and x.dim() and x.shape != p.shape
                       for x in its.values()):
                    raise ValueError("an optimizer's state is of other shapes than the weights")
        torch.set_rng_state(state["rng"].cpu())
        t.step, t.rows_seen = int(state["step"]), int(state["rows_seen"])
        block_size = state["config"]["block_size"]
        t.tokens_seen = int(state.get("tokens_seen", t.rows_seen * block_size))
        t.best, t.saved = float(state["best_val_loss"]), t.step
        before = TrainConfig(**{f.name: state["config"][f.name] for f in fields(TrainConfig)
                                if f.name in state["config"]})
        best_id = state.get("best_id")
        if best_id and len(best_id) == 4:  # earlier versions had both, name and digest
            best_id = [best_id[1] or os.path.normpath(best_id[0]), *best_id[2:]]
        learning_rate(t.step, before)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise damaged(t.path, error) from None
    same = same_data(t.c, t.meta, state)
    if not same:
        t.rows_seen = 0
    t.best_id = best_id or t.val_id  # earlier versions had none
    if t.val_rows is not None and t.best_id != t.val_id and t.best < math.inf:
        t.processes.print("note: the best loss so far was one of other validation rows; it "
                          "starts anew, and best.pt will be set aside (best-previous.pt)")
    of_rows = ["seed", "block_size"]
    others = ["batch_size", "gradient_accumulation_steps", "weight_decay", "grad_clip", "momentum",
              "beta1", "beta2", "dtype"]
    (others if same else of_rows).insert(0, "dataset")
    if other := differing(of_rows, t.c, before):
        t.processes.print(f"note: goes on with {other}, and so on other rows")
    if other := differing(others, t.c, before):
        t.processes.print(f"note: goes on with {other}")
    for step in range(t.step, t.c.max_iters, max(1, (t.c.max_iters - t.step) // 10)):
        now, then = learning_rate(step, t.c), learning_rate(step, before)
        if not 0.8 * then <= now <= 1.25 * then:
            when = "" if step == t.step else f", in step {step},"
            t.processes.print(f"note: goes on at a learning rate of {now:.2e}{when} where the "
                              f"earlier settings had {then:.2e} (max_iters={t.c.max_iters}, there: "
                              f"{before.max_iters})")
            break


def keep_later_best(path: Path, step: int, say: Callable):
    """Set best.pt aside where a run goes on from an older checkpoint, `path`, of this step."""
    best, later = path.with_name("best.pt"), False
    with suppress(Exception):  # there may be none, or none that can be read
        later = torch.load(best, "cpu", weights_only=True, mmap=True)["step"] > step
    if later:
        say(f"note: {best} is of a later step than {path}: it is kept as {set_aside(best)}")
