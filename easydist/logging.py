"""Loggers that write on the main process only, or on all processes in the order of their ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from easydist.agreement.runner import meet, reported
from easydist.base.eager import eager
from easydist.state import communicators
from easydist.state.groups import current_rank
from easydist.typing import Group, Timeout

__all__ = ["MultiProcessAdapter", "get_logger"]

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter  # in Python 3.10 it takes no parameter


class MultiProcessAdapter(_Adapter):
    """A logger whose methods also take ``main_process_only``, ``in_order``, and a user's own ``extra``.

    Source: accelerate's ``MultiProcessAdapter``.
    """

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the rank in front of a message."""
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return f"[RANK {current_rank()}] {msg}", kwargs

    @eager
    def log(  # type: ignore[override]
        self,
        level: int,
        msg: object,
        *args: object,
        main_process_only: bool = True,
        in_order: bool = False,
        stacklevel: int = 1,
        group: Group = None,
        timeout: Timeout | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a message; ``info``, ``warning`` and the like take the same arguments.

        Args:
            level: The level.
            msg: The message, with ``%`` for each of ``args``.
            *args: The values in the message.
            main_process_only: Write on the main process only, not on all. It needs no exchange and no process group.
            in_order: Write on all processes, one after the other, and ignore ``main_process_only``. All processes have
                to make this call, and leave it together. Each level decides about writing only.
            stacklevel: The frame whose line is logged: 1 is the caller, as in ``logging``.
            group: The ranks that write one after the other, with ``in_order``.
            timeout: The time limit of each of their exchanges; None is the group's.
            **kwargs: ``exc_info``, ``stack_info`` and ``extra``.

        Raises:
            DisagreementError: With ``in_order``, another process made a different call.
            RemoteError: With ``in_order``, writing raised an exception on another process.

        Cost: no exchange; with ``in_order`` one header exchange for each process.
        """
        with _in_turn(group, timeout) if in_order else nullcontext():
            if self.isEnabledFor(level) and (in_order or not main_process_only or current_rank() == 0):
                msg, kwargs = self.process(msg, kwargs)  # type: ignore[assignment]
                self.logger.log(level, msg, *args, stacklevel=stacklevel + 1, **kwargs)  # this frame is one more

    @eager
    def warning_once(
        self,
        msg: object,
        *args: object,
        main_process_only: bool = True,
        in_order: bool = False,
        stacklevel: int = 1,
        group: Group = None,
        timeout: Timeout | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a warning, unless this logger has written the same one before.

        Args:
            msg: The message, with ``%`` for each of ``args``.
            *args: The values in the message; the same message with other values is another one.
            main_process_only: As in ``log``.
            in_order: As in ``log``. A process that has written the warning before takes part, and writes nothing.
            stacklevel: The frame whose line is logged: 1 is the caller.
            group: As in ``log``.
            timeout: As in ``log``.
            **kwargs: The other arguments of ``log``.
        """
        seen = self.__dict__.setdefault("_seen", set())
        # Not only for a new message: which ones are new may differ between ranks.
        with _in_turn(group, timeout) if in_order else nullcontext():
            if (message := (str(msg), *map(repr, args))) not in seen:
                seen.add(message)
                here = main_process_only and not in_order
                self.log(logging.WARNING, msg, *args, main_process_only=here, stacklevel=stacklevel + 1, **kwargs)


@contextmanager
def _in_turn(group: Group, timeout: Timeout | None) -> Iterator[None]:
    """Run the body on each process after those of lower ranks; all leave together."""
    comms = communicators(group)
    for _ in range(comms.rank):
        meet(comms, "log", timeout=timeout)
    with reported(comms, "log", timeout):
        yield
    for _ in range(comms.rank, comms.size):
        meet(comms, "log", timeout=timeout)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger that writes on the main process, unless a call says otherwise.

    It works at any time, before there is a process group or a ``ProcessState``, and creates neither. Each message
    begins with the rank.

    Args:
        name: The name, usually ``__name__``; the logger is ``logging.getLogger(name)``.
        log_level: The level of that logger and of the root logger, such as ``"INFO"``; None reads
            ``ACCELERATE_LOG_LEVEL``, and changes nothing if that is not set.

    Example:
        >>> import easydist
        >>> logger = easydist.logging.get_logger("train")
        >>> logger.info("written once")
        >>> logger.info("written by every rank, in order", in_order=True)

    Returns:
        The logger. ``debug``, ``info``, ``warning``, ``error``, ``critical``, ``exception``, ``log`` and
        ``warning_once`` take ``main_process_only=True`` and ``in_order=False``.

    Raises:
        ValueError: There is no such level.

    Source: accelerate's ``get_logger``.
    """
    logger = logging.getLogger(name)
    if log_level := log_level or os.environ.get("ACCELERATE_LOG_LEVEL"):
        logger.setLevel(log_level.upper())
        logging.getLogger().setLevel(log_level.upper())
    return MultiProcessAdapter(logger, {})
