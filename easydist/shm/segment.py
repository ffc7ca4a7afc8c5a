"""A block of memory that processes of one host share.

It is a file in ``/dev/shm`` without a name. The others open it through the process that created it
(``/proc/<pid>/fd``), which only the same user may do, and compare device and inode: if they are equal, both see the
same memory. Equal host names would not prove that, because containers may share a host name. As the file has no name,
it cannot be left behind, however the processes end.
"""

from __future__ import annotations

import contextlib
import mmap
import os

FOLDER = "/dev/shm"
"""The folder of a file system in memory."""


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
        name: The text that another process needs to attach; it is invalid after ``unlink``.
        nbytes: The size in bytes.
        memory: The memory, zeros at first; it lives as long as anything refers to it.
    """

    def __init__(self, name: str, nbytes: int, descriptor: int) -> None:
        self.name, self.nbytes = name, nbytes
        self.memory = mmap.mmap(descriptor, nbytes)
        self._descriptor = -1

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """Create a segment with all its memory allocated: a full file system raises here, instead of SIGBUS later.

        Raises:
            OSError: There is no room, or the system does not support nameless files.
        """
        descriptor = nameless_file(nbytes, nbytes)
        try:
            segment = cls(name_of(descriptor), nbytes, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        segment._descriptor = descriptor
        return segment

    @classmethod
    def attach(cls, name: str, nbytes: int) -> Segment:
        """Attach the segment of another process of this user; it must not have called ``unlink`` yet.

        Raises:
            OSError: The segment is not accessible: it is on another host, in another container, or another user's.
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
        """Stop other processes from attaching; those that have attached keep the memory."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self.unlink()


def name_of(descriptor: int) -> str:
    """Return the text that another process needs to attach a file of this process."""
    status = os.fstat(descriptor)
    return f"{os.getpid()}/{descriptor}/{status.st_dev}/{status.st_ino}"


def spare() -> int:
    """Return the bytes that can be taken for speed alone, while a quarter of shared memory stays free for the rest."""
    system = os.statvfs(FOLDER)
    return (system.f_bavail - system.f_blocks // 4) * system.f_frsize


def nameless_file(nbytes: int, backed: int) -> int:
    """Return a new nameless file in shared memory, its first bytes allocated: a full file system raises here.

    Without that, touching the memory later could end the process with SIGBUS.

    Args:
        nbytes: The length of the file.
        backed: The number of bytes to allocate now.

    Raises:
        OSError: There is no room, or the system does not support nameless files.
    """
    flag = getattr(os, "O_TMPFILE", None)
    if flag is None or not os.path.isdir(FOLDER):
        raise OSError(f"{FOLDER} does not support files without a name on this system")
    file = os.open(FOLDER, os.O_RDWR | os.O_CLOEXEC | flag, 0o600)
    try:
        os.posix_fallocate(file, 0, backed)
        os.ftruncate(file, nbytes)
    except BaseException:
        os.close(file)
        raise
    return file
