"""
A folder that one run at a time writes to.
"""

import os
from collections.abc import Callable
from pathlib import Path

from configurator import UserError

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None
    import msvcrt

LOCK = ".lock"  # a file in the folder


class Taken(UserError):
    """Another run has the folder."""


class Lock:
    """It makes a folder ours until it is closed. Raises Taken if another run has the folder, and
    UserError if it cannot be written to.

    The lock is a file of its own, which stays: systems that refuse to replace or remove an open
    file could not replace a log or a checkpoint that carries it.
    """

    def __init__(self, folder: Path, say: Callable[[str], None] = print):
        self.folder, self.say = folder, say
        self.take()

    def take(self, so: str = ""):
        """Lock the folder of that name as it is now; `so` is what it means if that fails."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file = open(self.folder / LOCK, "a")
        except OSError as error:
            raise UserError(f"out_dir={self.folder}: cannot be written to ({error.strerror}){so}"
                            ) from None
        self.sure = True
        try:
            if fcntl is not None:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            else:
                msvcrt.locking(self.file.fileno(), msvcrt.LK_NBLCK, 1)
        except (BlockingIOError, PermissionError):
            self.close()
            raise Taken(f"out_dir={self.folder}: another run is writing there{so}") from None
        except OSError:
            self.sure = False  # a file system without locks
        self.place = os.stat(self.folder)

    def keep(self):
        """Before something is written: lock the folder of that name anew if ours was moved or
        removed; what lies there by now is moved to `previous`. Raises UserError if another run has
        it."""
        if self.file.closed:
            return
        mine, same = os.fstat(self.file.fileno()), False
        try:
            same = os.path.samestat(self.place, os.stat(self.folder))
            if os.path.samestat(mine, os.stat(self.folder / LOCK)):
                return
        except FileNotFoundError:
            pass
        except OSError:  # a disk that does not answer is none that was moved
            return
        self.close()
        self.take("; this run's folder was moved or removed while it went on, and its last steps "
                  "are not saved")
        if not same:
            from checkpoint import keep_previous  # with torch, which a lock does not need

            previous = keep_previous(self.folder)
            kept = f"; the run that lay there is kept in {previous}" if previous else ""
            self.say(f"note: {self.folder} was moved or removed; the run goes on in a new one"
                     + kept)

    def close(self):
        self.file.close()
