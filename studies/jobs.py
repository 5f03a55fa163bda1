"""
Many runs, a few at a time, with the results of all in one JSON file that can be added to.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from configurator import UserError
from measure.timing import write_whole


@dataclass
class Job:
    """Commands, one behind the other, and what they leave: a record with the job's name."""

    name: str
    commands: list[list[str]]  # of python
    record: Callable[[], dict]

    def lines(self) -> list[str]:
        """The commands as one would type them."""
        return [f"python {' '.join(command)}" for command in self.commands]


def read_records(path: str) -> list[dict]:
    """What a file of results holds; nothing if there is none. UserError for another file."""
    if not Path(path).exists():
        return []
    try:
        runs = json.loads(Path(path).read_text(encoding="utf-8"))["runs"]
        return [r for r in runs if r["name"]]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"json={path}: not a file of results that a study has written") from None


def add_record(path: str, record: dict):
    """Put a record into the file, in place of one of its name, at once and in one piece."""
    runs = [r for r in read_records(path) if r["name"] != record["name"]] + [record]
    runs.sort(key=lambda r: r["name"])
    text = ",\n".join(json.dumps(r) for r in runs)
    write_whole(Path(path), f'{{"runs": [\n{text}\n]}}\n'.encode())


def chosen(jobs: Iterable[Job], only: str | None, path: str) -> list[Job]:
    """Those that have no record yet; of them, those whose name has one of the parts in `only`, in
    the order of these. Raises UserError for a part that no job's name has."""
    jobs = list(jobs)
    if only is not None:
        parts = only.split(",")
        for part in parts:
            if not any(part in job.name for job in jobs):
                raise UserError(f"only={only}: no run has {part!r} in its name; there are "
                                + ", ".join(job.name for job in jobs))
        jobs = list({job.name: job for part in parts for job in jobs if part in job.name}.values())
    there = {r["name"] for r in read_records(path)}
    return [job for job in jobs if job.name not in there]


def run_jobs(jobs: list[Job], path: str, logs: Path, at_once: int, minutes: float | None):
    """Run them, so many at once; stdout and stderr of each in logs/NAME.txt. After `minutes` those
    that still run get SIGTERM, upon which train.py saves; the same command goes on with them."""
    logs.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * minutes if minutes else float("inf")
    waiting, running = list(jobs), []
    try:
        while waiting or running:
            late = time.monotonic() > end
            while waiting and len(running) < at_once and not late:
                running.append(Running(waiting.pop(0), logs))
            if late:
                waiting = []
            for r in list(running):
                if late:
                    r.process.terminate()
                if r.process.poll() is None:
                    continue
                if r.process.returncode == 0 and r.start_next():
                    continue
                running.remove(r)
                r.finish(path)
            time.sleep(0.2)
    finally:
        for r in running:
            r.process.terminate()


class Running:
    """A job in progress."""

    def __init__(self, job: Job, logs: Path):
        self.job, self.left, self.began = job, list(job.commands), time.monotonic()
        self.log = logs / f"{job.name}.txt"
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

    def finish(self, path: str):
        """Add its record, or say how it ended."""
        seconds = time.monotonic() - self.began
        status = self.process.returncode
        if status == 0:
            add_record(path, {"name": self.job.name, "commands": self.job.lines(),
                              **self.job.record()})
            said = "done"
        elif status in (128 + signal.SIGTERM, -signal.SIGTERM):
            said = "stopped for lack of time"
        else:
            said = f"failed with status {status}: see {self.log}"
        print(f"{self.job.name}: {said} after {seconds:.0f} s", flush=True)
