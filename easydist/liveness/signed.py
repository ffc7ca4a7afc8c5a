"""The job key (``EASYDIST_JOB_KEY``): it signs the values that easydist writes to a store, and greets its connections.

Without a key, values are stored as they are. With one, a value is stored as ``signed:FINGERPRINT:HMAC:VALUE``; the HMAC
covers the key of the store and the value, so that a value counts at its own key only. A key of the store is relative to
the group's part of the store: torch does not tell the rest.
"""

from __future__ import annotations

import functools
import hashlib
import os
import socket
from collections.abc import Mapping, Sequence

from easydist import settings
from easydist.errors import WireError
from easydist.liveness.stored import in_store

_MARK = b"signed:"
_ADVICE = (
    "Give all ranks the same key (easydist run --job-key FILE). If they have the same one, another program writes to "
    "the store"
)


def digest(key: bytes, purpose: bytes, text: bytes) -> bytes:
    """Return the HMAC-SHA256 of a text for one purpose."""
    import hmac

    return hmac.digest(key, b"easydist " + purpose + b"\0" + text, hashlib.sha256)


class Seal:
    """The signatures of one key.

    Args:
        key: The key; empty for none.

    Attributes:
        key: The key.
        fingerprint: A short text that tells keys apart, and nothing about them; empty without a key.

    Example:
        >>> seal = Seal(b"a key of at least 32 characters .")
        >>> seal.opened("who/1", seal.sealed("who/1", "[7]").encode())
        b'[7]'
        >>> Seal(b"").sealed("who/1", "[7]")
        '[7]'
    """

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.fingerprint = digest(key, b"fingerprint", b"").hex()[:12] if key else ""

    def sealed(self, key: str, text: str) -> str:
        """Return the text to store as the value of a key of the store."""
        if not self.key:
            return text
        return f"{_MARK.decode()}{self.fingerprint}:{self._signature(key, text.encode())}:{text}"

    def opened(self, key: str, value: bytes, by: int | None = None) -> bytes:
        """Return the text whose sealed form is stored.

        Args:
            key: The key of the store.
            value: Its value.
            by: The rank that writes this key, for errors; None if several ranks may.

        Raises:
            WireError: The value was not signed with this key, or is signed although this process has no key.
        """
        is_signed = value.startswith(_MARK)
        if not self.key and not is_signed:
            return value
        import hmac

        _, fingerprint, signature, text = value.split(b":", 3) if value.count(b":") >= 3 else (b"", b"", b"", value)
        if is_signed and self.key and hmac.compare_digest(signature, self._signature(key, text).encode()):
            return text
        raise WireError(f"{in_store(key)} {self._fault(is_signed, fingerprint, by)}. {_ADVICE}")

    def _signature(self, key: str, text: bytes) -> str:
        return digest(self.key, b"store", key.encode() + b"\0" + text).hex()

    def _fault(self, is_signed: bool, fingerprint: bytes, by: int | None) -> str:
        who = "another rank" if by is None else f"rank {by}"
        if not self.key:
            return f"is signed, but this process on {socket.gethostname()} has no valid {settings.JOB_KEY}"
        if not is_signed:
            return f"is not signed: {who} has no valid {settings.JOB_KEY}, or another program has written it"
        if fingerprint != self.fingerprint.encode():
            return f"is signed with another key: {who} has another {settings.JOB_KEY} than this process"
        return f"has a wrong signature: another program, without {settings.JOB_KEY}, has changed it"


def text_in(value: bytes) -> bytes:
    """Return the text of a value that may be signed, unchecked."""
    return value.split(b":", 3)[-1] if value.startswith(_MARK) else value


def seal() -> Seal:
    """Return the seal of this process, by its environment."""
    return _seal(settings.read(settings.JOB_KEY))


@functools.cache
def _seal(key: str) -> Seal:
    return Seal(os.fsencode(key))


def difference(fingerprints: Mapping[int, str], hosts: Sequence[str | None]) -> str:
    """Return the lines about ranks with different keys; empty if all have the same one, or none.

    Args:
        fingerprints: The fingerprint of each rank's key.
        hosts: The host of each rank.

    Example:
        >>> print(difference({0: "5f1b", 1: ""}, ["node1", "node2"]))
          rank 0 on node1: EASYDIST_JOB_KEY with the fingerprint 5f1b
          rank 1 on node2: no EASYDIST_JOB_KEY
    """
    if len(set(fingerprints.values())) == 1:
        return ""
    told = {rank: f"with the fingerprint {text}" if text else "" for rank, text in fingerprints.items()}
    return "\n".join(
        f"  rank {rank} on {hosts[rank]}: {f'{settings.JOB_KEY} {text}' if text else f'no {settings.JOB_KEY}'}"
        for rank, text in sorted(told.items())
    )
