"""What can go wrong between processes, as one tree.

    EasydistError
    ├── DisagreementError   ranks called different operations, or with trees that do not match
    ├── RemoteError         another rank failed before the exchange; its text is inside
    ├── WireError           bytes that are not a valid message
    └── UnsafeObjectError   decoding met a global that is not allow-listed

The first two are raised on every rank of the group, with the same text, before any of the call's data has moved; the
next call on the group works. Misuse that every rank commits alike stays a plain ``TypeError`` or ``ValueError``.
"""

from __future__ import annotations


class EasydistError(Exception):
    """Any error that concerns more than one process.

    Attributes:
        raised_in: The communicators of the group, all of whose ranks raise this error.
    """

    raised_in: object = None


class DisagreementError(EasydistError):
    """The ranks of a group called different operations, or one operation with trees that do not match.

    Example:
        >>> import easydist
        >>> easydist.DistributedOperationException is easydist.DisagreementError
        True
    """


class RemoteError(EasydistError):
    """One rank failed before the exchange; every rank of the group raises this, with that rank's text.

    On the rank that failed, ``__cause__`` is the original exception.
    """


class WireError(EasydistError, ValueError):
    """Bytes that are not a valid message; nothing was made of them."""


class UnsafeObjectError(EasydistError):
    """Decoding met a global that is not allow-listed, or pickle was asked for where it is denied.

    Nothing of the message has run. The text names the global and says how to allow it.
    """
