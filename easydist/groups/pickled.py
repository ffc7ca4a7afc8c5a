"""Pickles of objects that belong to one process: there they stand for the same object, and nowhere else for any."""

from __future__ import annotations

import os
import socket
import uuid
import weakref
from collections.abc import Callable
from typing import Any

from easydist.liveness.texts import process

_alive: weakref.WeakValueDictionary[str, OfThisProcess] = weakref.WeakValueDictionary()


class OfThisProcess:
    """An object that a pickle or a copy in the same process stands for, as ``torch.compile`` and ``deepcopy`` need it.

    Example:
        >>> import copy, pickle
        >>> from easydist.comms import Solo, TorchComm
        >>> comm = TorchComm(Solo(), "main")
        >>> copy.deepcopy([comm])[0] is pickle.loads(pickle.dumps(comm)) is comm
        True
    """

    _key = ""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        if not self._key:
            self._key = uuid.uuid4().hex
        _alive[self._key] = self
        return _found, (self._key, type(self).__name__, process(os.getpid(), socket.gethostname()))


def _found(key: str, kind: str, where: str) -> OfThisProcess:
    """Return the object again.

    Raises:
        RuntimeError: It belongs to another process, or is gone.
    """
    if (found := _alive.get(key)) is None:
        raise RuntimeError(f"this {kind} belongs to {where}, and may be gone there: make one here, on all of its ranks")
    return found
