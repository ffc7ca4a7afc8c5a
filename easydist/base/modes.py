"""The modes of torch in which tensors do not hold their data, and a context outside of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_transform = torch._C._functorch.peek_interpreter_stack
_depth = torch._C._len_torch_dispatch_stack
_get = torch._C._get_dispatch_mode
_KEYS = torch._C._TorchDispatchModeKey
_MODES = {
    _KEYS.FAKE: "under FakeTensorMode, where tensors have no data",
    _KEYS.PROXY: "inside make_fx, which records operations on this rank's tensors, not the others' part",
    _KEYS.FUNCTIONAL: "under FunctionalTensorMode, where tensors stand for others",
}


def without_data() -> str:
    """Return a text about the mode of this thread and its tensors; empty if tensors hold their data.

    Example:
        >>> without_data()
        ''
        >>> seen = []
        >>> _ = torch.vmap(lambda x: seen.append(without_data()) or x)(torch.ones(2))
        >>> seen
        ['inside vmap or another transform of torch.func, where one tensor stands for several']

    Cost: 0.1 µs without such a mode, which is the usual case.
    """
    if _transform() is not None:
        return "inside vmap or another transform of torch.func, where one tensor stands for several"
    return next((text for key, text in _MODES.items() if _get(key) is not None), "") if _depth() else ""


def demand_data(operation: str) -> None:
    """Refuse an operation in a mode in which tensors do not hold their data.

    Raises:
        TypeError: This thread is in such a mode; the text names the operation.
    """
    if (_transform() is not None or _depth()) and (where := without_data()):  # few calls: every operation asks
        raise refusal(operation, where)


def refusal(operation: str, where: str) -> TypeError:
    """Return the error for an operation in such a mode, of which ``without_data`` has returned a text."""
    return TypeError(f"{operation}: called {where}; call it outside, with tensors that have data")


@contextlib.contextmanager
def left() -> Iterator[None]:
    """Leave these modes for the body."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        modes = [torch._C._unset_dispatch_mode(key) for key in _MODES]
        try:
            yield
        finally:
            for mode in modes:
                if mode is not None:
                    torch._C._set_dispatch_mode(mode)
