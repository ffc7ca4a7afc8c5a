"""The operations of a communicator: time limits, hooks, one operation at a time, and the handling of failures."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import NoReturn

from torch.distributed import Store

from easydist.agreement.notes import listeners
from easydist.base import forks
from easydist.base.modes import demand_data
from easydist.base.wording import reason
from easydist.comms.failures import BROKEN, BROKEN_WRAPPED, CommDisagreement, abort, explained, is_late, later
from easydist.comms.hooks import HookArgs, Hooks, traced
from easydist.comms.options import CommOptions, checked_hints, limited
from easydist.comms.statuses import Statuses, asks_for_headers, compare_headers
from easydist.errors import DisagreementError, EasydistError, OverlappingCallError
from easydist.liveness.monitor import Monitor
from easydist.liveness.timed_store import TimedStore
from easydist.transport.backend import Backend
from easydist.transport.backends.c10d import Gloo
from easydist.transport.checked import About, Begin, Hints, Staging, checked_timeout, ended
from easydist.transport.described import MESSAGE, OWN, PAIRS, Described, described, text
from easydist.transport.work import TorchWork, handle
from easydist.typing import T


class Operations:
    """The rules of one communicator for its operations.

    Args:
        backend: Moves the bytes.
        name: A name for error messages and logs.
        options: The options of the communicator.
        monitor: Watches the other processes; None if there is no monitor.

    Attributes:
        options: The options of the communicator.
        time_limit: The time limit of an operation that does not set its own.
        hooks: The hooks of the communicator.
        busy: Holds the operation that has begun and that its caller still waits for.
        failure: The error because of which no further operation can begin; None if there is none.
        is_final: True once the communicator has been finalized.
    """

    def __init__(self, backend: Backend, name: str, options: CommOptions, monitor: Monitor | None) -> None:
        self._backend, self._name, self._monitor = backend, name, monitor
        self._broken = BROKEN_WRAPPED if monitor is None else BROKEN
        self._is_on_cpu = backend.device.type == "cpu"
        self.options, self.hooks = options, Hooks()
        self.time_limit: timedelta = options.time_limit
        self.busy: dict[str, tuple[int, str]] = {}
        self.failure: BaseException | None = None
        self.is_final = False
        self._operations, self._generation = 0, forks.generation
        self._checks = False
        self._checks = self._is_checked = self._asks_for_check(options.hints)
        self._statuses: Statuses | None = None
        if not backend.compares:
            backend.compare(CommDisagreement, f"The communicator {name!r}", self.busy.__len__)

    def _asks_for_check(self, hints: Mapping[str, str] | None) -> bool:
        """True if headers go before the operation: over gloo, where its messages are not compared otherwise."""
        asked = asks_for_headers(hints)
        return isinstance(self._backend, Gloo) and (self._checks if asked is None else asked)

    def _compare(self, name: str, call: Described, about: About, limit: timedelta | None) -> None:
        """Exchange headers with the ranks that take part in the operation."""
        if name != "batch_op":
            peer = about[1] if name in PAIRS else None
            assert isinstance(self._backend, Gloo)
            compare_headers(self._backend, call, peer, limit, f"The communicator {self._name!r}")

    def watch(self, store: Store) -> None:
        """Compare operations that wait over gloo.

        Args:
            store: A store of this communicator alone.
        """
        if isinstance(self._backend, Gloo):
            text_of = functools.partial(text, end=f"The communicator {self._name!r} {self._broken}")
            self._statuses = Statuses(TimedStore(store), self._backend, text_of, self.busy)

    def exchange(self, name: str, run: Callable[[], T]) -> T:
        """Run an exchange of easydist's own, without hooks; no further operation can begin if it fails.

        Args:
            name: The name of the exchange for errors.
            run: Runs it.
        """
        limit = self.time_limit
        self.demand_own_process()
        demand_data(name)
        try:
            if self._backend.compares:
                self._backend.call = described(name)
            return run()
        except BaseException as error:
            self._fail(name, limit, error)
        finally:
            if self._backend.compares:
                self._backend.call = OWN

    def demand_own_process(self) -> None:
        """Check that this is not a forked child, which would use its parent's connections in its name.

        Raises:
            RuntimeError: This process is a forked child.
        """
        if self._backend.size > 1:
            forks.demand_own(self._generation)

    def end(self, reason: BaseException) -> None:
        """Let no further operation begin. The first reason counts."""
        if self.failure is None:
            self.failure = reason

    def finish(self) -> None:
        """Let no further operation begin, and wait for the collectives under way: other ranks may need them."""
        self.is_final = True
        if self.failure is None:
            try:
                self._backend.finish(self.time_limit)
            except Exception as error:  # their own waits raise it
                self._tell(self._explained("finalize", self.time_limit, error))
            if self._statuses is not None:
                self._statuses.finish()

    def run(
        self,
        name: str,
        begin: Begin,
        async_op: bool,
        hints: Hints,
        timeout: timedelta | None,
        staging: Staging | None = None,
        about: About = (None, None, None),
    ) -> TorchWork:
        """Begin an operation with checked arguments, and wait for its end unless it is asynchronous."""
        if self.failure is not None or self.is_final:
            raise self._unusable(name)
        self.demand_own_process()
        demand_data(name)
        limit = self.time_limit if hints is None and timeout is None else self._limit(hints, timeout)
        self._is_checked = self._checks if hints is None else self._asks_for_check(hints)
        number = self._operations
        self._operations += 1
        if not (listeners or self.hooks.before or self.hooks.after):
            return self._begun(name, begin, async_op, limit, staging, about)
        args = HookArgs(name, bool(async_op), hints, limit, [] if staging is None else staging.outputs)
        return self._watched(number, args, lambda: self._begun(name, begin, async_op, limit, staging, about))

    def _limit(self, hints: Hints, timeout: timedelta | None) -> timedelta:
        """Return the time limit of an operation, after checking what the caller has passed."""
        if hints is not None:
            checked_hints(hints)
        return self.time_limit if timeout is None else limited(checked_timeout(timeout), self.time_limit)

    def _watched(self, number: int, args: HookArgs, run: Callable[[], TorchWork]) -> TorchWork:
        """Run an operation, and report it to the hooks and to a trace."""
        for before in tuple(self.hooks.before.values()):
            before(args.name, number, args)
        with traced(self._backend, self._name, number, args):
            work = run()
        for after in tuple(self.hooks.after.values()):
            after(number, args._replace(work=work))
        return work

    def _begun(
        self, name: str, begin: Begin, async_op: bool, limit: timedelta, staging: Staging | None, about: About
    ) -> TorchWork:
        """Begin the operation, after making sure that no other one of this process is under way."""
        # On a GPU a wait without a limit blocks only the stream; the backend's own watchdog enforces the default limit.
        waits = limit if self._is_on_cpu or limit is not self.time_limit else None
        mine = threading.get_ident(), name
        if (other := self.busy.setdefault("operation", mine)) is not mine:
            raise OverlappingCallError(self._two_at_once(mine, other))
        try:
            if (backend := self._backend).compares:
                if self._is_checked:
                    self._compare(name, described(name, *about), about, waits)
                backend.call = MESSAGE if name in PAIRS else described(name, *about)
                begun = begin()
                backend.call = OWN
            else:
                begun = begin()
            if not async_op:
                return ended(begun, waits, staging)
            work = handle(begun).within(waits)
        except BaseException as error:
            self._fail(name, limit, error)
        finally:
            self.busy.pop("operation", None)
        if staging is not None:
            staging.deliver(work)
        work.reporting(self._failed, name, limit, () if staging is None else staging.outputs)
        if self._statuses is not None:
            self._statuses.add(work)
        return work.in_background() if self._is_on_cpu else work.on(self._backend.device)

    def _unusable(self, name: str) -> RuntimeError:
        if self.is_final:
            return RuntimeError(f"{name}: TorchComm {self._name!r} not initialized: it has been finalized")
        assert self.failure is not None
        return later(f"{name}: the communicator {self._name!r} is broken: {reason(self.failure)}", self.failure)

    def _two_at_once(self, mine: tuple[int, str], other: tuple[int, str]) -> str:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = [
            f"{mine[1]}: another call of the group is under way in this process",
            *[f"  {names.get(thread)}: {operation}" for thread, operation in (other, mine)],
            f"All ranks make the calls of a communicator ({self._name!r}) in the same order, so calls cannot overlap. "
            "Give each thread a communicator of its own (new_comm, split), and make no calls in a signal handler.",
        ]
        return "\n".join(lines)

    def _fail(self, name: str, limit: timedelta, error: BaseException) -> NoReturn:
        if isinstance(error, DisagreementError):
            if self._backend.compares:
                self._backend.call = OWN
            error.is_told = True
        raised = self._failed(name, limit, error)
        if raised is error:
            raise error
        raise raised from error

    def _failed(self, name: str, limit: timedelta, error: BaseException) -> BaseException:
        """Mark the communicator as broken, and return the error to raise."""
        if self.failure is not None:
            return later(f"{name}: the operation can no longer complete: {self.failure}", self.failure)
        if self.is_final:
            return RuntimeError(f"{name}: the operation can no longer complete: finalized")
        if isinstance(error, DisagreementError) and not error.is_final:  # the communicator goes on
            self._tell_hooks(error)
            return error
        raised = self._explained(name, limit, error) if isinstance(error, Exception) else error
        self.failure = raised
        if raised is not error:
            raised.__cause__ = error
        self._tell(raised)
        self._tell_hooks(raised)
        return raised

    def _tell(self, error: BaseException) -> None:
        """Tell the other ranks, which must not wait for this one, and raise the same error."""
        if self._monitor is not None:
            self._monitor.give_up(error) if isinstance(error, EasydistError) else self._monitor.ended_by(error)

    def _tell_hooks(self, error: BaseException) -> None:
        self.hooks.tell_failed(error)
        if self.options.abort_process_on_timeout_or_error:
            abort(error)

    def _explained(self, name: str, limit: timedelta, error: Exception) -> Exception:
        """Return the error to raise; the monitor knows why a connection broke, perhaps on behalf of a third rank."""
        if self._statuses is not None and (text := self._statuses.found()) is not None:
            different = CommDisagreement(text)
            different.is_final = different.is_told = True
            return different
        peer: int | None = getattr(error, "peer", None)
        if self._monitor is not None and peer is not None and not is_late(error):
            error = self._monitor.explain(error, peer)
        peers = [] if self._monitor is None else list(self._monitor.peers.values())
        what = f"{name} in the communicator {self._name!r} (rank {self._backend.rank} of {self._backend.size})"
        return explained(error, what, limit, peers, f"The communicator {self._broken}")
