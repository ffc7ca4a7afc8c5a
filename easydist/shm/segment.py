"""A piece of memory that processes of one host share.

It is a file in ``/dev/shm`` without a name. The others open it through the process that made it (``/proc/<pid>/fd``),
which only this user may do, and compare device and inode: that proves that both see the same memory. Host names prove
nothing, containers share them. Without a name nothing can stay behind, however the processes end.
"""

from __future__ import annotations

import contextlib
import mmap
import os

FOLDER = "/dev/shm"
"""Files here are memory."""


class Segment:
    """Memory mapped from a file that only this user can open.

    Example:
        >>> mine = Segment.create(4096)
        >>> theirs = Segment.attach(mine.name, 4096)
        >>> mine.unlink()
        >>> mine.memory[0] = 7
        >>> theirs.memory[0]
        7

    Attributes:
        name: What another process needs to attach; of no use after ``unlink``.
        nbytes: How large it is.
        memory: The memory, zeros at first; it lives as long as anything refers to it.
    """

    def __init__(self, name: str, nbytes: int, descriptor: int) -> None:
        self.name, self.nbytes = name, nbytes
        self.memory = mmap.mmap(descriptor, nbytes)
        self._descriptor = -1

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """A new segment, all of it backed by memory now: a full file system is an error here, not a SIGBUS later.

        Raises:
            OSError: There is no room, or the system has no such files.
        """
        descriptor = nameless_file(nbytes, nbytes)
        try:
            status = os.fstat(descriptor)
            segment = cls(f"{os.getpid()}/{descriptor}/{status.st_dev}/{status.st_ino}", nbytes, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        segment._descriptor = descriptor
        return segment

    @classmethod
    def attach(cls, name: str, nbytes: int) -> Segment:
        """The segment that another process of this user has created, before that one has called ``unlink``.

        Raises:
            OSError: It is not to be seen from here: another host, another container, another user.
        """
        pid, number, device, inode = map(int, name.split("/"))
        path = f"/proc/{pid}/fd/{number}"
        if not os.readlink(path).startswith(FOLDER):  # opening a pipe of another program could block
            raise PermissionError(f"{path} is not the segment that was announced")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino, status.st_size) != (device, inode, nbytes):
                raise PermissionError(f"{path} is not the segment that was announced")
            return cls(name, nbytes, descriptor)
        finally:
            os.close(descriptor)

    def unlink(self) -> None:
        """Let nobody else attach; the memory stays with those that have."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self.unlink()


def nameless_file(nbytes: int, backed: int) -> int:
    """A file without a name in shared memory, its first bytes backed now: a full file system is no SIGBUS later.

    Args:
        nbytes: Its length.
        backed: How many of them shall have memory.

    Raises:
        OSError: There is no room, or the system has no such files.
    """
    flag = getattr(os, "O_TMPFILE", None)
    if flag is None or not os.path.isdir(FOLDER):
        raise OSError(f"{FOLDER} has no files without a name on this system")
    file = os.open(FOLDER, os.O_RDWR | os.O_CLOEXEC | flag, 0o600)
    try:
        os.posix_fallocate(file, 0, backed)
        os.ftruncate(file, nbytes)
    except BaseException:
        os.close(file)
        raise
    return file
