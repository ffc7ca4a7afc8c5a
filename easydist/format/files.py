"""Saving and loading nested data as safetensors files."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import torch

from easydist.base.wording import a_or_an
from easydist.errors import WireError
from easydist.format import outline
from easydist.format.header import Header, chunks, decode, encode
from easydist.format.links import is_planted, resolved
from easydist.format.naming import Names
from easydist.format.targets import Targets
from easydist.typing import Device, Tree

__all__ = ["header", "load", "load_metadata", "read_header", "save"]


def save(
    tree: Tree, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None, *, names: Names = None
) -> None:
    """Write a tree as a safetensors file.

    Law: after ``save(x, path)``, ``load(path)`` equals ``x`` bit for bit. The structure is stored as JSON beside the
    tensors; nothing is pickled. A tensor that is in several places is stored once and loaded as one tensor, and so are
    tensors with the same elements in the same memory, such as tied weights.

    A flat mapping of text to tensors, such as a state dict, is stored under its own names, as other programs expect it.
    In any other tree each tensor and array is stored under its path (``['layer']['weight']``).

    JSON cannot name classes, and a file that could would not be safe. So some values are loaded as plainer types: a
    dataclass or namedtuple as a dict of its fields, other mappings as dict, a deque and subclasses of list as list,
    subclasses of tuple as tuple, parameters as tensors without ``requires_grad``, arrays in native byte order.
    ``into=`` of ``load`` fills the original classes.

    The file is written completely or not at all: it is written beside ``path`` under another name, synchronised with
    the disk, then renamed.

    Args:
        tree: Tensors, arrays, numbers, text, bytes, None, dtypes and devices in containers nested at most 100 deep.
        path: The file. An existing one is replaced, and its mode is kept; tensors loaded from it keep their values.
        metadata: Further texts for ``load_metadata`` and other readers. Keys that begin with ``easydist.`` are
            reserved.
        names: The names of the tensors in the file. ``"dots"`` joins keys, indices and fields by dots
            (``layer.weight``); a function takes a path and returns a name. Any names give the same tree in ``load``.

    Raises:
        TypeError: ``path`` is not a path (the arguments may be swapped), or the tree holds other values (the text names
            their path), or the metadata is not text, or ``names`` returns something other than text.
        ValueError: The tree is nested too deeply, or has more than 100 000 tensors, or keys or sizes that ``load``
            refuses, or the metadata uses a reserved key, or ``names`` makes names equal (the text has all of them, with
            their paths).
        OSError: The file cannot be written, or ``path`` is a FIFO or device; an existing file is not changed.
        PermissionError: ``path`` leads through a link that another user has made in a sticky folder, such as ``/tmp``.

    Cost: one write of the data; tensors that are not contiguous or not on the CPU are copied, one at a time.

    Example:
        >>> import tempfile, torch
        >>> path = tempfile.mkdtemp() + "/step.safetensors"
        >>> save({"weight": torch.ones(2), "step": 3}, path)
        >>> load(path)
        {'weight': tensor([1., 1.]), 'step': 3}

    Source: https://huggingface.co/docs/safetensors/index#format; ties are recorded as by ``safetensors.torch``'s
    ``save_model``.
    """
    target: object = path
    if not isinstance(target, str | bytes | os.PathLike):
        swapped = ", and a path as the tree: they are swapped" if isinstance(tree, str | os.PathLike) else ""
        raise TypeError(f"save: got {type(target).__name__} as the path{swapped}; pass save(tree, path)")
    tensors, texts = described("save", tree, metadata, names)
    with _replacing(path) as file:
        for chunk in chunks(tensors, texts):
            file.write(chunk)


def described(
    operation: str, tree: Tree, metadata: Mapping[str, str] | None, names: Names
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a tree by name, and the metadata of their file; ``operation`` is named in errors."""
    if taken := [key for key in metadata or () if str(key).startswith("easydist.")]:
        raise ValueError(f"{operation}: metadata keys that begin with 'easydist.' are reserved, got {taken[0]!r}")
    return outline.describe(tree, metadata, names)


def header(tree: Tree, metadata: Mapping[str, str] | None = None, *, names: Names = None) -> Header:
    """Describe the file that ``save`` writes, and the message that ``send_tensor_dict`` sends, without writing it.

    Law: after ``save(x, path, metadata, names=names)``, ``read_header(path) == header(x, metadata, names=names)``; and
    ``header(x)`` is the header that ``send_tensor_dict(x, …)`` and ``broadcast_tensor_dict(x)`` announce. If tensors
    are on an accelerator, such a message adds the types of their devices under ``easydist.devices``.

    Args:
        tree: As in ``save``.
        metadata: As in ``save``.
        names: As in ``save``.

    Returns:
        The names, dtypes, shapes and offsets of the tensors, and the metadata. It is printed as a table.

    Raises:
        TypeError: As for ``save``.
        ValueError: As for ``save``.

    Cost: copies no data.

    Example:
        >>> import torch
        >>> described = header({"weight": torch.ones(2, 3), "step": torch.tensor(7)})
        >>> described.entries[0]
        Entry(name='step', dtype=torch.int64, shape=(), start=0, stop=8)
        >>> [entry.name for entry in described.entries], described.metadata["format"]
        (['step', 'weight'], 'pt')

    Source: https://huggingface.co/docs/safetensors/index#format
    """
    return decode(encode(*described("header", tree, metadata, names)), apart=True)


def read_header(source: str | os.PathLike[str] | bytes | bytearray | memoryview) -> Header:
    """Read the header of a safetensors file, from ``save`` or from any other writer.

    Args:
        source: The path of the file, as text or ``PathLike``; bytes are the contents of a file, or its header alone.

    Returns:
        The names, dtypes, shapes and offsets of the tensors, and the metadata. It is printed as a table.

    Raises:
        WireError: It is not a valid safetensors file. Nothing is allocated for its data.
        OSError: The file cannot be read, or is not a regular file.
        TypeError: ``source`` is neither a path nor bytes.

    Cost: reads the header only.

    Example:
        >>> import torch
        >>> from safetensors.torch import save as to_bytes
        >>> read_header(to_bytes({"weight": torch.ones(2, 3)}, {"format": "pt"}))
        name    dtype    shape   start  stop
        weight  float32  (2, 3)      0    24
        format: pt

    Source: https://huggingface.co/docs/safetensors/index#format
    """
    if isinstance(source, str | os.PathLike):
        with _naming(source):
            return _open(source)[1]
    if not isinstance(source, bytes | bytearray | memoryview):
        raise TypeError(f"read_header takes a path or bytes, got {type(source).__name__}")
    data = memoryview(source).cast("B")
    return decode(data, apart=len(data) == 8 + int.from_bytes(data[:8], "little"))


@contextlib.contextmanager
def _replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file that replaces ``path`` when all of it is on the disk."""
    target = resolved(os.fsdecode(path))  # replace the target of a link, not the link
    folder, existing = os.path.dirname(target), None
    with contextlib.suppress(FileNotFoundError):
        existing = os.stat(target)
        _check_regular("save", path, existing)  # the file would replace a device
    if os.fsdecode(path).endswith("/") or (existing is not None and stat.S_ISDIR(existing.st_mode)):
        raise IsADirectoryError(errno.EISDIR, "save needs the path of a file, but this is a folder", os.fspath(path))
    if not os.path.isdir(folder):
        raise FileNotFoundError(errno.ENOENT, "save makes no folders, and there is none", folder)
    temporary = os.path.join(folder, f".{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb", opener=_open_private if existing else None) as file:
            if existing:
                _keep_mode(file.fileno(), existing, folder)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):  # a write names no file, the other steps the temporary one
            error.filename = os.fspath(path)
        raise
    _synchronise(folder)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _keep_mode(file: int, existing: os.stat_result, folder: str) -> None:
    """Give a new file, which only its owner can open so far, the group and the mode of the file that it replaces."""
    mode = stat.S_IMODE(existing.st_mode)
    if is_planted(existing, folder):
        mode = 0o600
    try:
        os.fchown(file, -1, existing.st_gid)
    except OSError:  # the group's permissions are not for the group that the file has now
        mode &= ~stat.S_IRWXG
    os.fchmod(file, mode)


def _synchronise(folder: str) -> None:
    """Make the new name survive a power cut, if the system supports that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def load(path: str | os.PathLike[str], *, device: Device = "cpu", into: Tree = None) -> Tree:
    """Read a safetensors file, from ``save`` or from any other writer.

    Law: ``load(path)`` is the tree that was saved; for a file that easydist did not write it is ``{name: tensor}``.

    On the CPU the file is mapped, not read: pages are loaded when they are used, and tensors may be written without
    changing the file. Do not truncate or overwrite a file in place while its tensors are in use; ``save`` never does.

    Args:
        path: The file.
        device: The device of the tensors; arrays stay on the CPU.
        into: A tree with tensors and arrays, on any devices, to be written in place. Its leaves are matched by path and
            must have the dtypes and shapes of the file's, which is checked before the first is written.

    Returns:
        The tree; with ``into``, that tree, in which numbers are replaced by the loaded ones.

    Raises:
        WireError: The file is not a valid safetensors file. Nothing is allocated for its data.
        TypeError: ``into`` is a module, whose ``state_dict()`` is meant.
        ValueError: ``into`` does not fit the file, or cannot be written; it is not changed.
        OSError: The file cannot be read, or is not a regular file.

    Cost: reads the header at once, and data when it is used. With ``into`` or another device, one copy.

    Example:
        >>> import tempfile, torch
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> model = torch.nn.Linear(2, 1)
        >>> save(model.state_dict(), path)
        >>> model.load_state_dict(load(path))
        <All keys matched successfully>

    Source: https://huggingface.co/docs/safetensors/index#format
    """
    if isinstance(into, torch.nn.Module):
        kind = a_or_an(type(into).__name__)
        raise TypeError(f"load: into= takes a tree of tensors, got {kind}; pass its state_dict()")
    with _naming(path):
        targets = None if into is None else Targets(into)
        data, leaves = tree_in(*_open(path), device, targets)
    return data if targets is None else _write_into(targets, leaves, os.fspath(path))


def tree_in(
    buffer: Any, head: Header, device: Device = "cpu", targets: Targets | None = None
) -> tuple[Tree, Mapping[str, Any]]:
    """Return the tree in the memory of a file, and its leaves by path.

    Args:
        buffer: The memory, which the tensors keep alive.
        head: Its header.
        device: As in ``load``.
        targets: The leaves to be written in place; those of the file stay on the CPU.
    """
    tensors, where = head.tensors(buffer), device if targets is None else "cpu"
    if (text := head.metadata.get(outline.METADATA)) is not None:
        return outline.decode(text, tensors, where, None if targets is None else targets.values)
    data = {name: tensor.to(where) for name, tensor in tensors.items()}
    return data, {f"[{name!r}]": tensor for name, tensor in tensors.items()}


def load_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the metadata of a file as other programs see it, without easydist's own.

    This is the ``metadata`` that was passed to ``save``, or that another writer put into the file. If ``save`` named
    the tensors other than by their paths, it has added ``format``, and the stored name for each tied one.

    Args:
        path: The file.

    Raises:
        WireError: The file is not a valid safetensors file.
        OSError: The file cannot be read.

    Example:
        >>> import tempfile, torch
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> save({"weight": torch.ones(1)}, path, {"step": "3"})
        >>> load_metadata(path)
        {'format': 'pt', 'step': '3'}
    """
    with _naming(path):
        metadata = _open(path)[1].metadata
    return {key: text for key, text in metadata.items() if key != outline.METADATA}


@contextlib.contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except WireError as error:
        raise WireError(f"{os.fspath(path)}: {error}") from None


def _open(path: str | os.PathLike[str]) -> tuple[Any, Header]:
    """Return the file as private memory, and its header; tensors keep the memory alive."""
    if not isinstance(path, str | bytes | os.PathLike):  # an integer would be a file that is open here
        raise TypeError(f"load: got {type(path).__name__} as the path")
    _check_regular("load", path, os.stat(path))  # before opening, because opening a device may have any effect
    with open(path, "rb", opener=_open_at_once) as file:
        status = os.fstat(file.fileno())
        _check_regular("load", path, status)  # the file may have been replaced in between
        if not status.st_size:
            return b"", decode(b"")
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return buffer, decode(buffer)


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; for a FIFO, do not wait for a writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _check_regular(operation: str, path: str | os.PathLike[str], status: os.stat_result) -> None:
    """Refuse FIFOs, sockets and devices; opening a directory raises its own error.

    Raises:
        OSError: The file is one of these.
    """
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        kinds = {stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
        what = kinds.get(stat.S_IFMT(status.st_mode), "special file")
        raise OSError(errno.EINVAL, f"{operation} needs a regular file, but this is a {what}", os.fspath(path))


def _write_into(targets: Targets, leaves: Mapping[str, Any], path: str) -> Tree:
    if differing := targets.differing(leaves):
        lines = [f"  {name or 'the root'}  file: {there}   into: {here}" for name, there, here in differing[:10]]
        raise ValueError(
            "\n".join([f"load: {path} and into= differ in {len(differing)} of {targets.count(leaves)} leaves", *lines])
            + "\nPass the structure, dtypes and shapes of the file, or load without into=."
        )
    targets.check_writable("load", "the file", leaves)
    return targets.write(leaves)
