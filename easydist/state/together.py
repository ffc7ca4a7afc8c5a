"""``easydist.together``, which raises an exception of one rank on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from easydist.agreement.calling import seconds
from easydist.agreement.runner import jointly
from easydist.state.process_state import communicators
from easydist.typing import Group, Timeout


@contextmanager
def together(group: Group = None, *, timeout: Timeout | None = None) -> Iterator[None]:
    """Let an exception of the body on one rank raise an error on all ranks, in whichever call of the group they wait.

    Law: either the body succeeds on every rank, or every rank raises. The others learn anyway of a process that ends
    with an exception; this is for programs that continue: in a notebook, or around a step that may fail. A wait in
    another group, or in a call of torch such as DDP's, ends with its own time limit.

    Args:
        group: The ranks that take part.
        timeout: The time limit of the call at the end of the body; None is the group's.

    Raises:
        RemoteError: The body raised an exception on another rank; on that rank its own exception is raised. The next
            call of the group works.

    Example:
        >>> import easydist
        >>> with easydist.together():
        ...     easydist.gather(1.0)
        tensor([1.], dtype=torch.float64)

    Cost: one header exchange, at the end.
    """
    comms = communicators(group)
    limit = None if timeout is None else seconds(timeout, "together")
    with jointly(comms, "together", limit):
        yield
