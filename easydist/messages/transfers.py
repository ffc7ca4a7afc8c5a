"""Messages under way, as handles that can be waited for any number of times, or dropped."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch

from easydist.agreement.calling import waiting
from easydist.base import forks
from easydist.errors import RemoteError
from easydist.groups.communicators import Communicators
from easydist.liveness.page import MessageWait
from easydist.messages.frames import REFUSED, Message, error_of
from easydist.transport.backends.waits import wait_watched
from easydist.transport.work import COMPLETED, Begun, TorchWork

_FOREVER = timedelta(days=365)


class Part(TorchWork):
    """One message, and the memory that it needs until it has arrived.

    Args:
        begun: The message, through a backend without a monitor, since any thread may wait for it.
        memory: The data to send, or the memory in which it arrives.
    """

    def __init__(self, begun: Begun, memory: torch.Tensor) -> None:
        super().__init__([begun], timeout=_FOREVER if memory.is_cpu else None)
        self.memory = memory


def _in_order(parts: list[Part]) -> Iterator[Part]:
    """Yield the parts of a message, and drop each, so that its memory is released as soon as it has arrived."""
    while parts:
        yield parts.pop(0)


class Answer:
    """The receiver's answer to a message.

    Args:
        read: Returns the answer, after waiting for it if necessary; None if the message is accepted.
        parts: Parts that must arrive before the answer can be read.
        has_come: True if ``read`` would not wait once the parts have arrived.
        is_known: True if ``read`` then needs no connection any more.
    """

    def __init__(
        self,
        read: Callable[[], Message | None],
        parts: Sequence[Part] = (),
        has_come: Callable[[], bool] = lambda: True,
        is_known: Callable[[], bool] = lambda: True,
    ) -> None:
        self.parts, self._read = parts, read
        self.has_come: Callable[[], bool] = has_come
        self.is_known: Callable[[], bool] = is_known

    def check(self) -> None:
        """Wait for the answer.

        Raises:
            EasydistError: The receiver has refused the message.
        """
        answer = self._read()
        if answer is not None and answer.status == REFUSED:
            raise error_of(answer.terms)


class Transfer:
    """A message under way, with ``wait`` and ``is_completed``.

    Dropping the handle is safe: the message still travels, and its memory is freed once it has arrived.

    Args:
        comms: The group.
        operation: The call's name, for error messages.
        peer: The other rank.
        parts: The parts under way.
        answer: The receiver's answer; None if there is none to wait for.
        message: The message to be answered, as the receiver counts it.
        is_promised: True if the other rank has posted all parts, so that they arrive even if it leaves the group.
    """

    _abandon: Any = None

    def __init__(
        self,
        comms: Communicators,
        operation: str,
        peer: int,
        parts: Sequence[Part],
        answer: Answer | None = None,
        message: MessageWait | None = None,
        is_promised: bool = False,
    ) -> None:
        self._message, self._is_promised = message, is_promised
        self._comms, self._operation, self._peer = comms, operation, peer
        self._work, self._answer = TorchWork(_in_order([*parts])) if parts else COMPLETED, answer
        for device in [part.memory.device for part in parts if not part.memory.is_cpu][:1]:
            self._work.on(device)
        self._phase, self._generation = comms.monitor.phase, forks.generation
        self._error: BaseException | None = None
        self._is_done = False
        if parts:
            self._abandon = weakref.finalize(self, _aside, self._work, weakref.ref(comms), (peer, answer is not None))
            self._abandon.atexit = False

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to wait for."""
        return self._work.has_succeeded and self._answer is None

    def is_completed(self) -> bool:
        """True if ``wait`` would return or raise at once."""
        is_of_parent = self._generation != forks.generation
        return self._is_done or is_of_parent or self._has_arrived() or self._is_in_vain()

    def _is_in_vain(self) -> bool:
        """True if no answer can come any more."""
        monitor = self._comms.monitor
        peer = monitor.peers[self._peer]
        return monitor.phase != self._phase or peer.has_ended() or (peer.has_left() and not self._is_promised)

    def _has_arrived(self) -> bool:
        if self._abandon is not None:  # gloo reports the end of a message only to a thread that waits for it
            self._abandon()
        return self._work.has_ended and (self._answer is None or self._answer.has_come())

    def wait(self) -> None:
        """Block until the message has arrived. A second call returns or raises the same at once.

        Raises:
            RemoteError: The receiver refused it, or the group has reconnected since it was sent.
            DisagreementError: The two ranks meant different messages.
            EasydistError: The other rank is lost, or the time limit has passed.
        """
        if self._is_done:
            if self._error is not None:
                raise self._error
            return
        if self.is_empty:
            self._is_done = True
            return
        with waiting(self._comms, self._operation, None, self._peer):
            if self._message is not None and self._comms.monitor.phase == self._phase:
                self._comms.monitor.waits_for(self._message)
            self.wait_inside()

    def wait_inside(self) -> None:
        """Wait as ``wait`` does, inside of a call."""
        if self._is_promised:
            self._comms.monitor.is_promised = True
        try:
            self._demand_connection()
            self._drain()
            if self._answer is not None:
                self._answer.check()
        except BaseException as error:  # including an interrupted wait, after which there is no answer
            self._error, self._is_done = error, True
            raise
        finally:
            if self._abandon is not None:
                self._abandon.detach()
        self._is_done, self._answer = True, None

    def _demand_connection(self) -> None:
        if self._comms.monitor.phase == self._phase:
            return
        if not self._has_arrived() or not (self._answer is None or self._answer.is_known()):
            raise RemoteError(
                f"{self._operation}: the message to or from rank {self._peer} was under way when the ranks had to "
                "reconnect; send it again"
            )

    def _drain(self) -> None:
        monitor, work = self._comms.monitor, self._work
        is_given = self._abandon is not None and not self._abandon.alive
        aside = is_given and not work.has_ended
        try:
            wait_watched(monitor, lambda: self._peer, work.wait, monitor.raise_if_broken if aside else None)
            if aside:
                work.wait()  # on this thread's stream of an accelerator
        except BaseException:
            if aside:
                monitor.disconnect()  # otherwise the thread would go on waiting
            raise


def _aside(work: TorchWork, comms: weakref.ref[Communicators], line: Hashable) -> None:
    """Let a background thread wait for a message for which no caller waits, until the group's connections break."""
    if (group := comms()) is not None:
        work.in_line(group, line)
