"""
Many runs, a few at a time, with the results of all in one JSON file that can be added to.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from configurator import UserError, key, parse
from measure.timing import check, write_whole


@dataclass
class Job:
    """Commands, one behind the other, and what they leave: a record with the job's name."""

    name: str
    commands: list[list[str]]  # of python
    record: Callable[[], dict]

    def lines(self) -> list[str]:
        """The commands as one would type them."""
        return [shlex.join(["python", *command]) for command in self.commands]


@dataclass
class StudyConfig:
    """What every study takes."""

    only: str | None = key(None, "names of runs, or parts of names, with commas; None: all")
    list: bool = key(False, "print the names of the runs that are left, and end")
    at_once: int = key(1, "runs side by side, all on the same device")
    minutes: float | None = key(None, "time for all; then runs are stopped, to go on later")
    folder: str = key("out/study", "where logs and checkpoints go")
    json: str = key("results/study.json", "file of results, of one command at a time")


def study(argv: list[str], defaults: StudyConfig, make: Callable[..., Iterable[Job]], usage: str):
    """Run the jobs that make(settings) names and that have no record yet, and add theirs.

    A job that fails, or lacks time, leaves none: then the exit status is 1.
    """
    c = parse(defaults, argv, usage)
    check(c, "at_once")
    if c.json == "-":
        raise UserError("json=-: a study adds to a file of results")
    if c.minutes is not None and not 0 < c.minutes < math.inf:
        raise UserError(f"minutes={c.minutes}: more than 0 are needed; None sets no limit")
    jobs = chosen(make(c), c.only, c.json)
    if c.list or not jobs:
        print("\n".join(job.name for job in jobs) or f"{c.json}: nothing left to do")
        return
    try:
        Path(c.folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"folder={c.folder}: {error.strerror}") from None
    left = run_jobs(jobs, c.json, Path(c.folder), c.at_once, c.minutes)
    if left:
        raise UserError(f"{left} of {len(jobs)} runs have no result yet; the same command goes on")


def read_records(path: str, *needed: str) -> list[dict]:
    """What a file of results holds; nothing if there is none. UserError for another file, or one
    whose records have not what is needed."""
    if not Path(path).exists():
        return []
    try:
        runs = json.loads(Path(path).read_text(encoding="utf-8"))["runs"]
        lacking = [name for name in ("name", *needed) if any(name not in r for r in runs)]
    except (OSError, ValueError, KeyError, TypeError):
        lacking = ["runs"]
    if lacking:
        raise UserError(f"{path}: not the file of results that is needed here, which a study has "
                        f"written: no {', '.join(lacking)}")
    return runs


def add_record(path: str, record: dict):
    """Put a record into the file, in place of one of its name, at once and in one piece."""
    runs = [r for r in read_records(path) if r["name"] != record["name"]] + [record]
    runs.sort(key=lambda r: r["name"])
    text = ",\n".join(json.dumps(r) for r in runs)
    write_whole(Path(path), f'{{"runs": [\n{text}\n]}}\n'.encode())


def chosen(jobs: Iterable[Job], only: str | None, path: str) -> list[Job]:
    """Those that have no record yet; of them, those that `only` names, by a whole name or by a part
    of it, in its order. Raises UserError for what no job's name has."""
    jobs = list(jobs)
    if only is not None:
        found = {}
        for part in only.split(","):
            its = [job for job in jobs if job.name == part]
            its = its or [job for job in jobs if part and part in job.name]
            if not its:
                raise UserError(f"only={only}: no run has {part!r} in its name; there are "
                                + ", ".join(job.name for job in jobs))
            found |= {job.name: job for job in its}
        jobs = list(found.values())
    there = {r["name"] for r in read_records(path)}
    return [job for job in jobs if job.name not in there]


def run_jobs(jobs: list[Job], path: str, logs: Path, at_once: int, minutes: float | None) -> int:
    """Run them, so many at once; stdout and stderr of each in logs/NAME.txt. How many have no
    record in the end.

    After `minutes`, or SIGTERM, those that still run get SIGTERM, upon which train.py saves.
    """
    end = time.monotonic() + 60 * minutes if minutes else math.inf
    waiting, running, done, stop = list(jobs), [], 0, False

    def ask(number, frame):
        nonlocal stop
        stop = True

    before = signal.signal(signal.SIGTERM, ask)
    try:
        while running or (waiting and not stop):
            stop = stop or time.monotonic() > end
            while waiting and len(running) < at_once and not stop:
                running.append(Running(waiting.pop(0), logs))
            for r in list(running):
                if stop:
                    r.stop()
                if r.process.poll() is None:
                    continue
                if r.process.returncode == 0 and not r.stopped and r.start_next():
                    continue
                running.remove(r)
                done += r.finish(path)
            time.sleep(0.1)
    finally:
        for r in running:
            r.stop()
            r.process.wait()
        signal.signal(signal.SIGTERM, before)
    return len(jobs) - done


class Running:
    """A job in progress."""

    def __init__(self, job: Job, logs: Path):
        self.job, self.left, self.began = job, list(job.commands), time.monotonic()
        self.log, self.stopped = logs / f"{job.name}.txt", False
        self.start_next()

    def start_next(self) -> bool:
        """Start the next command, if there is one."""
        if not self.left:
            return False
        command = [sys.executable, *self.left.pop(0)]
        with open(self.log, "a", encoding="utf-8") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT,
                                            env={**os.environ, "PYTHONUNBUFFERED": "1"})
        return True

    def stop(self):
        if not self.stopped:
            self.process.terminate()
        self.stopped = True

    def finish(self, path: str) -> bool:
        """Add its record, or say how it ended."""
        said, status = f"failed: see {self.log}", self.process.returncode
        if status == 0 and not self.left:
            try:
                add_record(path, {"name": self.job.name, "commands": self.job.lines(),
                                  **self.job.record()})
                said = "done"
            except (OSError, ValueError, KeyError, UserError) as error:
                said = f"failed: its results cannot be read or written ({error})"
        elif self.stopped:
            said = "stopped"
        print(f"{self.job.name}: {said}, after {time.monotonic() - self.began:.0f} s", flush=True)
        return said == "done"
