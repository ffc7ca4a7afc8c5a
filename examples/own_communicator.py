"""A custom backend that counts the bytes that a rank sends, and passes the conformance test for communicators.

torchrun --standalone --nproc-per-node 2 examples/own_communicator.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

import easydist
from easydist.comms import Gloo, TorchComm, TorchWork
from easydist.testing import check_comm


class Counting(Gloo):
    """Gloo, with a count."""

    sent = 0

    def all_gather_v(self, outputs: Sequence[torch.Tensor], data: torch.Tensor) -> TorchWork:
        """Send this rank's data to all others."""
        self.sent += data.nbytes * (self.size - 1)
        return super().all_gather_v(outputs, data)


def backend() -> Counting:
    """Create the backend over the default group, which must exist."""
    return Counting(dist.group.WORLD, torch.device("cpu"), "counting")


def make(rank: int, world_size: int) -> TorchComm:
    """Create the communicator to check. The conformance test calls this on every rank."""
    return TorchComm(backend(), "counting")


if __name__ == "__main__":
    state = easydist.ProcessState()
    if state.process_group is None:
        check_comm(make, world_sizes=[1, 2])
        print("the communicator does what it has to")
    else:
        counting = backend()
        comm = TorchComm(counting, "counting")
        easydist.wait_for_everyone(group=comm)  # the first call also tells each rank of the others
        counting.sent = 0
        easydist.gather({"a": torch.ones(100_000), "b": torch.ones(2, 2)}, group=comm)
        state.print(comm, counting.sent, "bytes sent by rank 0", sep="\n")
