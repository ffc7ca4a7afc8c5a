"""The leaves of one rank's tree as tensors, in an order that is the same on every rank."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from easydist import tree
from easydist.base.torch_private import foreach_copy, is_zerotensor
from easydist.data.aliasing import aliases, are_disjoint, overlap, overlaps_itself, separate
from easydist.data.arithmetic import fingerprint
from easydist.data.backing import backed, is_backed, starts
from easydist.data.kinds import Kind, kind_of
from easydist.data.packing import Packed, Packing, copy_each, dtype_name, sort_key
from easydist.data.plain import described
from easydist.typing import Tree

_PYTHON_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
_ARRAYS = (np.ndarray, np.generic)
_TENSORS = frozenset([torch.Tensor])
_is_cpu = operator.attrgetter("is_cpu")


def as_tensor(leaf: Any, path: str = "") -> torch.Tensor:
    """Return a leaf as a detached, dense tensor, which shares the leaf's memory if possible.

    NumPy arrays keep their dtype; a Python int becomes int64, a float float64, a complex complex128, a bool bool.

    Args:
        leaf: A tensor, a NumPy array or scalar, or a Python number.
        path: The path of the leaf, for the error.

    Raises:
        TypeError: No dense tensor can hold the leaf (strings, sparse tensors, DTensors, …).
        ValueError: A Python int does not fit 64 bits.

    Example:
        >>> as_tensor(0.5)
        tensor(0.5000, dtype=torch.float64)
    """
    if isinstance(leaf, torch.Tensor):
        return backed(leaf, _at(path))
    if isinstance(leaf, _ARRAYS):
        return _from_numpy(np.asanyarray(leaf), path)
    dtype = next(dtype for cls, dtype in _PYTHON_DTYPES.items() if isinstance(leaf, cls))
    try:
        return torch.tensor(leaf, dtype=dtype, device="cpu")
    except (OverflowError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{_at(path)} is an int that does not fit 64 bits; use gather_object for such numbers"
        ) from error


_BLOCK = 16
"""The count of Python numbers of one type from which they become elements of one tensor."""


def _as_tensors(values: Sequence[Any], paths: Sequence[str], vectors: bool) -> tuple[list[torch.Tensor], bool]:
    """Return ``as_tensor`` of all leaves, and True if one requires grad.

    With ``vectors``, Python numbers may become tensors of one dimension.
    """
    tensors: list[Any] = list(values)
    requires_grad = False
    rest = list(range(len(tensors)))
    for cls, dtype in _PYTHON_DTYPES.items():
        found = [i for i in rest if type(values[i]) is cls]
        if len(found) >= _BLOCK:
            # On an overflow, as_tensor below raises the error that names the leaf.
            with contextlib.suppress(OverflowError, RuntimeError, ValueError):
                block = torch.tensor([values[i] for i in found], dtype=dtype, device="cpu")
                for i, tensor in zip(found, (block.view(-1, 1) if vectors else block).unbind(), strict=True):
                    tensors[i] = tensor
                rest = [i for i in rest if type(values[i]) is not cls]
    for i in rest:
        value = values[i]
        tensors[i] = tensor = as_tensor(value, paths[i])
        if tensor is not value and getattr(value, "requires_grad", False):
            requires_grad = True
    return tensors, requires_grad


def _as_vector(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """Return a tensor of one dimension in place of one without dimensions."""
    try:
        return tensor if tensor.ndim else tensor.reshape(1)
    except RuntimeError:  # it has no memory, which the check would find too late
        return backed(tensor, _at(path)).reshape(1)


def _at(path: str) -> str:
    return f"leaf {path}" if path else "the value"


def _from_numpy(array: np.ndarray[Any, Any], path: str) -> torch.Tensor:
    check_unmasked(array, path)
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    size = native.itemsize or 1  # a record without fields has no bytes
    if not native.flags.writeable or any(stride < 0 or stride % size for stride in native.strides):
        native = native.copy()
    try:
        return torch.from_numpy(native.view(np.ndarray))
    except TypeError:
        raise TypeError(
            f"{_at(path)} is a NumPy array of {array.dtype}, which no tensor can hold; use gather_object or "
            "broadcast_object_list"
        ) from None


def check_unmasked(array: np.ndarray[Any, Any], path: str = "") -> None:
    """Refuse a masked array.

    Args:
        array: Any array.
        path: The path of the array, for the error.

    Raises:
        TypeError: The array is masked.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{_at(path)} is a masked array, whose mask would be lost; send .data and .mask")


def is_numeric(array: np.ndarray[Any, Any]) -> bool:
    """True if a tensor can hold the array.

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
    """Return a NumPy array if ``like`` is a NumPy array or scalar; else, or with a gradient, the tensor itself."""
    is_tensor = isinstance(like, torch.Tensor) or not isinstance(like, _ARRAYS) or tensor.requires_grad
    return tensor if is_tensor else tensor.cpu().numpy()


def as_value(tensor: torch.Tensor, like: Any) -> Any:
    """Return the tensor converted to the type of ``like``, unless it has a gradient, which only a tensor can keep.

    The types are those of leaves: NumPy array or scalar, Python number, or tensor.
    """
    if isinstance(like, torch.Tensor) or tensor.requires_grad:
        return tensor
    if isinstance(like, np.generic):
        return tensor.cpu().numpy()[()]
    return tensor.cpu().numpy() if isinstance(like, np.ndarray) else tensor.item()


def _ties(values: Sequence[Any]) -> list[int] | None:
    """Return for each leaf the index of the first leaf that is the same object; None if all are different.

    Numbers count as different: Python may use one object for equal numbers.
    """
    if len(set(map(id, values))) == len(values):
        return None
    first: dict[int, int] = {}
    arrays = [isinstance(value, torch.Tensor | np.ndarray) for value in values]
    ties = [first.setdefault(id(v), i) if array else i for i, (v, array) in enumerate(zip(values, arrays, strict=True))]
    return None if ties == list(range(len(values))) else ties


LeafType = tuple[str, str, list[int]]
"""A leaf: path, dtype, shape."""


def _picker(indices: Sequence[int]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that picks the items with these indices out of a list or a mapping."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda items: tuple([items[i] for i in indices])


class Layout:
    """The order of the leaves of one structure, and other data that depends only on paths, dtypes and shapes.

    The leaves are sorted by descending item size, then dtype, then path. The order is the same on all ranks, in
    whichever order their dicts were filled, and leaves no holes in a packed buffer.

    Attributes:
        places: For each leaf in the tree's order its position in the sorted order.
        ordered: The function from a sequence in the tree's order to a tuple in the sorted order.
        placed: The inverse of ``ordered``.
        paths: The paths in the sorted order.
        dtypes: The dtypes in the sorted order.
        shapes: The shapes in the sorted order.
        fingerprint: The fingerprint of paths, dtypes and shapes, of 64 bits.
        packing: The layout of the leaves in a buffer.
    """

    def __init__(self, paths: Sequence[str], dtypes: Sequence[torch.dtype], shapes: Sequence[torch.Size]) -> None:
        order = sorted(range(len(paths)), key=lambda i: (sort_key(dtypes[i]), paths[i]))
        self.places = sorted(range(len(paths)), key=order.__getitem__)
        self.ordered, self.placed = _picker(order), _picker(self.places)
        self.paths, self.dtypes, self.shapes = self.ordered(paths), self.ordered(dtypes), self.ordered(shapes)
        self.packing = Packing(self.dtypes, self.shapes)
        self._names = fingerprint(self.paths)
        self.fingerprint = fingerprint((self._names, self._runs(self.shapes)))
        self._free: dict[int, tuple[list[int], int]] = {}

    def types(self, dim: int | None = None, any_size: bool = False) -> list[LeafType]:
        """Return the leaves as (path, dtype, shape), with -1 for the size along ``dim``, or for all sizes."""
        rows = [(p, dtype_name(d), list(s)) for p, d, s in zip(self.paths, self.dtypes, self.shapes, strict=True)]
        if any_size:
            return [(path, dtype, [-1] * len(shape)) for path, dtype, shape in rows]
        if dim is not None:
            for _, _, shape in rows:
                shape[dim] = -1
        return rows

    @functools.cached_property
    def of_any_size(self) -> int:
        """The fingerprint of paths, dtypes and numbers of dimensions."""
        return fingerprint((self._names, self._runs([-1] * len(shape) for shape in self.shapes)))

    def _runs(self, shapes: Iterable[Sequence[int]]) -> list[tuple[str, tuple[int, ...], int]]:
        """Return runs of leaves with the same dtype and shape, and their lengths: short even for many numbers."""
        runs = itertools.groupby(zip(self.dtypes, shapes, strict=True))
        return [(dtype_name(dtype), tuple(shape), sum(1 for _ in run)) for (dtype, shape), run in runs]

    def has(self, dim: int) -> bool:
        """True if every leaf has this dimension."""
        return dim in self._free or all(-len(shape) <= dim < len(shape) for shape in self.shapes)

    def free(self, dim: int) -> tuple[list[int], int]:
        """Return ``dim`` as a non-negative index into each shape, and the fingerprint without the sizes along it.

        Raises:
            ValueError: A leaf has no such dimension.
        """
        if dim not in self._free:
            for path, shape in zip(self.paths, self.shapes, strict=True):
                if not -len(shape) <= dim < len(shape):
                    raise ValueError(f"{path or 'the tensor'} of shape {tuple(shape)} has no dim {dim}")
            dims = [dim % len(shape) for shape in self.shapes]
            free = ((*s[:d], -1, *s[d + 1 :]) for s, d in zip(self.shapes, dims, strict=True))
            self._free[dim] = dims, fingerprint((self._names, self._runs(free)))
        return self._free[dim]


layout = functools.lru_cache(maxsize=256)(Layout)
"""A cached ``Layout``: for a structure that was seen before it costs one look-up."""


Indexed: TypeAlias = Mapping[int, Any] | Sequence[Any]
"""Items of any kind, one per leaf, by the leaf's index."""


class Leaves:
    """The leaves of a tree, prepared for sending.

    Attributes:
        layout: The order of the leaves.
        values: The leaves themselves, in that order.
        tensors: The leaves as detached tensors, with any strides.
        is_cpu: True if all of these are on the CPU.
        requires_grad: True if one of the leaves requires grad.
        ties: For each leaf the index of the first leaf that is the same object; None if all are different.
        plain: The values that are not leaves, as sorted (path, text); equal values have equal texts.
    """

    _are_unchanged = True
    """True if all leaves are tensors that need no conversion."""

    _starts: list[int] | None = None
    """The addresses of the tensors, if all are contiguous, plain memory."""

    _are_disjoint = False
    """True if ``check_writable`` has seen that no two leaves share memory."""

    def __init__(self, data: Tree, vectors: bool = False, spec: tree.Spec | None = None) -> None:
        """Flatten ``data``; with ``vectors``, a leaf without dimensions counts as one of shape ``(1,)``.

        With ``spec``, ``data`` is the list of the leaves of this structure.
        """
        values, self._spec = tree.flatten(data) if spec is None else (data, spec)
        paths = tuple(self._spec.paths)
        tensors, kind, self.requires_grad = values, kind_of(values, paths), False
        if kind is None:
            tensors, self.requires_grad = _as_tensors(values, paths, vectors)
            dtypes = tuple([tensor.dtype for tensor in tensors])
            kind = Kind(dtypes, tuple([tensor.shape for tensor in tensors]), all(map(_is_cpu, tensors)), False)
            self._are_unchanged = False
        self.is_cpu, shapes = kind.is_cpu, kind.shapes
        if vectors and not all(shapes):  # () is the shape of a leaf without dimensions
            tensors = list(map(_as_vector, tensors, paths))
            shapes = tuple([tensor.shape for tensor in tensors])
        self.layout = layout(paths, kind.dtypes, shapes)
        self.values, self.tensors = self.layout.ordered(values), self.layout.ordered(tensors)
        if self._are_unchanged:
            self._check_memory(kind.is_contiguous)
        self._starts_differ = self._starts is not None and len(set(self._starts)) == len(self._starts)
        self.ties = None if self._starts_differ else _ties(self.values)
        self.plain = sorted([(path, described(value, path)) for path, value in self._spec.plain])

    def _check_memory(self, contiguous: bool) -> None:
        """Find the addresses of the tensors; if they are not plain memory, let ``as_tensor`` decide about each."""
        if contiguous:
            self._starts = starts(self.tensors, self.layout.packing.lengths)
        if self._starts is None and not all(map(is_backed, self.tensors)):
            tensors = tuple(map(as_tensor, self.tensors, self.layout.paths))
            self._are_unchanged = all(map(operator.is_, tensors, self.tensors))
            self.tensors = tensors

    @property
    def alike(self) -> list[str]:
        """The paths that more than one leaf has, so that other ranks cannot tell these leaves apart."""
        return self._spec.alike

    def travelling(self, tied: bool) -> Sequence[int]:
        """Return the indices of the leaves to send: each object once if ``tied``, else all of them."""
        if self.ties is None or not tied:
            return range(len(self.values))
        return [i for i, tie in enumerate(self.ties) if tie == i]

    def rebuild(self, results: Indexed, tied: bool, convert: Callable[[Any, Any], Any]) -> Tree:
        """Return the tree with a result in place of every leaf.

        Args:
            results: The results by index, for all of ``travelling(tied)``.
            tied: True to make leaves that were one object one object again.
            convert: A function of ``(result, original leaf)`` that returns the value for the caller; not called if all
                leaves are tensors.
        """
        if not self._are_unchanged and not _TENSORS.issuperset(map(type, self.values)):
            results = {i: convert(results[i], self.values[i]) for i in self.travelling(tied)}
        return self._rebuild(results, tied)

    def _rebuild(self, done: Indexed, tied: bool) -> Tree:
        if tied and self.ties:
            return self._spec.rebuild([done[self.ties[i]] for i in self.layout.places])
        return self._spec.rebuild([*self.layout.placed(done)])

    def check_writable(self) -> None:
        """Check that ``write`` will succeed.

        Raises:
            ValueError: A leaf is a read-only array, an inference tensor outside inference mode, or a tensor or array
                with elements that share memory (an expanded one, …); or two leaves share part of their memory.
        """
        lengths = self.layout.packing.lengths
        self._are_disjoint = (
            are_disjoint(self.tensors, lengths) if self._starts is None else separate(self._starts, lengths)
        )
        if self._are_unchanged and self._are_disjoint and not any(map(torch.Tensor.is_inference, self.values)):
            return  # the usual case
        for path, value in zip(self.layout.paths, self.values, strict=True):
            if reason := unwritable(value):
                raise ValueError(f"{_at(path)} {reason}, so it cannot be written in place")
        if self._are_disjoint:
            return
        filled = [i for i, value in enumerate(self.values) if isinstance(value, torch.Tensor | np.ndarray)]
        if (pair := overlap([self.tensors[i] for i in filled])) is not None:
            first, second = (self.layout.paths[filled[i]] for i in pair)
            raise ValueError(f"{_at(first)} and {second} share memory, so they cannot be written in place; pass copies")

    def aliases(self) -> list[int] | None:
        """Return for each leaf the index of the first one with the same memory; None if all are different."""
        if self.ties is not None:  # a tensor that was converted was converted for each of its places
            return aliases([self.tensors[i] for i in self.ties])
        return None if self._starts_differ or self._are_disjoint else aliases(self.tensors)

    def write_packed(self, packed: Packed, row: int) -> Tree:
        """Do as ``write``, with the values of all leaves from a row of packed ones."""
        if not (self._are_unchanged and self.is_cpu) or 0 in self.layout.packing.lengths:  # no change, either
            return self.write(dict(enumerate(packed.views(row))), False)
        packed.unpack_to(self.tensors, row)
        return self._rebuild(self.values, False)

    def write(self, arrived: Mapping[int, torch.Tensor], tied: bool) -> Tree:
        """Write into the tree's tensors and arrays, and return the tree with them and with new numbers.

        Args:
            arrived: The values for every index in ``travelling(tied)``, in the leaf's dtype and shape.
            tied: True if leaves that are one object come once.
        """
        done: dict[int, Any] = {}
        targets, sources = [], []
        for i, view in arrived.items():
            done[i], tensor = self.values[i], self.tensors[i]
            if tensor is not done[i] and not _is_detached(tensor, done[i]):
                done[i] = write(done[i], view)
            elif tensor.data_ptr() != view.data_ptr():
                targets.append(tensor)
                sources.append(view)
        if targets:
            (foreach_copy if self.is_cpu else copy_each)(targets, sources)
        return self._rebuild(done, tied)


def unwritable(value: Any) -> str:
    """Return the reason why a leaf cannot be written in place; empty if it can be written."""
    if isinstance(value, torch.Tensor):
        if is_zerotensor(value):
            return "is a ZeroTensor, whose zeros are not in memory (pass a clone)"
        if not value.is_contiguous() and overlaps(value):
            kind = "an expanded tensor" if 0 in value.stride() else "a tensor with strides"
            return f"is {kind} whose elements share memory (pass .contiguous())"
        is_fixed = value.is_inference() and not torch.is_inference_mode_enabled()
        return "is an inference tensor (pass a clone)" if is_fixed else ""
    if not isinstance(value, np.ndarray):
        return ""
    if not value.flags.writeable:
        return "is a read-only array (pass a copy)"
    return (
        "is an array whose elements share memory (pass a copy)" if overlaps_itself(value.shape, value.strides) else ""
    )


def overlaps(value: torch.Tensor) -> bool:
    """True if several elements of the tensor share memory, as in an expanded tensor."""
    return overlaps_itself(value.shape, value.stride())


def _is_detached(tensor: torch.Tensor, value: Any) -> bool:
    """True if a leaf's tensor has the leaf's memory, so that writing to one also writes to the other."""
    return isinstance(value, torch.Tensor) and type(tensor) is torch.Tensor and not (value.is_conj() or value.is_neg())


def write(target: Any, source: torch.Tensor) -> Any:
    """Write into a tensor or an array, and return it; for a number, return the new number.

    Args:
        target: A leaf that ``check_writable`` has accepted, with any strides.
        source: The values, in the target's dtype and shape.
    """
    if isinstance(target, torch.Tensor):
        if source.data_ptr() != target.data_ptr():
            target.detach().copy_(source)
        return target
    if isinstance(target, np.ndarray):
        np.copyto(target, source.cpu().numpy())
        return target
    return as_value(source, target)
