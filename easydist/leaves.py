"""The leaves of one rank's tree as tensors, in an order on which every rank agrees."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from easydist import tree
from easydist.typing import Tree
from easydist.wire import sort_key

_PYTHON_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def as_tensor(leaf: Any, path: str = "") -> torch.Tensor:
    """The leaf as a detached, dense tensor; memory is shared where that is possible.

    NumPy arrays keep their dtype; a Python int becomes int64, a float float64, a complex complex128, a bool bool.

    Args:
        leaf: A tensor, a NumPy array or scalar, a Python number.
        path: Where it was, for the error.

    Raises:
        TypeError: No dense tensor can hold the leaf (strings, sparse tensors, DTensors, …).
        ValueError: A Python int does not fit 64 bits.

    Example:
        >>> as_tensor(0.5)
        tensor(0.5000, dtype=torch.float64)
    """
    if isinstance(leaf, torch.Tensor):
        return _dense(leaf, path)
    if isinstance(leaf, np.ndarray | np.generic):
        return _from_numpy(np.asanyarray(leaf), path)
    dtype = next(dtype for cls, dtype in _PYTHON_DTYPES.items() if isinstance(leaf, cls))
    try:
        return torch.tensor(leaf, dtype=dtype)
    except (OverflowError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{_at(path)} is an int that does not fit 64 bits; use gather_object for such numbers"
        ) from error


def _at(path: str) -> str:
    return f"leaf {path}" if path else "the value"


def _dense(leaf: torch.Tensor, path: str) -> torch.Tensor:
    dtensor = sys.modules.get("torch.distributed.tensor")
    if dtensor is not None and isinstance(leaf, dtensor.DTensor):
        raise TypeError(f"{_at(path)} is a DTensor; pass .full_tensor() or .to_local(), whichever is meant")
    if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized or leaf.is_meta:
        kind = "nested" if leaf.is_nested else "quantized" if leaf.is_quantized else f"{leaf.layout} on {leaf.device}"
        raise TypeError(f"{_at(path)} is not a dense tensor ({kind}); pass its dense parts")
    return leaf.detach().resolve_conj().resolve_neg()


def _from_numpy(array: np.ndarray[Any, Any], path: str) -> torch.Tensor:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{_at(path)} is a masked array, whose mask would be lost; send .data and .mask")
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    if not native.flags.writeable or any(stride < 0 or stride % native.itemsize for stride in native.strides):
        native = native.copy()
    try:
        return torch.from_numpy(native.view(np.ndarray))
    except TypeError:
        raise TypeError(
            f"{_at(path)} is a NumPy array of {array.dtype}, which no tensor can hold; use gather_object or "
            "broadcast_object_list"
        ) from None


def is_numeric(array: np.ndarray[Any, Any]) -> bool:
    """Whether a tensor can hold the array.

    Example:
        >>> is_numeric(np.ones(1)), is_numeric(np.array(["text"]))
        (True, False)
    """
    try:
        _from_numpy(array[:0] if array.ndim else array, "")
    except TypeError:
        return False
    return True


def as_array(tensor: torch.Tensor, like: Any) -> Any:
    """The result as a NumPy array where ``like`` was one, else the tensor itself."""
    return tensor.cpu().numpy() if isinstance(like, np.ndarray | np.generic) else tensor


def as_value(tensor: torch.Tensor, like: Any) -> Any:
    """The result in the type of ``like``: NumPy array or scalar, Python number, tensor."""
    if isinstance(like, torch.Tensor):
        return tensor
    if isinstance(like, np.generic):
        return tensor.cpu().numpy()[()]
    return tensor.cpu().numpy() if isinstance(like, np.ndarray) else tensor.item()


def _may_be_tied(value: Any) -> bool:
    """Equal numbers are often one object, which means nothing."""
    return isinstance(value, torch.Tensor | np.ndarray)


class Leaves:
    """A tree made ready to travel.

    The order is by falling item size, then dtype, then path: the same on all ranks however their dicts were filled.

    Attributes:
        paths: One per leaf, in that order.
        values: The leaves themselves.
        tensors: The leaves as detached tensors, of any strides.
        ties: For each leaf the index of the first leaf that is the same object.
    """

    def __init__(self, data: Tree) -> None:
        values, self._spec = tree.flatten(data)
        tensors = [as_tensor(value, path) for value, path in zip(values, self._spec.paths, strict=True)]
        paths = self._spec.paths
        self._order = sorted(range(len(values)), key=lambda i: (sort_key(tensors[i].dtype), paths[i]))
        self.paths = [paths[i] for i in self._order]
        self.values = [values[i] for i in self._order]
        self.tensors = [tensors[i] for i in self._order]
        first: dict[int, int] = {}
        self.ties = [first.setdefault(id(v), i) if _may_be_tied(v) else i for i, v in enumerate(self.values)]

    def travelling(self, tied: bool) -> list[int]:
        """The indices of the leaves to send: each object once where ``tied``, else all of them."""
        return [i for i, tie in enumerate(self.ties) if not tied or tie == i]

    def rebuild(self, results: Mapping[int, Any], tied: bool, convert: Callable[[Any, Any], Any]) -> Tree:
        """The tree with a result in place of every leaf.

        Args:
            results: For every index in ``travelling(tied)``.
            tied: As there; leaves that were one object become one object again.
            convert: Makes ``(result, original leaf)`` into what the caller gets.
        """
        done = {i: convert(result, self.values[i]) for i, result in results.items()}
        local: list[Any] = [None] * len(self.values)
        for i, position in enumerate(self._order):
            local[position] = done[self.ties[i] if tied else i]
        return self._spec.rebuild(local)

    def check_writable(self) -> None:
        """Make sure that ``write`` will succeed.

        Raises:
            ValueError: A leaf is a read-only array, an expanded tensor, or an inference tensor outside inference mode.
        """
        for path, value in zip(self.paths, self.values, strict=True):
            if reason := _unwritable(value):
                raise ValueError(f"{_at(path)} {reason}, so it cannot be written in place")

    def write(self, arrived: Mapping[int, torch.Tensor], tied: bool) -> Tree:
        """Write into the tree's tensors and arrays; the tree with them, and with new numbers.

        Args:
            arrived: For every index in ``travelling(tied)`` the values, of the leaf's dtype and shape.
            tied: As there.
        """
        return self.rebuild(arrived, tied, _write)


def _unwritable(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return "" if value.flags.writeable else "is a read-only array"
    if not isinstance(value, torch.Tensor):
        return ""
    if any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True)):
        return "is an expanded tensor whose elements share memory (pass .contiguous())"
    return "is an inference tensor" if value.is_inference() and not torch.is_inference_mode_enabled() else ""


def _write(view: torch.Tensor, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        np.copyto(value, view.numpy())
    elif not isinstance(value, torch.Tensor):
        return as_value(view, value)
    elif value.data_ptr() != view.data_ptr() or value.is_conj() or value.is_neg():
        value.detach().copy_(view)
    return value
