"""Comparisons of operations over gloo: in the store of the ranks while they wait, or by headers before any data moves.

The messages of operations that differ never meet, so both ranks wait. A rank that waits for a while writes its last
operations to the store, reads those of the others, and ends the wait if they differ. No message is sent for that, and
a rank that does not wait writes nothing.

Ranks may also wait for one another in a circle, as in ``easydist.shm.cycles``. So a rank writes what it waits for, too,
unless another thread may begin operations; and once it sees a circle, it counts its looks there.

With ``hints={"check": "1"}`` a header goes before each operation, with its description.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from easydist.comms.failures import CommDisagreement
from easydist.liveness.stored import decoded, in_store
from easydist.liveness.timed_store import TimedStore
from easydist.liveness.watchdog import watchdog
from easydist.shm.calls import ABSENT, EQUAL, NOT_BEGUN, UNKNOWN, Description, Dispute, Mismatch
from easydist.shm.cycles import Looks, circle_of
from easydist.shm.progress import handles, is_alone
from easydist.transport.backends.c10d import KEPT, Gloo, Posted
from easydist.transport.described import GOES_ON, OWN, Described, described_message, text
from easydist.transport.work import TorchWork, wait

_PATIENCE = 4
"""The looks at a difference until a rank stops waiting for the descriptions of the others; there are four a second."""

_FOUND = "different"
_FORM = {
    "calls": [(int, int, int, {str: int}, {str: int})],
    "messages": [(str, int, int, int, int)],
    "wait": (int, int),
    "needs": [(int, str, int)],
    "looks": int,
}
_NO_WAIT = Description(0, 0)


class _Statement(NamedTuple):
    """The operations of a rank, and its wait, as it has written them."""

    calls: dict[int, tuple[Description, dict[str, int], dict[str, int]]]
    """Its collectives by their numbers, with the bytes to and from each rank."""
    messages: dict[tuple[str, int, int], tuple[int, int]]
    """The dtypes and bytes of its messages by direction, peer, number."""
    wait: Description
    """The operation for which it waits, if it begins nothing else before that has ended."""
    needs: list[tuple[int, str, int]]
    """The needs of this wait: the rank, and the direction and number of the message, or ``"call"`` and a number, that
    this rank has to begin."""
    looks: int
    """Its looks at a circle of which it is a part."""

    def last(self, what: str, peer: int) -> int | None:
        """Return the number of the last collective, or of the last message to or from a peer; None if unknown."""
        numbers = (
            [*self.calls] if what == "call" else [n for way, rank, n in self.messages if (way, rank) == (what, peer)]
        )
        is_whole = len(self.calls) + len(self.messages) < KEPT
        return max(numbers) if numbers else 0 if is_whole else None


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
        self._works: deque[tuple[weakref.ref[TorchWork], Posted | None]] = deque()
        self._seen: object = None
        self._different: str | None = None
        self._told, self._looks = "", 0
        self._circle = Looks()
        watchdog().look_regularly(self._look)

    def add(self, work: TorchWork) -> None:
        """Watch an asynchronous operation, too, which is the last that has begun."""
        while self._works and ((first := self._works[0][0]()) is None or first.has_ended):
            self._works.popleft()
        self._works.append((weakref.ref(work), self._last()))

    def finish(self) -> None:
        """Wait until the collectives under way have ended, each within its time limit."""
        for ref, posted in tuple(self._works):
            if posted is not None and posted.call[0] > 0 and (work := ref()) is not None:
                with contextlib.suppress(Exception):  # its own wait raises it
                    work.wait()

    def found(self) -> str | None:
        """Return the text of the error that a rank has found; None if there is none."""
        if self._different is None:
            with contextlib.suppress(RuntimeError):  # the store is gone
                text = self._store.get(_FOUND)
                self._different = None if text is None else text.decode()
        return self._different

    def _look(self) -> None:
        """Compare the operations if one has been waiting since the last look; end it if they differ."""
        last = self._last() if self._is_waiting() else None
        if last is not None and last is self._seen and self._has_difference():
            self._backend.disconnect()
        self._seen = last

    def _last(self) -> Posted | None:
        return self._backend.log[-1] if self._backend.log else None

    def _is_waiting(self) -> bool:
        works = [work for ref, _ in tuple(self._works) if (work := ref()) is not None]
        return bool(self._busy) or not all(work.has_ended for work in works)

    def _awaited(self) -> Posted | None:
        """Return the last part of the operation that has to end before this rank begins another one."""
        if self._busy:
            return self._last()
        for thread, handle in handles.copy().items():
            for ref, posted in tuple(self._works):
                if handle is ref() and is_alone(thread):
                    return posted
        return None

    def _write(self) -> None:
        mine = _encoded(self._backend, self._awaited(), self._circle.count)
        if mine != self._told:
            self._store.set(f"calls/{self._backend.rank}", mine)
            self._told = mine

    def _has_difference(self) -> bool:
        self._write()
        if self.found() is None:
            known = {rank: told for rank in range(self._backend.size) if (told := self._of(rank)) is not None}
            if (dispute := self._circle_in(known)) is not None:
                self._store.set_first(_FOUND, self._text_of(dispute))
                return self.found() is not None
            dispute = _difference(known, self._backend.size)
            self._looks = 0 if dispute is None else self._looks + 1
            if dispute is None or (len(known) < self._backend.size and self._looks < _PATIENCE):
                return False
            self._store.set_first(_FOUND, self._text_of(dispute))
        return self.found() is not None

    def _circle_in(self, known: Mapping[int, _Statement]) -> Dispute | None:
        """Return the waits of a circle of which this rank is a part, once all of its ranks have looked at it again."""
        ranks = circle_of(self._backend.rank, self._backend.size, lambda one, other: _waits_for(known, one, other))
        if not self._circle.are_enough(ranks, {rank: (told.needs, told.looks) for rank, told in known.items()}):
            return None
        calls = [known[rank].wait if rank in ranks else Description(ABSENT, 0) for rank in range(self._backend.size)]
        return Dispute(calls, None)

    def _of(self, rank: int) -> _Statement | None:
        text = self._store.get(key := f"calls/{rank}", rank)
        if text is None:
            return None
        told: Any = decoded(in_store(key), text, _FORM)
        return _Statement(
            {number: (Description(code, numel), sends, recvs) for number, code, numel, sends, recvs in told["calls"]},
            {(way, peer, number): (code, nbytes) for way, peer, number, code, nbytes in told["messages"]},
            Description(*told["wait"]),
            [*map(tuple, told["needs"])],
            told["looks"],
        )


def _waits_for(known: Mapping[int, _Statement], rank: int, other: int) -> bool:
    """True if a rank waits for something that another one has not begun."""
    if rank not in known or other not in known:
        return False
    needed = [(what, number) for peer, what, number in known[rank].needs if peer == other]
    return any((last := known[other].last(what, rank)) is not None and last < number for what, number in needed)


def _needs(parts: Sequence[Posted]) -> list[tuple[int, str, int]]:
    """Return what the parts of an operation need from other ranks, see ``_Statement``.

    Data that it receives is needed from all senders; of several messages that it sends, some may have gone.
    """
    is_call = parts[0].call[0] > 0
    recvs = [(peer, "call" if is_call else "to", part.key) for part in parts for peer in part.recvs]
    sends = [(peer, "call" if is_call else "from", part.key) for part in parts for peer in part.sends]
    return recvs or (sends if len(sends) == 1 else [])


def _wait(part: Posted) -> Description:
    """Return the description of an operation of which this is a part."""
    if part.call[0] > 0:
        return Description(*part.call)
    name, sizes = ("recv", part.recvs) if part.recvs else ("send", part.sends)
    ((peer, nbytes),) = sizes.items()
    return Description(*described_message(name, -part.call[0], nbytes, peer))


def _encoded(backend: Gloo, awaited: Posted | None, looks: int) -> str:
    log = [*backend.log]
    parts = [] if awaited is None else [one for one in log if one.batch is awaited.batch]
    needing = next((part for part in parts if part.recvs), awaited)
    calls = [(one.key, *one.call, one.sends, one.recvs) for one in log if one.call[0] > 0]
    messages = [
        (way, peer, one.key, -one.call[0], nbytes)
        for one in log
        if one.call[0] < 0
        for way, sizes in (("to", one.sends), ("from", one.recvs))
        for peer, nbytes in sizes.items()
    ]
    wait, needs = (_NO_WAIT, []) if needing is None or not parts else (_wait(needing), _needs(parts))
    return json.dumps({"calls": calls, "messages": messages, "wait": wait, "needs": needs, "looks": looks})


def _difference(known: Mapping[int, _Statement], size: int) -> Dispute | None:
    """Return the first difference between the operations of the ranks."""
    for number in sorted({number for told in known.values() for number in told.calls}):
        told = {rank: of.calls[number] for rank, of in known.items() if number in of.calls}
        first = next(iter(told.values()))[0]
        differs = any(_differ(first, call) for call, _, _ in told.values())
        mismatch = None if differs or first.code & EQUAL else _mismatch(told)
        if differs or mismatch is not None:
            return Dispute([_call(known, told, rank, number) for rank in range(size)], mismatch)
    return _mismatched_message(known, size)


def _differ(one: Description, other: Description) -> bool:
    return one.code != other.code or bool(one.code & EQUAL and one.numel != other.numel)


def _call(known: Mapping[int, _Statement], told: Mapping[int, Sequence[Any]], rank: int, number: int) -> Description:
    if rank in told:
        call: Description = told[rank][0]
        return call
    is_past = rank in known and max(known[rank].calls, default=0) > number
    return Description(UNKNOWN if is_past else NOT_BEGUN, 0)


def _mismatch(told: Mapping[int, tuple[Description, dict[str, int], dict[str, int]]]) -> Mismatch | None:
    """Return the first message of a collective whose length is not what its receiver expects."""
    for sender, (_, sends, _) in told.items():
        for receiver, (_, _, recvs) in told.items():
            sent, awaited = sends.get(str(receiver), 0), recvs.get(str(sender), 0)
            if sender != receiver and sent != awaited:
                return Mismatch(sender, receiver, sent, awaited)
    return None


def _mismatched_message(known: Mapping[int, _Statement], size: int) -> Dispute | None:
    for receiver, told in known.items():
        for (way, sender, number), awaited in told.messages.items():
            sent = known[sender].messages.get(("to", receiver, number)) if sender in known else None
            if way == "from" and sent is not None and sent != awaited:
                calls = [Description(0, 0)] * size
                calls[sender], calls[receiver] = Description(sent[0], 0), Description(awaited[0], 0)
                return Dispute(calls, Mismatch(sender, receiver, sent[1], awaited[1]))
    return None


def asks_for_headers(hints: Mapping[str, str] | None) -> bool | None:
    """Return what the hints say about headers; None if they say nothing.

    Example:
        >>> asks_for_headers({"check": "1"}), asks_for_headers({"check": "0"})
        (True, False)
        >>> asks_for_headers({"other": "1"}), asks_for_headers(None)
        (None, None)
    """
    return hints["check"] == "1" if hints and "check" in hints else None


def compare_headers(backend: Gloo, call: Described, peer: int | None, limit: timedelta | None, who: str) -> None:
    """Exchange the description of an operation with the ranks that take part in it, and wait for theirs.

    Args:
        backend: The backend.
        call: The description.
        peer: The other rank of a message; None for a collective.
        limit: The time limit of the wait.
        who: The communicator.

    Raises:
        CommDisagreement: They differ; all ranks raise the same error before any data moves.
    """
    mine = torch.tensor(call, dtype=torch.int64)
    if peer is not None:
        calls = [Description(ABSENT, 0)] * backend.size
        theirs = torch.empty_like(mine)
        wait(backend.batch([(mine, peer)], [(theirs, peer)]), limit)
        one, other = calls[backend.rank], calls[peer] = Description(*call), Description(*theirs.tolist())
        differs = not _are_of_one_message(one, other)
    else:
        backend.call = call
        backend.announce()
        backend.call = OWN
        rows = mine.new_empty(backend.size, 2)
        wait(backend.all_gather_single(rows.view(-1), mine), limit)
        calls = [Description(*row) for row in rows.tolist()]
        differs = any(_differ(calls[0], one) for one in calls)
    if differs:
        raise CommDisagreement(text(Dispute(calls, None), f"{who} {GOES_ON}"))


_NAME, _DTYPE = 0x3F, 0x3FC0
"""The bits of a code that stand for the name of the operation, and for the dtype."""


def _are_of_one_message(one: Description, other: Description) -> bool:
    """True if one of two ranks sends what the other one receives."""
    same_data = one.code & _DTYPE == other.code & _DTYPE and one.numel == other.numel
    return same_data and one.code & _NAME != other.code & _NAME
