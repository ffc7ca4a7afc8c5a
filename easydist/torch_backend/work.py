"""A ``torch.distributed`` operation under way, and the tensors that it fills."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from easydist.base.eager import eager_methods
from easydist.base.torch_private import backward_id, is_profiled
from easydist.data.backing import absence, backed, is_backed, writable
from easydist.data.leaves import overlaps
from easydist.data.packing import as_bytes
from easydist.errors import EasydistError
from easydist.liveness.background import at_once
from easydist.torch_backend.rendezvous import NAME
from easydist.transport.work import Begun, wait

_NO_LIMIT = timedelta(0)
_NO_BACKWARD = -1
"""torch's number of the backward pass, outside of one."""

_NOTHING = contextlib.nullcontext()

TensorList = Sequence[torch.Tensor]


def event(operation: str, what: str = "") -> AbstractContextManager[Any]:
    """Return the context that a profiler shows under the name of the backend and this operation."""
    return torch.profiler.record_function(f"{NAME}:{operation}{what}") if is_profiled() else _NOTHING


class Owner(Protocol):
    """The owner of operations: a group.

    Attributes:
        ending: Held while an operation ends, because several threads may wait for it.
    """

    ending: AbstractContextManager[object]

    def leave(self, error: BaseException | None) -> None:
        """Record the end of an operation, with its error if it has failed."""

    def hold(self, work: GroupWork) -> None:
        """Keep a work alive that has not ended and that nothing in Python refers to."""


@eager_methods
class GroupWork(dist.Work):
    """An operation under way. It moves on whether or not a thread waits for it, as all of ``easydist.shm.streams`` do.

    Args:
        operation: Its name.
        works: The works that must end.
        tensors: Its result.
        owner: The group, which is told when it has ended.
        finish: A function to call before that, unless it has failed.
        keep: Refers to the tensors that must live until then.

    Attributes:
        operation: Its name.
        tensors: Its result.
        is_done: True if it has ended, whether or not it succeeded.
        limit: The limit of a wait that sets none; zero is the group's.
        sources: The rank that has sent, once a message of any rank has ended.
    """

    limit = timedelta(0)
    sources: Sequence[int] = ()

    def __init__(
        self,
        operation: str,
        works: Sequence[Begun],
        tensors: TensorList,
        owner: Owner,
        finish: Callable[[], None] | None = None,
        keep: object = None,
    ) -> None:
        super().__init__()
        self.operation, self.tensors = operation, tensors
        self._works, self._owner, self._finish, self._keep = works, owner, finish, keep
        self.is_done = False
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"GroupWork({self.operation}, {'done' if self.is_done else 'under way'})"

    def __del__(self) -> None:
        # DDP's join passes works to C++, which does not hold the Python object, and so would lose its ``wait``.
        if not self.is_done:
            self._owner.hold(self)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Block until the operation has ended.

        Args:
            timeout: The limit; zero means the group's. After a timeout the group can no longer be used.
        """
        if self._error is not None:
            if isinstance(self._error, EasydistError):
                raise copy.copy(self._error) from self._error
            raise RuntimeError(f"{self.operation} has failed: {self._error}") from self._error
        if self.is_done:
            return True
        try:
            with event(self.operation, " (wait)"):
                for work in self._works:
                    wait(work, timeout or self.limit or None)
            self._end(None)
        except BaseException as error:
            self._end(error)
            raise
        return True

    def _end(self, error: BaseException | None) -> None:
        with self._owner.ending:
            if self.is_done:  # another thread has waited for it, too
                return
            if error is None and self._finish is not None:
                self._finish()
            self._error, self.is_done = error, True
            self._works, self._keep, self._finish = (), None, None
            self._owner.leave(error)

    def is_completed(self) -> bool:
        """True if ``wait`` would return or raise at once."""
        if not self.is_done and all(work.is_completed() for work in self._works):
            try:
                self.wait()
            except Exception as error:
                self._error = error
        return self.is_done

    def is_success(self) -> bool:
        """True if it has succeeded."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error if it has failed."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Wait, and return the tensors that it has filled."""
        self.wait()
        return list(self.tensors)

    def _source_rank(self) -> int:
        """Return the rank that has sent the message of any rank; torch calls this after the end."""
        return self.sources[0]

    def synchronize(self) -> None:
        """Wait, as ``wait`` does."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the result, which a thread completes.

        In a backward pass, wait for the result: DDP waits for futures in C++, where neither Ctrl-C nor the type of an
        error would arrive. So its buckets are reduced one after the other, which takes no longer than reducing all of
        them at the end.
        """
        future: torch.futures.Future[Any] = torch.futures.Future()
        if backward_id() != _NO_BACKWARD:
            future.set_result(self.result())
        elif self.is_completed():
            self._tell(future)
        else:
            at_once(lambda: self._tell(future))
        return future

    def _tell(self, future: torch.futures.Future[Any]) -> None:
        """Wait for the end, and complete a future."""
        try:
            result = self.result()
        except BaseException as error:
            future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        else:
            future.set_result(result)


class Filled:
    """A tensor to fill, and contiguous memory for that, which is the tensor's own if possible.

    Args:
        tensor: A tensor of any strides.
        filled: True if its present values are needed.

    Raises:
        ValueError: It is not dense, not on the CPU, or expanded, so that several of its elements share memory.
        TypeError: It has no memory of its own.
    """

    def __init__(self, tensor: torch.Tensor, filled: bool = False) -> None:
        self.tensor = tensor
        _demand_here(tensor)
        if not is_backed(tensor) and (reason := absence(tensor)):
            raise TypeError(f"easydist_shm cannot fill {seen(tensor)}, which {reason}")
        self.is_direct = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        if self.is_direct:
            self.dense = writable(tensor.detach())
            return
        if overlaps(tensor):
            raise ValueError(f"easydist_shm cannot fill {seen(tensor)}, which is expanded; fill a clone")
        self.dense = writable(dense(tensor) if filled else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))

    def deliver(self) -> None:
        """Copy the values to the tensor if necessary."""
        if not self.is_direct:
            writable(self.tensor.detach()).copy_(self.dense)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values, contiguous: the tensor's own memory if it is contiguous."""
    _demand_here(tensor)
    return backed(tensor, f"the tensor, {seen(tensor)},").contiguous()


def _demand_here(tensor: torch.Tensor) -> None:
    """Make sure that the backend can move it."""
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise ValueError(f"easydist_shm moves dense tensors on the CPU, got {seen(tensor)}, {tensor.layout}")


def seen(tensor: torch.Tensor) -> str:
    """Describe a tensor in an error message."""
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


def all_bytes(targets: Sequence[Filled]) -> list[torch.Tensor]:
    """Return the memory of several targets as bytes."""
    return [as_bytes(target.dense) for target in targets]
