"""The modes of torch in which tensors do not hold their data, and a context outside of them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

_fake_mode = functools.partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE)
_transform = torch._C._functorch.peek_interpreter_stack


def without_data() -> str:
    """Return a text about the mode of this thread and its tensors; empty if tensors hold their data.

    Example:
        >>> without_data()
        ''
        >>> seen = []
        >>> _ = torch.vmap(lambda x: seen.append(without_data()) or x)(torch.ones(2))
        >>> seen
        ['inside vmap or another transform of torch.func, where one tensor stands for several']

    Cost: 0.03 µs without such a mode, which is the usual case.
    """
    if _transform() is not None:
        return "inside vmap or another transform of torch.func, where one tensor stands for several"
    return "under FakeTensorMode, where tensors have no data" if _fake_mode() is not None else ""


def demand_data(operation: str) -> None:
    """Refuse an operation in a mode in which tensors do not hold their data.

    Raises:
        TypeError: This thread is in such a mode; the text names the operation.
    """
    if _transform() is not None or _fake_mode() is not None:  # without another call: every operation asks
        raise refusal(operation, without_data())


def refusal(operation: str, where: str) -> TypeError:
    """Return the error for an operation in such a mode, of which ``without_data`` has returned a text."""
    return TypeError(f"{operation}: called {where}; call it outside, with tensors that have data")


@contextlib.contextmanager
def left() -> Iterator[None]:
    """Leave these modes for the body."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with temporarily_clear_interpreter_stack(), unset_fake_temporarily():
        yield
