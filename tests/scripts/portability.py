"""Every verb on a system that lacks features: they are hidden before easydist is imported for the first time.

python tests/scripts/portability.py proc futex+memfd mac …

A case lists the hidden features, joined by ``+``. The ranks are forked, so that torch is loaded once. At the end of a
case rank 1 is killed, and rank 0 prints the error that it gets.
"""

import builtins
import ctypes
import errno
import io
import json
import mmap
import os
import signal
import sys

import numpy as np
import torch
import torch.distributed
from forking import end, forked, side_by_side, statuses

SIZE = 2


class Refused:
    """A system call that a sandbox rejects."""

    argtypes = restype = None

    def __call__(self, *arguments: object) -> int:
        ctypes.set_errno(errno.ENOSYS)
        return -1


def refuse(*arguments: object, **options: object) -> None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def hide_folder(folder: str) -> None:
    """Hide everything below a folder."""

    def hiding(known):
        def look(path, *arguments, **options):
            if str(path).startswith(folder):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return known(path, *arguments, **options)

        return look

    for module, name in ((os, "open"), (os, "readlink"), (os, "stat"), (os, "listdir"), (io, "open")):
        setattr(module, name, hiding(getattr(module, name)))
    builtins.open = io.open


def hide_futex() -> None:
    """Let the C library's ``syscall`` fail, as in a sandbox. The library itself exists."""

    class Library(ctypes.CDLL):
        @property
        def syscall(self) -> Refused:
            return Refused()

    ctypes.CDLL = Library


def remove(module: object, *names: str) -> None:
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


HIDES = {
    "proc": lambda: hide_folder("/proc"),
    "shm": lambda: hide_folder("/dev/shm"),
    "futex": hide_futex,
    "memfd": lambda: setattr(os, "memfd_create", refuse),
    "pidfd": lambda: setattr(os, "pidfd_open", refuse),
    "linux": lambda: (
        remove(os, "memfd_create", "pidfd_open", "O_TMPFILE", "posix_fallocate", "sched_yield", "MFD_CLOEXEC"),
        remove(mmap, "MADV_HUGEPAGE"),
    ),
    "c": lambda: setattr(ctypes, "CDLL", refuse),
}


def use(rank: int, nbytes: int) -> None:
    """Call every verb once, with leaves of this many bytes."""
    import easydist

    size = nbytes // 4
    ones = torch.ones(size)
    mine = {"x": torch.full((size,), float(rank)), "n": np.full(3, rank), "i": rank}
    got = easydist.gather(mine)
    assert got["x"].shape == (2 * size,)
    assert (got["i"].tolist(), got["n"].tolist()) == ([0, 1], [0, 0, 0, 1, 1, 1])
    assert torch.equal(easydist.reduce(mine, "sum")["x"], ones)
    assert torch.equal(easydist.broadcast({"x": torch.full((size,), float(rank))}, 1)["x"], ones)
    assert torch.equal(easydist.copy_tensor_to_devices(ones if rank else None), ones)
    assert easydist.scatter(torch.arange(2 * size) if rank == 0 else None)[0] == rank * size
    every = torch.arange(2 * size)
    assert torch.equal(easydist.all_to_all(every), every[rank * size :][:size].repeat(2))
    assert easydist.pad_across_processes(torch.ones(size + rank)).shape == (size + 1,)
    assert easydist.gather_object({"rank": rank, "data": bytes(nbytes)})[1]["rank"] == 1
    objects = [{"data": bytes(nbytes)} if rank == 0 else None]
    assert len(easydist.broadcast_object_list(objects)[0]["data"]) == nbytes
    easydist.scatter_object_list(objects, ["for 0", "for 1"])
    assert objects == [f"for {rank}"]
    assert easydist.broadcast_tensor_dict({"x": ones} if rank == 0 else None)["x"].shape == (size,)
    if rank == 0:
        easydist.send_tensor_dict({"x": ones}, 1)
    else:
        assert easydist.recv_tensor_dict(0)["x"].shape == (size,)
    easydist.synchronize_rng_states(["torch", "numpy", "python"])
    easydist.wait_for_everyone()
    with easydist.together():
        pass
    queue = easydist.queue.MessageQueue.create_from_process_group(None, 1 << 16, 4)
    sent = torch.arange(size)
    assert queue.broadcast_object(sent if rank == 0 else None).equal(sent)
    queue.close()


def work(case: str, rank: int) -> None:
    import easydist

    for nbytes in (64, 3 << 20):
        use(rank, nbytes)
    backend = easydist.ProcessState().communicators().control.get_backend()
    row = {"case": case, "rank": rank, "backend": backend, "peer": easydist.gather_object(os.getpid())[1 - rank]}
    try:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        easydist.gather(torch.ones(1), timeout=30)
    except easydist.EasydistError as error:
        row |= {"type": type(error).__name__, "text": str(error), "lost": getattr(error, "rank", None)}
    os.write(1, (json.dumps(row) + "\n").encode())


def launch(case: str) -> None:
    """Fork a process that hides the features and loads easydist, and there the ranks, and wait for them."""
    if pid := os.fork():
        assert statuses([pid]) == [0]
        return
    for hidden in case.split("+"):
        HIDES[hidden]()
    import easydist

    for name in ("gather", "reduce", "broadcast", "scatter", "all_to_all", "broadcast_object_list", "send_tensor_dict"):
        getattr(easydist, name)
    ended = statuses(forked(SIZE, lambda rank: work(case, rank)))
    os.write(1, (json.dumps({"case": case, "statuses": ended}) + "\n").encode())
    end()


if __name__ == "__main__":
    side_by_side(2, sys.argv[1:], launch)
