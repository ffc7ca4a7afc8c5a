"""An operation of a ``torch.distributed`` group under way, and the tensors that it fills."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from easydist.data.leaves import overlaps
from easydist.data.packing import as_bytes
from easydist.eager import eager_methods
from easydist.transport.work import Pending, TorchWork

_NO_LIMIT = timedelta(0)

Tensors = Sequence[torch.Tensor]


class Owner(Protocol):
    """Whose operations they are: a group."""

    def leave(self, error: BaseException | None) -> None:
        """An operation has ended; ``error`` is why, if it has failed."""

    def hold(self, work: GroupWork) -> None:
        """Let it live on: nothing in Python holds it, and it has not ended."""


@eager_methods
class GroupWork(dist.Work):
    """An operation under way; moves on inside ``wait`` and ``is_completed``, and when it begins.

    Args:
        operation: Its name.
        works: What has to end.
        tensors: Its result.
        owner: Told when it has ended.
        finish: Run before, where it has not failed.
        keep: What has to live until then.

    Attributes:
        operation: Its name.
        tensors: Its result.
        is_done: True if it has ended, well or not.
    """

    def __init__(
        self,
        operation: str,
        works: Sequence[Pending | TorchWork],
        tensors: Tensors,
        owner: Owner,
        finish: Callable[[], None] | None = None,
        keep: Tensors = (),
    ) -> None:
        super().__init__()
        self.operation, self.tensors = operation, tensors
        self._works, self._owner, self._finish, self._keep = works, owner, finish, keep
        self.is_done = False
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"GroupWork({self.operation}, {'done' if self.is_done else 'under way'})"

    def __del__(self) -> None:
        # DDP's join hands works to C++, which does not hold the Python object, and with it would lose ``wait``.
        if not self.is_done:
            self._owner.hold(self)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Block until the operation has ended.

        Args:
            timeout: How long; zero is the group's. After it the group is of no use any more.
        """
        if self._error is not None:
            raise RuntimeError(f"{self.operation} has failed: {self._error}") from self._error
        if self.is_done:
            return True
        try:
            for work in self._works:
                work.within(timeout).wait() if isinstance(work, TorchWork) else work.wait(timeout)
            if self._finish is not None:
                self._finish()
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)
        return True

    def _end(self, error: BaseException | None) -> None:
        self._error, self.is_done = error, True
        self._works, self._keep, self._finish = (), (), None
        self._owner.leave(error)

    def is_completed(self) -> bool:
        """True if ``wait`` would return, or raise, at once."""
        if not self.is_done and all(work.is_completed() for work in self._works):
            try:
                self.wait()
            except Exception as error:
                self._error = error
        return self.is_done

    def is_success(self) -> bool:
        """True if it has ended well."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Why it has failed."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that it has filled."""
        self.wait()
        return list(self.tensors)

    def synchronize(self) -> None:
        """The same as ``wait``."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future with the result, completed already: no thread moves an operation on, and C++ waits for futures.

        So buckets of DDP are reduced one after the other, which takes no longer than all of them at the end.
        """
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.result())
        return future


class Target:
    """A tensor to be filled, and contiguous memory to do it in: its own where possible.

    Args:
        tensor: Any strides.
        filled: True if its values are needed before.

    Raises:
        ValueError: It is not dense, not on the CPU, or expanded: several of its elements share memory.
    """

    def __init__(self, tensor: torch.Tensor, filled: bool = False) -> None:
        self.tensor = tensor
        _demand_here(tensor)
        self.is_direct = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        if self.is_direct:
            self.dense = tensor.detach()
            return
        if overlaps(tensor):
            raise ValueError(f"easydist_shm cannot fill {seen(tensor)}, which is expanded; fill a clone")
        self.dense = dense(tensor) if filled else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    def deliver(self, divisor: int = 1) -> None:
        """Divide, and put the values where they belong."""
        if divisor > 1:
            self.dense.div_(divisor)
        if not self.is_direct:
            self.tensor.detach().copy_(self.dense)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous; the tensor's own memory where it is so already."""
    _demand_here(tensor)
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _demand_here(tensor: torch.Tensor) -> None:
    """That the backend can move it."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise ValueError(f"easydist_shm moves dense tensors on the CPU, got {seen(tensor)}, {tensor.layout}")


def seen(tensor: torch.Tensor) -> str:
    """A tensor, for an error."""
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


def all_bytes(targets: Sequence[Target]) -> list[torch.Tensor]:
    """The memory of several targets."""
    return [as_bytes(target.dense) for target in targets]
