"""The modes of torch in which tensors do not hold their data, and a context outside of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from easydist.base import torch_private
from easydist.base.torch_private import mode_depth, mode_of, tracing, transform

_KINDS = {
    "FAKE": "under FakeTensorMode, where tensors have no data",
    "PROXY": "inside make_fx, which records operations on this rank's tensors, not the others' part",
    "FUNCTIONAL": "under FunctionalTensorMode, where tensors stand for others",
}
_KEYS = torch_private.MODE_KEYS
_MODES = {getattr(_KEYS, kind): text for kind, text in _KINDS.items() if hasattr(_KEYS, kind)}


def without_data() -> str:
    """Return a text about the mode of this thread and its tensors; empty if tensors hold their data.

    Example:
        >>> without_data()
        ''
        >>> import torch
        >>> seen = []
        >>> _ = torch.vmap(lambda x: seen.append(without_data()) or x)(torch.ones(2))
        >>> seen
        ['inside vmap or another transform of torch.func, where one tensor stands for several']

    Cost: 0.1 µs without such a mode, which is the usual case.
    """
    if transform() is not None:
        return "inside vmap or another transform of torch.func, where one tensor stands for several"
    if tracing() is not None:
        return "inside torch.jit.trace, which records operations on this rank's tensors, not the others' part"
    return next((text for key, text in _MODES.items() if mode_of(key) is not None), "") if mode_depth() else ""


def demand_data(operation: str) -> None:
    """Refuse an operation in a mode in which tensors do not hold their data.

    Raises:
        TypeError: This thread is in such a mode; the text names the operation.
    """
    # Few calls: every operation asks.
    if (transform() is not None or mode_depth() or tracing() is not None) and (where := without_data()):
        raise refusal(operation, where)


def refusal(operation: str, where: str) -> TypeError:
    """Return the error for an operation in such a mode, of which ``without_data`` has returned a text."""
    return TypeError(f"{operation}: called {where}; call it outside, with tensors that have data")


@contextlib.contextmanager
def left() -> Iterator[None]:
    """Leave these modes for the body."""
    with torch_private.transforms_left():
        modes, trace = [torch_private.unset_mode(key) for key in _MODES], tracing()
        torch_private.set_tracing(None)
        try:
            yield
        finally:
            torch_private.set_tracing(trace)
            for mode in modes:
                if mode is not None:
                    torch_private.set_mode(mode)
