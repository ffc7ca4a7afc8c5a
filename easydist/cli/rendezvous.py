"""The rendezvous of an agent that is alone: one store, which listens on the loopback interface only.

torchrun's own ``--standalone`` opens two stores, and both listen on all interfaces of the host.
"""

from __future__ import annotations

import click
from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from easydist.liveness.timed_store import served

BACKEND = "easydist-loopback"
_HOST = "127.0.0.1"
_SECONDS = 60.0


class LoopbackRendezvous(RendezvousHandler):
    """The rendezvous of one agent with itself.

    Args:
        run_id: The name of the job.
        port: The port of the first store; 0 for a free one.
    """

    def __init__(self, run_id: str, port: int) -> None:
        self._run_id, self._port = run_id, port

    def get_backend(self) -> str:
        """Return the name by which torchrun selects this rendezvous."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """True: the ranks are clients of the agent's store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the place of the only agent, and a new store: restarted ranks must not find the keys of others.

        Raises:
            click.ClickException: The port is in use.
        """
        try:
            store = served(_HOST, self._port, _SECONDS, only_there=True)
        except OSError as error:
            raise click.ClickException(f"cannot listen on port {self._port} of {_HOST}: {error.strerror}") from None
        self._port = 0
        return RendezvousInfo(PrefixStore(self._run_id, store), 0, 1, RendezvousStoreInfo(_HOST, store.port))

    def is_closed(self) -> bool:
        """Return False: there is no other agent that could close it."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no other agent can join."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return self._run_id

    def shutdown(self) -> bool:
        """Return True: the store ends with this process."""
        return True


def _create(params: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(params.run_id, int(params.endpoint.rpartition(":")[2]))


def register() -> None:
    """Let torchrun know this rendezvous."""
    rendezvous_handler_registry.register(BACKEND, _create)
