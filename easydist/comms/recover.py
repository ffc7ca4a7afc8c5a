"""``TorchComm.recover``: a communicator of the surviving ranks."""

from __future__ import annotations

from easydist.comms.failures import CommLeftOut, CommPeerLost, CommTimeout
from easydist.comms.making import Made, Place, make
from easydist.errors import CollectiveTimeout, EasydistError, LeftOutError, PeerLostError
from easydist.groups.recovering import Attempt, Recovered, Recovery


def recovered(recovery: Recovery, kind: str, old: Place, timeout: float) -> Recovered[tuple[Made, Place]]:
    """Agree on the survivors, and make a backend for them.

    Args:
        recovery: The communicator's recovery.
        kind: The name of the backend.
        old: The place of this rank in the old communicator. Its store is not used.
        timeout: Seconds to wait for ranks that are alive but have not called; they are left out after that.

    Raises:
        CommLeftOut: The others have continued without this rank.
        CommTimeout: The survivors could not be connected in time.
        CommPeerLost: The survivors cannot agree.
    """

    def connect(attempt: Attempt) -> tuple[Made, Place]:
        size = len(attempt.members)
        place = old._replace(store=attempt.store, rank=attempt.rank, size=size, timeout=attempt.left)
        return make(kind, place), place

    try:
        return recovery.run(timeout, connect)
    except EasydistError as error:
        raise _of_comm(error) from error


def _of_comm(error: EasydistError) -> EasydistError:
    """Return the same error as a ``RuntimeError``."""
    kinds: list[tuple[type[EasydistError], type[EasydistError]]]
    kinds = [(LeftOutError, CommLeftOut), (CollectiveTimeout, CommTimeout), (PeerLostError, CommPeerLost)]
    kind = next((own for known, own in kinds if isinstance(error, known)), None)
    if kind is None:
        return error
    found = kind(*error.args)
    vars(found).update(vars(error))
    return found
