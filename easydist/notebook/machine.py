"""This machine as the place of ranks: their folder, the pipe that ends them, and their processes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import zmq

from easydist.notebook.process import Home, RankProcess, free_port

_LONGEST_FOLDER = 70
"""The longest path of the folder in bytes. The paths of the sockets in it can have 107."""


class Machine:
    """This machine.

    Args:
        size: The number of ranks.
    """

    def __init__(self, size: int) -> None:
        read_end, self._write_end = os.pipe()
        self._home = Home(size, private_folder(tempfile.gettempdir()), read_end, free_port(), zmq.Context())

    @property
    def folder(self) -> Path:
        """The ranks' folder, which only this user can open."""
        return self._home.folder

    def meeting(self, ranks: Iterable[int], epoch: int) -> Mapping[int, dict[str, Any]]:
        """Return what each rank needs for a meeting: they meet in a file of their folder."""
        return {rank: {"epoch": epoch} for rank in range(self._home.size)}

    def begin(self, meetings: Mapping[int, dict[str, Any]]) -> Iterator[RankProcess]:
        """Start the processes of ranks, each for the meeting that it joins."""
        for rank, meeting in meetings.items():
            yield RankProcess(rank, meeting, self._home)

    def close(self) -> None:
        """End what is left of the ranks, and remove their folder."""
        os.close(self._write_end)
        os.close(self._home.lifeline)
        self._home.context.term()
        shutil.rmtree(self.folder, ignore_errors=True)


def private_folder(parent: str) -> Path:
    """Create a folder that only this user can open, with a path short enough for sockets."""
    is_short = len(os.fsencode(parent)) < _LONGEST_FOLDER
    return Path(tempfile.mkdtemp(prefix="easydist-", dir=parent if is_short else "/tmp"))
