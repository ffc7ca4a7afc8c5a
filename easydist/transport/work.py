"""Operations under way: anything with a ``wait`` is ``Pending``, and a ``TorchWork`` consists of such parts.

An operation of several steps is an iterator of the parts for which it waits. Whoever waits for the operation runs it;
otherwise a thread does.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import torch

from easydist.base import forks
from easydist.errors import DisagreementError, drop_frames, without_frames
from easydist.liveness.background import at_once, in_background, in_line
from easydist.shm.progress import handles

Failed = Callable[[str, timedelta, BaseException], BaseException]
"""A function of an operation's name, its time limit, and the exception that ended it; it returns the one to raise."""


class Pending(Protocol):
    """A message or an operation under way; ``torch.distributed``'s own ``Work`` is one."""

    def wait(self, timeout: timedelta = ...) -> object:
        """Wait for the end; raise an error if the operation failed."""

    def is_completed(self) -> bool:
        """True if ``wait`` would return at once."""


class _Ended:
    """An operation that has ended."""

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """True."""
        return True


ENDED = _Ended()


class TorchWork:
    """The handle of an operation, with which to wait for its end.

    Operations may be waited for in any order, by any thread, any number of times, or never: a work that is dropped
    costs nothing, and its operation still ends.

    Args:
        parts: The parts of the operation, in the order in which to wait for them; an iterator may begin each only when
            those before have ended.
        keep: Tensors that have to live until the end.
        timeout: The time limit for each message; None is the communicator's own.

    Source: the torchcomms API.
    """

    _error: BaseException | None = None
    _reports: tuple[Failed, str, timedelta] | None = None
    _is_driven = _is_asked = _is_done = False
    _part: Begun | None = None
    _parts: Iterator[Begun] = iter(())
    _keep: Sequence[torch.Tensor] = ()
    _timeout: timedelta | None = None
    _device: torch.device | None = None
    _event: torch.Event | None = None
    _outputs: Sequence[torch.Tensor] = ()
    _results: Sequence[weakref.ref[torch.Tensor]] = ()

    def __init__(
        self,
        parts: Iterable[Begun] = (),
        keep: Sequence[torch.Tensor] = (),
        timeout: timedelta | None = None,
    ) -> None:
        if not parts:
            self._is_done = True  # and no more: every operation that is waited for at once returns such a work
            return
        self._keep, self._timeout = keep, timeout
        self._begin(parts)

    def _begin(self, parts: Iterable[Begun]) -> None:
        self._lock, self._generation = threading.Lock(), forks.generation
        self._futures: list[torch.futures.Future[Any]] = []
        self._parts = iter(parts)
        self._part = next(self._parts, None)
        self._is_done = self._part is None

    def followed_by(self, step: Callable[[], Iterable[Begun]]) -> TorchWork:
        """Add a step, and return this work: ``step`` runs inside ``wait`` and returns the messages to wait for next.

        Args:
            step: Is called when the parts before have ended; returns the next ones.
        """
        if self._is_done:
            self._begin([ENDED])
        self._parts = itertools.chain(self._parts, _of(step))
        return self

    def within(self, timeout: timedelta | None) -> TorchWork:
        """Set the time limit for each message, and return this work; None or zero means the communicator's own.

        Args:
            timeout: The limit.
        """
        self._timeout = timeout or None
        return self

    def on(self, device: torch.device) -> TorchWork:
        """Return this work, which runs on an accelerator: every ``wait`` makes the current stream wait for it.

        Args:
            device: The accelerator.
        """
        self._device = device
        return self

    def reporting(self, failed: Failed, name: str, limit: timedelta, outputs: Sequence[torch.Tensor] = ()) -> TorchWork:
        """Return this work; from now on ``failed`` converts an error, and futures return ``outputs``.

        Args:
            failed: Takes the name, the limit and the exception, and returns the one to raise.
            name: The name of the operation.
            limit: The time limit of the operation.
            outputs: The tensors that the operation fills.
        """
        if self._is_done:
            return self.returning(outputs)
        self._reports, self._outputs = (failed, name, limit), outputs
        return self

    def returning(self, outputs: Sequence[torch.Tensor]) -> TorchWork:
        """Return this work, which has ended; futures return ``outputs``.

        Args:
            outputs: The tensors that the operation has filled.
        """
        self._results = [*map(weakref.ref, outputs)]
        return self

    def in_background(self) -> TorchWork:
        """Let a thread complete this work, and return it."""
        if not self._is_done:
            self._is_driven = True
            in_background(self._drive)
        return self

    def in_line(self, owner: object, name: Hashable) -> None:
        """Let a thread complete this work after those that were given to it before; see ``background.in_line``.

        Args:
            owner: The owner of the works that end in this order, such as a communicator.
            name: The name of this order among those of its owner.
        """
        if not self.has_ended:
            in_line(owner, name, self._drive)

    def wait(self) -> None:
        """Block until the operation has completed; on a GPU, make the current stream wait for it.

        Raises:
            RuntimeError: The operation failed; every further ``wait`` raises the same error again, as a copy. Or this
                process was forked from the one that has begun it.
        """
        if not self._is_done:
            forks.demand_own(self._generation)  # a thread of the parent may have held the lock
            handles[mine := threading.get_ident()] = self
            try:
                with self._lock:
                    self._finish()
            finally:
                handles.pop(mine, None)
            if self._futures:
                self._tell_futures()
            if self._error is not None:
                if isinstance(self._error, DisagreementError):
                    self._error.is_told = True
                raise without_frames(self._error)
        if self._event is not None:
            self._event.wait()

    @property
    def parts(self) -> Sequence[Begun]:
        """The part for which it waits."""
        return () if self._part is None else (self._part,)

    def wait_blocking(self) -> None:
        """Block the CPU until the operation has completed; on a GPU, too."""
        self.wait()
        outputs = [tensor for result in self._results if (tensor := result()) is not None]
        for device in {tensor.device for tensor in outputs if not tensor.is_cpu}:
            torch.accelerator.current_stream(device).synchronize()

    @property
    def has_ended(self) -> bool:
        """True if it is known that the operation has completed or failed."""
        return self._is_done or self._error is not None

    @property
    def has_succeeded(self) -> bool:
        """True if it is known that the operation has completed without an error."""
        return self._is_done

    def is_completed(self) -> bool:
        """True if ``wait`` would return or raise at once; an operation begun with ``async_op=True`` ends without it."""
        # In a forked child, ``wait`` raises at once.
        if self.has_ended or self._generation != forks.generation:
            return True
        if not self._is_driven:
            self._drive(waits=False)
            return self.has_ended
        if not self._is_asked and not self._lock.locked():  # it may be queued behind a long operation
            self._is_asked = True
            at_once(self._drive)
        return False

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the operation's outputs, which completes or fails when the operation does.

        Outputs that have been garbage-collected by then are left out.
        """
        future: torch.futures.Future[Any] = torch.futures.Future()
        if self._is_done:
            self._tell(future)
            return future
        forks.demand_own(self._generation)
        self._futures.append(future)
        if self.has_ended:
            self._tell_futures()
        else:
            at_once(self._drive)
        return future

    def _drive(self, waits: bool = True) -> None:
        """Run the operation, unless another thread is doing that; ``wait`` raises its errors later."""
        if self._lock.acquire(blocking=False):
            try:
                # A caller may poll in the main thread. Another one uses a stream of its own: what the caller begins
                # meanwhile must not wait for this operation, which may need it.
                with contextlib.suppress(BaseException if waits else Exception), self._stream(waits):
                    self._finish(waits, is_aside=waits)
            finally:
                self._lock.release()
        self._tell_futures()

    def _stream(self, is_aside: bool) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._device is None or not is_aside else torch.Stream(self._device)

    def _finish(self, waits: bool = True, is_aside: bool = False) -> None:
        """Run the operation to its end, or until it would have to wait; the caller holds the lock.

        Args:
            waits: True to wait.
            is_aside: True if a thread calls this for others: it also waits for the accelerator.
        """
        if self._is_done or self._error is not None:
            return
        try:
            if not self.advance(waits, self._timeout):
                return
        except BaseException as error:
            self._part, self._parts = None, iter(())
            if self._reports is not None:
                failed, name, limit = self._reports
                self._error = failed(name, limit, error)
            else:
                self._error = error
            if not isinstance(error, Exception):
                raise
            drop_frames(self._error)
        else:
            self.returning(self._outputs)
            self._mark(is_aside)
        self._keep = self._outputs = ()
        self._is_done = self._error is None  # last, because it is read without the lock

    def _mark(self, is_aside: bool) -> None:
        """Record where the current stream is, for the streams that wait later."""
        if self._device is not None:
            self._event = torch.Event(self._device)
            self._event.record()
            if is_aside:
                self._event.synchronize()  # the values of a future are there, and memory may be freed

    def advance(self, waits: bool, timeout: timedelta | None) -> bool:
        """Wait for the parts, or only run those that have completed; return True if none is left.

        Args:
            waits: True to wait.
            timeout: The time limit for each part; None is its own.
        """
        while (part := self._part) is not None:
            if not (waits or part.is_completed()):
                return False
            wait(part, timeout)  # also if it has completed: it may have failed
            self._part = next(self._parts, None)
        return True

    def _tell_futures(self) -> None:
        while self._futures and (self._is_done or self._error is not None):
            with contextlib.suppress(IndexError):  # two threads may get here at the same time
                self._tell(self._futures.pop())

    def _tell(self, future: torch.futures.Future[Any]) -> None:
        if self._error is None:
            future.set_result([tensor for result in self._results if (tensor := result()) is not None])
        else:
            future.set_exception(self._error)


def _of(step: Callable[[], Iterable[Begun]]) -> Iterator[Begun]:
    yield from step()


COMPLETED = TorchWork()
"""The handle of all operations without outputs that have ended."""

Begun: TypeAlias = Pending | TorchWork
"""An operation that has begun."""


def handle(pending: Begun) -> TorchWork:
    """Return the handle of an operation that has begun."""
    return pending if isinstance(pending, TorchWork) else TorchWork([pending])


def wait(pending: Begun, timeout: timedelta | None) -> None:
    """Wait for a part of an operation, within a time limit; None means its own."""
    if isinstance(pending, TorchWork):
        pending.within(timeout or pending._timeout).wait()
    else:
        pending.wait() if timeout is None else pending.wait(timeout)
