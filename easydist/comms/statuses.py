"""The operations that wait over gloo, as the ranks describe and compare them in their store.

The messages of operations that differ never meet, so both ranks wait. A rank that waits for a while writes its last
operations to the store, reads those of the others, and ends the wait if they differ. No message is sent for that, and
a rank that does not wait writes nothing.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from easydist.liveness.stored import decoded, in_store
from easydist.liveness.timed_store import TimedStore
from easydist.liveness.watchdog import watchdog
from easydist.shm.calls import EQUAL, NOT_BEGUN, UNKNOWN, Call, Dispute, Message
from easydist.transport.backends.c10d import Gloo
from easydist.transport.work import TorchWork

_PATIENCE = 4
"""The looks at a difference until a rank stops waiting for the descriptions of the others; there are four a second."""

_MOST = 64
"""The most asynchronous operations of which it is known whether they have ended."""

_FOUND = "different"
_FORM = {"calls": [(int, int, int, {str: int}, {str: int})], "messages": [(str, int, int, int, int)]}

Described = tuple[dict[int, tuple[Call, dict[str, int], dict[str, int]]], dict[tuple[str, int, int], tuple[int, int]]]
"""The collectives by their numbers, with the bytes to and from each rank; the messages by direction, peer, number."""


class Statuses:
    """The watch over the operations of one communicator that wait.

    Args:
        store: The store of the communicator.
        backend: Its backend.
        text_of: Makes the text of the error for a difference.
        busy: Holds the operation that has begun and that its caller still waits for.
    """

    def __init__(
        self, store: TimedStore, backend: Gloo, text_of: Callable[[Dispute], str], busy: Mapping[str, object]
    ) -> None:
        self._store, self._backend, self._text_of, self._busy = store, backend, text_of, busy
        self._works: deque[weakref.ref[TorchWork]] = deque(maxlen=_MOST)
        self._seen: object = None
        self._different: str | None = None
        self._told, self._looks = "", 0
        watchdog().look_regularly(self._look)

    def add(self, work: TorchWork) -> None:
        """Watch an asynchronous operation, too."""
        self._works.append(weakref.ref(work))

    def found(self) -> str | None:
        """Return the text of the error that a rank has found; None if there is none."""
        if self._different is None:
            with contextlib.suppress(RuntimeError):  # the store is gone
                text = self._store.get(_FOUND)
                self._different = None if text is None else text.decode()
        return self._different

    def _look(self) -> None:
        """Compare the operations if one has been waiting since the last look; end it if they differ."""
        last = self._backend.log[-1] if self._backend.log and self._is_waiting() else None
        if last is not None and last is self._seen and self._has_difference():
            self._backend.disconnect()
        self._seen = last

    def _is_waiting(self) -> bool:
        works = [work for ref in tuple(self._works) if (work := ref()) is not None]
        return bool(self._busy) or not all(work.has_ended for work in works)

    def _has_difference(self) -> bool:
        if (mine := _encoded(self._backend)) != self._told:
            self._store.set(f"calls/{self._backend.rank}", mine)
            self._told = mine
        if self.found() is None:
            known = {rank: told for rank in range(self._backend.size) if (told := self._of(rank)) is not None}
            dispute = _difference(known, self._backend.size)
            self._looks = 0 if dispute is None else self._looks + 1
            if dispute is None or (len(known) < self._backend.size and self._looks < _PATIENCE):
                return False
            self._store.set_first(_FOUND, self._text_of(dispute))
        return self.found() is not None

    def _of(self, rank: int) -> Described | None:
        text = self._store.get(key := f"calls/{rank}", rank)
        if text is None:
            return None
        told: Any = decoded(in_store(key), text, _FORM)
        return (
            {number: (Call(code, numel), sends, recvs) for number, code, numel, sends, recvs in told["calls"]},
            {(way, peer, number): (code, nbytes) for way, peer, number, code, nbytes in told["messages"]},
        )


def _encoded(backend: Gloo) -> str:
    log = [*backend.log]
    calls = [(one.key, *one.call, one.sends, one.recvs) for one in log if one.call[0] > 0]
    messages = [
        (way, peer, one.key, -one.call[0], nbytes)
        for one in log
        if one.call[0] < 0
        for way, sizes in (("to", one.sends), ("from", one.recvs))
        for peer, nbytes in sizes.items()
    ]
    return json.dumps({"calls": calls, "messages": messages})


def _difference(known: Mapping[int, Described], size: int) -> Dispute | None:
    """Return the first difference between the operations of the ranks."""
    for number in sorted({number for calls, _ in known.values() for number in calls}):
        told = {rank: calls[number] for rank, (calls, _) in known.items() if number in calls}
        first = next(iter(told.values()))[0]
        differs = any(_differ(first, call) for call, _, _ in told.values())
        message = None if differs or first.code & EQUAL else _mismatch(told)
        if differs or message is not None:
            return Dispute([_call(known, told, rank, number) for rank in range(size)], message)
    return _mismatched_message(known, size)


def _differ(one: Call, other: Call) -> bool:
    return one.code != other.code or bool(one.code & EQUAL and one.numel != other.numel)


def _call(known: Mapping[int, Described], told: Mapping[int, Sequence[Any]], rank: int, number: int) -> Call:
    if rank in told:
        call: Call = told[rank][0]
        return call
    is_past = rank in known and max(known[rank][0], default=0) > number
    return Call(UNKNOWN if is_past else NOT_BEGUN, 0)


def _mismatch(told: Mapping[int, tuple[Call, dict[str, int], dict[str, int]]]) -> Message | None:
    """Return the first message of a collective whose length is not what its receiver expects."""
    for sender, (_, sends, _) in told.items():
        for receiver, (_, _, recvs) in told.items():
            sent, awaited = sends.get(str(receiver), 0), recvs.get(str(sender), 0)
            if sender != receiver and sent != awaited:
                return Message(sender, receiver, sent, awaited)
    return None


def _mismatched_message(known: Mapping[int, Described], size: int) -> Dispute | None:
    for receiver, (_, messages) in known.items():
        for (way, sender, number), awaited in messages.items():
            sent = known[sender][1].get(("to", receiver, number)) if sender in known else None
            if way == "from" and sent is not None and sent != awaited:
                calls = [Call(0, 0)] * size
                calls[sender], calls[receiver] = Call(sent[0], 0), Call(awaited[0], 0)
                return Dispute(calls, Message(sender, receiver, sent[1], awaited[1]))
    return None
