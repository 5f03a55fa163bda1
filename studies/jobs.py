"""
Many runs, a few at a time, with the results of all in one JSON file that can be added to.
"""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from configurator import UserError, key
from measure.timing import check, write_whole
from running.signals import REQUESTS


@dataclass
class Job:
    """Commands, one behind the other, and what they leave: a record with the job's name."""

    name: str
    commands: list[list[str]]  # of python
    record: Callable[[], dict]
    check: Callable[[], object] = lambda: None  # UserError: an earlier start does not fit this one
    settings: Callable[[], dict] = dict  # its record's, where it has them: else it is another run


@dataclass
class StudyConfig:
    only: str | None = key(None, "names of runs, or parts of names, with commas; None: all")
    list: bool = key(False, "print the names of the runs that are left, and end")
    at_once: int = key(1, "runs side by side, all on the same device")
    minutes: float | None = key(None, "time for all; then runs are stopped, to go on later")
    folder: str = key("out/study", "where logs and checkpoints go")
    json: str = key("out/study.json", "file of results, of one command at a time")


def study(c: StudyConfig, make: Callable[..., Iterable[Job]],
          needs: Callable[..., None] = lambda c: None, has: tuple[str, ...] = ()):
    """Run the jobs that make(c) names and that have no record yet, and add theirs; needs(c) raises
    UserError if what all of them need is not there. has: what all records have, of this study.

    A job that fails, or lacks time, leaves none: then the exit status is 1.
    """
    if c.json == "-":
        raise UserError("json=-: a study adds to a file of results")
    if c.minutes is not None and not 0 < c.minutes < math.inf:
        raise UserError(f"minutes={c.minutes}: more than 0 are needed; None sets no limit")
    if not c.list:
        try:
            Path(c.folder).mkdir(parents=True, exist_ok=True)
            if "json" not in c.given:
                Path(c.json).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"folder={c.folder}: {error.strerror}") from None
        check(c, "at_once")
    jobs = chosen(make(c), c.only, c.json, has)
    if c.list or not jobs:
        print("\n".join(job.name for job in jobs) or f"{c.json}: nothing left to do")
        return
    needs(c)
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


def chosen(jobs: Iterable[Job], only: str | None, path: str, has: tuple[str, ...] = ()
           ) -> list[Job]:
    """Those that have no record yet; of them, those that `only` names, by a whole name or by a part
    of it, in its order. Raises UserError for what no job's name has, and for records of another
    study or of other settings."""
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
    there = {r["name"]: r.get("settings") for r in read_records(path, *has)}
    for job in jobs:
        if there.get(job.name) and there[job.name] != job.settings():
            raise UserError(f"json={path}: its {job.name} had other settings than those of today; "
                            "--json= and --folder= name places for new runs")
    return [job for job in jobs if job.name not in there]


def run_jobs(jobs: list[Job], path: str, logs: Path, at_once: int, minutes: float | None) -> int:
    """Run them, so many at once; stdout and stderr of each in logs/NAME.txt. How many have no
    record in the end.

    After `minutes`, or a signal that asks for an end, those that still run get SIGTERM, upon which
    train.py saves.
    """
    stop, lock, pool = threading.Event(), threading.Lock(), ThreadPoolExecutor(at_once)
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in REQUESTS
              if number != signal.SIGINT and signal.getsignal(number) is not signal.SIG_IGN}
    try:
        made = [pool.submit(run_job, job, path, logs, stop, lock) for job in jobs]
        wait(made, minutes and 60 * minutes, FIRST_EXCEPTION)
        stop.set()
        return sum(not done.result() for done in made)
    finally:
        stop.set()
        pool.shutdown()
        for number, handler in before.items():
            signal.signal(number, handler)


def run_job(job: Job, path: str, logs: Path, stop: threading.Event, lock: threading.Lock) -> bool:
    """Run a job and add its record, or say how it ended; nothing starts after `stop`."""
    log, left, began = logs / f"{job.name}.txt", list(job.commands), time.monotonic()
    status, wrong = 0, ""
    if stop.is_set():
        return False
    try:
        job.check()
    except UserError as error:
        status, wrong = 1, f"failed: {error}"
    while left and status == 0 and not stop.is_set():
        with open(log, "a", encoding="utf-8") as output:
            process = subprocess.Popen([sys.executable, *left.pop(0)], stdout=output,
                                       stderr=subprocess.STDOUT,
                                       env={**os.environ, "PYTHONUNBUFFERED": "1"})
        while process.poll() is None and not stop.wait(0.1):
            pass
        if process.poll() is None:
            process.terminate()
        status = process.wait()
    with lock:
        said = "stopped" if stop.is_set() else wrong or f"failed: see {log}"
        if status == 0 and not left:
            commands = [shlex.join(["python", *command]) for command in job.commands]
            try:
                add_record(path, {"name": job.name, "commands": commands, **job.record()})
                said = "done"
            except (OSError, ValueError, KeyError, UserError) as error:
                said = f"failed: its results cannot be read or written ({error})"
        print(f"{job.name}: {said}, after {time.monotonic() - began:.0f} s", flush=True)
    return said == "done"
