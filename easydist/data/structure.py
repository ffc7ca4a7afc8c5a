"""Functions on nested data that need no other process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch

from easydist import tree
from easydist.base.arguments import UNSET, dimension, either, hiding
from easydist.base.wording import a_or_an
from easydist.data.backing import readable
from easydist.data.leaves import as_tensor, check_unmasked, is_numeric
from easydist.errors import ShapeError
from easydist.tree import is_namedtuple
from easydist.typing import Device, T, Tree

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "TensorInformation",
    "concatenate",
    "find_batch_size",
    "find_device",
    "get_data_structure",
    "honor_type",
    "initialize_tensors",
    "is_tensor_information",
    "is_torch_tensor",
    "listify",
    "pad_input_tensors",
    "recursively_apply",
    "send_to_device",
    "slice_tensors",
]


@dataclass(frozen=True)
class TensorInformation:
    """The description of a tensor that suffices to make one like it.

    Attributes:
        shape: The shape.
        dtype: The dtype.
        device: The type of the device.
        is_array: True if it was a NumPy array.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: str = "cpu"
    is_array: bool = False


@overload
def is_torch_tensor(tensor: object) -> bool: ...
@overload
def is_torch_tensor(*, data: object) -> bool: ...
@hiding("data")
def is_torch_tensor(tensor: object = UNSET, *, data: object = UNSET) -> bool:
    """True if this is a torch tensor.

    Args:
        tensor: Anything.
        data: Another name for ``tensor``.

    Example:
        >>> is_torch_tensor(torch.ones(1)), is_torch_tensor([1.0])
        (True, False)
    """
    if data is not UNSET or tensor is UNSET:
        tensor = either("is_torch_tensor", "tensor", tensor, "data", data)
    return isinstance(tensor, torch.Tensor)


@overload
def is_tensor_information(tensor_info: object) -> bool: ...
@overload
def is_tensor_information(*, data: object) -> bool: ...
@hiding("data")
def is_tensor_information(tensor_info: object = UNSET, *, data: object = UNSET) -> bool:
    """True if this is a ``TensorInformation``.

    Args:
        tensor_info: Anything.
        data: Another name for ``tensor_info``.

    Example:
        >>> is_tensor_information(get_data_structure(torch.ones(1)))
        True
    """
    if data is not UNSET or tensor_info is UNSET:
        tensor_info = either("is_tensor_information", "tensor_info", tensor_info, "data", data)
    return isinstance(tensor_info, TensorInformation)


def _is_array_leaf(value: object) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _is_numeric_leaf(value: object) -> bool:
    """True if this is a tensor, or an array that a tensor can hold (not one of strings or objects)."""
    return isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and is_numeric(value))


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Return the values of ``generator`` in a container of the type of ``obj`` (list, tuple, namedtuple, subclasses).

    Example:
        >>> honor_type((1, 2), (x * 10 for x in (1, 2)))
        (10, 20)

    Args:
        obj: The container whose type counts.
        generator: The values.
    """
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


_ALWAYS_OPENED = (list, tuple, Mapping)


def recursively_apply(
    func: Callable[..., Any],
    data: Tree,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Tree:
    """Return the tree with ``func(leaf, *args, **kwargs)`` in place of every leaf for which ``test_type`` is true.

    Args:
        func: The function, called with the leaf and the further arguments.
        data: Any tree.
        *args: Further arguments of ``func``.
        test_type: Returns True for a leaf. It is not asked about lists, tuples and mappings, which are always opened;
            other containers, such as dataclasses, are opened if it returns False.
        error_on_other_type: True to refuse trees with other values; False to return those unchanged.
        **kwargs: Further keyword arguments of ``func``.

    Raises:
        TypeError: There is another value, and ``error_on_other_type`` is set; the text names its path.

    Example:
        >>> recursively_apply(lambda t: t + 1, {"a": torch.zeros(2), "b": "text"})
        {'a': tensor([1., 1.]), 'b': 'text'}
    """

    def is_leaf(value: Any) -> bool:
        return not isinstance(value, _ALWAYS_OPENED) and (not tree.is_container(value) or test_type(value))

    values, spec = tree.flatten(data, is_leaf)
    tests = [test_type(value) for value in values]
    if error_on_other_type and not all(tests):
        other = tests.index(False)
        name, test = (getattr(f, "__name__", f) for f in (func, test_type))
        where, what = spec.paths[other] or "the value", type(values[other]).__name__
        raise TypeError(
            f"{name}: {where} is {a_or_an(what)}; pass only values that satisfy {test}, and containers of them"
        )
    return spec.rebuild(
        [func(value, *args, **kwargs) if test else value for value, test in zip(values, tests, strict=True)]
    )


@overload
def send_to_device(
    tensor: NDArray[Any], device: Device, non_blocking: bool = False, skip_keys: str | Sequence[str] | None = None
) -> torch.Tensor: ...
@overload
def send_to_device(
    tensor: T, device: Device, non_blocking: bool = False, skip_keys: str | Sequence[str] | None = None
) -> T: ...
def send_to_device(
    tensor: Tree, device: Device, non_blocking: bool = False, skip_keys: str | Sequence[str] | None = None
) -> Tree:
    """Return the tree with all its tensors and NumPy arrays as tensors on ``device``.

    An object that has a method ``to`` (a module, ``PackedSequence``, ``BatchEncoding``, a dataclass or a list that
    defines one) is sent by that method, whose result takes its place. Some such methods change the object itself and
    return it. All other containers are rebuilt, and the input is not changed.

    Args:
        tensor: Any tree.
        device: The target device.
        non_blocking: Do not wait for the copy, if the hardware allows it. A ``to`` that raises a ``TypeError`` with
            this argument is called without it.
        skip_keys: Keys of mappings, at any depth; their values are not changed. A mapping that has a method ``to``
            sends all its values.

    Example:
        >>> send_to_device({"x": np.ones(2), "name": "a"}, "cpu")
        {'x': tensor([1., 1.], dtype=torch.float64), 'name': 'a'}
    """
    skip = {f"[{key!r}]" for key in ([skip_keys] if isinstance(skip_keys, str) else skip_keys or ())}
    if device == "npu":
        device = "npu:0"  # torch_npu finds no context if the first call has no index

    def move(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return as_tensor(value).to(device, non_blocking=non_blocking)
        try:
            return value.to(device, non_blocking=non_blocking)
        except TypeError:  # a class with its own .to(), without non_blocking
            return value.to(device)

    return tree.map(move, tensor, lambda value: _is_numeric_leaf(value) or _moves_itself(value), skip)


def _moves_itself(value: object) -> bool:
    """True if ``value`` is sent by its own ``to``; a class, or a mapping with a *key* of that name, has none."""
    return callable(getattr(value, "to", None)) and not isinstance(value, type)


def get_data_structure(data: Tree) -> Tree:
    """Return the tree with a ``TensorInformation`` in place of every tensor and array; one per distinct tensor.

    Example:
        >>> get_data_structure({"a": torch.zeros(2, 3)})["a"].shape
        torch.Size([2, 3])

    Args:
        data: The tree.
    """
    known: dict[int, TensorInformation] = {}

    def describe(value: Any) -> TensorInformation:
        if isinstance(value, np.ndarray):
            return TensorInformation(torch.Size(value.shape), as_tensor(value).dtype, is_array=True)
        return TensorInformation(value.shape, value.dtype, value.device.type)

    return tree.map(lambda value: known.setdefault(id(value), describe(value)), data, _is_numeric_leaf)


def initialize_tensors(data_structure: Tree, *, tied: bool = False, hollow: bool = False) -> Tree:
    """Return the tree with uninitialised tensors and arrays: the inverse of ``get_data_structure``.

    Args:
        data_structure: A tree of ``TensorInformation``.
        tied: Make one tensor for a ``TensorInformation`` that is in several places, as ``get_data_structure`` returns
            it for a tensor that is; by default every place gets a tensor of its own.
        hollow: Make all elements of a tensor share the memory of one, for uses that need only shape and dtype.

    Example:
        >>> initialize_tensors(get_data_structure([torch.ones(2, 3)]))[0].shape
        torch.Size([2, 3])
    """
    known: dict[int, Any] = {}

    def make(info: TensorInformation) -> Any:
        if hollow:
            tensor = torch.empty((), dtype=info.dtype, device=info.device).expand(info.shape)
        else:
            tensor = torch.empty(info.shape, dtype=info.dtype, device=info.device)
        return tensor.numpy() if info.is_array else tensor

    def once(info: TensorInformation) -> Any:
        if id(info) not in known:
            known[id(info)] = make(info)
        return known[id(info)]

    return tree.map(once if tied else make, data_structure, is_tensor_information)


def find_batch_size(data: Tree) -> int | None:
    """Return the size of dim 0 of the first tensor or array that has one; None if there is none.

    Example:
        >>> find_batch_size({"text": "abc", "x": torch.zeros(4, 2)})
        4

    Args:
        data: The tree.
    """
    return next((len(value) for value in tree.leaves(data) if _is_array_leaf(value) and value.ndim), None)


@overload
def find_device(*args: Tree) -> torch.device | None: ...
@overload
def find_device(*, data: Tree) -> torch.device | None: ...
@hiding("data")
def find_device(*args: Tree, data: Tree = UNSET) -> torch.device | None:
    """Return the device of the first tensor in one or several trees; None if there is none.

    Args:
        *args: Any number of trees.
        data: Another name for a single one.

    Example:
        >>> find_device({"text": "abc"}, {"x": torch.zeros(4)})
        device(type='cpu')
    """
    if data is not UNSET:
        args = (either("find_device", "args", args or UNSET, "data", data),)
    tensors = (value for arg in args for value in tree.leaves(arg) if isinstance(value, torch.Tensor))
    return next((tensor.device for tensor in tensors), None)


def listify(data: Tree) -> Tree:
    """Return the tree with tensors and arrays as nested lists of Python numbers.

    Example:
        >>> listify({"x": torch.tensor([1.5, 2.0])})
        {'x': [1.5, 2.0]}

    Args:
        data: The tree.
    """

    def listed(value: Any) -> Any:
        return (readable(value, "listify: a tensor") if isinstance(value, torch.Tensor) else value).tolist()

    return tree.map(listed, data, lambda value: isinstance(value, torch.Tensor | np.ndarray | np.generic))


def slice_tensors(data: T, tensor_slice: Any, process_index: int | None = None, num_processes: int | None = None) -> T:
    """Return the tree with ``value[tensor_slice]`` in place of every tensor and array.

    Args:
        data: Any tree.
        tensor_slice: Anything that indexes a tensor: a slice, an int, a tuple, a mask.
        process_index: Accepted for compatibility with accelerate, and ignored.
        num_processes: Accepted for compatibility with accelerate, and ignored.

    Example:
        >>> slice_tensors({"x": torch.arange(4)}, slice(0, 2))
        {'x': tensor([0, 1])}
    """
    sliced: T = tree.map(lambda value: value[tensor_slice], data, _is_array_leaf)
    return sliced


def concatenate(data: Sequence[T], dim: int = 0) -> T:
    """Concatenate the trees of a list, leaf by leaf.

    Law: leaf p is ``torch.cat([leaf p of item for item in data], dim)``. Leaves are matched by path. Values other than
    tensors and arrays come from the first item, and have to be equal in all items.

    Args:
        data: Trees of the same structure, at least one.
        dim: The dimension along which to concatenate.

    Raises:
        ValueError: ``data`` is empty, or an item has other leaves than the first (the text names their paths).
        ShapeError: The shapes of a leaf do not fit along ``dim``. It is a ``ValueError`` and, as with ``torch.cat``, a
            ``RuntimeError``.
        TypeError: ``data`` is a single tree, such as a tensor or a dict, instead of a list of trees; or values other
            than tensors and arrays differ between items; or an array is masked; or ``dim`` is not an integer.

    Example:
        >>> concatenate([{"x": torch.tensor([1])}, {"x": torch.tensor([2, 3])}])
        {'x': tensor([1, 2, 3])}
    """
    _check_series(data)
    dim = dimension(dim)
    if not data:
        raise ValueError("concatenate needs at least one item")
    flat = [tree.flatten(item, lambda value: not tree.is_container(value)) for item in data]
    spec = flat[0][1]
    columns = [dict(zip(item.paths, leaves, strict=True)) for leaves, item in flat]
    for index, column in enumerate(columns):
        if differing := column.keys() ^ columns[0].keys():
            raise ValueError(f"concatenate: item {index} and item 0 differ in {_listed(differing)}")
    joined: T = spec.rebuild([_join([column[path] for column in columns], path, dim) for path in spec.paths])
    return joined


def _check_series(data: object) -> None:
    """Refuse a single tree; a tensor, a mapping or a text would be accepted otherwise, as it can be iterated over."""
    if isinstance(data, torch.Tensor | np.ndarray | Mapping | str | bytes) or not isinstance(data, Iterable):
        what = f" of shape {tuple(data.shape)}" if isinstance(data, torch.Tensor | np.ndarray) else ""
        raise TypeError(
            f"concatenate: takes a list of trees, got a single {type(data).__name__}{what}; pass [first, second, …]"
        )


def _listed(paths: Iterable[str]) -> str:
    return ", ".join(path or "the root" for path in sorted(paths))


def _join(parts: list[Any], path: str, dim: int) -> Any:
    first = parts[0]
    for part in parts:
        check_unmasked(part, path)
        if isinstance(part, torch.Tensor):
            readable(part, f"concatenate: {path or 'an item'}")
    for cls, join in ((torch.Tensor, torch.cat), (np.ndarray, np.concatenate)):
        if all(isinstance(part, cls) for part in parts):
            return _fitting(join, parts, path, dim)
    if all(
        part is first or (type(part) is type(first) and not _is_array_leaf(part) and part == first) for part in parts
    ):
        return first
    kinds = ", ".join(sorted({type(part).__name__ for part in parts}))
    raise TypeError(
        f"concatenate: {path or 'the items'}: can only concatenate tensors and arrays, got {kinds} that differ"
    )


def _fitting(join: Callable[..., Any], parts: list[Any], path: str, dim: int) -> Any:
    try:
        return join(parts, dim)
    except (RuntimeError, IndexError, ValueError) as error:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise ShapeError(f"concatenate: {path or 'the items'}: shapes {shapes} do not fit along dim {dim}") from error


def pad_input_tensors(tensor: T, batch_size: int, num_processes: int, dim: int = 0) -> T:
    """Lengthen every tensor with zeros along ``dim`` until ``num_processes`` divides its size there.

    Args:
        tensor: Any tree; the leaves have ``batch_size`` elements along ``dim``.
        batch_size: The number of elements.
        num_processes: The number of shares to cut later.
        dim: The batch dimension.

    Example:
        >>> pad_input_tensors(torch.ones(3, 4), 3, 2).shape
        torch.Size([4, 4])

    Returns:
        The tree with the longer tensors; the others are the same.
    """
    missing, dim = -batch_size % num_processes, dimension(dim)

    def pad(value: torch.Tensor) -> torch.Tensor:
        shape = list(value.shape)
        shape[dim] = missing
        return torch.cat([value, value.new_zeros(shape)], dim=dim) if missing else value

    padded: T = recursively_apply(pad, tensor, error_on_other_type=True)
    return padded
