"""A cache for flat dicts that are sent repeatedly: their headers are made once, and read once.

An engine sends dicts with the same keys, dtypes and shapes at every step. Everything that depends only on these is
kept, so that each further dict costs one copy per tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from easydist import memory
from easydist.base.recent import Recent
from easydist.data.backing import addresses
from easydist.format import outline
from easydist.format.header import Header
from easydist.typing import Tree

_MOST, _LONGEST_TEXT = 256, 64
LONGEST_HEADER = 1 << 14
"""The bytes up to which a header is kept."""

_PLAIN = frozenset({bool, int, str, type(None)})
_ROOT: Any = object()
"""The key of a tensor that is not in a dict."""


class SendRecipe(NamedTuple):
    """A header that was made before.

    Attributes:
        header: The bytes of the header.
        keys: The keys of the tensors, in the order of the data.
    """

    header: torch.Tensor
    keys: Sequence[Any]

    def tensors(self, data: Tree) -> list[torch.Tensor]:
        """Return the tensors in the order of the data."""
        return [data] if self.keys == [_ROOT] else [data[key] for key in self.keys]

    @classmethod
    def of(cls, header: torch.Tensor, data: Tree, tensors: Sequence[torch.Tensor]) -> SendRecipe | None:
        """Return the recipe of a header; None if a tensor had to be converted for it.

        Args:
            header: The bytes of the header.
            data: The tensor or flat dict.
            tensors: Its tensors, in the order of the data.
        """
        own = {id(value): name for name, value in data.items()} if type(data) is dict else {id(data): _ROOT}
        return cls(header, [own[id(one)] for one in tensors]) if own.keys() >= set(map(id, tensors)) else None


made: Recent[SendRecipe] = Recent(_MOST)
"""The recipes of the data sent last, by the results of ``key_of``."""


def key_of(data: Tree) -> Any:
    """Return a key that determines the header of a tensor or a flat dict; None for other trees and tied tensors."""
    if type(data) is torch.Tensor:
        return None if _is_odd(data) or addresses([data]) is None else (data.dtype, data.shape)
    if type(data) is not dict:
        return None
    parts: list[Any] = []
    tensors: list[torch.Tensor] = []
    for name, value in data.items():
        if type(name) is not str:
            return None
        if type(value) is torch.Tensor and not _is_odd(value):
            parts.append((name, value.dtype, value.shape))
            tensors.append(value)
        elif type(value) in _PLAIN and not (type(value) is str and len(value) > _LONGEST_TEXT):
            parts.append((name, type(value), value))
        else:
            return None
    places = addresses(tensors)
    return tuple(parts) if places is not None and len(set(places)) == len(places) else None


def _is_odd(tensor: torch.Tensor) -> bool:
    """True if the header has to describe more of a tensor than its dtype and shape."""
    return (
        not tensor.is_cpu
        or tensor.requires_grad
        or tensor.is_nested
        or tensor.is_neg()
        or (tensor.dtype.is_complex and tensor.is_conj())
    )


class ReceiveRecipe(NamedTuple):
    """The dict or tensor that a header describes, from an earlier reading.

    Attributes:
        nbytes: The bytes of the data.
        rows: One row per key: an empty tensor of the dtype, the shape, and the start and the length of the data; for a
            plain value None, and the value in place of the shape.
    """

    nbytes: int
    rows: Sequence[tuple[Any, torch.Tensor | None, Any, int, int]]

    def tree(self, data: torch.Tensor) -> Tree:
        """Return the dict, or the tensor; each tensor gets its own memory.

        Args:
            data: The data, of ``nbytes`` bytes.
        """
        tree: dict[Any, Any] = {}
        address = data.data_ptr()
        for key, like, shape, start, nbytes in self.rows:
            if like is None:
                tree[key] = shape
            else:
                tree[key] = tensor = like.new_empty(shape)
                memory.copy(tensor.data_ptr(), address + start, nbytes)
        return tree.get(_ROOT, tree)

    @classmethod
    def of(cls, head: Header, tree: Tree, tensors: Mapping[str, torch.Tensor]) -> ReceiveRecipe | None:
        """Return the recipe of a header of a tensor, or of a flat dict of tensors and plain values; else None.

        Args:
            head: The header.
            tree: The decoded tree.
            tensors: The tensors of the tree by name.
        """
        if not head.metadata.keys() <= {"format", outline.METADATA} or (rows := _rows(head, tree, tensors)) is None:
            return None
        return cls(max([entry.stop for entry in head.entries], default=0), rows)


read: Recent[ReceiveRecipe] = Recent(_MOST)
"""The recipes of the data received last, by the bytes of its header."""


def _rows(head: Header, tree: Tree, tensors: Mapping[str, torch.Tensor]) -> list[Any] | None:
    items = {_ROOT: tree} if type(tree) is torch.Tensor else tree
    if type(items) is not dict:
        return None
    entries = {id(tensors[entry.name]): entry for entry in head.entries}
    rows: list[Any] = []
    for key, value in items.items():
        entry = entries.pop(id(value), None)
        if entry is None and type(value) in _PLAIN:
            rows.append((key, None, value, 0, 0))
        elif entry is not None and not value.requires_grad:
            like = torch.empty(0, dtype=entry.dtype, device="cpu")
            rows.append((key, like, entry.shape, entry.start, entry.stop - entry.start))
        else:
            return None
    return None if entries else rows
