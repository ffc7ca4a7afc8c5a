"""The operations of this process that are under way, and the thread that moves them while no thread waits for one.

A wait moves all operations of the process. The *helper* does so between waits, so that no rank waits for one that
computes. Most operations are waited for as soon as they have begun, and waking a thread for each would slow them down.
So the helper looks for pending operations every few milliseconds, as long as some have begun lately; then it sleeps
until the next one begins. If the process has begun none between two looks, it stays with those that are pending, and
sleeps on the futex of one of them.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

_LOOK, _LOOK_LATER = 0.002, 0.008
"""The least and the most seconds between two looks for operations for which nobody waits. The time doubles while other
threads begin or await operations: each look takes the interpreter from them."""

_LOOKS = 10
"""The number of looks without progress before the helper sleeps until an operation begins."""

_ASIDE, _LONGEST = 0.001, 0.05
"""The first and the longest sleep in seconds while operations of other communicators are under way, too, because their
progress does not wake the helper. Sleeps take a twentieth of the time in which nothing has moved."""

_FAREWELL, _STILL = 2.0, 0.2
"""At the end of the process, the seconds for which operations move on, and those after which nothing moves any more."""

_log = logging.getLogger("easydist")


class Movable(Protocol):
    """A communicator with operations under way."""

    def advance(self) -> bool:
        """Move them without waiting; return True if anything has moved."""

    def doze(self, woken: Callable[[], bool], seconds: float) -> bool:
        """Sleep until another rank has moved them, as ``Slots.sleep`` does."""

    def rouse(self) -> None:
        """Wake the threads of this process that sleep for them."""


class Waited(Protocol):
    """An operation for which a thread waits."""

    left: int


class HasParts(Protocol):
    """Several operations, of this module or others, for which a thread waits together."""

    @property
    def parts(self) -> Sequence[object]:
        """Those that have not ended."""


running: dict[Movable, None] = {}
"""The communicators with an operation under way."""

waits: list[Waited] = []
"""The operations for which threads of this process sleep."""

handles: dict[int, HasParts] = {}
"""The handles for which threads wait; another thread may be completing their operations."""

OWN_THREADS = "easydist-"
"""The beginning of the names of easydist's own threads."""


_SERVICES = (
    "IPython.core.history",
    "ipykernel.control",
    "ipykernel.heartbeat",
    "ipykernel.iostream",
    "multiprocessing.queues",
    "ray._private.",
    "tensorboard.",
    "torch.utils.data.",
    "tqdm.",
    "wandb.",
)
"""The modules of threads that serve a library, as a progress bar's monitor does, and begin no operations."""


def is_alone(mine: int | None) -> bool:
    """True if no thread of this process but one may begin operations."""
    return all(thread.ident == mine or _is_service(thread) for thread in threading.enumerate())


def _is_service(thread: threading.Thread) -> bool:
    if thread.name.startswith((OWN_THREADS, "fsspecIO")):  # the latter runs the event loop of fsspec
        return True
    runs = type(thread) if type(thread).__module__ != "threading" else getattr(thread, "_target", None)
    return str(getattr(runs, "__module__", "")).startswith(_SERVICES)


def move_all() -> bool:
    """Move all operations of this process without waiting; return True if anything has moved."""
    moved = False
    for movable in tuple(running):
        moved = movable.advance() or moved
    return moved


class Helper:
    """The thread that moves operations while no thread waits for one. It starts with the first one under way.

    Attributes:
        is_awake: True if it will see operations that begin now; else ``wake`` has to be called.
        begun: Changes with each operation that begins and has not ended at once.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin without a thread; in a forked child, again."""
        self.is_awake = self._has_to_end = False
        self.begun = 0
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._signal = threading.Lock()
        self._signal.acquire()
        self._at: Movable | None = None

    def wake(self) -> None:
        """Let the thread look for operations."""
        self.is_awake = True
        if self._thread is not None:
            self._call()
        elif self._starting.acquire(blocking=False):
            try:
                self._start()
            finally:
                self._starting.release()

    def _start(self) -> None:
        if self._has_to_end or self._thread is not None:  # another thread has started it meanwhile
            return
        thread = threading.Thread(target=self._serve, name="easydist-progress", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter is about to end
            thread.start()
            self._thread = thread

    def _call(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has been called already
            self._signal.release()

    def stop(self) -> None:
        """End the thread, and start no other one until ``resume`` is called."""
        self._has_to_end = True
        thread, self._thread = self._thread, None
        if thread is None or thread is threading.current_thread():
            return
        self._call()
        for movable in tuple(running):
            movable.rouse()
        thread.join(_FAREWELL)

    def resume(self) -> None:
        """Allow the thread again, and start it if operations are under way."""
        self.is_awake = self._has_to_end = False
        if running:
            self.wake()

    def release(self, movable: Movable) -> None:
        """Wait until the thread does not use the memory of a communicator that has no operation under way any more."""
        until = time.monotonic() + _FAREWELL
        while self._at is movable and time.monotonic() < until and threading.current_thread() is not self._thread:
            movable.rouse()
            time.sleep(0)

    def _serve(self) -> None:
        looks, pause, seen = 0, _LOOK, -1
        while not self._has_to_end:
            if looks < _LOOKS:
                self._signal.acquire(timeout=pause)
            else:
                looks, pause = self._rest(), _LOOK
            looks += 1
            if not running:
                continue
            looks, is_free = 0, not _is_waited()
            stays = is_free and self.begun == seen
            pause = _LOOK if stays else min(2 * pause, _LOOK_LATER)
            if is_free:
                seen = self.begun
                self._move(stays)

    def _rest(self) -> int:
        """Sleep until an operation begins; return the new number of looks without progress."""
        self.is_awake = False
        if not running:  # look after that: an operation may have begun before
            self._signal.acquire()
        self.is_awake = True
        return 0

    def _move(self, stays: bool) -> None:
        """Move operations once; if ``stays``, until another thread begins or awaits one, or none is left."""
        try:
            move_all()
            if stays:
                self._stay(self.begun)
        except Exception:  # without this thread, other ranks might wait for this one forever
            _log.exception("easydist: an operation under way could not be moved")
        finally:
            self._at = None

    def _stay(self, begun: int) -> None:
        moved = time.monotonic()
        while self.begun == begun and not self._is_wanted_elsewhere() and (movables := tuple(running)):
            now = time.monotonic()
            seconds = _LONGEST if len(movables) == 1 else min(_LONGEST, max(_ASIDE, (now - moved) / 20))
            # Before the look at ``running``: a communicator leaves that first, then waits for ``_at`` (``release``).
            self._at = movables[0]
            if self._at in running and self._at.doze(self._has_moved, seconds):
                moved = now
            self._at = None

    def _is_wanted_elsewhere(self) -> bool:
        return self._has_to_end or _is_waited()

    def _has_moved(self) -> bool:
        return self._is_wanted_elsewhere() or move_all()


def _is_waited() -> bool:
    """True if a thread waits. Ctrl-C may have kept one from taking back that it waits for an operation that ended."""
    return any(operation.left for operation in tuple(waits))


helper = Helper()


def _before_fork() -> None:
    helper.stop()


def _after_fork_in_parent() -> None:
    helper.resume()


def _after_fork_in_child() -> None:
    helper.reset()
    running.clear()
    waits.clear()


def _at_exit() -> None:
    """End the thread, which must not run while the interpreter ends, and move operations on as long as others do."""
    helper.stop()
    now = moved = time.monotonic()
    until = now + _FAREWELL
    while running and now < until and now - moved < _STILL:
        if move_all():
            moved = now
        else:
            time.sleep(_ASIDE)
        now = time.monotonic()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
