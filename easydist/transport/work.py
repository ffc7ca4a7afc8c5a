"""Operations under way: whatever can be waited for is ``Pending``, and a ``TorchWork`` is made of such parts."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from easydist.transport.background import at_once, in_background

Failed = Callable[[BaseException], BaseException]
"""Takes what ended an operation; returns what ``wait`` raises."""


class Pending(Protocol):
    """A message or an operation under way; ``torch.distributed``'s own ``Work`` is one."""

    def wait(self, timeout: timedelta = ...) -> object:
        """Wait for the end, or raise."""

    def is_completed(self) -> bool:
        """True if ``wait`` would return at once."""


class TorchWork:
    """Tells when an operation has completed.

    Operations may be waited for in any order, by any thread, any number of times, or never: a work that is dropped
    costs nothing, and its operation ends all the same.

    Args:
        pending: What has to end, in the order in which it is waited for.
        keep: Tensors that have to live until the end.
        timeout: For each message; None is the communicator's own.

    Source: the torchcomms API.
    """

    _error: BaseException | None = None
    _failed: Failed | None = None
    _is_driven = _is_asked = _is_done = False
    _outputs: Sequence[torch.Tensor] = ()
    _results: Sequence[weakref.ref[torch.Tensor]] = ()

    def __init__(
        self,
        pending: Sequence[Pending | TorchWork] = (),
        keep: Sequence[torch.Tensor] = (),
        timeout: timedelta | None = None,
    ) -> None:
        self._pending = pending
        self._steps: list[Callable[[], Sequence[Pending | TorchWork]]] = []
        self._keep = keep
        self._timeout = timeout
        self._lock = threading.Lock()
        self._futures: list[torch.futures.Future[Any]] = []

    def followed_by(self, step: Callable[[], Sequence[Pending | TorchWork]]) -> TorchWork:
        """The same work with one more step: ``step`` runs inside ``wait`` and returns the messages to wait for then."""
        self._steps.append(step)
        return self

    def within(self, timeout: timedelta | None) -> TorchWork:
        """The same work with another time limit for each message; zero means the communicator's own."""
        self._timeout = timeout or None
        return self

    def reporting(self, failed: Failed, outputs: Sequence[torch.Tensor] = ()) -> TorchWork:
        """The same work; ``failed`` hears of an error, and futures give ``outputs``."""
        self._failed, self._outputs = failed, outputs
        return self

    def in_background(self) -> TorchWork:
        """The same work, which goes on and ends by itself, in a thread."""
        self._is_driven = True
        in_background(self._drive)
        return self

    def wait(self) -> None:
        """Block until the operation has completed; on a GPU, make the current stream wait for it.

        Raises:
            RuntimeError: The operation failed; every further ``wait`` raises the same error again.
        """
        if not self._is_done:
            with self._lock:
                self._finish()
            if self._futures:
                self._tell_futures()
            if self._error is not None:
                raise self._error

    def wait_blocking(self) -> None:
        """Block the CPU until the operation has completed; on a GPU, too."""
        devices = {tensor.device for tensor in self._outputs if tensor.is_cuda}
        self.wait()
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def is_completed(self) -> bool:
        """True if the operation has completed; it does so by itself if it was begun with ``async_op=True``."""
        if self._is_done or self._error is not None or not self._is_driven:
            return self._error is None and not self._steps and all(p.is_completed() for p in self._pending)
        if not self._is_asked and not self._lock.locked():  # it may stand in a queue behind one that takes long
            self._is_asked = True
            at_once(self._drive)
        return False

    def get_future(self) -> torch.futures.Future[Any]:
        """A future with the operation's outputs, which completes, or fails, when the operation does.

        Outputs that nobody holds any more when it has ended are left out.
        """
        future: torch.futures.Future[Any] = torch.futures.Future()
        self._futures.append(future)
        if self._is_done or self._error is not None:
            self._tell_futures()
        else:
            at_once(self._drive)
        return future

    def _drive(self) -> None:
        """Go on to the end, unless another thread is doing it already; errors stay for ``wait``."""
        if self._lock.acquire(blocking=False):
            try:
                with contextlib.suppress(BaseException):
                    self._finish()
            finally:
                self._lock.release()
        self._tell_futures()

    def _finish(self) -> None:
        """Wait for all messages and take all steps; the lock is held."""
        if self._is_done or self._error is not None:
            return
        try:
            self._drain()
            while self._steps:
                self._pending = self._steps.pop(0)()
                self._drain()
        except BaseException as error:
            self._error = error if self._failed is None else self._failed(error)
            if not isinstance(error, Exception):
                raise
        else:
            self._results = [weakref.ref(tensor) for tensor in self._outputs]
        self._pending = self._keep = self._outputs = ()
        self._is_done = self._error is None  # last: whoever sees it holds no lock

    def _drain(self) -> None:
        for pending in self._pending:
            if isinstance(pending, TorchWork):
                pending.within(self._timeout or pending._timeout).wait()
            else:
                pending.wait() if self._timeout is None else pending.wait(self._timeout)
        self._pending = ()

    def _tell_futures(self) -> None:
        while self._futures and (self._is_done or self._error is not None):
            with contextlib.suppress(IndexError):  # two threads may tell
                future = self._futures.pop()
                if self._error is None:
                    future.set_result([tensor for result in self._results if (tensor := result()) is not None])
                else:
                    future.set_exception(self._error)
