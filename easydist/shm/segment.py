"""A piece of memory that processes of one host share.

Who creates it names it with 128 random bits and gives the name to the others over a channel they have already. That a
process can attach by this name proves that it sees the same memory: host names prove nothing, containers share them.
Once all have attached, the name is taken away, so that nothing stays behind however the processes end.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import stat

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
        name: Of the file; not known outside the processes that share the memory.
        nbytes: How large it is.
        memory: The memory, zeros at first; it lives as long as anything refers to it.
    """

    def __init__(self, name: str, nbytes: int, descriptor: int) -> None:
        self.name, self.nbytes = name, nbytes
        self.memory = mmap.mmap(descriptor, nbytes)

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """A new segment, all of it backed by memory now: a full file system is an error here, not a SIGBUS later.

        Raises:
            OSError: There is no room, or no such folder.
        """
        name = f"easydist-{secrets.token_hex(16)}"
        path = os.path.join(FOLDER, name)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            return cls(name, nbytes, descriptor)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)

    @classmethod
    def attach(cls, name: str, nbytes: int) -> Segment:
        """The segment that another process of this user has created.

        Raises:
            OSError: It is not to be seen from here: another host, another container, another user.
        """
        path = os.path.join(FOLDER, os.path.basename(name))
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            status = os.fstat(descriptor)
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o600 or status.st_size != nbytes:
                raise PermissionError(f"{path} is not the segment that was announced")
            return cls(name, nbytes, descriptor)
        finally:
            os.close(descriptor)

    def unlink(self) -> None:
        """Take the name away; the memory stays with those that have attached."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(FOLDER, self.name))
