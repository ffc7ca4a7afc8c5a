"""A store with a time limit on each answer: while the process that serves it is stopped, a call blocks in C++.

The calls are made in threads (``liveness/background.py``). The caller waits a moment for the answer; until it has come,
no further call waits. No other module of the library calls a store or makes a connection to one. So values are signed,
and signatures are checked, here (``liveness/signed.py``).
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import (
    Future,
    TimeoutError as Unanswered,  # the builtin one from Python 3.11 on
)
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

from torch.distributed import PrefixStore, Store, TCPStore

from easydist.errors import WireError
from easydist.liveness.background import Caller, NoAnswerError, idle_caller, release, within
from easydist.liveness.rules import PATIENCE
from easydist.liveness.signed import seal, text_in

T = TypeVar("T")

POLL = 0.005
"""Seconds between two looks for a key: the store's own wait cannot be interrupted."""

_MOST_PATIENCE, _FORGOTTEN = 5.0, 0.9
"""The longest wait for an answer, in seconds, and the factor by which waits get shorter with each faster answer."""

_DELETED = "\0deleted"

_DIGITS = 9
"""More than the digits of any rank."""

Written: TypeAlias = tuple[int | None, bytes | WireError]
"""An entry of a log: the rank that has written it, or None if another program has, and its text, or the error if it is
not signed with this process's job key."""


class TimedStore:
    """A ``torch.distributed`` store that never blocks the caller for long.

    How long depends on the answers before: a question may take several ways to another continent, and an answer that
    comes too late is lost. So the caller waits twice as long as for the slowest of the last answers.

    Args:
        store: The store.

    Attributes:
        has_answered: True if the last question was answered in time. ``is_silent`` may have changed since.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._seal = store, seal()
        self.has_answered = False
        self._unanswered: Future[Any] | None = None
        self._caller: Caller | None = None
        self._patience = PATIENCE

    @property
    def is_silent(self) -> bool:
        """True if the store has not answered in time, and still has not."""
        return self._unanswered is not None and not self._unanswered.done()

    @property
    def plain(self) -> Store:
        """The store, for torch."""
        return self._store

    def address(self) -> tuple[str, int] | None:
        """Return the host and the port at which the store is served; None if it is no ``TCPStore``."""
        store = underlying(self._store)
        return (store.host, store.port) if isinstance(store, TCPStore) else None

    def check(self, keys: Sequence[str]) -> bool:
        """True if all these keys have been set, and the store answers.

        Raises:
            RuntimeError: The store is gone.
            WireError: As for ``get``.
        """
        if self._seal.key:
            return all(self.get(key) is not None for key in keys)
        return bool(self._ask(lambda: self._store.check(list(keys))))

    def get(self, key: str, by: int | None = None) -> bytes | None:
        """Return the value of a key; None if it is not set, or the store does not answer.

        Args:
            key: The key.
            by: The rank that writes this key, for errors; None if several ranks may.

        Raises:
            RuntimeError: The store is gone.
            WireError: The value is not signed with this process's job key.
        """
        value = self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)
        opened = None if value is None else self._seal.opened(key, value, by)
        return None if opened == _DELETED.encode() else opened

    def values(self, keys: Sequence[str]) -> list[bytes | None]:
        """Do as ``get`` for several keys, in two questions if all are set."""
        found = zip(keys, self._ask(lambda: _values(self._store, keys)) or [None] * len(keys), strict=True)
        return [None if value is None else self._seal.opened(key, value) for key, value in found]

    def set_first(self, key: str, text: str) -> bytes | None:
        """Set a key unless it is set; later, if the store does not answer.

        Returns:
            The value of the key afterwards; None if the store does not answer.

        Raises:
            RuntimeError: The store is gone.
            WireError: As for ``get``.
        """
        sealed = self._seal.sealed(key, text)
        value = self._ask(lambda: self._store.compare_set(key, "", sealed), is_lasting=True)
        return None if value is None else self._seal.opened(key, value)

    def set(self, key: str, text: str) -> None:
        """Set a key; later, if the store does not answer.

        Raises:
            RuntimeError: The store is gone.
        """
        sealed = self._seal.sealed(key, text)
        self._ask(lambda: self._store.set(key, sealed), is_lasting=True)

    def delete(self, key: str) -> None:
        """Let a key count as missing; later, if the store does not answer.

        It stays in the store: if another rank has just checked that it is there, torch's ``get`` would wait for it, and
        all other questions of that process with it.

        Raises:
            RuntimeError: The store is gone.
        """
        self.set(key, _DELETED)

    def append(self, log: str, rank: int, text: str) -> None:
        """Append an entry to a log (``liveness/log.py``); later, if the store does not answer.

        Raises:
            RuntimeError: The store is gone.
        """

        def append() -> None:
            key = f"{log}/{self._store.add(log, 1)}"
            self._store.set(key, self._seal.sealed(key, f"{rank} {text}"))

        self._ask(append, is_lasting=True)

    def entries(self, log: str, new: range, unwritten: Sequence[int]) -> tuple[int, dict[int, Written | None]] | None:
        """Return entries of a log by number.

        Args:
            log: The log.
            new: The numbers to ask for, as far as there are such entries.
            unwritten: Earlier numbers to ask for, too.

        Returns:
            The last number of ``new`` that there is, or the one before them, and the entries, None for those that are
            counted, but not written yet; None if the store does not answer.

        Raises:
            RuntimeError: The store is gone.
        """
        if (found := self._ask(lambda: _entries(self._store, log, new, unwritten))) is None:
            return None
        last, values = found
        return last, {number: self._written(f"{log}/{number}", value) for number, value in values.items()}

    def _written(self, key: str, value: bytes | None) -> Written | None:
        if value is None:
            return None
        by = _rank_in(text_in(value))
        try:
            text = self._seal.opened(key, value, by)
        except WireError as error:
            return by, error
        return by, text if by is None else text.partition(b" ")[2]

    def add(self, key: str, amount: int, seconds: float) -> int:
        """Add to a counter, and return its new value.

        Args:
            key: The key of the counter.
            amount: The number to add.
            seconds: The time limit.

        Raises:
            RuntimeError: The store is gone, or has not answered in time.
        """
        return int(within(seconds, lambda: self._store.add(key, amount)))

    def _ask(self, question: Callable[[], T], is_lasting: bool = False) -> T | None:
        asked, self.has_answered = functools.partial(self._answered, question), False
        if self.is_silent:
            if is_lasting and self._caller is not None:
                self._unanswered = self._caller.begin(asked)  # it stays silent until this is done, too
            return None
        caller, self._caller = self._caller or idle_caller(), None
        answer = caller.begin(asked)
        try:
            value = answer.result(self._patience)
            self.has_answered = True
            return value
        except Unanswered:
            return None
        finally:  # also after Ctrl-C
            if answer.done():
                release(caller)
            else:
                self._caller, self._unanswered = caller, answer

    def _answered(self, question: Callable[[], T]) -> T:
        began = time.monotonic()
        try:
            return question()
        except RuntimeError:
            raise
        except Exception as error:  # a store written in Python may raise anything
            raise RuntimeError(f"the store has failed: {error!r}") from error
        finally:
            usual = max(PATIENCE, _FORGOTTEN * self._patience)
            self._patience = min(max(usual, 2 * (time.monotonic() - began)), _MOST_PATIENCE)


_AT_ONCE = 100
"""The most values of gloo to ask for at once: with a thousand ranks each has some 40 KB."""


class InterruptibleStore(Store):
    """A store in which torch's own waits end once the caller gives up, so that no thread and no socket stays behind.

    torch calls its methods from C++. The values may be any bytes. gloo waits for the key of each other rank, and gets
    it; with ``GLOO_ENABLE_STORE_V2_API=1`` in the environment it gets all of them at once.

    Args:
        store: The store.
        seconds: The time limit of all waits.
    """

    def __init__(self, store: Store, seconds: float) -> None:
        super().__init__()
        self._timed, self._ends = TimedStore(store), time.monotonic() + seconds
        self._awaited: dict[str, bytes] = {}

    def give_up(self) -> None:
        """End a wait in another thread, and all further ones."""
        self._ends = 0.0

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        self._timed.set(key, bytes(value).decode("latin-1"))

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value."""
        return self._awaited.pop(key, None) or self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for keys, and return their values."""
        found: list[bytes] = []
        while asked := keys[len(found) : len(found) + _AT_ONCE]:
            values = [value for value in self._timed.values(asked) if value is not None]
            if len(values) == len(asked):
                found += [value.decode().encode("latin-1") for value in values]
            elif time.monotonic() >= self._ends:
                raise RuntimeError("timed out, or given up, in the store through which the ranks connect")
            else:
                time.sleep(POLL)
        return found

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys."""
        self._awaited |= zip(keys, self.multi_get(keys), strict=True)

    def has_extended_api(self) -> bool:
        """True: there is a ``multi_get``."""
        return True

    def check(self, keys: Sequence[str]) -> bool:
        """True if all these keys have been set."""
        return self._timed.check(keys)


def _entries(store: Any, log: str, new: range, unwritten: Sequence[int]) -> tuple[int, dict[int, bytes | None]]:
    count = _count(store, log)
    last, values = max(new.start - 1, min(count, new[-1])), dict[int, bytes | None]()
    for numbers in (unwritten, range(new.start, last + 1)):
        values |= zip(numbers, _values(store, [f"{log}/{number}" for number in numbers]), strict=True)
    return last, values


def _count(store: Any, log: str) -> int:
    """Return the number of entries: by one question to a server, whereas a file would record each ``add``."""
    if isinstance(underlying(store), TCPStore):
        return int(store.add(log, 0))
    return int(store.get(log)) if store.check([log]) else 0


def underlying(store: Any) -> Any:
    """Return the store behind prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _rank_in(text: bytes) -> int | None:
    """Return the rank at the beginning of an entry; None if there is none."""
    rank = text.partition(b" ")[0]
    return int(rank) if rank.isdigit() and len(rank) < _DIGITS else None


def _values(store: Any, keys: Sequence[str]) -> list[bytes | None]:
    """Return the values of some keys, None for those that are not set; the fewer these are, the fewer questions."""
    if not keys:
        return []
    if store.check(list(keys)):
        return [*store.multi_get(keys)] if store.has_extended_api() else [store.get(key) for key in keys]
    half = len(keys) // 2
    return [*_values(store, keys[:half]), *_values(store, keys[half:])] if half else [None]


def served(host: str, port: int, seconds: float, waits: float | None = None, only_there: bool = False) -> TCPStore:
    """Return a store that this process serves.

    Args:
        host: An address of this host.
        port: The port, where the store listens on all addresses, and stores of this process may share it; 0 for a free
            port of that address alone.
        seconds: The time limit.
        waits: The limit of torch's own waits in the store; None is ``seconds``.
        only_there: True to listen at no other address in any case.

    Raises:
        RuntimeError: The port is in use, or this process cannot reach it at that address.
        OSError: The port is in use, of this address alone.
    """
    where: dict[str, Any] = {"multi_tenant": True}
    if only_there or port == 0:
        listener = socket.create_server((host, port))
        port, where = listener.getsockname()[1], {"master_listen_fd": listener.detach()}
    seconds = max(PATIENCE, seconds)
    limit = timedelta(seconds=seconds)
    store = within(seconds, lambda: TCPStore(host, port, None, True, limit, wait_for_workers=False, **where))
    return _waiting(store, waits)


def reached(
    host: str, port: int, seconds: float, check: Callable[[], None] | None = None, waits: float | None = None
) -> TCPStore:
    """Return a connection to a store that another process serves.

    Args:
        host: The address of its host.
        port: Its port.
        seconds: The time limit.
        check: As for ``within``.
        waits: The limit of torch's own waits in the store; None is ``seconds``.

    Raises:
        RuntimeError: No process serves a store there, or it has not answered in time.
    """
    deadline = time.monotonic() + seconds
    # In Python, since C++ would log each attempt.
    while not _listens(host, port):
        if check is not None:
            check()
        if time.monotonic() >= deadline:
            raise NoAnswerError(f"no process listens at {host}:{port}")
    seconds = max(PATIENCE, deadline - time.monotonic())
    limit = timedelta(seconds=seconds)
    store = within(seconds, lambda: TCPStore(host, port, None, False, limit, wait_for_workers=False), check)
    return _waiting(store, waits)


def _waiting(store: TCPStore, waits: float | None) -> TCPStore:
    if waits is not None:
        store.set_timeout(timedelta(seconds=waits))
    return store


def _listens(host: str, port: int) -> bool:
    """True if a process listens there; else False, after a moment."""
    if is_reachable(host, port, listens=True):
        return True
    time.sleep(_TICK)
    return False


def is_reachable(host: str, port: int, listens: bool = False) -> bool:
    """True if this host can reach another one; it can, if a process there listens that is stopped.

    Args:
        host: The address of the other host.
        port: A port.
        listens: True to demand that a process listens there.

    Cost: up to half a second.
    """
    try:
        with socket.create_connection((host, port), PATIENCE):
            return True
    except ConnectionRefusedError:
        return not listens
    except OSError:
        return False


_TICK = 0.1
"""Seconds between two attempts to reach a store."""
