"""Shared memory for the ranks of each host: the first of them creates it, and the others attach it.

The ranks agree on it through an ``Exchange``: an all-gather if they are connected already, or the group's store while
the group is being made.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import logging
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from easydist import settings
from easydist.errors import RemoteError, WireError
from easydist.liveness import keepalive, signed
from easydist.liveness.monitor import Monitor
from easydist.liveness.page import own_page
from easydist.liveness.peer import RECORD_NBYTES, Peer, by_host, host_id, record
from easydist.liveness.stored import decoded
from easydist.shm.segment import Segment
from easydist.shm.streams import Guard
from easydist.transport.backend import Backend
from easydist.transport.backends.shm import Shm
from easydist.transport.backends.solo import Solo
from easydist.transport.comm import Collectives

Hosts = Sequence[Sequence[int]]
"""The ranks of each host, ascending; the hosts by their lowest ranks."""

Exchange = Callable[[bytes], Sequence[bytes]]
"""A function that sends a message of at most ``RECORD_NBYTES``, and returns all ranks' messages, padded with spaces."""

_log = logging.getLogger("easydist")


def is_wanted() -> bool:
    """True if this process uses shared memory; ``EASYDIST_SHM=0`` turns it off.

    A system without nameless files cannot share memory. A process without a page must not: ranks that wait for it in
    shared memory could not see that it has ended, whereas gloo's connections break.
    """
    is_asked: bool = settings.read("EASYDIST_SHM")
    return is_asked and hasattr(os, "O_TMPFILE") and own_page() is not None


def all_gather(control: Collectives, mine: bytes, timeout: timedelta | None = None) -> list[bytes]:
    """Exchange messages over a communicator of the group."""
    rows = torch.empty((control.get_size(), RECORD_NBYTES), dtype=torch.uint8, device="cpu")
    message = bytearray(mine.ljust(RECORD_NBYTES)[:RECORD_NBYTES])
    control.all_gather_single(rows, torch.frombuffer(message, dtype=torch.uint8), async_op=False, timeout=timeout)
    return [row.numpy().tobytes() for row in rows]


def introduce(exchange: Exchange, monitor: Monitor, shares: bool, kind: type[Peer] = Peer) -> Hosts:
    """Exchange the records of all ranks, which identify their processes.

    Args:
        exchange: An exchange among all ranks of the group.
        monitor: The group's monitor, which gets its ``peers`` here.
        shares: True if this process would use shared memory.
        kind: The class of the peers.

    Returns:
        The ranks that may share memory, by host; attaching has to prove it.

    Raises:
        ValueError: A variable of this process is malformed (``settings``).
        RemoteError: A variable of another rank is; the text is the same on every rank.
        WireError: The ranks have different job keys; the text is the same on every rank.
    """
    records = exchange(record(own_page(), monitor.entry, shares))
    monitor.describe(hashlib.blake2b(b"".join(records), digest_size=8).hexdigest())  # every rank has the same records
    monitor.peers = {rank: kind(rank, records[rank]) for rank in monitor.peers}
    if far := {one for peer in monitor.peers.values() if peer.host_id != host_id() for one in peer.addresses}:
        keepalive.watch_hosts(far)  # a group that was adopted has been connected before
    _check_variables(monitor)
    _check_keys(monitor)
    return by_host(records)


def _check_variables(monitor: Monitor) -> None:
    """Check that no rank has a malformed variable; if no rank has, one rank of each host warns of unknown names."""
    own = settings.fault()
    malformed = {rank: peer.malformed for rank, peer in monitor.peers.items()} | {monitor.rank: own}
    if rows := [f"  rank {r}: {settings.text_of(text)}" for r, text in sorted(malformed.items()) if text]:
        monitor.is_awaited = False  # every rank raises here
        kind = ValueError if own else RemoteError
        raise kind("\n".join([f"{monitor.operation}: an environment variable is malformed", *rows]))
    if all(peer.host_id != host_id() for rank, peer in monitor.peers.items() if rank < monitor.rank):
        settings.warn_of_unknown()


def _check_keys(monitor: Monitor) -> None:
    """Check that all ranks have the same job key, or none."""
    found = {rank: peer.fingerprint for rank, peer in monitor.peers.items()} | {monitor.rank: signed.seal().fingerprint}
    hosts = [peer.host for _, peer in sorted(monitor.peers.items())]
    hosts.insert(monitor.rank, socket.gethostname())
    if rows := signed.difference(found, hosts):
        monitor.is_awaited = False  # every rank raises here
        raise WireError(
            f"{monitor.operation}: the ranks have different job keys\n{rows}\n"
            "Give all ranks the same key: easydist run --job-key FILE"
        )


def attach(control: Collectives, monitor: Monitor, hosts: Hosts, slots: Sequence[int]) -> tuple[Backend, Hosts]:
    """Share memory with the ranks of this host, as far as that is possible.

    A rank that cannot attach counts as a host of its own. If the first rank of a host cannot create the memory, all
    ranks of that host count as separate hosts.

    Args:
        control: A communicator of the group.
        monitor: The group's monitor.
        hosts: The ranks that may share memory, by host.
        slots: As for ``share``.

    Returns:
        The backend among the ranks that share memory with this one, and the ranks that share memory, by host.

    Cost: two all-gathers for each attempt; there is one more attempt each time that a rank cannot attach.
    """
    exchange, rank = functools.partial(all_gather, control), control.get_rank()
    while any(len(ranks) > 1 for ranks in hosts):
        guard = monitor.guard if len(hosts) == 1 else functools.partial(_guard, monitor)
        backend, failures = share(exchange, rank, hosts, slots, guard)
        if failures[rank]:
            _warn(failures[rank])
        if not any(failures):
            return backend or Solo(), hosts
        hosts = _proved(hosts, failures)
    return Solo(), hosts


def share(
    exchange: Exchange, rank: int, hosts: Hosts, slots: Sequence[int], guard: Guard
) -> tuple[Shm | None, list[str]]:
    """Try once to share memory on every host; called by all ranks.

    Args:
        exchange: An exchange among all ranks of the group.
        rank: The rank of this process in the group.
        hosts: The ranks to share memory, by host.
        slots: The sizes to try, in bytes that a rank can publish at once; the first that fits is used.
        guard: The guard of waits in the memory; called with ranks of this host.

    Returns:
        The backend among the ranks of this host, or None if there is none or this rank is alone; and for each rank of
        the group the reason why it failed, empty if it did not.
    """
    here = next(ranks for ranks in hosts if rank in ranks)
    backend, segment, slot, failure = None, None, 0, ""
    if len(here) > 1 and rank == here[0]:
        segment, slot, failure = _create(rank, len(here), slots)
    told = exchange(json.dumps([segment.name if segment else "", slot]).encode())[here[0]]
    name, slot = decoded(f"the message of rank {here[0]}", told, (str, int))
    if name:
        try:
            memory = segment or Segment.attach(name, Shm.nbytes(len(here), slot))
            backend = Shm(memory, here.index(rank), len(here), guard)
        except (OSError, ValueError) as error:
            failure = f"rank {rank} cannot attach the memory of rank {here[0]} ({error})"
    failures = exchange(failure.encode())
    if segment is not None:  # every rank that can has attached by now
        segment.unlink()
    return backend, [text.decode(errors="replace").strip() for text in failures]


def _create(rank: int, size: int, slots: Sequence[int]) -> tuple[Segment | None, int, str]:
    for slot in slots:
        try:
            return Segment.create(Shm.nbytes(size, slot)), slot, ""
        except OSError as error:
            reason = error
    return None, 0, f"rank {rank} has no room for {Shm.nbytes(size, slots[-1])} bytes in /dev/shm ({reason})"


def _proved(hosts: Hosts, failures: Sequence[str]) -> Hosts:
    found: list[list[int]] = []
    for ranks in hosts:
        together = [] if failures[ranks[0]] else [r for r in ranks if not failures[r]]
        found += [together, *[[r] for r in ranks if r not in together]]
    return sorted(ranks for ranks in found if ranks)


def _guard(monitor: Monitor, ranks: Sequence[int], waited: float) -> None:
    """Guard a wait for all ranks: the awaited ranks of this host may themselves be waiting for another host."""
    monitor.guard(list(monitor.peers), waited, is_exact=False)


@functools.cache
def _warn(reason: str) -> None:
    is_full = os.strerror(errno.ENOSPC) in reason
    _log.warning(
        "easydist: %s; the ranks of this host use gloo, which is slower. %s EASYDIST_SHM=0 to turn off shared memory "
        "and this warning.",
        reason,
        "In a container, give /dev/shm more room (docker run --shm-size=1g), or set" if is_full else "Set",
    )
