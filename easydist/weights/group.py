"""Groups of processes beside torch's default group, each with its own store and connections.

A process can be in any number of them, with any other processes, beside a world of its own. After the loss of members,
the next generation of the group is simply another group.
"""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
from torch.distributed import Store

from easydist.errors import CollectiveTimeout, DisagreementError
from easydist.groups.communicators import Communicators
from easydist.groups.connecting import gloo_group
from easydist.groups.rendezvous import Rendezvous
from easydist.liveness import texts
from easydist.liveness.timed_store import TimedStore
from easydist.transport.backends.c10d import Gloo
from easydist.transport.comm import Collectives

_ABANDONED = "abandoned"
"""The key that is set once a member has given up waiting for others."""

_REFUSED = "refused"
"""The key of the text of a member that was told another number of members than rank 0."""

_LOST = (
    "The group cannot continue without it. Replace the process, and make the group again: call create_group in the "
    "driver, or init_group on all members."
)
_ADVICE = texts.Advice(
    "Each member has to call init_group with its rank; a process that has ended has to be replaced first.",
    "Make the group again on all members.",
    "make this group again on all members",
    _LOST,
)

CONNECT = 5.0
"""Seconds within which an existing store answers."""


class Participant(NamedTuple):
    """A process in a group, as the others see it.

    Attributes:
        rank: The rank, from 0.
        size: The number of processes in the group.
        host: This process's own address, where the others can reach it.
    """

    rank: int
    size: int
    host: str


class PrivateGroup:
    """This process in one generation of a group.

    Args:
        name: The name of the group.
        store: A store for the members of the group alone.
        participant: This process in the group.
        deadline: The time by which all members must have joined, on the clock of ``time.monotonic``.
        timeout: The seconds that a call in the group may take.
        wait: A function to call while members are missing or connect. It may raise to give up.

    Raises:
        CollectiveTimeout: Ranks are missing; the text and ``missing`` name them.
        DisagreementError: A member was told another number of members.
        PeerLostError: A member that had joined has ended, or the store has.

    Attributes:
        comm: The communicator that verbs accept as ``group=``.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        participant: Participant,
        deadline: float,
        timeout: float,
        wait: Callable[[], None],
    ) -> None:
        self._store, what, (rank, size, host) = store, f"group {name!r}", participant
        left = timedelta(seconds=max(0.0, deadline - time.monotonic()))
        look = wait if rank else functools.partial(_look, TimedStore(store), wait)
        with Rendezvous(store, rank, size, left, name=what, advice=_ADVICE, look=look) as rendezvous:
            try:
                rendezvous.introduce(False)
            except (CollectiveTimeout, DisagreementError) as error:
                TimedStore(store).set(_ABANDONED, "")
                rendezvous.monitor.give_up(error)  # to those that have come: all of them raise it
                rendezvous.monitor.is_awaited = False  # so this rank's record stays, by which they find the report
                raise
            own, limit, monitor = f"{name}/{secrets.token_hex(4)}", timedelta(seconds=timeout), rendezvous.monitor
            self._group = gloo_group(rendezvous.store, rank, size, own, limit, monitor, rendezvous.check, hostname=host)
        self.comm = Collectives(Gloo(self._group, torch.device("cpu"), "gloo"), name)
        self._communicators = Communicators(self.comm, self._group)
        self._communicators.monitor.advice = texts.RECONNECTS._replace(lost=_LOST)
        self.comm.communicators = self._communicators

    def close(self) -> None:
        """Leave the group, and release connections, shared memory and store."""
        self._communicators.leave()
        self._communicators.stop()
        self._communicators.let_go()
        self.comm.communicators = None
        del self._communicators, self._group, self._store


def is_given_up(store: Store) -> bool:
    """True if a member has given up waiting for the others."""
    return TimedStore(store).check([_ABANDONED])


def check_size(name: str, store: Store, participant: Participant, size: int) -> None:
    """Check that a member was told the same number of members as rank 0, which waits for it; all members raise.

    Args:
        name: The name of the group.
        store: The store of the group.
        participant: The member.
        size: The number that rank 0 was told.

    Raises:
        DisagreementError: It is another one.
    """
    if participant.size == size:
        return
    text = (
        f"group {name!r}: ranks disagree on the number of members\n  rank 0: {size}   rank {participant.rank}: "
        f"{participant.size}\nAll members have to call init_group with the same world_size."
    )
    TimedStore(store).set(_REFUSED, text)
    raise DisagreementError(text)


def _look(store: TimedStore, wait: Callable[[], None]) -> None:
    wait()
    if (text := store.get(_REFUSED)) is not None:
        raise DisagreementError(text.decode())
