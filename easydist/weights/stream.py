"""The transfer of a schedule's messages: several are under way at a time, never more bytes than the bucket has."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from easydist.groups.communicators import Communicators
from easydist.transport.comm import Collectives
from easydist.transport.work import TorchWork
from easydist.weights.schedule import Message

_DEPTH = 16
"""The most messages under way, however small they are, as gloo keeps a buffer for each."""

Step = Callable[[int], None]
"""A function to call with the number of bytes that have moved."""


class Carriers:
    """The communicator that carries each kind of data.

    Args:
        comms: The group.
        messages: All messages to move.
    """

    def __init__(self, comms: Communicators, messages: Sequence[Message]) -> None:
        carried = {kind: comms.data(torch.device(kind)) for kind in {message.kind for message in messages}}
        on_cpu = [kind for kind, comm in carried.items() if comm is comms.control]
        cpu = comms.cpu(sum(message.nbytes for message in messages if message.kind in on_cpu))
        self._carried = carried | dict.fromkeys(on_cpu, cpu)

    def __getitem__(self, message: Message) -> Collectives:
        return self._carried[message.kind]


class Side:
    """This rank's side of the messages: it loads them, or it has memory for them and stores them."""

    def buffer(self, message: Message, there: torch.device) -> torch.Tensor:
        """Return the bytes to send, or the memory in which they arrive."""
        raise NotImplementedError

    def take(self, message: Message, buffer: torch.Tensor) -> None:
        """Store a message that has arrived."""
        raise NotImplementedError


def move(carriers: Carriers, messages: Sequence[Message], side: Side, bucket_nbytes: int, step: Step) -> None:
    """Broadcast each message from its root.

    Args:
        carriers: The communicators of these messages.
        messages: The same on every rank; each has a fraction of the bucket.
        side: This rank's side.
        bucket_nbytes: The most bytes under way.
        step: A function to call after every message.

    Cost: one broadcast for each message.
    """
    under_way: deque[tuple[Message, torch.Tensor, TorchWork]] = deque()
    room = bucket_nbytes
    for message in messages:
        while under_way and (message.nbytes > room or len(under_way) == _DEPTH):
            room += _end(under_way.popleft(), side, step)
        comm = carriers[message]
        buffer = side.buffer(message, comm.get_device())
        under_way.append((message, buffer, comm.broadcast(buffer, message.root, async_op=True)))
        room -= message.nbytes
    while under_way:
        _end(under_way.popleft(), side, step)


def _end(one: tuple[Message, torch.Tensor, TorchWork], side: Side, step: Step) -> int:
    message, buffer, work = one
    work.wait()
    side.take(message, buffer)
    step(message.nbytes)
    return message.nbytes


@contextmanager
def progress(is_shown: bool, nbytes: int, title: str) -> Iterator[Step]:
    """Show a progress bar once the transfer has taken a second, if requested."""
    if not is_shown:
        yield lambda nbytes: None
        return
    from tqdm.auto import tqdm

    with tqdm(desc=title, total=nbytes, unit="B", unit_scale=True, delay=1) as bar:
        yield lambda nbytes: bar.update(nbytes) and None
