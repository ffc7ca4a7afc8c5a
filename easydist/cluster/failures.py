"""The failure of a function on some ranks, as one error for the driver."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from easydist.base.wording import named
from easydist.cluster.facts import Facts, versions
from easydist.errors import PeerLostError, RemoteError
from easydist.liveness import texts

if TYPE_CHECKING:
    from easydist.cluster.world import Outcome

_KEPT = "The ranks keep their variables. The next run() connects them in a new world: wrap models in DDP again."
_BECAUSE_OF_OTHERS = re.compile(r"RemoteError|PeerLostError|RuntimeError: .*gloo/transport")


def raised(failed: Mapping[int, Outcome], facts: Sequence[Facts]) -> RemoteError:
    """Return the error for a function that raised on some ranks.

    Args:
        failed: Their outcomes, in the order in which they came; the first one that is not due to others counts.
        facts: The processes of all ranks.
    """
    own = [rank for rank, outcome in failed.items() if not _BECAUSE_OF_OTHERS.match(outcome.raised)]
    first = (own or [*failed])[0]
    outcome, process = failed[first], facts[first]
    same = [rank for rank in failed if failed[rank].raised == outcome.raised]
    lines = [
        f"run: {named(same)} of {len(facts)} raised {outcome.raised}",
        *rows({rank: failed[rank] for rank in failed if rank not in same}),
        f"on rank {first}, {_where(process)}:",
        outcome.traceback.rstrip(),
        _KEPT,
    ]
    error = RemoteError("\n".join(lines), rank=first)
    if outcome.error:
        from ray import cloudpickle

        with contextlib.suppress(Exception):  # its class may exist on the ranks only
            error.__cause__ = cloudpickle.loads(outcome.error)
    return error


def rows(failed: Mapping[int, Outcome]) -> list[str]:
    """Return a line for each error, with the ranks that raised it."""
    found: dict[str, list[int]] = {}
    for rank in sorted(failed):
        found.setdefault(failed[rank].raised.partition("\n")[0], []).append(rank)
    return [f"  {named(ranks)} raised {text}" for text, ranks in found.items()]


def lost(rank: int, process: Facts, error: Exception) -> PeerLostError:
    """Return the error for a rank whose process or node has ended.

    Args:
        rank: The rank.
        process: Its process.
        error: Ray's error.
    """
    status = status_of(error)
    what = f"{_where(process)}{_how(process.node, status, error)}"
    loss = PeerLostError(texts.lost("run", f"rank {rank}", what, advice=_remedy([rank])))
    loss.rank, loss.pid, loss.host, loss.exit_status = rank, process.pid, process.host, status
    loss.__cause__ = error
    return loss


def status_of(error: BaseException) -> int | None:
    """Return the exit status of the process of an actor, negative for a signal, as far as Ray knows it.

    Example:
        >>> status_of(Exception("Worker exits with an exit code 3.")), status_of(Exception("End of file."))
        (3, None)
        >>> status_of(Exception("Worker exits with an exit code 1. The process receives a SIGTERM."))
        -15
    """
    import ray

    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return -signal.SIGKILL
    if "receives a SIGTERM" in str(error):  # Ray itself ends with 1 then
        return -signal.SIGTERM
    found = re.search(r"exit code (\d+)", str(error))
    return int(found[1]) if found else None


def all_lost(losses: Mapping[int, PeerLostError], failed: Mapping[int, Outcome]) -> PeerLostError:
    """Return one error for all ranks that are lost, with the attributes of the first.

    Args:
        losses: Their errors.
        failed: The outcomes on ranks that have raised.
    """
    first = next(iter(losses.values()))
    heads = [str(loss).partition("\n")[0] for loss in losses.values()]
    error = PeerLostError("\n".join([*heads, *rows(failed), _remedy(losses)]))
    vars(error).update(vars(first))
    error.__cause__ = first.__cause__
    return error


def is_of_node(error: Exception) -> bool:
    """True if an actor has ended, or never begun, because its node has died."""
    return "node has died" in str(error)


def _remedy(ranks: Iterable[int]) -> str:
    return f"ranks.restart({sorted(ranks)}) replaces what is lost; the other ranks keep their variables."


def _where(process: Facts) -> str:
    return f"{texts.process(process.pid, process.host)} ({process.address})"


def _how(node: str, status: int | None, error: Exception) -> str:
    """Return how a process ended, as far as Ray knows."""
    import ray

    if (gone := _end_of_node(node, error)) is not None:
        return f": {gone}"
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return " was killed by Ray, because its node ran out of memory"
    return " was killed, or crashed" if status is None else f" ended ({texts.status_text(status)})"


def _end_of_node(node: str, error: BaseException) -> str | None:
    import ray

    if not any(one["Alive"] and one["NodeID"] == node for one in ray.nodes()):
        return "its node has died"
    return "its node does not answer" if isinstance(error, ray.exceptions.ActorUnavailableError) else None


def end_of(process: Facts, error: BaseException) -> str:
    """Return how a process of an actor has ended, as far as Ray knows.

    Args:
        process: The process.
        error: Ray's error.
    """
    import ray

    if (gone := _end_of_node(process.node, error)) is not None:
        return gone
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return "killed by Ray, because its node ran out of memory"
    if isinstance(error, ray.exceptions.RayTaskError):
        return str(error.cause)
    status = status_of(error)
    return "killed, or crashed" if status is None else texts.status_text(status)


def unequal_versions(processes: Iterable[Facts]) -> RuntimeError | None:
    """Return the error if a node has other versions than the driver; None if all have the same."""
    own = versions()
    wrong = {one.address: one.versions for one in processes if one.versions != own}
    lines = [f"  {address}: {_listed(found)}" for address, found in wrong.items()]
    head = f"Ranks: nodes have other versions than the driver, which has {_listed(own)}"
    advice = "Install the same versions there, or let Ray do so: runtime_env={'pip': [...]}"
    return RuntimeError("\n".join([head, *lines, advice])) if wrong else None


def _listed(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())
