"""The texts of errors about lost, late and failed ranks. Each names the event, the ranks' calls, and the next step."""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Sequence
from typing import NamedTuple

from easydist.base.wording import duration
from easydist.liveness import keepalive

LOST = "The group cannot continue without it. Restart the job, or call easydist.recover() on the ranks that are left."
LEFT = "The group cannot continue without it. End the group on all ranks after the same call, or make a new one."
SILENT = (
    "The store through which the hosts exchange their status does not answer: rank 0, or the launcher, may be stopped."
)

BROKE = ": its connection broke"
IDLE = "has begun it, but waits for nothing"
"""The state of a rank that computes, or is stopped, while others wait for an operation that it has begun."""


STORE_ENDED = "The store through which the hosts exchange their status has ended with the process that served it."


def cut_off(host: str, store_host: str, port: int) -> str:
    """Return the text for a host that cannot reach the store any more.

    Example:
        >>> print(cut_off("node2", "node1", 29500))
        This host (node2) has lost the store at node1:29500, through which the hosts exchange their status: its network,
        or that of node1, is down. The other hosts may go on.
    """
    return (
        f"This host ({host}) has lost the store at {store_host}:{port}, through which the hosts exchange their status: "
        f"its network,\nor that of {store_host}, is down. The other hosts may go on."
    )


MATCH = "Make the calls of all ranks in the same order everywhere. Where ranks send in a circle, one receives first."


class Advice(NamedTuple):
    """The advice at the end of an error.

    Attributes:
        late: The advice after a timeout.
        failed: The advice after a rank has failed or was interrupted before the end of a call.
        recovered: What to do with the group after ``recover`` of another one, in which a rank was instead.
        lost: The advice after a rank was lost.
    """

    late: str
    failed: str
    recovered: str
    lost: str = LOST


RECONNECTS = Advice(
    "Make sure that every rank makes this call, or give it more time (timeout=). The next call reconnects.",
    "The next call of the group reconnects.",
    "repeat this call",
)
CONNECTS_ALL = (
    "A message between two ranks needs all ranks if the group has to be connected, first or again after an error: let "
    "each make a call of it, such as wait_for_everyone(). The next call reconnects."
)
UNMADE = "Make sure that every rank makes this call, or give it more time (timeout=). Then make it again on all ranks."
ENDED = Advice(
    "The group can no longer be used. Make a new one, with more time (timeout=).",
    "The group can no longer be used. Make a new one.",
    "for this one",
)
VERBS_ENDED = Advice(
    "Verbs can no longer use this communicator. Make a new one on all ranks, with more time (timeout=).",
    "Verbs can no longer use this communicator. Make a new one on all ranks.",
    "for this communicator",
)
"""The advice for a communicator that is given as a group: without a process group, its ranks cannot reconnect."""


def late(
    operation: str,
    missing: Sequence[int],
    unknown: Sequence[int],
    size: int,
    seconds: float,
    rows: Sequence[str],
    advice: Sequence[str],
) -> str:
    """Return the text of a timeout.

    Args:
        operation: The verb of the call.
        missing: The ranks that have not begun the call.
        unknown: The ranks that cannot be observed.
        size: The number of processes in the group.
        seconds: The seconds that this rank has waited.
        rows: The states of the ranks, from ``row``.
        advice: The lines of advice.

    Example:
        >>> print(late("gather", [1], [], 2, 0.3, [row(1, state("", True), "")], [RECONNECTS.failed]))
        gather: 1 of 2 ranks did not come within 0.3 s
          rank 1: missing; not seen in this group yet
        The next call of the group reconnects.
    """
    who = f"{len(missing)} of {size} ranks did not come" if missing else "all ranks came, but their data did not arrive"
    if unknown:
        others = f"{who}, and {len(unknown)}" if missing else f"{len(unknown)} of {size} ranks"
        who = f"{others} could not be observed{',' if missing else ''}"
    return "\n".join([f"{operation}: {who} within {duration(seconds)}", *rows, *advice])


def lost(operation: str, who: str, what: str, rows: Sequence[str] = (), advice: str = LOST) -> str:
    """Return the text about a lost rank.

    Example:
        >>> print(lost("gather", "rank 1", f"{process(7, 'node1')} ended ({status_text(-9)})"))
        gather: rank 1 is lost: process 7 on node1 ended (killed by SIGKILL)
        The group cannot continue without it. Restart the job, or call easydist.recover() on the ranks that are left.
    """
    return "\n".join([f"{operation}: {who} is lost: {what}", *rows, advice])


def unreachable() -> str:
    """Return how a rank was lost whose host does not answer."""
    time = f" for {keepalive.AFTER:g} s" if not math.isinf(keepalive.AFTER) else ""
    return f": its host has not answered{time}; that host, or the network, is down"


def left(operation: str, rank: int, pid: int | None, host: str | None, rows: Sequence[str]) -> str:
    """Return the text about a rank that has left the group while its process goes on.

    Example:
        >>> print(left("gather", 1, 7, "node1", []))
        gather: rank 1 has left the group: process 7 on node1 has destroyed or finalized it, and sends nothing more
        The group cannot continue without it. End the group on all ranks after the same call, or make a new one.
    """
    who = "its process" if pid is None else process(pid, host)
    head = f"{operation}: rank {rank} has left the group: {who} has destroyed or finalized it, and sends nothing more"
    return "\n".join([head, *rows, LEFT])


def crossed(rows: Sequence[str], advice: str) -> str:
    """Return the text for ranks that wait for one another in different calls.

    Example:
        >>> print(crossed([row(0, "waits in gather", ""), row(1, "waits in recv_object", "")], RECONNECTS.failed))
        ranks wait for one another, in calls that do not match
          rank 0: waits in gather
          rank 1: waits in recv_object
        Make the calls of all ranks in the same order everywhere. Where ranks send in a circle, one receives first.
        The next call of the group reconnects.
    """
    head = "ranks wait for one another, in calls that do not match"
    return "\n".join([head, *rows, MATCH, advice])


def raised(operation: str, rank: int, by: int, error: str, rows: Sequence[str]) -> str:
    """Return the text for ``rank``, which waited for ``by`` when that process ended with an exception."""
    head = f"{operation}: rank {by} ended with an exception while rank {rank} waited for it"
    return "\n".join([head, f"  rank {by}: {error}", *rows])


def interrupted(operation: str, rank: int, error: BaseException, advice: str) -> str:
    """Return the text about a rank that Ctrl-C or the like interrupted in its call.

    Example:
        >>> print(interrupted("gather", 1, KeyboardInterrupt(), RECONNECTS.failed))
        gather: rank 1 was interrupted (KeyboardInterrupt)
        The next call of the group reconnects.
    """
    return f"{operation}: rank {rank} was interrupted ({type(error).__name__})\n{advice}"


def failed(operation: str, rank: int, error: Exception, advice: str) -> str:
    """Return the text about a rank that failed with an error of its own while the others waited for its data."""
    head = f"{operation}: rank {rank} failed during the call"
    return "\n".join([head, f"  rank {rank}: {type(error).__name__}: {error}", advice])


def given_up(operation: str, advice: str) -> str:
    """Return the text for a rank in a call that all other ranks have given up for a later one."""
    return f"{operation}: the other ranks have given up this call and gone on to a later one\n{advice}"


def without_store(operation: str) -> str:
    """Return the text for ranks that cannot meet again because their store is gone."""
    return f"{operation}: the store through which the ranks connect is gone, and so is the rank that hosted it"


def unreached(operation: str, where: str, is_served_by_rank_0: bool, seconds: float, own_row: str, advice: str) -> str:
    """Return the text for a rank that cannot reach the store in which the ranks meet.

    Example:
        >>> print(unreached("gather", "node1:29500", True, 4.0, row(1, "waits in gather", ""), RECONNECTS.late))
        gather: the rendezvous store at node1:29500 was not reached within 4 s
          rank 0: missing; it serves the store, and has not made its first call
          rank 1: waits in gather
        Make sure that every rank makes this call, or give it more time (timeout=). The next call reconnects.
    """
    server = row(0, "missing; it serves the store, and has not made its first call", "")
    rows = [server, own_row] if is_served_by_rank_0 else ["  the launcher serves it (torchrun, easydist run)", own_row]
    head = f"{operation}: the rendezvous store at {where} was not reached within {duration(seconds)}"
    return "\n".join([head, *rows, advice])


def unserved(where: str, is_taken: bool) -> str:
    """Return the text for rank 0 if it has to serve the store in which the ranks meet, and cannot.

    Example:
        >>> unserved("node1:29500", is_taken=True).partition(":29500")[2][:32]
        ', because the port is in use: by'
    """
    text = f"rank 0 cannot serve the store at {where}"
    if not is_taken:
        return f"{text}, or cannot reach it there. MASTER_ADDR has to be an address of its host"
    return (
        f"{text}, because the port is in use: by another job, by a process that an earlier job left behind, or by the "
        "rank of which this process is a child. Set another MASTER_PORT on all ranks, or end the other process"
    )


def recovers_another(operation: str, rank: int, name: str, then: str) -> str:
    """Return the text for a rank that waits for another one, which recovers another group and waits there for it."""
    return (
        f"{operation}: rank {rank} recovers {_group(name)}, and waits for this rank there\n"
        f"Call recover() for that group on this rank, too, and then {then}."
    )


def recovers(rank: int) -> str:
    """Return the text for ranks that wait in a group that another rank has left to recover it."""
    return f"recover: rank {rank} has left the group to recover it\nCall recover() on this rank, too."


def _group(name: str) -> str:
    return name if " " in name else f"the group {name!r}"


def unmet(operation: str) -> str:
    """Return the text for ranks in the first meeting of a group that another rank is already recovering."""
    return f"{operation}: another rank is already recovering the group\nCall recover() on this rank, too."


def left_out(rank: int, name: str, members: Sequence[int]) -> str:
    """Return the text for a rank that has come too late to recover the group.

    Example:
        >>> print(left_out(2, "default", (0, 1)))
        recover: rank 2 was left out of the group 'default': ranks 0, 1 have continued without it
        It did not call recover() within their time limit (timeout=), or had given up before. End this process.
    """
    who = ", ".join(map(str, members))
    return (
        f"recover: rank {rank} was left out of {_group(name)}: ranks {who} have continued without it\n"
        "It did not call recover() within their time limit (timeout=), or had given up before. End this process."
    )


def not_recovered(rank: int, name: str) -> str:
    """Return the text for a rank that could not be connected with the survivors in time."""
    return (
        f"recover: rank {rank} could not connect to the survivors of {_group(name)} in time\n"
        "Call recover() again on all of them, or restart the job."
    )


def unrecoverable(rank: int, name: str, is_silent: bool = False) -> str:
    """Return the text for survivors that cannot agree because their store is gone, or does not answer."""
    why = "does not answer" if is_silent else "is gone, and so is the rank that hosted it"
    return (
        f"recover: rank {rank} cannot agree with the survivors of {_group(name)}: the store that they need {why}\n"
        "On one host, survivors need no store once the ranks have made a call. On several hosts, let the launcher "
        "host it (torchrun, easydist run), or a process that does not end (init_process_group(store=...))."
    )


def row(rank: int, state: str, condition: str) -> str:
    """Return a line about a rank and its state, for ``late``."""
    return f"  rank {rank}: {state}" + (f"; {condition}" if condition else "")


def state(place: str, is_missing: bool, is_unknown: bool = False) -> str:
    """Return the state of another rank as text, for ``row``.

    Args:
        place: The place of its last call; empty if it is not known.
        is_missing: True if the rank has not come.
        is_unknown: True if the rank cannot be observed.
    """
    if is_unknown:
        return "could not be observed; it may have come"
    if is_missing:
        return f"missing; {f'last seen in {place}' if place else 'not seen in this group yet'}"
    return f"came; {place or 'nothing more is known'}"


def in_body(body: str) -> str:
    """Return the state of a rank in a body that the others wait for, for ``row``."""
    return f"in the body of {body}"


def process(pid: int | None, host: str | None) -> str:
    """Return the words for a process."""
    return f"process {pid} on {host}"


def status_text(status: int | None) -> str:
    """Return the words for an exit status.

    Example:
        >>> status_text(-9), status_text(3), status_text(None)
        ('killed by SIGKILL', 'exit status 3', 'exit status not known')
    """
    if status is None:
        return "exit status not known"
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}"
    return f"killed by signal {-status}"
