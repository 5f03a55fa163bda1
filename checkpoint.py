"""
Checkpoints: ckpt.pt, best.pt and what becomes of those of an earlier run.

A file is written beside its place and renamed, so that there is never half of one; whatever is
loaded is looked at first, so that a damaged one, or one of another version, is named.
"""

import contextlib
import itertools
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import torch
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from baselines import build
from configurator import UserError, no_memory
from model import ROUTERS, SYSTEMS, Decoder, ModelConfig


@contextlib.contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """A temporary name in the same folder; what is written there replaces `path` in the end."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_checkpoint(path: Path, state: dict):
    """All of a checkpoint, on the disk when this returns, or what was there stays."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_beside(path) as temporary, open(temporary, "wb") as f:
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())
    except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into the latter
        reason = getattr(error, "strerror", None) or "an incomplete write; is the disk full?"
        raise UserError(f"{path}: cannot be written ({reason}); an earlier checkpoint there is "
                        "as it was") from error


def free(path: Path) -> Path:
    """The path, or the first of path-2, path-3, ..., where nothing is yet."""
    names = (path.with_stem(f"{path.stem}-{n}") for n in itertools.count(2))
    return next(name for name in itertools.chain([path], names) if not name.exists())


def set_aside(path: Path) -> Path:
    """Rename best.pt, if it is there, to best-previous.pt, best-previous-2.pt, ..., which is
    returned."""
    to = free(path.with_stem(f"{path.stem}-previous"))
    if path.exists():
        os.replace(path, to)
    return to


def keep_previous(folder: Path) -> Path | None:
    """Move a run's files to a new folder in theirs, previous, previous-2, ...; None if there is no
    run: no checkpoint, nor a log with a row. Nothing is ever overwritten."""
    log = folder / "log.csv"
    logged = log.is_file() and log.read_bytes().count(b"\n") > 1
    if not logged and not any((folder / name).exists() for name in ("ckpt.pt", "best.pt")):
        return None
    previous = free(folder / "previous")
    try:
        previous.mkdir()
        # the last one is what a run goes on from: it stays until all else has been moved
        others = sorted(path.name for path in folder.glob("best-previous*.pt"))
        for name in ("log.csv", "tokenizer", *others, "best.pt", "ckpt.pt"):
            if (folder / name).exists():
                os.replace(folder / name, previous / name)
    except OSError as error:
        raise UserError(f"{folder} holds a run that cannot be moved to {previous} "
                        f"({error.strerror}); another out_dir leaves it alone") from None
    return previous


def load_checkpoint(path: str | Path, device: str = "cpu") -> dict:
    """The checkpoint in a file or an out_dir. Only tensors and plain values are ever loaded."""
    path = Path(path)
    path = path if path.is_file() or path.suffix and not path.is_dir() else path / "ckpt.pt"
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint (python train.py writes one)")
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as file:
                if file.testzip():  # torch looks at no sum
                    raise ValueError("a sum does not fit its bytes")
        state = torch.load(path, map_location=device, weights_only=True)
        state["model"] = {re.sub(r"^((module|_orig_mod)\.)+", "", name): tensor
                          for name, tensor in state["model"].items()}
        sizes = dict(state["model_config"])
        strange = sorted(sizes.keys() - {f.name for f in fields(ModelConfig)})
        for name, known in (("kv", SYSTEMS), ("router", ROUTERS)):
            if isinstance(value := sizes.get(name), str) and value not in known:
                strange.append(f"{name}={value}")
        if strange:
            raise UserError(f"{path}: a model with {', '.join(strange)}, which this version has "
                            "not; a changed model, or a later version, wrote it")
        ModelConfig(**sizes)
        for part, name, kind in (("config", "block_size", int), ("meta", "tokenizer", str),
                                 ("meta", "vocab_size", int)):
            if not isinstance(value := state[part][name], kind):
                raise TypeError(f"{name}={value!r}")
        state["meta"]["eos_id"]
    except Exception as error:
        if no_memory(error) or isinstance(error, (UserError, PermissionError)):
            raise
        raise damaged(path, error) from None
    return state


def load_weights(model: Decoder, state: dict, path: str | Path):
    """Give the model a checkpoint's weights. Raises UserError if they are not such a model's."""
    theirs, ours = state["model"], model.state_dict()
    strange, missing = ([name for name in a if name not in b]
                        for a, b in ((theirs, ours), (ours, theirs)))
    if strange or missing:
        raise UserError(f"{path}: weights of other names than this version's: it has "
                        f"{', '.join(strange[:3]) or 'no more'}, it lacks "
                        f"{', '.join(missing[:3]) or 'none'}; an earlier version, or a changed "
                        "model, wrote it")
    try:
        model.load_state_dict(theirs)
    except RuntimeError as error:
        raise UserError(f"{path}: {' '.join(str(error).split())[:300]}") from None


def damaged(path: Path, error: Exception) -> UserError:
    """What to say of a checkpoint in which something is missing or wrong."""
    # torch's own words for a file that would run code on loading advise to allow it
    reason = "holds something other than tensors and plain values" \
        if isinstance(error, pickle.UnpicklingError) else \
        ": ".join(filter(None, [type(error).__name__, " ".join(str(error).split())[:120]]))
    return UserError(f"{path}: not a checkpoint of train.py, or damaged ({reason})")


class Undrawn(TorchFunctionMode):
    """Initial weights are not drawn: a file's take their place, and for 54 M parameters drawing
    takes 1.4 s of each command."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        drawn = getattr(func, "__module__", None) == "torch.nn.init" and kwargs.get("tensor")
        return drawn if isinstance(drawn, Parameter) else func(*args, **kwargs)


def load_model(path: str | Path, device: str = "cpu") -> tuple[Decoder, dict]:
    """Model in evaluation mode and its checkpoint, from a file or an out_dir."""
    state = load_checkpoint(path)
    config = ModelConfig(**state["model_config"])
    try:
        with Undrawn():
            model = build(config)
    except Exception as error:
        if no_memory(error):
            raise UserError(f"{path}: a model of its sizes does not fit into memory") from None
        model = build(config)  # one of one's own, which looks at what it has drawn
    load_weights(model, state, path)
    return model.to(device, torch.float32).eval(), state
