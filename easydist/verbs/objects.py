"""The verbs for any Python value.

They use pickle, which can run code on the receiver, unless ``weights_only`` is set. With it, a value that the sender's
own decoder would refuse is never sent: all ranks raise before any data has moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch

from easydist import memory
from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement, room
from easydist.agreement.runner import Verb, run
from easydist.base.arguments import UNSET, either, hiding
from easydist.base.eager import eager
from easydist.format import codec
from easydist.groups.communicators import Communicators
from easydist.state import communicators
from easydist.typing import Device, Group, T, Timeout
from easydist.verbs.ranks import check_rank, named_rank, source_rank

__all__ = ["broadcast_object_list", "gather_object", "scatter_object_list"]


@overload
def gather_object(
    object: Any,
    *,
    dst: None = None,
    weights_only: bool = False,
    group: Group = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> list[Any]: ...
@overload
def gather_object(
    object: Any,
    *,
    dst: int | None = None,
    group_dst: int | None = None,
    weights_only: bool = False,
    group: Group = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> list[Any] | None: ...
@overload
def gather_object(
    *,
    obj: Any,
    dst: None = None,
    weights_only: bool = False,
    group: Group = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> list[Any]: ...
@eager
@hiding("obj")
def gather_object(
    object: Any = UNSET,
    *,
    dst: int | None = None,
    group_dst: int | None = None,
    weights_only: bool = False,
    group: Group = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
    obj: Any = UNSET,
) -> list[Any] | None:
    """Collect every rank's value.

    Law: for lists ``gather_object(x) == x of rank 0 + … + x of rank W-1``; for anything else
    ``gather_object(x) == [x of rank 0, …, x of rank W-1]``. The law holds at W = 1 as well.

    Example:
        >>> import easydist
        >>> easydist.gather_object(["a", "b"]), easydist.gather_object({"a": 1})
        (['a', 'b'], [{'a': 1}])

    On two ranks::

        easydist.gather_object([f"row {rank}"])  # both ranks: ['row 0', 'row 1']
        easydist.gather_object({"r": rank}, dst=1)  # rank 0: None   rank 1: [{'r': 0}, {'r': 1}]

    Args:
        object: Any value that can be pickled, without DTensors; a list on all ranks, or on none.
        dst: The only rank that gets the result, a rank inside the group; None for all ranks. With a group of torch, it
            must be the same rank of the world.
        group_dst: The same, for any group.
        weights_only: Decode only containers, numbers, text, dates, tensors, arrays, and classes that
            ``easydist.allow_globals`` has allowed; the same on all ranks.
        group: The ranks that take part.
        check: True to compare the calls of all ranks; None follows ``EASYDIST_CHECK`` (on by default).
        timeout: The time limit of the call; None is the group's.
        obj: Another name for ``object``.

    Returns:
        The list, on every rank; all values are copies, including this rank's own. None on ranks other than ``dst``.

    Raises:
        ValueError: ``dst`` is not a rank of the group, or is ambiguous.
        RemoteError: A rank's value cannot be pickled, or is not allow-listed (``weights_only``).
        UnsafeObjectError: ``weights_only`` is False and pickle is denied, or a value is not allow-listed.
        DisagreementError: Some ranks passed a list and some did not.

    Cost: one header exchange, which carries small objects (512 KiB / W in small groups); for larger ones an exchange in
    which every rank sends only its own bytes, to all ranks or to ``dst`` alone. Tensors and arrays are copied once,
    into the message; received ones share the memory of their message.

    Source: accelerate's ``gather_object``.
    """
    if obj is not UNSET or object is UNSET:
        object = either("gather_object", "object", object, "obj", obj)
    dst = named_rank(group, "gather_object", "dst", dst, group_dst)
    return run(GatherObject(object, dst, weights_only), communicators(group), timeout, check)


@overload
def broadcast_object_list(
    object_list: list[T],
    from_process: int = 0,
    group: Group = None,
    device: Device | None = None,
    *,
    group_src: int | None = None,
    weights_only: bool = False,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> list[T]: ...
@overload
def broadcast_object_list(
    *,
    objects: list[Any],
    src: int = 0,
    group: Group = None,
    device: Device | None = None,
    group_src: int | None = None,
    weights_only: bool = False,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> list[Any]: ...
@eager
@hiding("objects", "src", from_process=0)
def broadcast_object_list(
    object_list: list[Any] = UNSET,
    from_process: int = UNSET,
    group: Group = None,
    device: Device | None = None,
    *,
    group_src: int | None = None,
    weights_only: bool = False,
    check: bool | None = None,
    timeout: Timeout | None = None,
    objects: list[Any] = UNSET,
    src: int = UNSET,
) -> list[Any]:
    """Give every rank the source's objects, in place.

    Law: ``object_list == object_list of rank from_process``, element by element. With an empty list, or in a single
    process, the call does nothing: the objects need not be picklable.

    Example:
        >>> import easydist
        >>> easydist.broadcast_object_list([{"lr": 0.1}, None])
        [{'lr': 0.1}, None]

    On two ranks::

        easydist.broadcast_object_list([f"from {rank}"])  # both ranks: ['from 0']

    Args:
        object_list: A list of the same length on all ranks; the elements of the other ranks' lists are replaced.
        from_process: The source, a rank inside the group. With a group of torch, it must be the same rank of the world.
        group: The ranks that take part.
        device: Accepted for compatibility with torch, whose order of arguments this is.
        group_src: The source, a rank inside any group.
        weights_only: As in ``gather_object``.
        check: True to compare the calls of all ranks; None follows ``EASYDIST_CHECK`` (on by default).
        timeout: The time limit of the call; None is the group's.
        objects: Another name for ``object_list``.
        src: Another name for ``from_process``.

    Returns:
        The same list.

    Raises:
        DisagreementError: The lists differ in length.
        RemoteError: The source's objects cannot be pickled, or are not allow-listed; or a rank did not pass a list.
        UnsafeObjectError: As in ``gather_object``.
        ValueError: ``from_process`` is not a rank of the group, or is ambiguous.

    Cost: one header exchange, which carries small objects (512 KiB / W in small groups); for larger ones a broadcast of
    the pickled bytes.

    Source: accelerate's ``broadcast_object_list``.
    """
    if objects is not UNSET or object_list is UNSET:
        object_list = either("broadcast_object_list", "object_list", object_list, "objects", objects)
    name = "from_process" if src is UNSET else "src"
    if src is not UNSET:
        from_process = either("broadcast_object_list", "from_process", from_process, "src", src)
    source = named_rank(group, "broadcast_object_list", name, from_process, group_src)
    verb = BroadcastObjectList(object_list, source, weights_only)
    return run(verb, communicators(group), timeout, check)


@eager
@hiding(src=0)
def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int = UNSET,
    group: Group = None,
    *,
    group_src: int | None = None,
    weights_only: bool = False,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> None:
    """Give each rank one of the source's objects.

    Law: ``scatter_object_output_list[0] == scatter_object_input_list[rank] of rank src``.

    Example:
        >>> import easydist
        >>> output = [None]
        >>> easydist.scatter_object_list(output, ["mine"])
        >>> output
        ['mine']

    Args:
        scatter_object_output_list: A list of at least one element; the first is replaced.
        scatter_object_input_list: On the source one object per rank; ignored on other ranks.
        src: The source, a rank inside the group. With a group of torch, it must be the same rank of the world.
        group: The ranks that take part.
        group_src: The source, a rank inside any group.
        weights_only: As in ``gather_object``.
        check: True to compare the calls of all ranks; None follows ``EASYDIST_CHECK`` (on by default).
        timeout: The time limit of the call; None is the group's.

    Raises:
        ValueError: A list is missing or has the wrong length, or ``src`` is not a rank of the group, or is
            ambiguous.
        RemoteError: Another rank raised that ``ValueError``; or an object cannot be pickled, or is not allow-listed.
        UnsafeObjectError: As in ``gather_object``. This rank alone raises it if it allows less than the source does.

    Cost: one header exchange, one exchange of sizes, and one scatter in which each rank gets only its own bytes.

    Source: ``torch.distributed.scatter_object_list``.
    """
    source = named_rank(group, "scatter_object_list", "src", src, group_src)
    verb = _ScatterObjectList(scatter_object_output_list, scatter_object_input_list, source, weights_only)
    run(verb, communicators(group), timeout, check)


class GatherObject(Verb["list[Any] | None"]):
    """The verb ``gather_object``: the values of all ranks, on all of them or on one."""

    operation = "gather_object"

    def __init__(self, value: Any, dst: int | None, weights_only: bool) -> None:
        self._value, self._dst, self._mine = value, dst, _Encoded(weights_only)

    def prepare(self, comms: Communicators) -> Call:
        dst = check_rank(comms, self.operation, "dst", self._dst)
        arguments = {"is_list": isinstance(self._value, list), **self._mine.arguments()}
        if dst is not None:
            arguments["dst"] = dst
        return self._mine.fill(Call(arguments), self._value, room(comms))

    def exchange(self, comms: Communicators, agreed: Agreement) -> list[torch.Tensor] | None:
        if comms.size == 1 or agreed.has_payload:
            return None
        comm = comms.cpu(sum(agreed.nbytes))
        if self._dst not in (None, comms.rank):
            comm.gather([], self._mine.data(), self._dst, async_op=False)
            return None
        messages = [memory.empty([nbytes], torch.uint8) for nbytes in agreed.nbytes]
        messages[comms.rank] = data = self._mine.data()
        if self._dst is None:
            comm.all_gather_v(messages, data, async_op=False)
        else:
            comm.gather(messages, data, self._dst, async_op=False)
        return messages

    def result(self, comms: Communicators, agreed: Agreement, arrived: list[torch.Tensor] | None) -> list[Any] | None:
        if self._dst not in (None, comms.rank):
            return None
        values = [
            self.own()
            if rank == comms.rank
            else self._mine.decoded(agreed.view(rank) if arrived is None else arrived[rank])
            for rank in range(comms.size)
        ]
        return _chained(values) if isinstance(self._value, list) else values

    def own(self) -> Any:
        """Return this rank's value as it stands in the result: a copy, like the others."""
        return self._mine.own()


class BroadcastObjectList(Verb[list[Any]]):
    """The verb ``broadcast_object_list``: the source's objects in the lists of all ranks."""

    operation = "broadcast_object_list"
    source_name = "from_process"
    """The argument that holds the source, for the error."""

    def __init__(self, values: list[Any], source: int, weights_only: bool) -> None:
        self._values, self._source, self._mine = values, source, _Encoded(weights_only)

    def prepare(self, comms: Communicators) -> Call:
        _check_list(self.operation, "object_list", self._values)
        source = source_rank(comms, self.operation, self.source_name, self._source)
        arguments = {"from_process": source, "length": len(self._values), **self._mine.arguments()}
        travels = self._values and (comms.size > 1 or self._mine.weights_only)  # if not, pickling is not required
        is_sent = comms.rank == self._source and travels
        return self._mine.fill(Call(arguments), self._values, room(comms)) if is_sent else Call(arguments)

    def exchange(self, comms: Communicators, agreed: Agreement) -> torch.Tensor | None:
        if comms.size == 1 or agreed.has_payload:
            return None
        return agreed.payload_of(comms, self._source)

    def result(self, comms: Communicators, agreed: Agreement, arrived: torch.Tensor | None) -> list[Any]:
        if comms.rank != self._source and self._values:
            self._values[:] = self._mine.decoded(agreed.view(self._source) if arrived is None else arrived)
        return self._values


class _ScatterObjectList(Verb[None]):
    operation = "scatter_object_list"

    def __init__(self, outputs: list[Any], inputs: list[Any] | None, source: int, weights_only: bool) -> None:
        self._outputs, self._inputs, self._source = outputs, inputs, source
        self._mine = _Encoded(weights_only)
        self._parts: list[torch.Tensor] = []

    def prepare(self, comms: Communicators) -> Call:
        _check_list(self.operation, "scatter_object_output_list", self._outputs)
        source = source_rank(comms, self.operation, "src", self._source)
        if not self._outputs:
            raise ValueError("scatter_object_list: scatter_object_output_list needs at least one element")
        arguments = {"src": source, **self._mine.arguments()}
        if comms.rank == self._source:
            weights_only = self._mine.weights_only
            self._parts = [codec.encode(each, weights_only=weights_only) for each in _to_scatter(comms, self._inputs)]
        return Call(arguments)

    def exchange(self, comms: Communicators, agreed: Agreement) -> torch.Tensor:
        sizes = torch.tensor([part.numel() for part in self._parts] or [0] * comms.size, device="cpu")
        comms.control.broadcast(sizes, self._source, async_op=False)
        output = torch.empty(int(sizes[comms.rank]), dtype=torch.uint8, device="cpu")
        comms.control.scatter(output, self._parts, self._source, async_op=False)
        return output

    def result(self, comms: Communicators, agreed: Agreement, arrived: torch.Tensor) -> None:
        self._outputs[0] = self._mine.decoded(arrived)


def _chained(lists: Sequence[list[Any]]) -> list[Any]:
    chained: list[Any] = []
    for each in lists:
        chained += each  # four times as fast as itertools.chain
    return chained


def _to_scatter(comms: Communicators, values: list[Any] | None) -> list[Any]:
    _check_list("scatter_object_list", "scatter_object_input_list", values)
    if len(values or ()) != comms.size:
        raise ValueError(
            f"scatter_object_list: scatter_object_input_list needs one object per rank, {comms.size}, "
            f"got {len(values or ())}"
        )
    return values or []


class _Encoded:
    """A value's bytes, made inside the agreed preparation and sent with it or after it."""

    _message: codec.EncodedObject
    _data: torch.Tensor | None = None
    _text: bytes = b""
    _strings: list[str] | None = None

    def __init__(self, weights_only: bool) -> None:
        self.weights_only = weights_only

    def arguments(self) -> dict[str, Any]:
        """Return the arguments on which the ranks have to agree; raise an error if pickle is needed and denied."""
        if not self.weights_only:
            codec.demand_pickle()
        return {"weights_only": True} if self.weights_only else {}

    def fill(self, call: Call, value: Any, most: int) -> Call:
        """Encode a value, and return the call with its bytes; refuse a value that all receivers would refuse.

        Args:
            call: The call.
            value: The value.
            most: The most bytes that are sure to travel with the header.
        """
        self._message = message = codec.EncodedObject(value)
        self._strings = value if message.is_strings else None
        if self.weights_only and not message.is_strings:
            message.check()
        call.nbytes = message.nbytes
        if message.nbytes <= most and (text := message.text()):
            call.text = self._text = text
        else:
            call.payload = [self.data()]
        return call

    def data(self) -> torch.Tensor:
        """Return the bytes as a tensor."""
        if self._data is None:
            self._data = self._message.joined()
        return self._data

    def own(self) -> Any:
        """Return a copy of the value, as the others get it."""
        if self._strings is not None:
            return list(self._strings)
        return self.decoded(memoryview(self._text) if self._text else self.data())

    def decoded(self, message: torch.Tensor | memoryview) -> Any:
        """Decode a message; a view of bytes may change afterwards."""
        if isinstance(message, torch.Tensor):
            return codec.decode(message, weights_only=self.weights_only)
        return codec.decode_copy(message, weights_only=self.weights_only)


def _check_list(operation: str, name: str, value: object) -> None:
    if not isinstance(value, list):
        raise TypeError(f"{operation}: {name} has to be a list, got {type(value).__name__}")
