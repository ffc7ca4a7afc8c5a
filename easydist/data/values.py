"""The values of a tree, described so that they are equal if the descriptions are: texts, and digests of data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from easydist import tree
from easydist.data.leaves import as_tensor, check_unmasked, is_numeric
from easydist.data.packing import as_bytes, type_text
from easydist.data.plain import exactly
from easydist.typing import Tree

NBYTES = 16
"""The length of a digest: two different data have the same one with a probability of 2 to the power of -128."""

_BLOCK = 1 << 16
"""The bytes that get a digest of their own."""

_BLOCKS_AT_ONCE = 256
"""The blocks that are copied from another device at once: small copies are slow."""


@dataclass(slots=True)
class Value:
    """One value of a tree.

    Attributes:
        path: Its path.
        text: The dtype and the shape of a tensor or an array; the value itself of all others.
        shape: The shape of a tensor or an array.
        data: The tensor or array; None for other values.
        digests: The digests of the blocks of elements, computed by ``digest``.
    """

    path: str
    text: str
    shape: tuple[int, ...] = ()
    data: Any = None
    digests: bytes = b""

    def digest(self) -> bytes:
        """Return the digest of the data; it has the same length for all data, and is empty for other values."""
        if self.data is None:
            return b""
        if not self.digests:
            flat, step, size = self._flat(), self.per_block * _BLOCKS_AT_ONCE, self.per_block * self._itemsize
            parts = (_bytes_of(flat[at : at + step]) for at in range(0, len(flat), step))
            self.digests = b"".join([_hash(part[at : at + size]) for part in parts for at in range(0, len(part), size)])
        return _hash(self.digests)

    def _flat(self) -> Any:
        """Return the elements; a copy if they are not contiguous, which is not kept."""
        is_tensor = isinstance(self.data, torch.Tensor)
        return self.data.contiguous().view(-1) if is_tensor else np.ascontiguousarray(self.data).reshape(-1)

    @property
    def per_block(self) -> int:
        """The number of elements in a block."""
        return max(1, _BLOCK // (self._itemsize or 1))

    @property
    def _itemsize(self) -> int:
        return int(self.data.dtype.itemsize)

    def block(self, number: int) -> bytes:
        """Return the bytes of a block."""
        return bytes(_bytes_of(self._flat()[number * self.per_block : (number + 1) * self.per_block]))

    def first_difference(self, blocks: list[bytes]) -> int:
        """Return the first element in which the same block of several ranks differs."""
        size = self._itemsize
        rows = [np.frombuffer(block, np.uint8).reshape(-1, size) for block in blocks]
        differ = np.any([np.any(row != rows[0], axis=1) for row in rows], axis=0)
        return int(np.argmax(differ))

    def element(self, block: bytes, index: int) -> tuple[str, str]:
        """Return an element of a block as text, and its bytes as hexadecimal digits, the highest first."""
        piece = bytearray(block[index * self._itemsize : (index + 1) * self._itemsize])
        digits = f"0x{piece[::-1].hex()}"
        if not isinstance(self.data, torch.Tensor):
            return repr(np.frombuffer(piece, self.data.dtype)[0].item()), digits
        try:
            return repr(torch.frombuffer(piece, dtype=self.data.dtype).item()), digits
        except (RuntimeError, ValueError):  # a dtype without numbers
            return digits, digits


def _bytes_of(flat: Any) -> memoryview:
    return as_bytes(flat.cpu()).numpy().data if isinstance(flat, torch.Tensor) else memoryview(flat.tobytes())


def _hash(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=NBYTES).digest()


def values_of(data: Tree) -> list[Value]:
    """Return all values of a tree: data, numbers, plain values, and empty containers.

    Raises:
        TypeError: A value cannot be compared between processes.
        ValueError: Several values have the same path.

    Example:
        >>> [(value.path, value.text) for value in values_of({"x": torch.ones(2), "n": 3, "s": "text", "e": []})]
        [("['x']", 'float32 (2,)'), ("['n']", '3'), ("['e']", 'an empty list'), ("['s']", "'text'")]
    """
    leaves, spec = tree.flatten(data, lambda value: tree.is_leaf(value) or _is_empty(value))
    if spec.alike:
        raise ValueError(f"{spec.alike[0]} is the path of several values, as keys of one dict have the same repr")
    plain = [Value(path, exactly(value, path)) for path, value in spec.plain]
    return [_value(leaf, path) for leaf, path in zip(leaves, spec.paths, strict=True)] + plain


def digest_of(values: Iterable[Value]) -> bytes:
    """Return a digest of all values, whatever the order in which their containers hold them."""
    rows = sorted((one.path, one.text, one.digest()) for one in values)
    return _hash(repr(rows).encode(errors="surrogatepass"))


def _is_empty(value: object) -> bool:
    return isinstance(value, dict | list | tuple) and len(value) == 0


def _value(leaf: Any, path: str) -> Value:
    if _is_empty(leaf):
        return Value(path, f"an empty {type(leaf).__name__}")
    if isinstance(leaf, torch.Tensor | np.ndarray | np.generic):
        return _data(leaf, path)
    base = next(cls for cls in (bool, int, float, complex) if isinstance(leaf, cls))
    return Value(path, base.__repr__(leaf))


def _data(leaf: Any, path: str) -> Value:
    if isinstance(leaf, torch.Tensor) or is_numeric(np.asanyarray(leaf)):
        tensor = as_tensor(leaf, path)
        return Value(path, type_text(tensor.dtype, tensor.shape), tuple(tensor.shape), tensor)
    array = np.asanyarray(leaf)
    check_unmasked(array, path)
    if array.dtype.kind not in "USMm":  # text and dates; others may contain objects, or bytes without a meaning
        raise TypeError(f"{path or 'the value'} is a NumPy array of {array.dtype}, which easydist cannot compare")
    return Value(path, f"{array.dtype} {array.shape}", array.shape, array)
