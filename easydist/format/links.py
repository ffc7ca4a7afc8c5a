"""Symbolic links on the way to a file, and the refusal of those that another user may have planted.

Everybody may create links in a folder such as ``/tmp``. There a link is followed only if this user, or the owner of the
folder, has made it, as Linux does with ``fs.protected_symlinks``.
"""

from __future__ import annotations

import errno
import os
import stat

_LONGEST_CHAIN = 40


def resolved(path: str) -> str:
    """Return a path without links, as ``os.path.realpath`` does.

    Args:
        path: The path; the file need not exist.

    Raises:
        PermissionError: A link on the way was made by another user in a sticky folder.
        OSError: The links form a circle.
    """
    done, left = ("/" if os.path.isabs(path) else os.getcwd()), path.split("/")
    followed = 0
    while left:
        name = left.pop(0)
        here = os.path.dirname(done) if name == ".." else os.path.join(done, name) if name not in ("", ".") else done
        if not os.path.islink(here):
            done = here
            continue
        _check(here, path)
        followed += 1
        if followed > _LONGEST_CHAIN:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        target = os.readlink(here)
        left[:0] = target.split("/")
        done = "/" if os.path.isabs(target) else done
    return done


def is_planted(status: os.stat_result, folder: str) -> bool:
    """True if neither this user nor the owner of the folder owns an entry of a sticky folder that others can write to.

    Args:
        status: The status of the entry, a link's own.
        folder: The folder.
    """
    around = os.stat(folder)
    is_open = around.st_mode & stat.S_ISVTX and around.st_mode & (stat.S_IWOTH | stat.S_IWGRP)
    return bool(is_open) and status.st_uid not in (os.geteuid(), around.st_uid)


def _check(link: str, path: str) -> None:
    if is_planted(status := os.lstat(link), os.path.dirname(link)):
        raise PermissionError(
            errno.EACCES,
            f"save does not follow the link {link}, which another user (uid {status.st_uid}) has made in a folder "
            "that everybody can write to; remove it, or pass the path to which it should lead",
            path,
        )
