"""Collectives over any Python value, with torchcomms' names and signatures.

Ranks exchange their errors before data moves, so a list of the wrong length, or an object that cannot be sent, raises
on all of them. ``weights_only=True`` decodes only plain data and allow-listed classes (``easydist.allow_globals``).

The examples on torchcomms' page run unchanged, although they do not match its signatures: a call may give the root by
name and pass the list in its position, ``src=`` means ``root=``, and ``device=`` is ignored.
"""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, SupportsIndex, TypeVar, cast

import torch

from easydist.comms.comm import TorchComm
from easydist.data.packing import as_bytes
from easydist.errors import RemoteError, UnsafeObjectError
from easydist.format import codec

__all__ = [
    "WeightsOnlyError",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
]

F = TypeVar("F", bound=Callable[..., None])


class WeightsOnlyError(UnsafeObjectError, pickle.UnpicklingError):
    """An object holds a class that ``weights_only=True`` does not allow. The sender raises it before data moves."""


class RemoteFault(RemoteError, RuntimeError):
    """Another rank failed. The text contains its error."""


class _Payload(NamedTuple):
    """This rank's bytes for the others, or the error that it has instead."""

    data: torch.Tensor
    fault: Exception | None = None


_FILLED, _READ = (list,), (list, tuple)
"""The types of lists that a call fills, and of those that it reads."""

_NO_LIST = -1
"""The length that a rank tells the others if it has passed no list."""

_NOTHING = _Payload(torch.empty(0, dtype=torch.uint8, device="cpu"))


def _as_in_examples(at: int) -> Callable[[F], F]:
    """Accept calls that give the root by name and pass the list at its position, ``at``."""

    def decorate(function: F) -> F:
        root = "root" if "root" in inspect.signature(function).parameters else ""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> None:
            kwargs.pop("device", None)
            if root and "src" in kwargs:
                kwargs[root] = kwargs.pop("src")
            if root in kwargs and len(args) > at and not isinstance(args[at], SupportsIndex):
                args = (*args[:at], kwargs.pop(root), *args[at:])
            function(*args, **kwargs)

        return cast(F, call)

    return decorate


@_as_in_examples(99)
def all_gather_object(
    comm: TorchComm,
    object_list: list[Any],
    obj: object,
    timeout: timedelta | None = None,
    weights_only: bool = True,
) -> None:
    """Gather an object from each rank on every rank.

    Law: ``object_list == [obj of rank 0, obj of rank 1, …]``, on every rank.

    Args:
        comm: The communicator.
        object_list: A list with one element per rank, which the call fills.
        obj: Anything that can be pickled.
        timeout: The limit for each wait; None means the communicator's.
        weights_only: Decode only plain data and allow-listed classes.

    Raises:
        RuntimeError: A list has another length, or an object of another rank cannot be sent.
        WeightsOnlyError: ``obj`` holds a class that is not allowed.

    Example:
        >>> from easydist.comms import Solo, TorchComm, objcol
        >>> output = [None]
        >>> objcol.all_gather_object(TorchComm(Solo()), output, {1: 2})
        >>> output
        [{1: 2}]

    Cost: an all-gather of 16 bytes, and one of the objects.
    """
    name, size = "all_gather_object", comm.get_size()
    check = functools.partial(_demand_list, name, "object_list", object_list, size)
    mine = _checked(check) or _encoded(obj, weights_only)
    sizes = _agreed(comm, name, mine, timeout)
    outputs = [_buffer(comm, nbytes) for nbytes in sizes]
    comm.all_gather_v(outputs, mine.data.to(comm.get_device()), False, timeout=timeout)
    object_list[:] = [_decoded(output, weights_only) for output in outputs]


@_as_in_examples(2)
def gather_object(
    comm: TorchComm,
    obj: object,
    root: int,
    object_gather_list: list[Any] | None = None,
    timeout: timedelta | None = None,
    weights_only: bool = True,
) -> None:
    """Gather an object from each rank on one rank.

    Law, on ``root``: ``object_gather_list == [obj of rank 0, obj of rank 1, …]``.

    Args:
        comm: The communicator.
        obj: Anything that can be pickled.
        root: The receiving rank.
        object_gather_list: On ``root``, a list with one element per rank, which the call fills. Other ranks ignore it.
        timeout: The limit for each wait; None means the communicator's.
        weights_only: Decode only plain data and allow-listed classes.

    Raises:
        RuntimeError: As for ``all_gather_object``, or ``root`` does not exist.
        WeightsOnlyError: ``obj`` holds a class that is not allowed.

    Cost: an all-gather of 16 bytes, and one gather.
    """
    name, rank = "gather_object", comm.checks.rank("root", root)
    is_root = rank == comm.get_rank()
    check = functools.partial(_demand_list, name, "object_gather_list", object_gather_list, comm.get_size())
    mine = (_checked(check) if is_root else None) or _encoded(obj, weights_only)
    sizes = _agreed(comm, name, mine, timeout)
    outputs = [_buffer(comm, nbytes) for nbytes in sizes] if is_root else []
    comm.gather(outputs, mine.data.to(comm.get_device()), rank, False, timeout=timeout)
    if is_root and object_gather_list is not None:
        object_gather_list[:] = [_decoded(output, weights_only) for output in outputs]


@_as_in_examples(99)
def send_object_list(comm: TorchComm, object_list: list[Any], dst: int, timeout: timedelta | None = None) -> None:
    """Send objects to one rank, which calls ``recv_object_list`` with a list of the same length.

    Args:
        comm: The communicator.
        object_list: Objects that can be pickled. The list may be empty.
        dst: Another rank.
        timeout: The limit for each wait; None means the communicator's.

    Raises:
        RuntimeError: The receiver's list has another length; ``dst`` does not exist, or is this rank.
        WeightsOnlyError: An object holds a class that the receiver does not allow.

    Cost: three messages.
    """
    asked = torch.empty(2, dtype=torch.int64, device=comm.get_device())
    comm.recv(asked, dst, False, timeout=timeout)
    count, weights_only = asked.tolist()
    check = functools.partial(_demand_same, "send_object_list", object_list, count)
    mine = _checked(check) or _encoded(list(object_list), bool(weights_only))
    data = mine.data if mine.fault is None else _text(mine.fault)
    answer = torch.tensor([data.numel(), mine.fault is not None], device=comm.get_device())
    comm.send(answer, dst, False, timeout=timeout)
    comm.send(data.to(comm.get_device()), dst, False, timeout=timeout)
    if mine.fault is not None:
        raise mine.fault


@_as_in_examples(99)
def recv_object_list(
    comm: TorchComm, object_list: list[Any], src: int, timeout: timedelta | None = None, weights_only: bool = True
) -> None:
    """Receive objects from one rank, which calls ``send_object_list`` with a list of the same length.

    Law: ``object_list == object_list of src``.

    Args:
        comm: The communicator.
        object_list: A list as long as the sender's, which the call fills.
        src: Another rank.
        timeout: The limit for each wait; None means the communicator's.
        weights_only: Decode only plain data and allow-listed classes.

    Raises:
        RuntimeError: The sender's list has another length or cannot be sent, or ``src`` does not exist or is this rank.

    Cost: three messages.
    """
    device = comm.get_device()
    fault = _checked(functools.partial(_demand_list, "recv_object_list", "object_list", object_list))
    asked = [_NO_LIST if fault else len(object_list), bool(weights_only)]
    comm.send(torch.tensor(asked, device=device), src, False, timeout=timeout)
    answer = torch.empty(2, dtype=torch.int64, device=device)
    comm.recv(answer, src, False, timeout=timeout)
    nbytes, is_fault = answer.tolist()
    data = _buffer(comm, nbytes)
    comm.recv(data, src, False, timeout=timeout)
    if fault is not None and fault.fault is not None:
        raise fault.fault
    if is_fault:
        raise _remote("recv_object_list", src, data)
    object_list[:] = _decoded(data, weights_only)


@_as_in_examples(99)
def broadcast_object_list(
    comm: TorchComm,
    object_list: list[Any],
    root: int,
    timeout: timedelta | None = None,
    weights_only: bool = True,
) -> None:
    """Send one rank's objects to all ranks.

    Law: ``object_list == object_list of root``, on every rank.

    Args:
        comm: The communicator.
        object_list: A list of the same length on every rank. The call fills it on all ranks but ``root``.
        root: The sending rank.
        timeout: The limit for each wait; None means the communicator's.
        weights_only: Decode only plain data and allow-listed classes.

    Raises:
        RuntimeError: The lists have different lengths, the root's objects cannot be sent, or ``root`` does not exist.
        WeightsOnlyError: On ``root``: an object holds a class that is not allowed.

    Cost: an all-gather of 16 bytes, and one broadcast.
    """
    name, rank = "broadcast_object_list", comm.checks.rank("root", root)
    is_root = rank == comm.get_rank()
    kinds = _READ if is_root else _FILLED
    fault = _checked(lambda: _demand_list(name, "object_list", object_list, kinds=kinds))
    mine = fault or (_encoded(list(object_list), weights_only) if is_root else _NOTHING)
    sizes = _agreed(comm, name, mine, timeout, _NO_LIST if fault else len(object_list))
    data = mine.data.to(comm.get_device()) if is_root else _buffer(comm, sizes[rank])
    comm.broadcast(data, rank, False, timeout=timeout)
    if not is_root:
        object_list[:] = _decoded(data, weights_only)


@_as_in_examples(1)
def scatter_object_list(
    comm: TorchComm,
    root: int,
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    timeout: timedelta | None = None,
    weights_only: bool = True,
) -> None:
    """Send each rank one of the root's objects.

    Law: ``scatter_object_output_list[0] == scatter_object_input_list[rank] of root``.

    Args:
        comm: The communicator.
        root: The sending rank.
        scatter_object_output_list: A list with at least one element. The call sets the first one.
        scatter_object_input_list: On ``root``, a list with one element per rank. Other ranks ignore it.
        timeout: The limit for each wait; None means the communicator's.
        weights_only: Decode only plain data and allow-listed classes.

    Raises:
        ValueError: A list is missing, empty or of another length.
        RuntimeError: Another rank has raised, or ``root`` does not exist.
        WeightsOnlyError: On ``root``: an object holds a class that is not allowed.

    Cost: an all-gather of 16 bytes, a scatter of the sizes, and one of the objects.
    """
    name, rank = "scatter_object_list", comm.checks.rank("root", root)
    is_root = rank == comm.get_rank()
    check = functools.partial(_demand_scatter, scatter_object_output_list, scatter_object_input_list, comm, is_root)
    fault = _checked(check)
    parts = (
        [_encoded(value, weights_only) for value in scatter_object_input_list or []] if is_root and not fault else []
    )
    mine = fault or next((part for part in parts if part.fault is not None), _NOTHING)
    _agreed(comm, name, mine, timeout)
    own = torch.empty(1, dtype=torch.int64, device=comm.get_device())
    sizes = [torch.tensor([part.data.numel()], device=comm.get_device()) for part in parts]
    comm.scatter(own, sizes, rank, False, timeout=timeout)
    data = _buffer(comm, int(own.item()))
    comm.scatter(data, [part.data.to(comm.get_device()) for part in parts], rank, False, timeout=timeout)
    scatter_object_output_list[0] = _decoded(data, weights_only)


def _demand_list(
    name: str, what: str, values: Any, size: int | None = None, kinds: tuple[type[Sequence[Any]], ...] = _FILLED
) -> None:
    if values is None and size is not None:
        raise RuntimeError(f"{name}: Must provide {what} on root rank")
    if not isinstance(values, kinds):
        raise TypeError(f"{name}: {what} has to be a list, got {type(values).__name__}")
    if size is not None and len(values) != size:
        raise RuntimeError(f"{name}: {what} has {len(values)} elements, but there are {size} ranks")


def _demand_same(name: str, mine: Any, theirs: int) -> None:
    _demand_list(name, "object_list", mine, kinds=_READ)
    if theirs == _NO_LIST:
        raise RuntimeError(f"{name}: the receiver's object_list is no list")
    if len(mine) != theirs:
        raise RuntimeError(f"{name}: the sender's list has {len(mine)} elements, the receiver's {theirs}")


def _demand_scatter(outputs: object, inputs: list[Any] | None, comm: TorchComm, is_root: bool) -> None:
    if not isinstance(outputs, list) or not outputs:
        raise ValueError("Expected argument scatter_object_output_list to be a list of size at least 1.")
    if is_root and inputs is None:
        raise ValueError("source rank must provide non-None scatter_object_input_list")
    if is_root and inputs is not None:
        _demand_list("scatter_object_list", "scatter_object_input_list", inputs, kinds=_READ)
        if len(inputs) != comm.get_size():
            raise ValueError(f"scatter_object_input_list has {len(inputs)} elements for {comm.get_size()} ranks")


def _checked(check: Callable[[], None]) -> _Payload | None:
    """Return the error of a check as a message; None if the check passes."""
    try:
        check()
    except (RuntimeError, TypeError, ValueError) as error:
        return _NOTHING._replace(fault=error)
    return None


def _encoded(value: object, weights_only: bool) -> _Payload:
    try:
        if not weights_only:
            codec.demand_pickle()
        encoded = codec.EncodedObject(value)
        if weights_only:
            encoded.check()
        return _Payload(encoded.joined())
    except UnsafeObjectError as error:
        return _NOTHING._replace(fault=WeightsOnlyError(f"Weights only load failed: {error}"))
    except Exception as error:  # a class of the user's may raise anything
        return _NOTHING._replace(fault=error)


def _decoded(data: torch.Tensor, weights_only: bool) -> Any:
    return codec.decode(data.cpu(), weights_only=weights_only)


def _agreed(
    comm: TorchComm, name: str, mine: _Payload, timeout: timedelta | None, length: int | None = None
) -> list[int]:
    """Return the sizes of all ranks' data, after making sure that no rank failed and all lists have one length."""
    text = mine.data if mine.fault is None else _text(mine.fault)
    header = [text.numel(), mine.fault is not None, _NO_LIST if length is None else length]
    rows = torch.empty((comm.get_size(), 3), dtype=torch.int64, device=comm.get_device())
    comm.all_gather_single(rows, torch.tensor(header, device=comm.get_device()), False, timeout=timeout)
    every = rows.tolist()
    if any(is_fault for _, is_fault, _ in every):
        _raise_faults(comm, name, mine, every, timeout)
    lengths = [count for _, _, count in every]
    if len(set(lengths)) > 1:
        raise RuntimeError(f"{name}: the ranks' lists have {lengths} elements; they must have the same number")
    return [nbytes for nbytes, _, _ in every]


def _raise_faults(
    comm: TorchComm, name: str, mine: _Payload, every: Sequence[Sequence[int]], timeout: timedelta | None
) -> None:
    sizes = [nbytes if is_fault else 0 for nbytes, is_fault, _ in every]
    texts = [_buffer(comm, nbytes) for nbytes in sizes]
    own = _NOTHING.data if mine.fault is None else _text(mine.fault)
    comm.all_gather_v(texts, own.to(comm.get_device()), False, timeout=timeout)
    if mine.fault is not None:
        raise mine.fault
    rank = next(rank for rank, (_, is_fault, _) in enumerate(every) if is_fault)
    raise _remote(name, rank, texts[rank])


def _remote(name: str, rank: int, text: torch.Tensor) -> RemoteFault:
    told = bytes(text.cpu().numpy()).decode(errors="replace")
    return RemoteFault(f"{name}: rank {rank} failed: {told}", rank=rank)


def _text(error: Exception) -> torch.Tensor:
    text = f"{type(error).__name__}: {error}".encode(errors="backslashreplace")  # it may hold half of a character
    return as_bytes(torch.frombuffer(bytearray(text), dtype=torch.uint8))


def _buffer(comm: TorchComm, nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=comm.get_device())
