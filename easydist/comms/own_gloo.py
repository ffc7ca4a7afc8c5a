"""Gloo over a communicator's own connections: its backend, and a group of ``torch.distributed`` over the same ones."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store

from easydist.base.gloo import end_wait, run_after_ranks
from easydist.errors import EasydistError
from easydist.liveness import keepalive
from easydist.liveness.monitor import Monitor
from easydist.liveness.rules import LISTEN_EVERY
from easydist.liveness.watchdog import signals_wake_watchdog, watchdog
from easydist.torch_backend.reductions import premultiplied
from easydist.transport.backends.c10d import Gloo
from easydist.transport.reduce_op import ReduceOp


class OwnGloo(Gloo):
    """Gloo over a private group.

    gloo waits in C++, where Python does not handle signals. At Ctrl-C the watchdog first tells the other ranks which
    rank was interrupted, then breaks the connections of the communicator for which the main thread waits.

    Args:
        group: The group.
        device: The CPU.
        ranks: The monitor of the other processes.

    Attributes:
        process_group: The group; None once the backend is closed.
        waits: Odd while the main thread waits.
        was_interrupted: Set by the watchdog at Ctrl-C.
        sync_signals: Set by the watchdog; not used here.
    """

    def __init__(self, group: Any, device: torch.device, ranks: Monitor) -> None:
        super().__init__(group, device, "gloo")
        self.process_group = group
        self.waits, self.was_interrupted = 0, False
        self.sync_signals: Callable[[], None] = ranks.sync_signals
        self._ranks, self.is_near = ranks, ranks.sees
        ranks.disconnect, ranks.waits_in_memory = self.disconnect, False
        run_after_ranks(sum(rank == self.rank or ranks.sees(rank) for rank in range(self.size)))
        self._lost = set[dist.Work]()
        self._awaited: Callable[[], int] = _nobody  # returns the rank for which it waits
        self._looked = 0, 0.0  # a wait, and the time of a look at it
        watchdog().add(self)
        watchdog().look_regularly(self._end_lost)

    def _end_lost(self) -> None:
        """End waits for messages to ranks that have ended, if they have not ended since the last look."""
        sends = [at for messages in tuple(self.gloo_waits.under_way) if not (at := messages.at).is_recv]
        lost = {message.work for message in sends if self._ranks.peers[message.peer].has_ended()}
        for work in lost & self._lost:
            end_wait(work)
        self._lost = lost

    def wait_alone(self, wait: Callable[[], object], peer: Callable[[], int], check: Callable[[], None] | None) -> None:
        """Wait for messages. Ctrl-C ends a wait of the main thread, and so does a recovery that needs this rank."""
        if check is not None:  # while a thread waits, Python handles signals
            return super().wait_alone(wait, peer, functools.partial(self._check, id(wait), peer, check))
        self._awaited = peer
        with signals_wake_watchdog() as is_heard:
            self.waits += is_heard
            try:
                super().wait_alone(wait, peer, None)
            finally:
                self.waits += is_heard
                self._awaited = _nobody  # the messages keep tensors and connections

    def interrupted(self, error: BaseException, wait: int) -> None:
        """Tell the other ranks, then break the connections. The watchdog calls this."""
        if wait == self.waits:
            self._ranks.interrupted(error)

    def publish(self) -> None:
        """Do nothing. The messages themselves carry all information for ranks of other hosts."""

    def check_wait(self, wait: int) -> None:
        """End connections to hosts that do not answer. That to an ended rank breaks, and each wait has its limit.

        Give the communicator up if the awaited rank recovers another group, and so waits for this rank.
        """
        keepalive.end_unreachable()
        if (error := self._recovering(wait, self._awaited)) is not None and wait == self.waits:
            self._ranks.give_up(error)

    def _check(self, wait: int, peer: Callable[[], int], check: Callable[[], None]) -> None:
        check()
        if (error := self._recovering(wait, peer)) is not None:
            self._ranks.give_up(error)
            self._ranks.raise_if_broken()

    def _recovering(self, wait: int, peer: Callable[[], int]) -> EasydistError | None:
        """Look once a second, from the second look on, whether a rank that a wait needs recovers another group."""
        now, (seen, looked) = time.monotonic(), self._looked
        if seen == wait and now - looked < LISTEN_EVERY:
            return None
        self._looked = wait, now
        return self._ranks.recovering([peer()]) if seen == wait else None

    def failed(self, error: Exception, wait: int) -> None:
        """Do as ``interrupted``, because of an error of the watchdog's own."""
        if wait == self.waits:
            self._ranks.failed(error)
            self.disconnect()

    def post_exception(self, text: str) -> None:
        """Do nothing, for the reason given in ``check_wait``."""

    def close(self) -> None:
        """Close the connections."""
        self._ranks.detach()
        self.process_group = None
        del self._group


def _nobody() -> int:
    return 0


_Base: Any = dist.ProcessGroup
"""Untyped, because its stubs have overloads that torch does not call."""


class GlooGroup(_Base):  # type: ignore[misc]
    """A process group over a gloo backend. ``PREMUL_SUM``, which gloo refuses, is a product and a sum.

    FSDP2 asks for that with a divide factor. Every operation goes through Python, which lets go of the interpreter
    while gloo takes the operation. Functional collectives, which call a group from C++, do not: a thread of gloo that
    ends an operation may need the interpreter, with the lock that gloo needs to take the next one, and both would wait
    forever.

    Args:
        store: The group's store.
        rank: The rank of this process in the group.
        size: The number of processes in the group.
        gloo: The backend.
    """

    def __init__(self, store: Store, rank: int, size: int, gloo: Any) -> None:
        super().__init__(rank, size)
        self._store = store
        # The methods below cannot call their base, which would call them again: it is virtual in C++.
        self._plain: Any = dist.ProcessGroup(store, rank, size)
        for group in (self, self._plain):
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)

    def _run(self, name: str, *args: Any, **options: Any) -> Any:
        """Begin an operation; the arguments that are None are those that the caller has left out."""
        return getattr(self._plain, name)(*(arg for arg in args if arg is not None), **options)

    def get_group_store(self) -> Store:
        """Return the store of the group."""
        return self._store

    def _reduced(self, name: str, tensors: Any, opts: Any = None) -> Any:
        """Reduce one tensor in place, or several."""
        if (op := premultiplied(opts)) is None:
            return self._run(name, tensors, opts)
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            tensor.detach().copy_(op.scaled(tensor))
        return self._run(name, tensors, _summing(opts))

    def reduce(self, tensors: Any, opts: Any) -> Any:
        """Reduce in place on the root. The tensors of the other ranks do not change if they are multiplied."""
        if (op := premultiplied(opts)) is None or opts.rootRank == self.rank():
            return self._reduced("reduce", tensors, opts)
        return self._run("reduce", _scaled(op, tensors), _summing(opts))

    def _scattered(self, name: str, output: Any, inputs: Any, opts: Any = None) -> Any:
        """Reduce the parts of one tensor, of several, or of lists."""
        if (op := premultiplied(opts)) is None:
            return self._run(name, output, inputs, opts)
        return self._run(name, output, _scaled(op, inputs), _summing(opts))


def _scaled(op: ReduceOp, tensors: Any) -> Any:
    """Return a tensor, or those in a list or in lists, times the factor."""
    return op.scaled(tensors) if isinstance(tensors, torch.Tensor) else [_scaled(op, part) for part in tensors]


def _add(method: Callable[..., Any], names: str) -> None:
    """Add the names of operations of which torch's versions have some; ``method`` takes the name first."""
    for name in names.split():
        if hasattr(dist.ProcessGroup, name):
            setattr(GlooGroup, name, functools.partialmethod(method, name))


_add(GlooGroup._reduced, "allreduce allreduce_coalesced")
_add(
    GlooGroup._scattered,
    "_reduce_scatter_base reduce_scatter reduce_scatter_single reduce_scatter_tensor_coalesced "
    "reduce_scatter_single_coalesced",
)
_add(
    GlooGroup._run,
    "_allgather_base all_gather_single all_gather_single_coalesced all_to_all_single allgather allgather_coalesced "
    "allgather_into_tensor_coalesced alltoall alltoall_base barrier broadcast gather gather_into_tensor gather_single "
    "scatter send recv recv_anysource",
)


def _summing(opts: Any) -> Any:
    """Return the same options with a sum."""
    plain = type(opts)()
    for name in ("rootRank", "rootTensor", "timeout", "asyncOp"):
        if hasattr(opts, name):
            setattr(plain, name, getattr(opts, name))
    plain.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
    return plain
