"""
Checkpoints: ckpt.pt, best.pt and what becomes of those of an earlier run.

A file is written beside its place and renamed, so that there is never half of one; whatever is
loaded is looked at first, so that a damaged one, or one of another version, is named.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import zipfile
from pathlib import Path

import torch

from baselines import build
from configurator import UserError
from model import Decoder, ModelConfig


def save_checkpoint(path: Path, state: dict):
    """Write to a temporary name in the same folder, flush, rename: never half a checkpoint."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as f:
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into the latter
        reason = getattr(error, "strerror", None) or "an incomplete write; is the disk full?"
        raise UserError(f"{path}: cannot be written ({reason}); an earlier checkpoint there is "
                        "as it was") from error
    finally:
        temporary.unlink(missing_ok=True)


def keep_copy(path: Path, copy: Path):
    """A second name for a checkpoint, which is never written to, only replaced."""
    temporary = copy.with_name(copy.name + ".tmp")
    temporary.unlink(missing_ok=True)
    try:
        try:
            os.link(path, temporary)
        except OSError:  # some file systems have no links
            shutil.copyfile(path, temporary)
        os.replace(temporary, copy)
    except OSError as error:
        raise UserError(f"{copy}: cannot be written ({error.strerror})") from error
    finally:
        temporary.unlink(missing_ok=True)


def keep_previous(folder: Path) -> bool:
    """Move a run's files to the folder `previous` in theirs, in place of those there; False if
    there is no run."""
    if not (folder / "ckpt.pt").exists():
        return False
    (folder / "previous").mkdir(exist_ok=True)
    for name in ("ckpt.pt", "best.pt", "log.csv"):
        (folder / "previous" / name).unlink(missing_ok=True)
        if (folder / name).exists():
            os.replace(folder / name, folder / "previous" / name)
    return True


def load_checkpoint(path: str | Path, device: str = "cpu") -> dict:
    """The checkpoint in a file or an out_dir. Only tensors and plain values are ever loaded."""
    path = Path(path)
    path = path if path.is_file() or path.suffix and not path.is_dir() else path / "ckpt.pt"
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint (python train.py writes one)")
    try:
        if zipfile.is_zipfile(path) and zipfile.ZipFile(path).testzip():  # torch looks at no sum
            raise ValueError("a sum does not fit its bytes")
        state = torch.load(path, map_location=device, weights_only=True)
        state["model"] = {re.sub(r"^((module|_orig_mod)\.)+", "", name): tensor
                          for name, tensor in state["model"].items()}
        ModelConfig(**state["model_config"])
        state["config"]["block_size"]
        state["meta"]["tokenizer"], state["meta"]["vocab_size"], state["meta"]["eos_id"]
    except Exception as error:
        raise damaged(path, error) from None
    return state


def damaged(path: Path, error: Exception) -> UserError:
    """What to say of a checkpoint in which something is missing or wrong."""
    # torch's own words for a file that would run code on loading advise to allow it
    reason = "holds something other than tensors and plain values" \
        if isinstance(error, pickle.UnpicklingError) else \
        ": ".join(filter(None, [type(error).__name__, " ".join(str(error).split())[:120]]))
    return UserError(f"{path}: not a checkpoint of train.py, or damaged ({reason})")


def load_model(path: str | Path, device: str = "cpu") -> tuple[Decoder, dict]:
    """Model in evaluation mode and its checkpoint, from a file or an out_dir."""
    state = load_checkpoint(path)
    model = build(ModelConfig(**state["model_config"]))
    if "embed" in state["model"]:
        raise UserError(f"{path}: written by an earlier version, whose parameters had other names; "
                        "train it again, or sample with that version")
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise UserError(f"{path}: {' '.join(str(error).split())[:300]}") from None
    return model.to(device).eval(), state
