"""The bodies that a process runs while others wait for it, as in ``main_process_first``.

A body may take longer than any limit for a call: it downloads, or prepares data. So a limit does not count while the
awaited process is known to run its body. Its page says so on its own host; for other hosts its watchdog repeats it in
the store, so that it is not taken for running after it was stopped or has ended.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from easydist.liveness.page import PageEntry, own_page
from easydist.liveness.stored import decoded

_under_way: dict[object, str] = {}
"""The bodies of this process, the innermost last."""

os.register_at_fork(after_in_child=_under_way.clear)
_beats = itertools.count()


class Body(NamedTuple):
    """The body that a process runs.

    Attributes:
        text: The call that runs it, with file and line.
        calls: The calls in which the process itself waits: each with the group, its meeting, and the only other rank.
    """

    text: str
    calls: Sequence[tuple[str, str, int | None]]

    def waits_for(self, entries: Sequence[PageEntry]) -> bool:
        """True if the body cannot end before a process with these entries, which waits for it, has come.

        Nobody knows yet who is in a group that has not met: it may be any process.

        Example:
            >>> one = PageEntry("world", "a1", 1, 3, 4, "gather, call 4", True, None, 0.0)
            >>> Body("first", [("world", "a1", None)]).waits_for([one])
            True
            >>> Body("first", [("world", "a1", 2)]).waits_for([one]), Body("first", []).waits_for([one])
            (False, False)
            >>> Body("first", [("new", "", None)]).waits_for([one])
            True
        """
        own = {(one.group, one.meeting): one.rank for one in entries}
        return any(
            not meeting or ((group, meeting) in own and peer in (None, own[group, meeting]))
            for group, meeting, peer in self.calls
        )


@contextlib.contextmanager
def running(text: str) -> Iterator[None]:
    """Let the others know that this process runs a body.

    Args:
        text: The call that runs it, with file and line.
    """
    key = object()
    _under_way[key] = text
    _show()
    try:
        yield
    finally:
        _under_way.pop(key, None)
        _show()


def _show() -> None:
    if (page := own_page()) is not None:
        page.set_body(next(reversed(_under_way.values()), ""))


def of_page(text: str, entries: Sequence[PageEntry]) -> Body | None:
    """Return the body of a process by its page; None if it runs none."""
    calls = [(one.group, one.meeting, one.peer) for one in entries if one.is_in_call]
    return Body(text, calls) if text else None


def message() -> str | None:
    """Return the message for other hosts about the body of this process, a new one each time; None if it runs none."""
    text = next(reversed(_under_way.values()), "")
    if not text:
        return None
    body = of_page(text, [] if (page := own_page()) is None else page.entries())
    return json.dumps([next(_beats), *body]) if body is not None else None


def of_message(what: str, told: bytes | None) -> Body | None:
    """Return the body of a process by its message; None if there is none.

    Raises:
        WireError: ``message`` did not write it; the error names it by ``what``.

    Example:
        >>> of_message("its body", b'[0, "main_process_first at train.py:7", [["world", "a1", null]]]')
        Body(text='main_process_first at train.py:7', calls=[('world', 'a1', None)])
    """
    if told is None:
        return None
    _, text, calls = decoded(what, told, (int, str, [(str, str, int | None)]))
    return Body(text, [(group, meeting, peer) for group, meeting, peer in calls])
