"""Descriptions of calls, by which ranks compare them: as a number, and as a text."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from easydist.shm.calls import ABSENT, EQUAL, NOT_BEGUN, UNKNOWN, Description, Dispute, Mismatch
from easydist.transport.reduce_op import OP_BIT, RedOpType, ReduceOp

# The first name is that of ``OWN``, because places are codes.
_NAMES = (
    "a call of easydist",
    "all_gather",
    "all_gather_single",
    "all_gather_upto",
    "all_gather_v",
    "all_gather_parts",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "all_to_all_v_single",
    "barrier",
    "broadcast",
    "broadcast_parts",
    "all_reduce_parts",
    "multicast",
    "gather",
    "gather_single",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_v",
    "scatter",
    "window",
    "init_device_mesh",
    "send",
    "recv",
    "batch_op",
)
_EQUAL = {
    "all_gather",
    "all_gather_single",
    "all_reduce",
    "all_to_all_single",
    "broadcast",
    "multicast",
    "gather_single",
    "reduce",
    "reduce_scatter_single",
}
# Sorted, because the order of a set of dtypes differs between processes.
_DTYPES = sorted({kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}, key=str)
_DTYPE, _ROOT = 6, 18
"""The lowest bits of the dtype and the root in a code. The name is before them; the reduction is between them."""

_NAME_CODES = {name: code | EQUAL * (name in _EQUAL) for code, name in enumerate(_NAMES, 1)}
# They move the same data, so one rank may call the one while another rank calls the other.
_NAME_CODES["all_reduce_from"] = _NAME_CODES["all_reduce"]
DTYPE_CODES = {dtype: code + 1 << _DTYPE for code, dtype in enumerate(_DTYPES)}
"""The part of a code that stands for a dtype; a quantized one moves as the integers that hold it."""

DTYPE_CODES |= dict.fromkeys((torch.quint8, torch.quint4x2, torch.quint2x4), DTYPE_CODES[torch.uint8])
DTYPE_CODES |= {torch.qint8: DTYPE_CODES[torch.int8], torch.qint32: DTYPE_CODES[torch.int32]}

Described = tuple[int, int]
"""The code of a call, and its number of elements."""

OWN: Described = (1, 0)
"""The description of every exchange that is part of one of easydist's verbs, which compare their calls themselves."""

PAIRS = frozenset(["send", "recv"])
"""The operations of two ranks. They are compared by their data; a text that names one is about ranks in a circle."""

MESSAGE: Described = (0, 0)
"""The description of a message: the backend looks at its tensor."""


def described(
    name: str,
    tensor: torch.Tensor | None = None,
    root: int | None = None,
    op: ReduceOp | None = None,
    sizes_differ: bool = False,
) -> Described:
    """Return the description of a call.

    Args:
        name: The name of the operation.
        tensor: The tensor whose dtype and number of elements describe the data; None if there is no data.
        root: The root.
        op: The reduction.
        sizes_differ: True if the number of elements may differ between ranks, whatever the name.
    """
    # Every part is one more than its number: zero stands for a part that is not there.
    code = _NAME_CODES[name] & ~EQUAL if sizes_differ else _NAME_CODES[name]
    if root is not None:
        code |= root + 1 << _ROOT
    if op is not None:
        code |= op.code
    if tensor is None:
        return code, 0
    return code | DTYPE_CODES[tensor.dtype], tensor.numel()


def described_message(name: str, dtype: int, nbytes: int, peer: int) -> Described:
    """Return the description of a message, for a text.

    Args:
        name: ``"send"`` or ``"recv"``.
        dtype: The part of the code that stands for the dtype.
        nbytes: The bytes.
        peer: The other rank.
    """
    kind = _dtype_of(dtype)
    return _NAME_CODES[name] | dtype | peer + 1 << _ROOT, nbytes if kind is None else nbytes // kind.itemsize


def text_of(call: Description) -> str:
    """Return the description of a call as text.

    Example:
        >>> text_of(Description(*described("broadcast", torch.zeros(3), root=1)))
        'broadcast(3 elements of float32, root=1)'
    """
    if call.code in _STATES:
        return _STATES[call.code]
    if call.code == OWN[0]:
        return _NAMES[0]
    op, root = call.code >> OP_BIT & 15, call.code >> _ROOT & 0xFFF
    parts = [_elements(call.code, call.numel)] if _dtype_of(call.code) else []
    parts += [RedOpType(op - 1).name] if op else []
    parts += [f"{_PEERS.get(_name_of(call), 'root')}={root - 1}"] if root else []
    return f"{_name_of(call)}({', '.join(parts)})"


_PEERS = {"send": "dst", "recv": "src"}
_STATES = {
    UNKNOWN: "has gone on to later calls",
    NOT_BEGUN: "has not come to this call yet",
    ABSENT: "takes no part in it",
}


def _name_of(call: Description) -> str:
    return _NAMES[(call.code & (1 << _DTYPE) - 1) - 1]


def _dtype_of(code: int) -> torch.dtype | None:
    number = code >> _DTYPE & 0xFF
    return _DTYPES[number - 1] if number else None


def _elements(code: int, numel: int) -> str:
    name = str(_dtype_of(code)).removeprefix("torch.")
    return f"{numel} element{'s' * (numel != 1)} of {name}"


def _size(code: int, nbytes: int) -> str:
    dtype = _dtype_of(code)
    return f"{nbytes} bytes" if dtype is None or nbytes % dtype.itemsize else _elements(code, nbytes // dtype.itemsize)


GOES_ON = "has dropped what was under way, and goes on with the next call."


def text(dispute: Dispute, end: str) -> str:
    """Return the text of the error about a difference.

    Args:
        dispute: The difference.
        end: What has become of the communicator: its name, and ``GOES_ON``, or that it is broken.

    Example:
        >>> one, other = (Description(*described("all_reduce", torch.zeros(n), op=ReduceOp.SUM)) for n in (4, 8))
        >>> print(text(Dispute([one, other], None), f"The communicator 'main' {GOES_ON}"))
        all_reduce: the ranks made different calls
          rank 0: all_reduce(4 elements of float32, SUM)
          rank 1: all_reduce(8 elements of float32, SUM)
        Every rank has to make the same calls in the same order, with the same dtypes and sizes.
        The communicator 'main' has dropped what was under way, and goes on with the next call.
    """
    if dispute.mismatch is not None and _is_bare(dispute):
        return _text_of_mismatch(dispute.mismatch, dispute.calls, end)
    names = dict.fromkeys(_name_of(call) for call in dispute.calls if call.code >= 0)
    is_circle = dispute.mismatch is None and not PAIRS.isdisjoint(names)
    rows = [f"  rank {rank}: {text_of(call)}" for rank, call in enumerate(dispute.calls)]
    if dispute.mismatch is not None:
        rows.append(_row(dispute.mismatch, max(call.code for call in dispute.calls)))
    what = "ranks wait for one another forever" if is_circle else "the ranks made different calls"
    return "\n".join([f"{' and '.join(names)}: {what}", *rows, _MEET if is_circle else _SAME, end])


_SAME = "Every rank has to make the same calls in the same order, with the same dtypes and sizes."

_MEET = "Every recv needs a send of the other rank, which must not wait for this one before; batches need no order."


def _row(mismatch: Mismatch, code: int) -> str:
    sent, awaited = _size(code, mismatch.sent), _size(code, mismatch.awaited)
    return f"  rank {mismatch.sender} passes {sent}, of which rank {mismatch.receiver} expects {awaited}"


def _is_bare(dispute: Dispute) -> bool:
    """True if the message is not part of a collective: the codes are only the dtypes of the two ranks."""
    return all(not call.code & (1 << _DTYPE) - 1 and call.code >= 0 for call in dispute.calls)


def _text_of_mismatch(mismatch: Mismatch, calls: Sequence[Description], end: str) -> str:
    sent, awaited = (_size(calls[rank].code, nbytes) for rank, nbytes in zip(mismatch[:2], mismatch[2:], strict=True))
    return (
        f"send and recv: rank {mismatch.sender} sends {sent}, but rank {mismatch.receiver} expects {awaited}\n"
        f"Pass tensors of the same dtype and size to both.\n{end}"
    )
