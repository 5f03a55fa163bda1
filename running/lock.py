"""
A folder that one run at a time writes to.
"""

from __future__ import annotations

from pathlib import Path

from configurator import UserError

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None
    import msvcrt


class FolderLock:
    """Until `release`, or the end of the process, the folder is ours. Raises UserError if another
    run has it, or if it cannot be written to.

    The lock is a file of its own, which stays: systems that refuse to replace or remove an open
    file could not replace a log or a checkpoint that carries it.
    """

    def __init__(self, folder: Path):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = open(folder / ".lock", "a")
        except OSError as error:
            raise UserError(f"out_dir={folder}: cannot be written to ({error.strerror})") from None
        try:
            if fcntl is not None:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            else:
                msvcrt.locking(self.file.fileno(), msvcrt.LK_NBLCK, 1)
        except (BlockingIOError, PermissionError):
            self.release()
            raise UserError(f"out_dir={folder}: another run is writing there") from None
        except OSError:
            pass  # a file system without locks

    def release(self):
        self.file.close()
