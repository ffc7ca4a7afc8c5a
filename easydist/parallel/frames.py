"""What two ranks of a coordinator tell each other, as bytes.

A frame is four 64-bit numbers (kind, status, bytes of the terms, bytes of the body), the terms as JSON, the body. The
body of a tensor dict is an ``Announcement``, that of an object a ``codec`` message.
"""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple

import torch

from easydist.errors import DisagreementError, EasydistError, RemoteError

FRAME = 1 << 15
"""Bytes that a message has in the first place, where its length is not known beforehand."""

_HEAD = struct.Struct("<4q")
LONGEST = FRAME // 16
"""Characters of an error, each of which may need 12 bytes."""

WELL, FAULT, REFUSED = range(3)
OBJECT, TENSOR, TENSOR_DICT = range(3)
_ERRORS: dict[str, type[EasydistError]] = {cls.__name__: cls for cls in (RemoteError, DisagreementError)}


class Message(NamedTuple):
    """What has come.

    Attributes:
        kind: What was sent: ``OBJECT``, ``TENSOR`` or ``TENSOR_DICT``.
        status: ``WELL``; ``FAULT`` if there is nothing but an error; ``REFUSED`` in an answer.
        terms: What both sides have to know beside it; ``"data"`` are the buffers that follow, as (kind, bytes).
        body: uint8.
    """

    kind: int
    status: int
    terms: dict[str, Any]
    body: torch.Tensor


def encode(kind: int, status: int, terms: dict[str, Any], body: torch.Tensor | None = None) -> torch.Tensor:
    """A frame.

    Args:
        kind: As in ``Message``.
        status: Likewise.
        terms: Likewise.
        body: Likewise; None is no bytes.
    """
    told = json.dumps(terms, separators=(",", ":")).encode() if terms else b""
    head = bytearray(_HEAD.pack(kind, status, len(told), 0 if body is None else body.numel()) + told)
    frame = torch.frombuffer(head, dtype=torch.uint8)
    return frame if body is None else torch.cat([frame, body])


def nbytes_of(frame: torch.Tensor) -> int:
    """How long a frame is, by its first bytes."""
    _, _, terms, body = _HEAD.unpack_from(frame.numpy().data)
    return _HEAD.size + int(terms) + int(body)


def decode(frame: torch.Tensor) -> Message:
    """What ``encode`` was given."""
    kind, status, terms, _ = _HEAD.unpack_from(view := frame.numpy().data)
    told = json.loads(bytes(view[_HEAD.size : _HEAD.size + terms])) if terms else {}
    return Message(kind, status, told, frame[_HEAD.size + terms :])


def terms_of(error: EasydistError) -> dict[str, Any]:
    """An error, as both ranks raise it."""
    return {"error": type(error).__name__, "text": str(error)}


def error_of(terms: dict[str, Any]) -> EasydistError:
    """The error that ``terms_of`` was given."""
    return _ERRORS.get(terms.get("error", ""), RemoteError)(terms.get("text", ""))


def shareable(error: Exception, text: str) -> EasydistError:
    """An error that two ranks can raise alike.

    Args:
        error: The error of this rank.
        text: What to say, unless its type is one that means the same on both ranks.
    """
    kind = _ERRORS.get(type(error).__name__)
    return RemoteError(text[:LONGEST]) if kind is None or type(error) is not kind else kind(str(error)[:LONGEST])
