"""Errors of failed operations: ``RuntimeError``, as in torchcomms, with the ranks that caused them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta

from torch.distributed import DistStoreError

from easydist.errors import (
    CollectiveTimeout,
    DisagreementError,
    EasydistError,
    LeftOutError,
    PeerLostError,
    RemoteError,
)
from easydist.liveness import keepalive
from easydist.liveness.peer import Peer
from easydist.liveness.report import INTERRUPT

_GRACE = 1.0
"""Seconds to wait for the end of a process whose connection broke."""

_SHOWN = 8
"""The most processes that a text describes."""

BROKEN = "is broken. recover() makes a new one of the ranks that are left."
BROKEN_WRAPPED = "is broken. Make a new one; over a process group, wrap what easydist.recover(group=...) returns."
UNMADE = "The communicator was not created."


class CommDisagreement(DisagreementError, RuntimeError):
    """The ranks called different operations, or one with dtypes, sizes, roots or reductions that do not match."""


class CommTimeout(CollectiveTimeout, RuntimeError):
    """Some ranks did not join an operation in time."""


class CommPeerLost(PeerLostError, RuntimeError):
    """A rank's process ended, or its connection broke, while an operation waited for it."""


class CommLeftOut(LeftOutError, RuntimeError):
    """The survivors have created a communicator without this rank."""


class CommRemoteError(RemoteError, RuntimeError):
    """Another rank was interrupted, or has failed, while an operation waited for it."""


def explained(
    error: BaseException, what: str, limit: timedelta, peers: Sequence[Peer], state: str
) -> CommTimeout | CommPeerLost | CommRemoteError | RuntimeError:
    """Return the error that explains why an operation failed.

    Args:
        error: The backend's error.
        what: The operation and its communicator.
        limit: The time limit of the operation.
        peers: The other ranks, as far as they are known.
        state: What has become of the communicator, for the text.
    """
    # Of a lost rank the first line: the monitor's next ones are about the last call that it has seen, new_comm.
    text = str(error).partition("\n")[0] if isinstance(error, PeerLostError) else str(error)
    why, broke = f"{state} ({text})", "onnection" in str(error)
    if isinstance(error, PeerLostError | RemoteError):
        return _known(error, what, why, peers)
    gone = _gone(peers, broke and not isinstance(error, CollectiveTimeout))
    if interrupted := [peer.rank for peer in gone if _was_interrupted(peer)]:
        return CommRemoteError(f"{what}: rank {interrupted[0]} was interrupted. {why}", rank=interrupted[0])
    if gone:
        return lost(f"{what}: {named(gone)} has {how(gone[0])}. {why}", gone)
    waited = getattr(error, "peer", None)
    if isinstance(error, CollectiveTimeout) or is_late(error):
        missing = getattr(error, "missing", ()) or (() if waited is None else (waited,))
        whom = f"rank {', '.join(map(str, missing))} did not come" if missing else "not all ranks came"
        within = "in time for another rank" if _is_reported(error) else f"within {limit.total_seconds():g} s"
        known = conditions(peer for peer in peers if peer.rank in missing)
        late = CommTimeout(f"{what}: timed out; {whom} {within}{known}. {why}")
        late.missing = missing
        return late
    whom = "" if waited is None else f" in the exchange with rank {waited}"
    return (CommPeerLost if broke else RuntimeError)(f"{what}: failed{whom}. {why}")


def conditions(peers: Iterable[Peer], even_if_well: bool = True) -> str:
    """Return what the system knows of the processes of some ranks, for a text."""
    found = [text for peer in peers if (text := peer.condition(even_if_well))]
    return f": {'; '.join(found[:_SHOWN])}" if found else ""


def _known(
    error: PeerLostError | RemoteError, what: str, why: str, peers: Sequence[Peer]
) -> CommPeerLost | CommRemoteError:
    """Return the error of a communicator for one in which a monitor names the rank."""
    who = "another rank" if error.rank is None else f"rank {error.rank}"
    if isinstance(error, PeerLostError):
        who = "a rank" if error.rank is None else f"{who} (process {error.pid} on {error.host})"
        known = [peer for peer in peers if peer.rank == error.rank and (peer.is_gone() or peer.has_left())]
        fate = f"has {how(known[0])}" if known else "is lost"  # on another host: it may live
        found: CommPeerLost | CommRemoteError = CommPeerLost(f"{what}: {who} {fate}. {why}")
    else:
        found = CommRemoteError(f"{what}: {who} {'was interrupted' if error.is_interrupt else 'has given up'}. {why}")
    vars(found).update(vars(error))
    return found


def later(text: str, first: BaseException) -> RuntimeError:
    """Return the error of an operation that cannot complete because an earlier one has failed.

    Args:
        text: The text about this operation.
        first: The error of the earlier one. The result has its type and its facts, so that the same handler fits both.
    """
    error = RuntimeError(text)
    if isinstance(first, RuntimeError) and isinstance(first, EasydistError):
        error = type(first)(text)
        vars(error).update(vars(first))
    error.__cause__ = first
    return error


def _is_reported(error: BaseException) -> bool:
    return isinstance(error, CollectiveTimeout) and error.is_reported


def is_late(error: BaseException) -> bool:
    """True for gloo's and a store's errors about time limits."""
    text = str(error).replace(keepalive.TEXT, "")  # of a host that does not answer
    return "imed out" in text or (isinstance(error, DistStoreError) and "timeout" in text)


def _gone(peers: Sequence[Peer], broke: bool) -> list[Peer]:
    """Return the ranks that have ended or were interrupted; if a connection broke, also those that have left.

    A connection breaks a moment before its process is gone, so the call then waits a moment for one.
    """
    deadline = time.monotonic() + (_GRACE if broke else 0.0)
    while not (gone := [peer for peer in peers if _was_interrupted(peer) or peer.is_gone()]):
        gone = [peer for peer in peers if broke and peer.has_left() and not _has_failed(peer)]
        if gone or time.monotonic() >= deadline:
            break
        time.sleep(0.005)
    return gone


def _was_interrupted(peer: Peer) -> bool:
    report = peer.report()
    return report is not None and report.kind == INTERRUPT and peer.is_same_group(report.entry)


def _has_failed(peer: Peer) -> bool:
    """True if an operation had failed there before it left: it is not the first that was gone."""
    report = peer.report()
    return report is not None and peer.is_same_group(report.entry)


def lost(text: str, gone: Sequence[Peer]) -> CommPeerLost:
    """Return an error with this text about ranks that have ended."""
    error = CommPeerLost(text)
    if gone:
        error.rank, error.pid, error.host = gone[0].rank, gone[0].pid, gone[0].host
        error.exit_status = gone[0].exit_status()
    return error


def named(peers: Sequence[Peer]) -> str:
    """Return the names of ranks for a text."""
    return ", ".join(f"rank {peer.rank} (process {peer.pid} on {peer.host})" for peer in peers)


def how(peer: Peer) -> str:
    """Return how a rank has gone, for a text."""
    return "left the communicator" if peer.has_left() and not peer.is_gone() else "ended"


def abort(error: BaseException) -> None:
    """Write the error and end this process, as ``abort_process_on_timeout_or_error=True`` asks."""
    sys.stderr.write(f"easydist: aborting the process: {error}\n")
    sys.stderr.flush()
    os.abort()
