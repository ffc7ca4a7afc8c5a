"""Groups of Ray actors: how members find each other, and how they tell the generations of a group apart.

A generation has a store, which rank 0 serves. Its address is in Ray's key-value store, under the group's name in the
actors' namespace or, if a driver creates the group, under a token of its own, so that actors of any job can be in it. A
rank can join a generation only once, so a returning member and a replacement wait for the next generation, even while
the name still points to the old one. The keys of a group that a driver creates are gone once it has ended, well or not.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from easydist.agreement.calling import seconds
from easydist.base.arguments import integer
from easydist.base.wording import counted
from easydist.errors import CollectiveTimeout, DisagreementError, PeerLostError
from easydist.liveness.stored import decoded
from easydist.liveness.timed_store import TimedStore, reached, served
from easydist.transport.comm import Collectives
from easydist.typing import Timeout
from easydist.weights.group import CONNECT, Participant, PrivateGroup, check_size, is_given_up

_POLL = 0.02
_NAMESPACE = "easydist"
_AFTER = 60.0
"""Seconds that actors wait longer than their driver, which tells them when it gives up unless it has ended."""

_HERE = "/here/"
"""The part of the key after the generation's, before the rank of an actor that has received the call."""

_WANTED = "/wanted"
"""The end of the key that is there as long as the driver waits for the generation."""

_JOINING = "joining"
"""The answer of an actor in which a thread joins."""

_Outcome = tuple[BaseException, str] | None
"""The error that ended a member's joining, and its traceback: Ray would print a raised one if the driver has given up
before."""

_joining: dict[str, Future[_Outcome]] = {}
"""The outcomes of the threads that join, by the key of the generation, until the driver has asked for them."""

_groups: dict[str, PrivateGroup] = {}
"""The groups of this process, by name."""

_in_vain: dict[str, Any] = {}
"""The stores of groups that some members did not join, for members that still wait; kept until the name is reused."""


def init_group(
    world_size: int,
    rank: int,
    group_name: str = "default",
    *,
    timeout: Timeout = 300.0,
    generation: str | None = None,
) -> None:
    """Make this actor a member of a group once all members have called. It first leaves any group of that name.

    The group shares nothing with torch's default group, so an actor can run DDP beside it, and be in any number of
    groups.

    Args:
        world_size: The number of members.
        rank: The rank of this member, from 0.
        group_name: The name. It can be reused after a member was lost: all members call again.
        timeout: How long to wait for the other members, and how long a call in the group may take.
        generation: A token that is the same on all members. Needed if several generations of one name may be under way.

    Raises:
        CollectiveTimeout: Members are missing; ``missing`` contains their ranks.
        DisagreementError: Members pass different numbers of members.
        PeerLostError: A member ended while the others were joining.
        TypeError: ``rank`` or ``world_size`` is not an integer.
        ValueError: ``rank`` does not fit ``world_size``.

    Example:
        >>> import easydist.ray
        >>> easydist.ray.init_group(world_size=2, rank=2)
        Traceback (most recent call last):
        ValueError: init_group: rank=2 is not a rank of the group, which has 2 ranks (0–1)

    Source: ``ray.util.collective.init_collective_group``.
    """
    world_size, rank = integer("world_size", world_size, "a number of actors"), integer("rank", rank, "a rank")
    if not 0 <= rank < world_size:
        raise ValueError(f"init_group: rank={rank} is not a rank of the group, which has {counted(world_size)}")
    limit = seconds(timeout, "init_group")
    participant = Participant(rank, world_size, _own_address())
    _enter(participant, group_name, _key(group_name, generation), limit, limit, lambda: time.sleep(_POLL))


def _enter(
    participant: Participant, group_name: str, key: str, timeout: float, patience: float, wait: Callable[[], None]
) -> None:
    """Enter a generation, which all members must join within ``patience`` seconds.

    Args:
        participant: This member.
        group_name: The name of the group.
        key: The key of the generation.
        timeout: The limit of a call in the group.
        patience: The seconds.
        wait: Called again and again meanwhile: sleeps for a moment, and raises once the generation is given up.
    """
    destroy_group(group_name)
    deadline, rank = time.monotonic() + patience, participant.rank
    wait()
    if rank == 0:
        store = served(participant.host, 0, timeout)
        TimedStore(store).add("joined/0", 1, CONNECT)
        _put(key, json.dumps([participant.host, store.port, participant.size]))
    else:
        store = _found(key, participant, deadline, group_name, wait)
    try:
        _groups[group_name] = PrivateGroup(group_name, store, participant, deadline, timeout, wait)
    except (CollectiveTimeout, DisagreementError):
        if rank == 0:
            _in_vain[group_name] = store
        raise


def _check_wanted(key: str, name: str) -> None:
    """Raise if the driver has given up the generation; otherwise sleep for a moment."""
    if _get(key + _WANTED) is None:
        raise CollectiveTimeout(f"group {name!r}: create_group has given up, because not all members came")
    time.sleep(_POLL)


def _found(key: str, participant: Participant, deadline: float, name: str, wait: Callable[[], None]) -> Any:
    """Return the store of a generation that this rank has not joined before."""
    old = None
    while time.monotonic() < deadline:
        text = _get(key)
        if text not in (None, old):
            with contextlib.suppress(RuntimeError):  # of an earlier generation: its rank 0 has ended
                if (store := _entered(text, participant, name)) is not None:
                    return store
                old = text  # not asked again: it may end meanwhile, which takes seconds to notice
        wait()
    error = CollectiveTimeout(
        f"group {name!r}: rank 0 did not come in time, or another process is already rank {participant.rank}\nAll "
        "members have to call init_group, each with a rank of its own."
    )
    error.missing = (0,)
    raise error


def _entered(text: str, participant: Participant, name: str) -> Any:
    """Return the store at an address if this rank can join its generation; None if all have, or it has itself before.

    Raises:
        DisagreementError: The generation waits for another number of members.
        RuntimeError: The store is gone.
    """
    host, port, size = decoded(f"the address of group {name!r}", text, (str, int, int))
    store = reached(host, port, CONNECT)
    joined = TimedStore(store)
    if is_given_up(store) or joined.check([f"joined/{rank}" for rank in range(size)]):
        return None
    check_size(name, store, participant, size)
    return store if joined.add(f"joined/{participant.rank}", 1, CONNECT) == 1 else None


def destroy_group(group_name: str = "default") -> None:
    """Leave the group of that name, if this process is in one. A call of the others that needs it raises PeerLostError.

    Example:
        >>> import easydist.ray
        >>> easydist.ray.destroy_group("no such group")

    Args:
        group_name: The name that the group was made with.
    """
    _in_vain.pop(group_name, None)
    if (group := _groups.pop(group_name, None)) is not None:
        group.close()


def group(group_name: str = "default") -> Collectives:
    """Return the group of that name, for ``group=`` of any verb; for a ``ray.util.collective`` group, a private copy.

    Args:
        group_name: The name that the group was made with.

    Raises:
        ValueError: This process is in no such group.

    Example:
        >>> import easydist.ray
        >>> easydist.ray.group("no such group")
        Traceback (most recent call last):
        ValueError: this process is in no group 'no such group'; call init_group, or create_group in the driver
    """
    if group_name not in _groups:
        size, rank = _known_to_ray(group_name)
        if size < 0:
            raise ValueError(
                f"this process is in no group {group_name!r}; call init_group, or create_group in the driver"
            )
        init_group(size, rank, group_name)
    return _groups[group_name].comm


def _known_to_ray(name: str) -> tuple[int, int]:
    """Return size and rank in a group that ``ray.util.collective`` has set up in this process; -1 if there is none."""
    collective = sys.modules.get("ray.util.collective")
    if collective is None or not collective.is_group_initialized(name):
        return -1, -1
    return collective.get_collective_group_size(name), collective.get_rank(name)


def create_group(actors: Sequence[Any], group_name: str = "default", *, timeout: Timeout = 300.0) -> None:
    """Create a group of actors, from the driver or from any process that has their handles, such as one of them.

    The actors need no method for it, and may belong to several jobs of a cluster (detached ones, those of another
    driver). Their ranks follow the order of the list. After the loss of an actor, call it again with the replacement:
    this creates a new generation under the same name.

    Args:
        actors: Their handles.
        group_name: The name by which the actors refer to the group.
        timeout: How long to wait for all of them, and how long a call in the group may take.

    Raises:
        TypeError: A value in the list is no handle of an actor.
        ValueError: There are no actors, or one is there twice.
        PeerLostError: An actor has died; ``rank`` contains its rank.
        CollectiveTimeout: Actors do not answer because they are busy or have not started; ``missing`` contains their
            ranks.

    Example:
        >>> import easydist.ray
        >>> easydist.ray.create_group([])
        Traceback (most recent call last):
        ValueError: create_group: there are no actors

    Source: ``ray.util.collective.create_collective_group``.
    """
    if not actors:
        raise ValueError("create_group: there are no actors")
    for rank, actor in enumerate(actors):
        if not hasattr(getattr(actor, "__ray_call__", None), "remote"):  # a class of actors has it, too, as a function
            text = f"create_group: rank {rank} is no handle of an actor: {actor!r}"
            raise TypeError(f"{text}\nPass what the remote() of the actor's class has returned.")
    if len({*actors}) < len(actors):
        raise ValueError("create_group: an actor is there twice, but has only one rank")
    import ray

    limit, size, key = seconds(timeout, "create_group"), len(actors), f"easydist/created/{secrets.token_hex(8)}"
    own, deadline = (group_name, limit, key), time.monotonic() + limit
    try:
        _put(key + _WANTED, "")
        ranks = {_asked(ray, actor, size, rank, *own): rank for rank, actor in enumerate(actors)}
        while ranks:
            done = _first_done(ray, ranks, deadline)
            if done is None or time.monotonic() > deadline:
                raise _silent(group_name, key, sorted(ranks.values()), size)
            rank = ranks.pop(done)
            if _is_joining(ray, done, rank, group_name):
                time.sleep(_POLL)
                ranks[actors[rank].__ray_call__.remote(_joined, key)] = rank
    finally:
        _forget(key)  # and all keys that begin with it: members that still wait hear by that


def _asked(ray: Any, actor: Any, *own: Any) -> Any:
    """Ask an actor to join, and return the reference of its answer; if it is this one, which is busy, a future."""
    context = ray.get_runtime_context()
    if context.get_actor_id() is None or actor != context.current_actor:
        return actor.__ray_call__.remote(_join, *own)
    return _join_in_thread(*own)


def _first_done(ray: Any, asked: Iterable[Any], deadline: float) -> Any:
    """Return the reference or future of an answer that has come; None if none comes before the deadline."""
    futures = [one for one in asked if isinstance(one, Future)]
    refs = [one for one in asked if not isinstance(one, Future)]
    while (left := deadline - time.monotonic()) > 0:
        if done := next((one for one in futures if one.done()), None):
            return done
        pause = _POLL if futures else left
        if not refs:
            time.sleep(pause)
        elif ready := ray.wait(refs, timeout=pause)[0]:
            return ready[0]
    return None


def _join(actor: Any, *own: Any) -> _Outcome | str:
    """Join the group, in an actor, which is the first argument; a thread does it if the actor runs an event loop.

    Ray calls no other method of such an actor before this one has returned.

    Args:
        actor: The actor.
        *own: The arguments of ``_outcome``, the last of which is the key of the generation.
    """
    if not inspect.getmembers(type(actor), _is_async):
        return _outcome(*own)
    _joining[own[-1]] = _join_in_thread(*own)
    return _JOINING


def _join_in_thread(*own: Any) -> Future[_Outcome]:
    future = Future[_Outcome]()
    joins = threading.Thread(target=lambda: future.set_result(_outcome(*own)), name="create_group", daemon=True)
    joins.start()
    return future


def _is_async(method: Any) -> bool:
    """True if Ray gives an actor with this method an event loop."""
    return inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)


def _joined(actor: Any, key: str) -> _Outcome | str:
    """Return the outcome of the thread that joins, in an actor."""
    future = _joining.get(key)  # None if the driver has given up meanwhile
    return _JOINING if future is None or not future.done() else _joining.pop(key).result()


def _outcome(size: int, rank: int, name: str, timeout: float, key: str) -> _Outcome:
    """Join the group. The driver decides when to give up."""
    wait = functools.partial(_check_wanted, key, name)
    try:
        wait()
        _put(f"{key}{_HERE}{rank}", "")
        _enter(Participant(rank, size, _own_address()), name, key, timeout, timeout + _AFTER, wait)
    except Exception as error:
        if _get(key + _WANTED) is None:
            _forget(key)  # what was written after the driver had given up
            _joining.pop(key, None)
        return error, traceback.format_exc()
    return None


def _is_joining(ray: Any, ref: Any, rank: int, name: str) -> bool:
    """True if a member has not joined yet; raise the error if one has ended its joining."""
    try:
        found = ref.result() if isinstance(ref, Future) else ray.get(ref)
    except ray.exceptions.RayActorError as error:
        lost = PeerLostError(f"group {name!r}: the actor of rank {rank} has died\nReplace it, and call create_group.")
        lost.rank = rank
        raise lost from error
    except ray.exceptions.RayTaskError as error:  # it did not come to the function
        raise error.cause from error
    if isinstance(found, tuple):
        raised, text = found
        raise raised from RuntimeError(f"in the actor of rank {rank}:\n{text}")
    return bool(found == _JOINING)


def _silent(name: str, key: str, waiting: Sequence[int], size: int) -> CollectiveTimeout:
    missing = [rank for rank in waiting if _get(f"{key}{_HERE}{rank}") is None] or waiting
    error = CollectiveTimeout(
        f"group {name!r}: the actors of ranks {list(missing)} of {size} did not answer in time\nThey may be busy with "
        "another call, or be waiting for resources to start."
    )
    error.missing = tuple(missing)
    return error


def _key(name: str, generation: str | None) -> str:
    import ray

    return f"easydist/{ray.get_runtime_context().namespace}/{name}/{generation or ''}"


def _own_address() -> str:
    import ray

    address: str = ray.util.get_node_ip_address()
    return address


def _put(key: str, value: str) -> None:
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(key, value, overwrite=True, namespace=_NAMESPACE)


def _get(key: str) -> str | None:
    from ray.experimental.internal_kv import _internal_kv_get

    value = _internal_kv_get(key, namespace=_NAMESPACE)
    return None if value is None else value.decode()


def _forget(key: str) -> None:
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(key, del_by_prefix=True, namespace=_NAMESPACE)
