"""
Signals: a request to stop after the step at hand, whoever sends it, and what repeats mean.
"""

import contextlib
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator

# from a terminal, a shell, a scheduler: kill, Ctrl-C, hang-up, warnings before a job's time is over
NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGBREAK")
REQUESTS = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
UNFINISHED: set[str] = set()  # folders that are removed where a process ends at once
SAME = 2.0  # seconds in which a repeat is the same request: torchrun passes on what it receives


class Signals:
    """Requests to stop. `received` is the first one's number; None: nobody has asked.

    Before `begun`, which is set after the first step, there is nothing to save: a signal ends the
    process at once, with a line and status 128 + its number, even where Python waits for other
    processes or a compiler. Afterwards the training loop looks at `received`. The same or another
    signal changes nothing then, only Ctrl-C pressed again, later than SAME, ends at once. A signal
    that is ignored from the start (nohup, a job in the background) stays ignored.
    """

    def __init__(self):
        self.received, self.begun = None, False
        self.interrupted = None  # when Ctrl-C was pressed first
        self.numbers = {n for n in REQUESTS if signal.getsignal(n) is not signal.SIG_IGN}
        # Python runs a handler when the main thread comes back from C++, which may be never; the
        # number is written to a socket at once, and the thread there needs no other
        self.reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)
        for number in self.numbers:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.leave)
        threading.Thread(target=self.watch, daemon=True).start()

    def leave(self):
        """What a forked process receives is its own business."""
        signal.set_wakeup_fd(-1)
        for number in self.numbers:
            signal.signal(number, signal.SIG_DFL)

    def watch(self):
        while True:
            for number in self.numbers.intersection(self.reader.recv(64)):
                self.request(number)

    def request(self, number: int):
        """What a signal means now."""
        name, now = signal.Signals(number).name, time.monotonic()
        if not self.begun:
            end(number, f"{name} before the first step: there was nothing to save")
        elif number != signal.SIGINT or self.interrupted is None:
            self.received = self.received or number
            if number == signal.SIGINT:
                self.interrupted = now
                say("Ctrl-C: ends after this step; again: at once")
        elif now - self.interrupted > SAME:
            end(number, "Ctrl-C again: ends without saving; the checkpoint is from before")


def end(number: int, said: str):
    """The end of the process, whatever its main thread does."""
    say(said)
    for folder in UNFINISHED:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(128 + number)


def say(said: str):
    """A line on stderr; of several processes by the first one of each node."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with contextlib.suppress(OSError):  # whoever read it may have gone
            os.write(2, f"{said}\n".encode())


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Signals that arrive in here count afterwards, but for those that train.py obeys at once."""
    received, before = [], {}
    if threading.current_thread() is not threading.main_thread():  # which none reaches
        yield
        return
    for number in REQUESTS:
        if signal.getsignal(number) is not None:  # not one of C's
            before[number] = signal.signal(number, lambda number, _: received.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in received:
            signal.raise_signal(number)
