"""
A folder that one run at a time writes to.
"""

from __future__ import annotations

import os
from pathlib import Path

from configurator import UserError

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None
    import msvcrt


class Lock:
    """It makes a folder ours until it is closed. Raises UserError if another run has the folder, or
    if it cannot be written to.

    The lock is a file of its own, which stays: systems that refuse to replace or remove an open
    file could not replace a log or a checkpoint that carries it.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.take()

    def take(self):
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file = open(self.folder / ".lock", "a")
        except OSError as error:
            raise UserError(f"out_dir={self.folder}: cannot be written to ({error.strerror})"
                            ) from None
        try:
            if fcntl is not None:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            else:
                msvcrt.locking(self.file.fileno(), msvcrt.LK_NBLCK, 1)
        except (BlockingIOError, PermissionError):
            self.close()
            raise UserError(f"out_dir={self.folder}: another run is writing there") from None
        except OSError:
            pass  # a file system without locks

    def keep(self):
        """Before something is written: lock the folder of that name anew if ours was moved or
        removed. Raises UserError if another run has it by now."""
        if self.file.closed:
            return
        try:
            if os.path.samestat(os.fstat(self.file.fileno()), os.stat(self.folder / ".lock")):
                return
        except FileNotFoundError:
            pass
        except OSError:  # a disk that does not answer is none that was moved
            return
        self.close()
        try:
            self.take()
        except UserError as error:
            raise UserError(f"{error}; this run's folder was moved or removed while it went on, "
                            "and its last steps are not saved") from None
        print(f"note: {self.folder} was moved or removed; the run goes on in a new one", flush=True)

    def close(self):
        self.file.close()
