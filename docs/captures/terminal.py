"""A real terminal for the captures of the documentation: a command under a pty, and its screen as text or as an SVG."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import pyte
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text

_FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # nothing to load from other hosts
_THEME = TerminalTheme(
    (30, 32, 40),
    (214, 218, 226),
    [(70, 75, 88), (255, 110, 110), (130, 210, 130), (235, 200, 110), *4 * [(130, 175, 255)]],
)


class Terminal:
    """A command on a screen of its own, which is ended with all that it started when the block is left."""

    def __init__(self, *command: str, columns: int, rows: int, cwd: Path, env: Mapping[str, str] = os.environ) -> None:
        self._screen = pyte.HistoryScreen(columns, rows, history=10_000, ratio=0)
        self._stream = pyte.ByteStream(self._screen)
        self.status: int | None = None
        self.pid, self._side = pty.fork()
        if not self.pid:
            os.chdir(cwd)
            os.execvpe(command[0], command, {**env, "TERM": "xterm-256color", "COLUMNS": "", "LINES": ""})
        fcntl.ioctl(self._side, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGINT)
            self.wait_for(lambda: False, 60, "to end after Ctrl-C")

    @property
    def lines(self) -> list[str]:
        """The text in the terminal, without the spaces at the ends of lines."""
        return [_text(row).rstrip() for row in self._rows()]

    def wait_for(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Read until the condition holds or the command has ended."""
        deadline = time.monotonic() + seconds
        while self.status is None and not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {seconds} s for {what}:\n" + "\n".join(self.lines))
            self._read(0.1)

    def finish(self, seconds: float) -> int:
        """Wait for the end; return the exit status."""
        self.wait_for(lambda: False, seconds, "the end")
        assert self.status is not None
        return self.status

    def is_over(self) -> bool:
        """Read what there is; True if the command has ended."""
        self._read(0)
        return self.status is not None

    def _read(self, seconds: float) -> None:
        if self.status is not None or not select.select([self._side], [], [], seconds)[0]:
            return
        try:
            data = os.read(self._side, 1 << 16)
        except OSError:  # nobody has the other side any more
            data = b""
        self._stream.feed(data)
        if not data:
            os.close(self._side)
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _rows(self) -> Iterator[Sequence[pyte.screens.Char]]:
        """The lines that have left the screen, and those on it down to the last one that is not empty."""
        buffers = [*self._screen.history.top, *(self._screen.buffer[y] for y in range(self._screen.lines))]
        rows = [[buffer[x] for x in range(self._screen.columns)] for buffer in buffers]
        while rows and not _text(rows[-1]).strip():
            rows.pop()
        return iter(rows)

    def save_svg(self, path: Path, title: str) -> None:
        """Write what stands in the terminal as a picture that names no font."""
        console = Console(record=True, width=self._screen.columns, file=io.StringIO(), highlight=False)
        for row in self._rows():
            console.print(_styled(row), soft_wrap=True)
        console.print()  # else the picture ends at the last line's base, which cuts off its underscores
        svg = console.export_svg(title=title, theme=_THEME, code_format=_FORMAT, unique_id=path.stem)
        svg = re.sub(r' clip-path="url\(#[^)]*-line-\d+\)"', "", svg)  # those of other lines
        path.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n", encoding="utf-8")


def _text(row: Sequence[pyte.screens.Char]) -> str:
    return "".join(char.data for char in row)


def _styled(row: Sequence[pyte.screens.Char]) -> Text:
    runs = groupby(row, key=lambda char: char._replace(data=""))
    return Text.assemble(*((_text(list(run)), _style(kind)) for kind, run in runs))


def _style(char: pyte.screens.Char) -> Style:
    names = {"default": None, "brown": "yellow"}
    color = names.get(char.fg, char.fg)
    return Style(color=color and color.replace("bright", "bright_"), bold=char.bold, italic=char.italics)
