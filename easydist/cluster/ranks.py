"""Ranks on the nodes of a Ray cluster, which a driver starts and calls functions on."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from easydist import settings
from easydist.agreement.agree import text_of
from easydist.base.arguments import integer, integers
from easydist.base.torch_private import unpickled
from easydist.base.wording import named
from easydist.cluster import failures
from easydist.cluster.actors import CLOSED, Actors, Loan
from easydist.cluster.world import Outcome, tell_of_loss, variables
from easydist.errors import OverlappingCallError, PeerLostError
from easydist.liveness.watchdog import interrupts_deferred
from easydist.typing import Timeout

_STOPS_WITHIN = 4.0
"""Seconds within which ranks must stop after Ctrl-C."""

_INLINE = 64 << 10
"""The most bytes of a call that travel with each request: on other nodes an object of Ray's store comes later."""

_LENT = (
    "a notebook runs cells on these ranks: cluster.run(fn) calls functions there, cluster.restart(ranks=[...]) "
    "replaces ranks, and cluster.stop() gives the ranks back"
)


class Ranks:
    """Ranks on a Ray cluster: one actor each, in one world.

    In each of them ``ProcessState``, ``init_process_group`` and all verbs work as under torchrun: the variables
    ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``NODE_RANK``, ``MASTER_ADDR`` and the like are set, and ranks of one node
    follow one another. Actors keep the modules that they have imported, with their variables, between calls.

    Args:
        size: The number of ranks.
        resources: The resources of each rank, as in a bundle of Ray's placement groups; None: one CPU.
        strategy: That of the placement group: ``"PACK"``, ``"SPREAD"``, ``"STRICT_PACK"`` or ``"STRICT_SPREAD"``.
        nodes: The number of nodes, with the same number of ranks on each; None leaves it to ``strategy``.
        runtime_env: Ray's runtime environment for the ranks; local folders are uploaded.
        address: The cluster, as in ``ray.init``; not used if Ray is connected already. None: the one that Ray finds, or
            a new one on this machine, which ends with the ranks and may have more ranks than cores.
        ship: True to send the driver's easydist to the nodes; None to do so unless all of them are this machine.
        timeout: How long to wait for resources and for the start of the actors.

    Attributes:
        size: The number of ranks.

    Raises:
        ValueError: ``size``, ``resources``, ``strategy`` or ``nodes`` cannot be met by any cluster; or a path of
            ``runtime_env`` does not exist or is too large, or its fields exclude each other.
        TypeError: A value of ``runtime_env`` has a type that Ray does not take, or ``size`` or ``nodes`` is not an
            integer.
        CollectiveTimeout: The resources were not free in time; the text lists the free ones. Nothing is left behind.
        RuntimeError: A node has another version of Python or torch, or cannot set up ``runtime_env``.
        PeerLostError: A rank ended while it started.
        ImportError: Ray is not installed.

    Example:
        >>> import easydist.ray
        >>> easydist.ray.Ranks(0)
        Traceback (most recent call last):
        ValueError: Ranks: size=0 is less than 1

    Cost: the start of the actors, some seconds; they import torch.
    """

    def __init__(
        self,
        size: int,
        *,
        resources: Mapping[str, float] | None = None,
        strategy: str = "PACK",
        nodes: int | None = None,
        runtime_env: dict[str, Any] | None = None,
        address: str | None = None,
        ship: bool | None = None,
        timeout: Timeout = 300.0,
    ) -> None:
        self.size = integer("size", size, "a number of ranks")
        self._epoch, self._needs_meeting = 0, True
        self._variables = dict[int, dict[str, str]]()
        self._lost = dict[int, PeerLostError]()
        self._busy = dict[Any, int]()
        self._is_lent, self._turn = False, threading.Lock()
        self._actors = Actors(
            self.size,
            resources=resources,
            strategy=strategy,
            nodes=nodes,
            runtime_env=runtime_env,
            address=address,
            ship=ship,
            timeout=timeout,
        )
        try:
            self._meet(self._start(range(self.size)))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """Refuse to be sent: a rank that called ``run`` would wait for itself.

        Raises:
            TypeError: Always.
        """
        raise TypeError("Ranks belong to the program that made them; pass what the function needs to know of them")

    # Actors and worlds.

    def _start(self, ranks: Sequence[int]) -> float:
        """Start the actors of ranks, and return the time until which the ranks may take to meet."""
        self._needs_meeting = True
        for rank in ranks:
            self._lost.pop(rank, None)
        try:
            return self._actors.start(ranks)
        except BaseException as error:
            for rank in ranks:
                self._lost[rank] = PeerLostError(f"run: rank {rank} was not started: {error}")
            raise

    def _meet(self, deadline: float) -> None:
        """Let all ranks enter a new world, whose store rank 0 serves."""
        port = self._asked({0: self._actors[0].serve.remote()}, deadline)[0]
        self._epoch += 1
        self._variables = variables([self._actors.facts[rank] for rank in range(self.size)], port, self._epoch)
        # Not in the runtime environment, which Ray writes to its logs.
        key = os.environ.get(settings.JOB_KEY)
        own = {} if key is None else {settings.JOB_KEY: key}
        entering = {rank: actor.enter.remote(self._variables[rank] | own) for rank, actor in self._actors.items()}
        self._asked(entering, deadline)
        self._needs_meeting = False

    def _asked(self, asked: Mapping[int, Any], deadline: float) -> dict[int, Any]:
        """Return the answers of ranks.

        Raises:
            PeerLostError: A rank has ended.
            RuntimeError: A rank has failed to enter the world.
            CollectiveTimeout: A rank has not been started in time.
        """
        import ray

        found: dict[int, Any] = {}
        actors, pending = self._actors, {ref: rank for rank, ref in asked.items()}
        for rank, answer in actors.answers(pending, lambda: actors.give_up(pending.values()), deadline):
            if isinstance(answer, ray.exceptions.RayTaskError):
                text = f"Ranks: rank {rank} at {actors.facts[rank].address} could not enter the world: {answer.cause}"
                raise RuntimeError(f"{text}\nOpen the ports between the nodes (docs/clusters.md).") from answer
            if isinstance(answer, Exception):
                raise self._lose(rank, answer)
            found[rank] = answer
        return found

    def _lose(self, rank: int, error: Exception) -> PeerLostError:
        """Record the loss of a rank, and tell the others."""
        self._needs_meeting = True
        loss = self._lost[rank] = failures.lost(rank, self._actors.facts[rank], error)
        if rank in self._variables:
            tell_of_loss(self._variables[rank], loss)
        return loss

    # Running functions.

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank.

        Law: ``[fn(*args, **kwargs) on rank r for r in range(size)]``.

        Ctrl-C interrupts the function on all ranks; they keep their variables.

        Args:
            fn: A function. It travels by cloudpickle: by its name if it is in a module, which the ranks must have.
            *args: Its positional arguments.
            **kwargs: Its keyword arguments.

        Returns:
            The results, by rank.

        Raises:
            TypeError: ``fn`` is no function; it or its arguments cannot be pickled; or a result cannot be unpickled in
                the driver.
            RemoteError: The function raised on a rank; ranks that waited for that one raised, too. Or ranks waited in a
                call for one that had returned.
            PeerLostError: The process or the node of a rank has ended, now or before. Ranks that waited for it raised,
                too.
            RuntimeError: Ranks are busy, because they did not react to Ctrl-C; or these ranks are closed, or a notebook
                has them.
            OverlappingCallError: Another thread runs a function on these ranks, or restarts them.

        Cost: one call of each actor. After a failure, the ranks also meet in a new world.
        """
        import ray

        message = _packed(fn, args, kwargs)
        with self._alone("run"):
            self._demand_ready()
            if self._needs_meeting:
                self._meet(time.monotonic() + self._actors.limit)
            return self._called(message if len(message) <= _INLINE else ray.put(message))

    def _called(self, message: Any) -> list[Any]:
        """Let all ranks call a function, and return the results."""
        answers: dict[int, Outcome | PeerLostError] = {}
        try:
            with interrupts_deferred():  # a call that no reference is known of could not be interrupted
                self._busy = {actor.call.remote(message): rank for rank, actor in self._actors.items()}
            for rank, answer in self._actors.answers(self._busy, lambda: self._look(answers)):
                answers[rank] = self._outcome(rank, answer)
        except BaseException:
            self._interrupt()
            raise
        return self._results(answers)

    @contextlib.contextmanager
    def _alone(self, call: str) -> Iterator[None]:
        """Refuse other calls while this one works with the ranks.

        Raises:
            OverlappingCallError: Another one does.
        """
        has_turn = False
        try:
            with interrupts_deferred():
                has_turn = self._turn.acquire(blocking=False)
            if not has_turn:
                raise OverlappingCallError(
                    f"{call}: another thread runs a function on these ranks, or restarts them: wait for it, or make "
                    "other Ranks for this thread"
                )
            yield
        finally:
            if has_turn:
                self._turn.release()

    def _outcome(self, rank: int, answer: Any) -> Outcome | PeerLostError:
        import ray

        if isinstance(answer, ray.exceptions.RayTaskError):  # it did not come to the function
            return Outcome(b"", str(answer.cause), str(answer))
        return self._lose(rank, answer) if isinstance(answer, Exception) else answer

    def _look(self, answers: Mapping[int, Outcome | PeerLostError]) -> None:
        """Let ranks that have returned see whether others still wait for them."""
        for rank, one in answers.items():
            if isinstance(one, Outcome) and not one.raised:
                self._actors[rank].part_if_awaited.remote()

    def _results(self, answers: Mapping[int, Outcome | PeerLostError]) -> list[Any]:
        lost = {rank: one for rank, one in answers.items() if isinstance(one, PeerLostError)}
        outcomes = {rank: one for rank, one in answers.items() if isinstance(one, Outcome)}
        failed = {rank: one for rank, one in outcomes.items() if one.raised}
        self._needs_meeting = bool(lost or failed)
        if lost:
            raise failures.all_lost(lost, failed)
        if failed:
            raise failures.raised(failed, [self._actors.facts[rank] for rank in range(self.size)])
        return [_loaded(rank, outcomes[rank].value) for rank in range(self.size)]

    def _demand_own(self) -> None:
        """Check that these ranks are open, and not lent.

        Raises:
            RuntimeError: They are closed, or a notebook has them.
        """
        if not self._actors.is_open:
            raise RuntimeError(CLOSED)
        if self._is_lent:
            raise RuntimeError(_LENT)

    def _demand_ready(self) -> None:
        """Check that all ranks can run a function.

        Raises:
            PeerLostError: Some are lost.
            RuntimeError: Some are busy, or these ranks are closed or lent.
        """
        self._demand_own()
        if self._lost:
            raise failures.all_lost(self._lost, {})
        if busy := self._still_busy():
            raise RuntimeError(f"run: code on {named(busy)} ignores Ctrl-C: wait, or ranks.restart({busy})")

    def _still_busy(self, within: float = 0.0) -> list[int]:
        """Return the ranks that have not ended an interrupted function, even after some seconds."""
        import ray

        if self._busy:
            for ref in ray.wait(list(self._busy), num_returns=len(self._busy), timeout=within)[0]:
                del self._busy[ref]
        return sorted(self._busy.values())

    def _interrupt(self) -> None:
        """Interrupt the function on the ranks that run it, unless they have been closed meanwhile."""
        self._needs_meeting = True
        if not self._actors.is_open:
            return
        until = time.monotonic() + _STOPS_WITHIN
        with interrupts_deferred():  # a second Ctrl-C ends the wait for the ranks, not their interruption
            self._actors.interrupt(self._busy.values())
        self._still_busy(max(0.0, until - time.monotonic()))

    def restart(self, ranks: Collection[int] | None = None) -> None:
        """Replace ranks by new actors, on another node if theirs has died. The others keep their variables.

        All ranks enter a new world, so groups made in the old one have ended.

        Args:
            ranks: The ranks to replace; None: all.

        Raises:
            TypeError: ``ranks`` is not a list of integers.
            ValueError: There is no such rank.
            RuntimeError: These ranks are closed, or a notebook has them, or others are lost or busy.
            OverlappingCallError: Another thread runs a function on these ranks, or restarts them.
            CollectiveTimeout: There are no resources for them; they stay lost.
            PeerLostError: A rank ended while it started.
        """
        again = sorted(range(self.size) if ranks is None else {*integers("ranks", ranks, "a list of ranks")})
        if unknown := [rank for rank in again if not 0 <= rank < self.size]:
            raise ValueError(f"restart: there is no {named(unknown)}: there are {self.size} ranks")
        with self._alone("restart"):
            self._demand_own()
            if away := sorted({*self._lost, *self._still_busy()} - {*again}):
                advice = f"ranks.restart({sorted({*again, *away})})"
                raise RuntimeError(f"restart: {named(away)} could not join the others, being lost or busy: {advice}")
            self._busy.clear()
            self._meet(self._start(again))

    def lend(self) -> Loan:
        """Give the actors to a notebook; until it gives them back, ``run`` and ``restart`` are errors.

        Raises:
            PeerLostError: Some ranks are lost.
            RuntimeError: Some are busy, or these ranks are closed or lent.
        """
        with self._alone("start"):
            self._demand_ready()
            self._is_lent = self._needs_meeting = True
        return Loan(self._actors, self._start, self._take_back)

    def _take_back(self, busy: dict[Any, int]) -> None:
        self._is_lent, self._busy = False, busy
        self._still_busy(_STOPS_WITHIN)

    def close(self) -> None:
        """End the ranks, give their resources back, and disconnect; a cluster that was started for them ends, too."""
        self._actors.close()


def _packed(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    from ray import cloudpickle

    if not callable(fn):
        raise TypeError(f"run: fn={fn!r} cannot be called: pass a function, and its arguments after it")
    try:
        message: bytes = cloudpickle.dumps((fn, args, kwargs))
    except Exception as error:  # a class of the user's may raise anything
        name = getattr(fn, "__name__", repr(fn))
        raise TypeError(f"run: {name} or its arguments cannot be sent to the ranks: {error}") from error
    return message


def _loaded(rank: int, value: bytes) -> Any:
    from ray import cloudpickle

    try:
        return unpickled(cloudpickle.loads, value)
    except Exception as error:
        text = f"run: the result of rank {rank} cannot be loaded in the driver: {text_of(error)}"
        raise TypeError(
            f"{text}\nReturn values of classes that the driver can import, and tensors on the CPU."
        ) from error
