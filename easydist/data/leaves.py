"""The leaves of one rank's tree as tensors, in an order on which every rank agrees."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from easydist import tree
from easydist.data.aliasing import aliases, overlap, overlaps_itself
from easydist.data.packing import Packing, dtype_name, sort_key
from easydist.data.plain import described
from easydist.data.plan import fingerprint
from easydist.typing import Tree

_PYTHON_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
_ARRAYS = (np.ndarray, np.generic)
_TENSORS = frozenset([torch.Tensor])


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
"""Python numbers of one type from which they become one tensor, whose elements are the leaves."""


def _as_tensors(values: Sequence[Any], paths: Sequence[str], vectors: bool) -> list[torch.Tensor]:
    """``as_tensor`` of all leaves; ``vectors``: those of Python numbers have one dimension."""
    tensors: list[Any] = list(values)
    rest = list(range(len(tensors)))
    for cls, dtype in _PYTHON_DTYPES.items():
        found = [i for i in rest if type(values[i]) is cls]
        if len(found) >= _BLOCK:
            with contextlib.suppress(OverflowError, RuntimeError, ValueError):  # as_tensor says which does not fit
                block = torch.tensor([values[i] for i in found], dtype=dtype, device="cpu")
                for i, tensor in zip(found, (block.view(-1, 1) if vectors else block).unbind(), strict=True):
                    tensors[i] = tensor
                rest = [i for i in rest if type(values[i]) is not cls]
    for i in rest:
        tensors[i] = as_tensor(values[i], paths[i])
    return tensors


_STRIDED = torch.strided
_PLAIN_DTYPES = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not (dtype.is_complex or "q" in str(dtype).removeprefix("torch."))
)
"""Without those that may be quantized or lazily conjugated."""


def _are_plain(values: Sequence[Any]) -> bool:
    """Whether all leaves are known to be what ``as_tensor`` would return.

    Asked for all leaves together: a call for each costs as much as two of the answers.
    """
    if not (_TENSORS.issuperset(map(type, values)) and _PLAIN_DTYPES.issuperset([tensor.dtype for tensor in values])):
        return False
    for tensor in values:
        if tensor.layout is not _STRIDED or tensor.requires_grad or tensor.is_nested or tensor.is_neg():
            return False
        if not tensor.is_cpu and tensor.is_meta:
            return False
    return True


def _at(path: str) -> str:
    return f"leaf {path}" if path else "the value"


def _dense(leaf: torch.Tensor, path: str) -> torch.Tensor:
    dtensor = sys.modules.get("torch.distributed.tensor")
    if dtensor is not None and isinstance(leaf, dtensor.DTensor):
        raise TypeError(f"{_at(path)} is a DTensor; pass .full_tensor() or .to_local(), whichever is meant")
    if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized or leaf.is_meta:
        kind = "nested" if leaf.is_nested else "quantized" if leaf.is_quantized else f"{leaf.layout} on {leaf.device}"
        raise TypeError(f"{_at(path)} is not a dense tensor ({kind}); pass its dense parts")
    plain = with_memory(leaf, _at(path)).detach() if leaf.requires_grad or type(leaf) is not torch.Tensor else leaf
    return plain.resolve_conj().resolve_neg() if leaf.is_conj() or leaf.is_neg() else plain


def with_memory(tensor: torch.Tensor, what: str = "the value") -> torch.Tensor:
    """The same tensor; of a functional collective's that is under way, its result.

    Args:
        tensor: Any.
        what: In the error.

    Raises:
        TypeError: It is of a class whose tensors hold other tensors, and no memory of their own.
    """
    if not hasattr(type(tensor), "__tensor_flatten__"):
        return tensor
    functional: Any = sys.modules.get("torch.distributed._functional_collectives")
    if functional is not None and isinstance(tensor, functional.AsyncCollectiveTensor):
        return cast(torch.Tensor, cast(Any, tensor).wait())
    raise TypeError(f"{what} is a {type(tensor).__name__}, which has no memory of its own; pass the tensors in it")


def _from_numpy(array: np.ndarray[Any, Any], path: str) -> torch.Tensor:
    check_unmasked(array, path)
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


def check_unmasked(array: np.ndarray[Any, Any], path: str = "") -> None:
    """Refuse a masked array.

    Args:
        array: Any.
        path: Where it was, for the error.

    Raises:
        TypeError: It is one.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{_at(path)} is a masked array, whose mask would be lost; send .data and .mask")


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
    return tensor if isinstance(like, torch.Tensor) or not isinstance(like, _ARRAYS) else tensor.cpu().numpy()


def as_value(tensor: torch.Tensor, like: Any) -> Any:
    """The result in the type of ``like``: NumPy array or scalar, Python number, tensor."""
    if isinstance(like, torch.Tensor):
        return tensor
    if isinstance(like, np.generic):
        return tensor.cpu().numpy()[()]
    return tensor.cpu().numpy() if isinstance(like, np.ndarray) else tensor.item()


def _ties(values: Sequence[Any]) -> list[int] | None:
    """Which tensors and arrays are one object; that equal numbers are one means nothing."""
    if len(set(map(id, values))) == len(values):
        return None
    first: dict[int, int] = {}
    arrays = [isinstance(value, torch.Tensor | np.ndarray) for value in values]
    ties = [first.setdefault(id(v), i) if array else i for i, (v, array) in enumerate(zip(values, arrays, strict=True))]
    return None if ties == list(range(len(values))) else ties


LeafType = tuple[str, str, list[int]]
"""A leaf: path, dtype, shape."""


def _picker(indices: Sequence[int]) -> Callable[[Any], tuple[Any, ...]]:
    """What picks the items with these indices out of a list or a mapping."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda items: tuple([items[i] for i in indices])


class Layout:
    """The order of the leaves of one structure, and what else follows from paths, dtypes and shapes alone.

    The order is by falling item size, then dtype, then path: the same on all ranks however their dicts were filled, and
    without holes in a packed buffer.

    Attributes:
        places: Of each leaf in the tree its position in that order.
        ordered: From a sequence in the tree's order to a tuple in that one.
        placed: The inverse.
        paths: In that order, as all below.
        dtypes: Likewise.
        shapes: Likewise.
        fingerprint: Of all of it, 64 bits.
        packing: How the leaves lie in a buffer.
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

    def types(self, dim: int | None = None) -> list[LeafType]:
        """The leaves as (path, dtype, shape), with -1 for the size along ``dim``."""
        rows = [(p, dtype_name(d), list(s)) for p, d, s in zip(self.paths, self.dtypes, self.shapes, strict=True)]
        if dim is not None:
            for _, _, shape in rows:
                shape[dim] = -1
        return rows

    def _runs(self, shapes: Iterable[Sequence[int]]) -> list[tuple[str, tuple[int, ...], int]]:
        """How many leaves in a row have one dtype and shape: short where there are many leaves, such as numbers."""
        runs = itertools.groupby(zip(self.dtypes, shapes, strict=True))
        return [(dtype_name(dtype), tuple(shape), sum(1 for _ in run)) for (dtype, shape), run in runs]

    def free(self, dim: int) -> tuple[list[int], int]:
        """``dim`` as a non-negative index into each shape, and the fingerprint of all but the sizes along it.

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
"""The layout of a structure that was seen before costs a look-up."""


Indexed: TypeAlias = Mapping[int, Any] | Sequence[Any]
"""What belongs to the leaves, by their index."""


class Leaves:
    """A tree made ready to travel.

    Attributes:
        layout: The order of the leaves.
        values: The leaves themselves, in that order.
        tensors: The leaves as detached tensors, of any strides.
        ties: For each leaf the index of the first leaf that is the same object; None where all are different.
        plain: The values that are no leaves, as (path, text), sorted; the texts are equal where the values are.
    """

    def __init__(self, data: Tree, vectors: bool = False, spec: tree.Spec | None = None) -> None:
        """Take ``data`` apart; with ``vectors`` a leaf without dimensions counts as one of a single element.

        With ``spec``, ``data`` is the list of the leaves of this structure.
        """
        values, self._spec = tree.flatten(data) if spec is None else (data, spec)
        tensors = values if _are_plain(values) else _as_tensors(values, self._spec.paths, vectors)
        if vectors:
            tensors = [tensor if tensor.ndim else tensor.reshape(1) for tensor in tensors]
        dtypes, shapes = tuple([t.dtype for t in tensors]), tuple([t.shape for t in tensors])
        self.layout = layout(tuple(self._spec.paths), dtypes, shapes)
        self.values, self.tensors = self.layout.ordered(values), self.layout.ordered(tensors)
        self.ties = _ties(self.values)
        self.plain = sorted([(path, described(value, path)) for path, value in self._spec.plain])

    @property
    def alike(self) -> list[str]:
        """The paths that several leaves have, so that no other rank can tell them apart."""
        return self._spec.alike

    def travelling(self, tied: bool) -> Sequence[int]:
        """The indices of the leaves to send: each object once where ``tied``, else all of them."""
        if self.ties is None or not tied:
            return range(len(self.values))
        return [i for i, tie in enumerate(self.ties) if tie == i]

    def rebuild(self, results: Indexed, tied: bool, convert: Callable[[Any, Any], Any]) -> Tree:
        """The tree with a result in place of every leaf.

        Args:
            results: By index, for all of ``travelling(tied)``.
            tied: As there; leaves that were one object become one object again.
            convert: Makes ``(result, original leaf)`` into what the caller gets; tensors stay what they are.
        """
        if not _TENSORS.issuperset(map(type, self.values)):
            results = {i: convert(results[i], self.values[i]) for i in self.travelling(tied)}
        return self._rebuild(results, tied)

    def _rebuild(self, done: Indexed, tied: bool) -> Tree:
        if tied and self.ties:
            return self._spec.rebuild([done[self.ties[i]] for i in self.layout.places])
        return self._spec.rebuild([*self.layout.placed(done)])

    def check_writable(self) -> None:
        """Make sure that ``write`` will succeed.

        Raises:
            ValueError: A leaf is a read-only array, an inference tensor outside inference mode, or a tensor or array
                whose elements share memory (an expanded one, …); or two leaves share part of their memory.
        """
        for path, value in zip(self.layout.paths, self.values, strict=True):
            if reason := _unwritable(value):
                raise ValueError(f"{_at(path)} {reason}, so it cannot be written in place")
        filled = self._filled()
        if (pair := overlap([self.tensors[i] for i in filled])) is not None:
            first, second = (self.layout.paths[filled[i]] for i in pair)
            raise ValueError(f"{_at(first)} and {second} share memory, so they cannot be written in place; pass copies")

    def _filled(self) -> Sequence[int]:
        """The leaves that are written in place: no numbers."""
        return [i for i, value in enumerate(self.values) if isinstance(value, torch.Tensor | np.ndarray)]

    def aliases(self) -> list[int] | None:
        """For each leaf the first one that is the same memory, also in another object; None where all are different."""
        return aliases(self.tensors)

    def write(self, arrived: Mapping[int, torch.Tensor], tied: bool) -> Tree:
        """Write into the tree's tensors and arrays; the tree with them, and with new numbers.

        Args:
            arrived: For every index in ``travelling(tied)`` the values, of the leaf's dtype and shape.
            tied: As there.
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
            torch._foreach_copy_(targets, sources)
        return self._rebuild(done, tied)


def _unwritable(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if not value.is_contiguous() and overlaps(value):
            kind = "an expanded tensor" if 0 in value.stride() else "a tensor with strides"
            return f"is {kind} whose elements share memory (pass .contiguous())"
        return "is an inference tensor" if value.is_inference() and not torch.is_inference_mode_enabled() else ""
    if not isinstance(value, np.ndarray):
        return ""
    if not value.flags.writeable:
        return "is a read-only array"
    return (
        "is an array whose elements share memory (pass a copy)" if overlaps_itself(value.shape, value.strides) else ""
    )


def overlaps(value: torch.Tensor) -> bool:
    """True if several elements of the tensor share memory: it is expanded, for instance."""
    return overlaps_itself(value.shape, value.stride())


def _is_detached(tensor: torch.Tensor, value: Any) -> bool:
    """Whether a leaf's tensor is the leaf itself but for autograd, so that writing the one writes the other."""
    return isinstance(value, torch.Tensor) and type(tensor) is torch.Tensor and not (value.is_conj() or value.is_neg())


def write(target: Any, source: torch.Tensor) -> Any:
    """Write into a tensor or an array, and return it; in place of a number, return a new one.

    Args:
        target: What ``check_writable`` has found writable; any strides.
        source: The values, of the target's dtype and shape.
    """
    if isinstance(target, torch.Tensor):
        if source.data_ptr() != target.data_ptr():
            target.detach().copy_(source)
        return target
    if isinstance(target, np.ndarray):
        np.copyto(target, source.cpu().numpy())
        return target
    return as_value(source, target)
