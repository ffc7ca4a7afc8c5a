"""A rank's part in its world: entering it as under torchrun, and calling functions in it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import PrefixStore

from easydist.agreement.agree import text_of
from easydist.base import torch_groups
from easydist.base.torch_private import unpickled
from easydist.base.wording import a_or_an, trace
from easydist.cluster.facts import Facts, interface
from easydist.errors import PeerLostError, RemoteError
from easydist.groups.communicators import Communicators
from easydist.liveness.monitor import Monitor
from easydist.liveness.status import nothing
from easydist.liveness.timed_store import TimedStore
from easydist.state import ProcessState
from easydist.state.environment import launched
from easydist.state.groups import forget_store, store_of_group

_ANSWERS = 1.0
"""Seconds within which the store of a world answers the driver."""

_CONNECTS = 30.0
"""The same for the ranks, which may be many."""


class Outcome(NamedTuple):
    """The outcome of a function on a rank.

    Attributes:
        value: The pickled result.
        raised: The class and the text of the exception; empty if there was none.
        traceback: Its traceback.
        error: The exception, pickled, which the driver may not be able to load; empty if it cannot be pickled.
    """

    value: bytes = b""
    raised: str = ""
    traceback: str = ""
    error: bytes = b""


def variables(processes: Sequence[Facts], port: int, epoch: int) -> dict[int, dict[str, str]]:
    """Return torchrun's variables for each rank.

    Args:
        processes: The processes of all ranks.
        port: The port of the store, which rank 0 serves.
        epoch: The number of this world.

    Example:
        >>> one = Facts(7, "node1", "a", "10.0.0.1", {})
        >>> found = variables([one, one, one._replace(node="b")], 29500, 1)
        >>> [found[rank]["LOCAL_RANK"] for rank in found], [found[rank]["NODE_RANK"] for rank in found]
        (['0', '1', '0'], ['0', '0', '1'])
    """
    nodes = [one.node for one in processes]
    numbers = list(dict.fromkeys(nodes))
    world = {
        "WORLD_SIZE": len(nodes),
        "GROUP_WORLD_SIZE": len(numbers),
        "MASTER_ADDR": processes[0].address,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # no rank may serve another one at this port
        "TORCHELASTIC_RESTART_COUNT": epoch,
    }
    own = {
        rank: {
            "RANK": rank,
            "LOCAL_RANK": nodes[:rank].count(node),
            "LOCAL_WORLD_SIZE": nodes.count(node),
            "NODE_RANK": numbers.index(node),
            "GROUP_RANK": numbers.index(node),
        }
        for rank, node in enumerate(nodes)
    }
    return {rank: {name: str(value) for name, value in {**world, **one}.items()} for rank, one in own.items()}


def enter(variables: dict[str, str], address: str) -> None:
    """Enter a world, and leave the one before.

    Args:
        variables: torchrun's variables for this rank.
        address: The address at which other nodes reach this one.

    Raises:
        RuntimeError: The store of the world cannot be reached.
    """
    _leave()
    forget_store()
    os.environ.update(variables)
    if (name := interface(address)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    store_of_group(launched(), _CONNECTS, nothing)  # now, so that its end is noticed in the first call, too


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    torch_groups.set_count(0)  # it numbers new groups, and begins with 0 in a rank that is new
    ProcessState._reset_state()


def outcome(message: bytes) -> Outcome:
    """Call a function, which SIGINT interrupts.

    Args:
        message: The pickled function and its arguments.
    """
    from ray import cloudpickle

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        fn, args, kwargs = unpickled(cloudpickle.loads, message)
        value = _packed(fn(*args, **kwargs))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return Outcome(value)
    except BaseException as error:  # not even sys.exit() ends the actor
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raised, pickled = text_of(error), b""
        _give_up(raised)
        with contextlib.suppress(Exception):
            pickled = cloudpickle.dumps(error)
        return Outcome(b"", raised, trace(error, __file__), pickled)


def _packed(result: Any) -> bytes:
    from ray import cloudpickle

    try:
        message: bytes = cloudpickle.dumps(result)
    except Exception as error:  # a class of the user's may raise anything
        raise TypeError(
            f"the result, {a_or_an(type(result).__name__)}, cannot be sent to the driver: {error}"
        ) from error
    return message


def _give_up(raised: str) -> None:
    """Leave the world, so that ranks that wait for this one hear of it."""
    with contextlib.suppress(Exception):  # only the error of the function counts
        _part(ProcessState().communicators(), "failed", f"\n  {raised}")
    with contextlib.suppress(Exception):
        _leave()  # for ranks that wait in smaller groups


def part_if_awaited() -> None:
    """Leave the world if others are in a call that this rank, which has returned from the function, does not make."""
    comms = ProcessState().communicators()
    comms.appear()
    if comms.monitor.is_behind():
        _part(comms, "returned from the function", "")


def _part(comms: Communicators, what: str, why: str) -> None:
    if comms.size == 1:
        return
    comms.appear()
    text = f"run: rank {comms.rank} {what} while others waited for it{why}"
    comms.monitor.leave_for_good(RemoteError(text, rank=comms.rank))


def tell_of_loss(variables: dict[str, str], error: PeerLostError) -> None:
    """Tell a world in place of a rank that it is lost: ranks that have not met it cannot notice.

    Args:
        variables: The variables of the lost rank.
        error: The error for those that wait for it.
    """
    world = launched(variables)
    if world.rank == 0:
        return  # it has served the store
    with contextlib.suppress(RuntimeError):
        store = PrefixStore("easydist", store_of_group(world, _ANSWERS, nothing, variables))
        Monitor(world.rank, world.size, _ANSWERS, TimedStore(store), "default").leave_for_good(error)
    forget_store(world)
