"""An operation of a ``torch.distributed`` group under way, and the tensors that it fills."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from easydist.comms.work import TorchWork
from easydist.wire import as_bytes

_NO_LIMIT = timedelta(0)

Tensors = Sequence[torch.Tensor]


class GroupWork(dist.Work):
    """An operation under way; moves on inside ``wait`` and ``is_completed``, and when it begins.

    Args:
        operation: Its name.
        works: What has to end.
        tensors: Its result.
        leave: Called at the end, with the error where it has failed.
        finish: Run before, where it has not.
        keep: What has to live until then.

    Attributes:
        operation: Its name.
        tensors: Its result.
    """

    def __init__(
        self,
        operation: str,
        works: Sequence[TorchWork],
        tensors: Tensors,
        leave: Callable[[BaseException | None], None],
        finish: Callable[[], None] | None = None,
        keep: Tensors = (),
    ) -> None:
        super().__init__()
        self.operation, self.tensors = operation, tensors
        self._works, self._leave, self._finish, self._keep = works, leave, finish, keep
        self._is_done = False
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"GroupWork({self.operation}, {'done' if self._is_done else 'under way'})"

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Block until the operation has ended.

        Args:
            timeout: How long; zero is the group's. After it the group is of no use any more.
        """
        if self._error is not None:
            raise RuntimeError(f"{self.operation} has failed: {self._error}") from self._error
        if self._is_done:
            return True
        try:
            for work in self._works:
                work.within(timeout).wait()
            if self._finish is not None:
                self._finish()
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)
        return True

    def _end(self, error: BaseException | None) -> None:
        self._error, self._is_done = error, True
        self._works, self._keep, self._finish = (), (), None
        self._leave(error)

    def is_completed(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        if not self._is_done and all(work.is_completed() for work in self._works):
            try:
                self.wait()
            except Exception as error:
                self._error = error
        return self._is_done

    def is_success(self) -> bool:
        """Whether it has ended well."""
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
        filled: Whether its values are needed before.
    """

    def __init__(self, tensor: torch.Tensor, filled: bool = False) -> None:
        self.tensor = tensor
        _demand_here(tensor)
        self.is_direct = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        if self.is_direct:
            self.dense = tensor.detach()
        else:
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
