"""
The processes of a run, which torchrun starts, and what they agree on.
"""

import atexit
import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group: see Processes.end
from torch import Tensor

from configurator import UserError, let_go


class Lost(UserError):
    """Another process has ended, so that none can go on."""


@dataclass
class Processes:
    """The processes that torchrun started, or this one alone."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    closed: int = 0  # SIGPIPE once nobody reads stdout any more: a request to stop, too

    def start(self, device: str):
        """Find the others. Raises UserError if they do not come."""
        if self.world == 1:
            return
        try:
            # torchrun's store may still have addresses of those who have died: --max_restarts
            again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store, rank, world = next(dist.rendezvous("env://"))
            # gloo for what the processes agree on, which then does not wait for a GPU
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo",
                                    store=dist.PrefixStore(again, store), rank=rank,
                                    world_size=world)
        except (RuntimeError, ValueError) as error:
            place = ":".join(os.environ.get(f"MASTER_{part}", "?") for part in ("ADDR", "PORT"))
            raise UserError(f"the {self.world} processes do not meet at {place} ({brief(error)}); "
                            "torchrun --standalone takes a free port") from None
        if not device.startswith("cuda"):
            # after an error too; NCCL is left alone then, as it may wait for the others
            atexit.register(self.end)

    def end(self):
        """Destroy the group, if there is one, which joins gloo's threads.

        One that lets go of a tensor while Python shuts down would abort the process. They are
        joined only if nothing else holds the group. The functions of torch.distributed.nn, which
        making an optimizer imports, hold the group of that time as a default argument: hence its
        import at the head, before there is one.
        """
        if dist.is_initialized():
            dist.destroy_process_group()

    def sum(self, x: Tensor, op=dist.ReduceOp.SUM) -> Tensor:
        """The sum over processes, in place. Raises Lost."""
        if self.world > 1:
            try:
                dist.all_reduce(x, op)
            except RuntimeError as error:
                raise Lost(f"another process has ended ({brief(error)})") from None
        return x

    def largest(self, number: int) -> int:
        """The largest of the processes' numbers, so that all know when one has something to say."""
        return int(self.sum(torch.tensor(int(number)), dist.ReduceOp.MAX))

    def print(self, *args):
        """By rank 0, at once; without a reader, nothing."""
        if self.rank == 0:
            try:
                print(*args, flush=True)
            except OSError as error:
                if isinstance(error, BrokenPipeError):
                    self.closed = 13
                let_go(sys.stdout)


def brief(error: Exception) -> str:
    """The first line of an error, cut."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:150]
