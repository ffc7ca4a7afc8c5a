"""The encoding of large data inside objects (tensors, NumPy values, many strings) as a function and a buffer.

pickle by itself would write them through ``torch.save`` or NumPy's ``__setstate__``, which copy the bytes or trust
them. A message needs only the functions here to make tensors and arrays, and they check their arguments.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from operator import countOf
from pickle import PickleBuffer
from typing import Any, TypeAlias
from uuid import UUID

import numpy as np
import torch

from easydist.base.wording import a_or_an
from easydist.data.backing import backed, is_backed
from easydist.data.packing import as_bytes

Reduced: TypeAlias = "str | tuple[Any, ...]"
Spec: TypeAlias = "str | list[Any]"
"""A NumPy dtype as text, or the fields of a record; see ``np.lib.format.dtype_to_descr``."""

_PLAIN_SPEC = re.compile(r"[<>|=][?a-zA-Z]\d{0,9}(\[[\w/]{1,24}\])?")
_DEEPEST_SPEC = 16


def make_tensor(buffer: Any, dtype: Any, shape: Any, device: str, requires_grad: bool) -> torch.Tensor:
    """Return a tensor of the bytes of ``buffer``; on the CPU it shares their memory.

    Raises:
        TypeError: An argument has a wrong type.
        RuntimeError: The buffer does not have as many bytes as the shape needs.

    Example:
        >>> make_tensor(bytearray(b"abcd"), torch.uint8, (2, 2), "cpu", False)
        tensor([[ 97,  98],
                [ 99, 100]], dtype=torch.uint8)
    """
    memory = memoryview(buffer)
    if memory.readonly or type(shape) is not tuple:
        raise TypeError(f"a tensor from {type(buffer).__name__} and {type(shape).__name__}")
    flat = torch.frombuffer(memory, dtype=torch.uint8) if memory.nbytes else _NONE
    return flat.view(dtype).view(shape).to(_here(device)).requires_grad_(requires_grad)


_NONE = torch.empty(0, dtype=torch.uint8, device="cpu")


def _here(device: str) -> torch.device:
    """Return this process's device of that type; the CPU if it has none."""
    kind = torch.device(device).type
    return torch.device(kind if kind == "cpu" or torch.get_device_module(kind).is_available() else "cpu")


def make_parameter(buffer: Any, dtype: Any, shape: Any, device: str, requires_grad: bool) -> torch.nn.Parameter:
    """Return a parameter, in the same way as ``make_tensor``."""
    return torch.nn.Parameter(make_tensor(buffer, dtype, shape, device, False), requires_grad)


def set_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    """Set Python attributes on a tensor.

    Raises:
        ValueError: The target is not a tensor, or one of them would hide an attribute of tensors.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise ValueError(f"attributes of {a_or_an(type(tensor).__name__)}")
    for name in attributes:
        if name.startswith("__") or hasattr(tensor, name):  # __array_interface__ can point anywhere
            raise ValueError(f"attribute {name} of {a_or_an(type(tensor).__name__)}")
    vars(tensor).update(attributes)


def make_dtype(spec: Spec) -> np.dtype[Any]:
    """Return the dtype of a spec: the inverse of ``_spec``.

    Raises:
        ValueError: The text or the fields do not describe a dtype that a buffer can hold.

    Example:
        >>> make_dtype("<f4")
        dtype('float32')
    """
    dtype: np.dtype[Any] = np.dtype(_checked(spec, _DEEPEST_SPEC))
    if dtype.hasobject:
        raise ValueError("a dtype with Python objects cannot describe a buffer")
    return dtype


def _checked(spec: Any, levels: int) -> Any:
    """Return the spec with fields as tuples, after checking that it has only text and fields (name, spec[, shape])."""
    if type(spec) is str and _PLAIN_SPEC.fullmatch(spec):
        return spec
    if type(spec) is not list or not levels:
        raise ValueError(f"{type(spec).__name__} is not a dtype")
    if not all(type(field) is list for field in spec):
        raise ValueError("a field of a dtype is a list")
    return [_field(*field, levels=levels) for field in spec]


def _field(name: Any, spec: Any, shape: Any = (), *, levels: int) -> tuple[Any, ...]:
    titled = type(name) is tuple and len(name) == 2 and set(map(type, name)) == {str}
    if not (type(name) is str or titled) or type(shape) is not tuple:
        raise ValueError(f"a field of {type(name).__name__} and {type(shape).__name__}")
    return name, _checked(spec, levels - 1), shape


def make_array(buffer: Any, spec: Spec, shape: tuple[int, ...], order: Any) -> np.ndarray[Any, Any]:
    """Return an array that shares the bytes of ``buffer``.

    Raises:
        ValueError: The buffer does not have as many bytes as the shape needs.

    Example:
        >>> make_array(bytearray(8), "<f4", (2,), "C")
        array([0., 0.], dtype=float32)
    """
    if type(shape) is not tuple:
        raise ValueError(f"{type(shape).__name__} is not a shape")
    array: np.ndarray[Any, Any] = np.ndarray(shape, make_dtype(spec), memoryview(buffer), order=order)
    if array.nbytes != memoryview(buffer).nbytes:
        raise ValueError(f"an array of {array.nbytes} bytes from {memoryview(buffer).nbytes}")
    return array


def make_object_array(values: list[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return an array of Python objects, filled in row-major order.

    Example:
        >>> make_object_array(["a", None], (2, 1)).shape
        (2, 1)
    """
    if type(values) is not list or type(shape) is not tuple:  # a range could have any length
        raise TypeError(f"an array from {type(values).__name__} and {type(shape).__name__}")
    array = np.empty(len(values), object)
    for i, value in enumerate(values):  # array[:] = values would unpack sequences
        array[i] = value
    return array.reshape(shape)


def make_scalar(data: bytes, spec: Spec) -> Any:
    """Return a NumPy scalar.

    Example:
        >>> int(make_scalar(b"ab", "<u2"))
        25185
    """
    return make_array(data, spec, (), "C")[()]


class Strings:
    """A list of strings, written as one text; pickle by itself would write them one by one.

    Args:
        text: The strings, separated by NULs.
    """

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    @classmethod
    def of(cls, value: object) -> Strings | None:
        """Return a list of strings as one text; None for other values, and for lists for which that is not faster."""
        if type(value) is not list or len(value) < _MANY or countOf(map(type, value), str) < len(value):
            return None
        sample = value[:: len(value) // _MANY]
        if len(set(map(id, sample))) < len(sample) or sum(map(len, sample)) > _LONG * len(sample):
            return None
        text = "\0".join(value)
        return cls(text) if text.count("\0") == len(value) - 1 and len(text) <= _LONG * len(value) else None


_MANY, _LONG = 32, 256
"""The number of strings from which a list is sent as one text, so that the restricted decoder is as fast as pickle; and
the average length up to which it is. Repeated strings are left to pickle, which writes each once."""


def make_strings(buffer: Any) -> list[str]:
    r"""Return the strings of a text.

    Raises:
        TypeError: ``buffer`` is not bytes.

    Example:
        >>> make_strings(b"one\0two")
        ['one', 'two']
    """
    if type(buffer) not in (bytes, bytearray, memoryview):
        raise TypeError(f"strings from {type(buffer).__name__}")
    return str(buffer, "utf-8", "surrogatepass").split("\0")


def _reduce_strings(strings: Strings) -> Reduced:
    return make_strings, (PickleBuffer(strings.text.encode("utf-8", "surrogatepass")),)


def _reduce_tensor(tensor: torch.Tensor) -> Reduced:
    """Reduce a tensor to values in row-major order, device type and ``requires_grad``; no graph and no ``.grad``."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        return tensor.__reduce_ex__(5)  # type: ignore[no-any-return]
    values = tensor.detach() if is_backed(tensor) else backed(tensor, "a tensor in it")
    flat = as_bytes(values.resolve_conj().resolve_neg().cpu().contiguous())
    make = make_parameter if type(tensor) is torch.nn.Parameter else make_tensor
    arguments = (
        _buffer(flat.numpy()),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.device.type,
        tensor.requires_grad,
    )
    return (make, arguments, vars(tensor), None, None, set_attributes) if vars(tensor) else (make, arguments)


def _spec(dtype: np.dtype[Any]) -> Spec | None:
    """Return the dtype in the form that ``make_dtype`` takes; None if it has none (objects, variable strings, …)."""
    if dtype.hasobject or dtype.metadata or dtype.subdtype:
        return None
    try:
        spec = _lists(np.lib.format.dtype_to_descr(dtype))
        return spec if make_dtype(spec) == dtype else None
    except (TypeError, ValueError):
        return None


def _lists(descr: Any) -> Any:
    return descr if isinstance(descr, str) else [[name, _lists(inner), *rest] for name, inner, *rest in descr]


def _reduce_array(array: np.ndarray[Any, Any]) -> Reduced:
    if array.dtype == object:
        return make_object_array, (array.ravel().tolist(), array.shape)
    if (spec := _spec(array.dtype)) is None:
        return array.__reduce_ex__(5)
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    flat = np.ascontiguousarray(array.T if order == "F" else array).reshape(-1)
    data = flat.view(np.uint8) if flat.nbytes else np.empty(0, np.uint8)
    return make_array, (_buffer(data), spec, array.shape, order)


def _buffer(array: Any) -> PickleBuffer:
    """Return the array's bytes; not through its ``data``, on which Python 3.11 crashes in a garbage cycle."""
    return PickleBuffer(array)


def _reduce_scalar(scalar: np.generic) -> Reduced:
    spec = _spec(scalar.dtype)
    return scalar.__reduce_ex__(5) if spec is None else (make_scalar, (scalar.tobytes(), spec))


def _reduce_dtype(dtype: np.dtype[Any]) -> Reduced:
    spec = _spec(dtype)
    return dtype.__reduce_ex__(5) if spec is None else (make_dtype, (spec,))


_SCALARS = {type_ for type_ in np.sctypeDict.values() if type_ is not np.object_}
_DTYPES = {type(np.dtype(type_)) for type_ in _SCALARS}

REDUCERS: dict[type, Callable[[Any], Reduced]] = {
    torch.Tensor: _reduce_tensor,
    torch.nn.Parameter: _reduce_tensor,
    np.ndarray: _reduce_array,
    **dict.fromkeys(_SCALARS, _reduce_scalar),
    **dict.fromkeys(_DTYPES, _reduce_dtype),
    Strings: _reduce_strings,
    Counter: lambda counter: (Counter, (), None, None, iter(counter.items())),
    Fraction: lambda fraction: (Fraction, (fraction.numerator, fraction.denominator)),
    UUID: lambda uuid: (UUID, (uuid.hex,)),
}
"""The reducers for values of exactly these types."""

MAKERS = {
    f"{make.__module__}.{make.__qualname__}": make
    for make in (
        make_tensor,
        make_parameter,
        set_attributes,
        make_dtype,
        make_array,
        make_object_array,
        make_scalar,
        make_strings,
    )
}
"""The functions that ``REDUCERS`` write into a message, by name."""

_SPEC_AT = {make_dtype: 0, make_array: 1, make_scalar: 1}
_PER_FIELD, _PER_CHARACTER = 32, 8


def weigh(make: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[int]:
    """Yield the costs of a call of one of ``MAKERS`` beyond those of its arguments, level by level of their contents.

    A list of strings needs about 20 bytes for each byte of text. The fields of a dtype may be shared, so that a few
    lists describe any number of fields.
    """
    if make is make_strings:
        yield _PER_CHARACTER * memoryview(args[0]).nbytes
    level = list(args[_SPEC_AT[make] :][:1]) if make in _SPEC_AT else []
    for _ in range(2 * _DEEPEST_SPEC):  # a list of fields, which are lists
        lists = [each for each in level if type(each) is list]
        if not lists:
            return
        yield _PER_FIELD * sum(map(len, lists))
        level = [child for each in lists for child in each]
