"""
A folder that one run at a time writes to.
"""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from configurator import UserError

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None
    import msvcrt


def lock_folder(folder: Path) -> TextIO:
    """A file that makes the folder ours until it is closed. Raises UserError if another run has
    the folder, or if it cannot be written to.

    The lock is a file of its own, which stays: systems that refuse to replace or remove an open
    file could not replace a log or a checkpoint that carries it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a")
    except OSError as error:
        raise UserError(f"out_dir={folder}: cannot be written to ({error.strerror})") from None
    try:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            msvcrt.locking(lock.fileno(), msvcrt.LK_NBLCK, 1)
    except (BlockingIOError, PermissionError):
        lock.close()
        raise UserError(f"out_dir={folder}: another run is writing there") from None
    except OSError:
        pass  # a file system without locks
    return lock
