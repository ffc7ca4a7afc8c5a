"""The messages of two ranks, as bytes.

A frame consists of four 64-bit numbers (kind, status, bytes of the terms, bytes of the body), the terms as JSON, and
the body. The body of a tensor dict is an ``Announcement``, that of an object a ``codec`` message.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from easydist.errors import DisagreementError, EasydistError, RemoteError

FRAME = 1 << 15
"""The bytes of the first part of a message whose length the receiver does not know."""

_HEAD = struct.Struct("<4q")
HEAD = _HEAD.size
"""The bytes of the numbers."""

LONGEST = FRAME // 16
"""The most characters of an error. Each may need 12 bytes."""

POSTED, ASKED, FAULT, ACCEPTED, REFUSED = range(5)
OBJECT, TENSOR, TENSOR_DICT = range(3)
_ERRORS: dict[str, type[EasydistError]] = {cls.__name__: cls for cls in (RemoteError, DisagreementError)}


class Message(NamedTuple):
    """A received message.

    Attributes:
        kind: The kind of data: ``OBJECT``, ``TENSOR`` or ``TENSOR_DICT``.
        status: ``ASKED`` if the sender waits for the answer before it sends the data, and ``POSTED`` if it does not;
            ``FAULT`` if the message contains only an error. Of an answer: ``ACCEPTED`` or ``REFUSED``.
        terms: Facts that both sides need; ``"data"`` lists the buffers that follow, as (kind, bytes).
        body: A uint8 tensor.
    """

    kind: int
    status: int
    terms: dict[str, Any]
    body: torch.Tensor


def encode(kind: int, status: int, terms: Mapping[str, Any], body: torch.Tensor | None = None) -> torch.Tensor:
    """Encode a message as a frame.

    Args:
        kind: As in ``Message``.
        status: As in ``Message``.
        terms: As in ``Message``.
        body: As in ``Message``; None means no bytes.
    """
    text = json.dumps(dict(terms), separators=(",", ":")).encode() if terms else b""
    head = bytearray(_HEAD.pack(kind, status, len(text), 0 if body is None else body.numel()) + text)
    frame = torch.frombuffer(head, dtype=torch.uint8)
    return frame if body is None else torch.cat([frame, body])


def nbytes_of(frame: torch.Tensor) -> int:
    """Return the length of a frame, given its first bytes."""
    _, _, terms, body = _HEAD.unpack_from(frame.numpy().data)
    return HEAD + int(terms) + int(body)


def decode(frame: torch.Tensor) -> Message:
    """Return the message that ``encode`` has encoded."""
    kind, status, terms, _ = _HEAD.unpack_from(view := frame.numpy().data)
    text = json.loads(bytes(view[HEAD : HEAD + terms])) if terms else {}
    return Message(kind, status, text, frame[HEAD + terms :])


def terms_of(error: EasydistError) -> dict[str, Any]:
    """Describe an error so that both ranks can raise it."""
    terms = {"error": type(error).__name__, "text": str(error)}
    return terms | {"rank": error.rank} if isinstance(error, RemoteError) else terms


def error_of(terms: dict[str, Any]) -> EasydistError:
    """Return the error that ``terms_of`` has described."""
    error = _ERRORS.get(terms.get("error", ""), RemoteError)(terms.get("text", ""))
    if isinstance(error, RemoteError):
        error.rank = terms.get("rank")
    return error


def shareable(error: Exception, text: str, rank: int) -> EasydistError:
    """Return an error that two ranks can raise alike.

    Args:
        error: The error of this rank.
        text: The text to use unless the error's type means the same on both ranks.
        rank: This rank.
    """
    kind = _ERRORS.get(type(error).__name__)
    return remote(text, rank) if kind is None or type(error) is not kind else kind(str(error)[:LONGEST])


def remote(text: str, rank: int) -> RemoteError:
    """Return the error about a rank that has failed, with as much of the text as a frame can hold."""
    return RemoteError(text[:LONGEST], rank=rank)
