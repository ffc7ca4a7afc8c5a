"""The folder of one launch, which is removed when the launcher ends, or by a later launch if it was killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "easydist-run-"
PIPE = "lifeline"
"""The named pipe in the folder. Only its launcher holds it open, so a folder whose pipe nobody reads is left over."""
_MAKING = 60.0
"""Seconds after which a folder without a pipe is no longer being made: its launcher could remove only a part of it."""


@contextlib.contextmanager
def home() -> Iterator[str]:
    """Make the folder of this launch, with its pipe, and remove those of launchers that were killed."""
    _remove_left_over()
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as folder:
        new = os.path.join(folder, "new")
        os.mkfifo(new, 0o600)
        held = os.open(new, os.O_RDWR)  # with O_RDONLY it would wait for a writer
        os.rename(new, os.path.join(folder, PIPE))  # never visible while nobody reads it
        try:
            yield folder
        finally:
            os.close(held)


def _remove_left_over() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if _is_own(folder) and _is_left_over(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_own(folder: Path) -> bool:
    """True if this is a folder of this user, and no link to one."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _is_left_over(folder: Path) -> bool:
    """True if nobody reads the pipe of this folder, or if it has been without one for long."""
    pipe = folder / PIPE
    with contextlib.suppress(FileNotFoundError):  # another launcher may remove it meanwhile
        try:
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW))
        except FileNotFoundError:
            return time.time() - folder.lstat().st_mtime > _MAKING
        except OSError:  # ENXIO
            return stat.S_ISFIFO(pipe.lstat().st_mode)
    return False
