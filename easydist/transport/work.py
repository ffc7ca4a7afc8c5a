"""Operations under way: whatever can be waited for is ``Pending``, and a ``TorchWork`` is made of such parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch


class Pending(Protocol):
    """A message or an operation under way; ``torch.distributed``'s own ``Work`` is one, and so is a ``TorchWork``."""

    def wait(self, timeout: timedelta = ...) -> object:
        """Wait for the end, or raise."""

    def is_completed(self) -> bool:
        """True if ``wait`` would return at once."""


class TorchWork:
    """Tells when an operation has completed.

    Args:
        pending: What has to end, in the order in which it is waited for.
        keep: Tensors that have to live until the end.
        timeout: For each message; None is the communicator's own.
    """

    def __init__(
        self,
        pending: Sequence[Pending] = (),
        keep: Sequence[torch.Tensor] = (),
        timeout: timedelta | None = None,
    ) -> None:
        self._pending = pending
        self._steps: list[Callable[[], Sequence[Pending]]] = []
        self._keep = keep
        self._timeout = timeout
        self._error: BaseException | None = None

    def followed_by(self, step: Callable[[], Sequence[Pending]]) -> TorchWork:
        """The same work with one more step: ``step`` runs inside ``wait`` and returns the messages to wait for then."""
        self._steps.append(step)
        return self

    def within(self, timeout: timedelta | None) -> TorchWork:
        """The same work with another time limit for each message; zero means the communicator's own."""
        self._timeout = timeout or None
        return self

    def wait(self, timeout: timedelta | None = None) -> None:
        """Block until the operation has completed; on a GPU, make the current stream wait for it.

        Args:
            timeout: As for ``within``; None leaves what was set before.

        Raises:
            RuntimeError: The operation failed; every further ``wait`` raises the same error again.
        """
        if self._error is not None:
            raise self._error
        if timeout is not None:
            self.within(timeout)
        try:
            self._drain()
            while self._steps:
                self._pending = self._steps.pop(0)()
                self._drain()
        except BaseException as error:
            self._error = error
            raise
        self._keep = ()

    def _drain(self) -> None:
        for pending in self._pending:
            pending.wait() if self._timeout is None else pending.wait(self._timeout)
        self._pending = ()

    def is_completed(self) -> bool:
        """True if the operation has completed; an operation of several steps moves on inside ``wait`` only."""
        return self._error is None and not self._steps and all(p.is_completed() for p in self._pending)
