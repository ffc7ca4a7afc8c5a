"""The verbs for any Python value. They use pickle: call them only between processes that trust each other."""

from __future__ import annotations

from typing import Any

import torch

from easydist import codec
from easydist.agree import Agreement, Call, agree
from easydist.comms import Communicators
from easydist.state import communicators
from easydist.typing import Group

__all__ = ["broadcast_object_list", "gather_object", "scatter_object_list"]


def gather_object(object: Any, *, group: Group = None) -> list[Any]:
    """Collect every rank's value.

    Law: for lists ``gather_object(x) == x of rank 0 + … + x of rank W-1``; for anything else
    ``gather_object(x) == [x of rank 0, …, x of rank W-1]``. Holds at W = 1 as well.

    Example:
        >>> import easydist
        >>> easydist.gather_object(["a", "b"]), easydist.gather_object({"a": 1})
        (['a', 'b'], [{'a': 1}])

    Args:
        object: Anything that can be pickled; on all ranks a list, or on none.
        group: The ranks that take part.

    Returns:
        The list, on every rank; copies, also of this rank's own value.

    Raises:
        RemoteError: A rank's value cannot be pickled.
        DisagreementError: Some ranks gave a list and some did not.

    Cost: one header exchange; one exchange in which every rank sends just its own bytes.

    Source: accelerate's ``gather_object``.
    """
    comms = communicators(group)
    is_list = isinstance(object, list)
    encoded = _Encoded()

    def prepare() -> Call:
        return Call({"is_list": is_list}, nbytes=encoded.fill(object))

    _, agreement = agree(comms, "gather_object", prepare)
    outputs = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in agreement.nbytes]
    comms.control.all_gather_v(outputs, encoded.data, async_op=False)
    values = [codec.decode(output) for output in outputs]
    return [item for value in values for item in value] if is_list else values


def broadcast_object_list(object_list: list[Any], from_process: int = 0, *, group: Group = None) -> list[Any]:
    """Give every rank the source's objects, in place.

    Law: ``object_list == object_list of rank from_process``, element by element. An empty list is a no-op.

    Example:
        >>> import easydist
        >>> easydist.broadcast_object_list([{"lr": 0.1}, None])
        [{'lr': 0.1}, None]

    Args:
        object_list: Lists of one length on all ranks; what the other ranks' hold is replaced.
        from_process: The source, a rank inside the group.
        group: The ranks that take part.

    Returns:
        The same list.

    Raises:
        DisagreementError: The lists differ in length.
        RemoteError: The source's objects cannot be pickled; a rank gave no list.
        ValueError: ``from_process`` is not a rank of the group.

    Cost: one header exchange, one broadcast of the pickled bytes.

    Source: accelerate's ``broadcast_object_list``.
    """
    comms = communicators(group)
    encoded = _Encoded()

    def prepare() -> Call:
        _check_list("broadcast_object_list", "object_list", object_list)
        _check_source(comms, "from_process", from_process)
        nbytes = encoded.fill(object_list) if comms.rank == from_process and object_list else 0
        return Call({"from_process": from_process, "length": len(object_list)}, nbytes=nbytes)

    _, agreement = agree(comms, "broadcast_object_list", prepare)
    if comms.size > 1 and object_list:
        buffer = _received(comms, encoded, agreement, from_process)
        comms.control.broadcast(buffer, from_process, async_op=False)
        if comms.rank != from_process:
            object_list[:] = codec.decode(buffer)
    return object_list


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int = 0,
    *,
    group: Group = None,
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
        scatter_object_input_list: On the source one object per rank; not looked at elsewhere.
        src: The source, a rank inside the group.
        group: The ranks that take part.

    Raises:
        ValueError: A list is missing or has the wrong length, or ``src`` is not a rank of the group.
        RemoteError: That happened on another rank; an object cannot be pickled.

    Cost: one header exchange, one exchange of sizes, one scatter in which each rank gets just its own bytes.

    Source: ``torch.distributed.scatter_object_list``.
    """
    comms = communicators(group)
    parts: list[torch.Tensor] = []

    def prepare() -> Call:
        _check_list("scatter_object_list", "scatter_object_output_list", scatter_object_output_list)
        _check_source(comms, "src", src)
        if not scatter_object_output_list:
            raise ValueError("scatter_object_list: scatter_object_output_list needs at least one element")
        if comms.rank == src:
            _check_list("scatter_object_list", "scatter_object_input_list", scatter_object_input_list)
            if len(scatter_object_input_list or ()) != comms.size:
                raise ValueError(
                    f"scatter_object_list: scatter_object_input_list needs one object per rank, {comms.size}, "
                    f"got {len(scatter_object_input_list or ())}"
                )
            parts.extend(codec.encode(value) for value in scatter_object_input_list or ())
        return Call({"src": src})

    agree(comms, "scatter_object_list", prepare)
    sizes = torch.tensor([part.numel() for part in parts] or [0] * comms.size)
    comms.control.broadcast(sizes, src, async_op=False)
    output = torch.empty(int(sizes[comms.rank]), dtype=torch.uint8)
    comms.control.scatter(output, parts, src, async_op=False)
    scatter_object_output_list[0] = codec.decode(output)


class _Encoded:
    """A value's bytes, made inside the agreed preparation and sent after it."""

    data = torch.empty(0, dtype=torch.uint8)

    def fill(self, value: Any) -> int:
        self.data = codec.encode(value)
        return self.data.numel()


def _received(comms: Communicators, encoded: _Encoded, agreement: Agreement, source: int) -> torch.Tensor:
    """The source's bytes, or on other ranks the place for them."""
    return encoded.data if comms.rank == source else torch.empty(agreement.nbytes[source], dtype=torch.uint8)


def _check_list(operation: str, name: str, value: object) -> None:
    if not isinstance(value, list):
        raise TypeError(f"{operation}: {name} has to be a list, got {type(value).__name__}")


def _check_source(comms: Communicators, name: str, rank: int) -> None:
    if not 0 <= rank < comms.size:
        raise ValueError(f"{name}={rank} is not a rank of the group: it has {comms.size}, counted from 0")
