"""What can go wrong between processes, as one tree.

    EasydistError
    ├── DisagreementError   ranks called different operations, or with trees that do not match
    └── RemoteError         another rank failed before the exchange; its text is inside

Both are raised on every rank of the group, with the same text, before any of the call's data has moved; the next call
on the group works. Misuse that every rank commits alike stays a plain ``TypeError`` or ``ValueError``.
"""

from __future__ import annotations


class EasydistError(Exception):
    """Any error that concerns more than one process."""


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
