"""Reconnecting a group after a failure: its ranks meet in the group's store, and make a gloo group there.

gloo cannot be interrupted while it connects, and cannot tell which ranks are missing. So the ranks first wait for one
another in the store, where the monitor can end the wait, and gloo connects once all of them are there.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.distributed import PrefixStore, Store

from easydist.errors import PeerLostError
from easydist.liveness import texts
from easydist.liveness.events import Announced, Do, Replies, Step
from easydist.liveness.log import Log, pause
from easydist.liveness.monitor import Monitor
from easydist.liveness.peer import Peer
from easydist.liveness.status import WHO
from easydist.liveness.stored import decoded, in_store
from easydist.liveness.timed_store import TimedStore

T = TypeVar("T")


def reconnect(store: TimedStore, monitor: Monitor, connect: Callable[[Store, float], T]) -> T:
    """Make connections once all ranks have come to the same call.

    Args:
        store: The group's store, with a prefix that only easydist uses; the same in every attempt, so that no more than
            one thread waits for it if it does not answer.
        monitor: The group's monitor; its call takes the highest number that any rank has reached.
        connect: Makes the connections (``groups/connecting.py``), in a store for this alone and within a number of
            seconds.

    Raises:
        EasydistError: Ranks are missing (see ``Monitor.guard``), or one has left again.
    """
    broken = monitor.begin_reconnecting()
    try:
        met = _meet(store, monitor)
        place = PrefixStore(_place(monitor.phase, met), store.plain)
        made = connect(place, monitor.connect_limit(time.monotonic()))  # almost at once, unless one has left again
        monitor.drop_log(_name_of_log(monitor.phase))
        monitor.end_meeting()  # inside try: from now on Ctrl-C ends a call of connected ranks
        broken = None
        return made
    except BaseException as error:
        monitor.ended_by(error)
        raise
    finally:
        monitor.broken = monitor.broken or broken


def _place(phase: int, met: Sequence[Announced]) -> str:
    """Return the prefix under which these ranks connect; ranks that have had other meetings get another."""
    meetings = hashlib.blake2b(repr([one.meetings for one in met]).encode(), digest_size=8).hexdigest()
    return f"{phase}/{met[0].at}/{meetings}"


def _meet(store: TimedStore, monitor: Monitor) -> Sequence[Announced]:
    """Wait for all ranks, and return their announcements: the last call that any of them has reached."""
    try:
        return _agree_on_call(store, monitor)
    except RuntimeError as error:  # from the store: the monitor raises no RuntimeError
        text = texts.without_store(monitor.operation)
        monitor.give_up(PeerLostError(text))
        raise PeerLostError(text) from error


def _agree_on_call(store: TimedStore, monitor: Monitor) -> Sequence[Announced]:
    """Carry out the steps of the meeting (``GroupProtocol.meeting``)."""
    steps, began = monitor.meeting(), time.monotonic()
    step = next(steps)
    try:
        while True:
            step = steps.send(_take(step, store, monitor, began))
    except StopIteration as end:
        met: Sequence[Announced] = end.value
        return met


def _take(step: Step, store: TimedStore, monitor: Monitor, began: float) -> Replies | None:
    if step.do is Do.ASK:
        return _ask(store, step.ranks, monitor)
    if step.do is Do.ANNOUNCE:
        _here(monitor).append(store, monitor.rank, json.dumps(step.told))
        store.set(f"{monitor.phase}/begun", "")
    elif step.do is Do.PAUSE:
        time.sleep(pause(monitor.size, time.monotonic() - began))
    else:
        _ACTIONS[step.do](monitor, step)
    return None


def _here(monitor: Monitor) -> Log:
    """Return the log of the announcements of this phase."""
    return monitor.log(_name_of_log(monitor.phase))


def _name_of_log(phase: int) -> str:
    return f"{phase}/here"


def _ask(store: TimedStore, ranks: Sequence[int], monitor: Monitor) -> Replies:
    told, peers = _here(monitor).last(store), monitor.peers
    where = in_store(_name_of_log(monitor.phase))
    announced = {rank: _announced(where, told[rank]) for rank in ranks if rank in told}
    if unknown := [rank for rank in announced if peers[rank].pid is None]:
        who = monitor.log(WHO).last(store)
        # So that their end is noticed before the ranks have met.
        peers |= {rank: Peer(rank, who[rank]) for rank in unknown if rank in who}
    return Replies(announced, store.check([f"{monitor.phase + 2}/begun"]))


def _announced(where: str, text: bytes) -> Announced:
    at, meetings, partner, turns = decoded(where, text, (float, int, int | None, [(int, int, int | None)]))
    return Announced(at, meetings, partner, tuple((rank, since, before) for rank, since, before in turns))


_ACTIONS: dict[Do, Callable[[Monitor, Step], None]] = {
    Do.GUARD: lambda monitor, step: monitor.guard(step.ranks),
    Do.LISTEN: lambda monitor, _: monitor.check_reports(),
    Do.NOTICE: lambda monitor, _: monitor.sync_signals(),
    Do.GIVE_UP: lambda monitor, _: monitor.give_up_for_others(),
    Do.MOVE: lambda monitor, _: monitor.move(),
}
