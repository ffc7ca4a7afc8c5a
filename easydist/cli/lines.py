"""The output of ranks on its way to the terminal: whole lines, which torchrun itself may tear.

torchrun reads the files into which the ranks write, and shows whatever it finds at that moment. A line that is only
half there would be followed by one of another rank, or by its own second half with the rank in front of it again.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import click

__all__ = ["show_whole_lines", "tail"]

_LONGEST = 1 << 24
"""The characters of a line that are held back until its end comes; more are shown at once."""


def show_whole_lines() -> None:
    """Let torchrun read the files of the ranks with ``tail``."""
    from torch.distributed.elastic.multiprocessing import tail_log

    tail_log.tail_logfile = tail


def tail(
    header: str,
    file: str,
    dst: TextIO,
    finished: threading.Event,
    interval_sec: float,
    log_line_filter: Callable[[str], bool] | None = None,
) -> None:
    """Show the lines of a file as they come, until ``finished`` is set and all of them are shown.

    Text without an end of line, such as a prompt, is shown if nothing follows within an interval.

    Args:
        header: The text in front of each line.
        file: The path of the file, which need not exist yet.
        dst: The stream to which the lines of all ranks go.
        finished: An event that is set once nobody writes to the file any more.
        interval_sec: The seconds between two looks at the file.
        log_line_filter: A function that returns False for lines that are not shown.

    Source: ``tail_logfile`` of torch.
    """
    while not Path(file).exists():
        if finished.is_set():
            return
        time.sleep(interval_sec)
    screen, held = _screen_of(dst), ""
    with open(file, errors="replace") as lines:
        while True:
            was_finished = finished.is_set()  # asked before reading: what was written before it must not stay unread
            found = lines.readline(_LONGEST)
            held += found
            is_part = not found.endswith("\n") and len(held) < _LONGEST
            if held and not (found and is_part):
                if log_line_filter is None or log_line_filter(held):
                    screen.show(header, held)
                held = ""
            if was_finished and not found:
                return
            if is_part and not was_finished:
                time.sleep(interval_sec)


class _Screen:
    """A stream to which the lines of several ranks go.

    Args:
        stream: The stream.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._lock = stream, threading.Lock()
        self._unended: str | None = None
        self._cut_off = set[str]()
        self._is_lost = False

    def show(self, header: str, text: str) -> None:
        """Show a line or a part of one, on a line of its own or behind this rank's last part.

        Args:
            header: The text in front of the rank's lines.
            text: The line.
        """
        with self._lock:
            if text == "\n" and header in self._cut_off:  # another rank's line has ended this one
                self._cut_off.remove(header)
                return
            self._cut_off.discard(header)
            begin = header if self._unended is None else f"\n{header}"
            if self._unended == header:
                # In a terminal, the answer to a prompt may have ended the line.
                begin = header if self._stream.isatty() and text != "\n" else ""
            elif self._unended is not None:
                self._cut_off.add(self._unended)
            self._unended = None if text.endswith("\n") else header
            self._write(f"{begin}{text}")

    def _write(self, text: str) -> None:
        """Write until it fails once: the ranks go on without anybody who sees their output."""
        try:
            if not self._is_lost:
                self._stream.write(text)
                self._stream.flush()
        except OSError as error:
            self._is_lost = True
            if not isinstance(error, BrokenPipeError):  # as in easydist run … | head
                click.echo(f"easydist run: cannot show the ranks' output any more: {error.strerror}", err=True)


@functools.cache
def _screen_of(stream: TextIO) -> _Screen:
    return _Screen(stream)
