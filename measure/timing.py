"""
Time and memory of the commands of bench.py: measured, described, written to a file.
"""

import contextlib
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from checkpoint import written_beside
from configurator import UserError, at_least, session


def synchronise(device: str):
    """Wait until the device has done all that it was given."""
    kind = torch.device(device).type
    if kind != "cpu":
        getattr(torch, kind).synchronize()


def timed(function: Callable, device: str, times: int = 1) -> float:
    """Seconds that so many calls take, until the device has done what they ask for."""
    synchronise(device)
    began = time.perf_counter()
    for _ in range(times):
        function()
    synchronise(device)
    return time.perf_counter() - began


def measure(run_once: Callable, device: str, warmups: int, trials: int, n_tokens: int) -> dict:
    """Seconds of warm-up and of each trial, their median, and n_tokens over it."""
    warmup_seconds = timed(run_once, device, warmups)
    seconds = [timed(run_once, device) for _ in range(trials)]
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
            "torch": torch.__version__, "threads": torch.get_num_threads(), "commit": commit()}


def commit() -> str | None:
    """The commit of this code, if git and its folder are here."""
    where = Path(__file__).parent
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=where,
                                       stderr=subprocess.DEVNULL, text=True).strip()
    return None


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def machine(device: str) -> str:
    """What the times were taken with, in words."""
    threads = f", {torch.get_num_threads()} threads" if device == "cpu" else ""
    return f"{device_name(device)}{threads}, torch {torch.__version__}"


# ---- settings and results

def check(c, *at_least_one: str):
    """Raise UserError for numbers below 1, and for a file that cannot be written in the end."""
    at_least(1, c, *at_least_one)
    if c.json not in (None, "-"):
        folder = Path(c.json).absolute().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise UserError(f"json={c.json}: there is no such folder, or it cannot be written to")
        if Path(c.json).is_dir():
            raise UserError(f"json={c.json}: this is a folder, a file is needed")


class Table:
    """A table that is printed as it grows."""

    def __init__(self, columns: dict[str, str]):
        """columns: by their names, formats with a width, such as 9.2f."""
        self.columns = [(form, int(re.search("[0-9]+", form)[0])) for form in columns.values()]
        print(*(f"{name:>{width}s}" for name, (_, width) in zip(columns, self.columns)))

    def add(self, *values, remark: str = ""):
        """A row; None is what is not known."""
        cells = (f"{'n/a':>{width}s}" if x is None else f"{x:{form}}"
                 for x, (form, width) in zip(values, self.columns))
        print(" ".join([*cells, remark]).rstrip(), flush=True)


def write_results(c, command: str, device: str, dtype: torch.dtype, **results):
    """The results of a command with its settings c, and what times depend on, to c.json."""
    write_json(c.json, {"command": command, "settings": asdict(c), **environment(device, dtype),
                        **results})


def write_json(path: str | None, results: dict):
    """To a file, to stdout (-) or nowhere (None)."""
    if path is None:
        return
    text = json.dumps(results)
    if path == "-":
        print(text, file=session.answers or sys.stdout)
        return
    try:
        write_whole(Path(path), f"{text}\n".encode())
    except OSError as error:
        print(text)  # which may have taken hours
        raise UserError(f"json={path}: cannot write there ({error.strerror}); the results are on "
                        "stdout") from None


def write_whole(path: Path, data: bytes):
    """All of a file, or what was there stays. Raises OSError."""
    if path.exists() and not path.is_file():  # such as /dev/stdout
        path.write_bytes(data)
        return
    with written_beside(path.resolve()) as temporary:  # a link stays a link
        temporary.write_bytes(data)
