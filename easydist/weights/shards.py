"""Entries of which ranks hold different parts: DTensors, and plain tensors with their place in the whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import index
from typing import Any, NamedTuple, SupportsIndex, TypeGuard

import torch
from torch.nn.parameter import is_lazy

from easydist.data.leaves import as_tensor
from easydist.format import outline
from easydist.verbs.sharded import is_sharded
from easydist.weights.blocks import Block, shard


class _Shard(NamedTuple):
    tensor: torch.Tensor
    """The part, on this rank."""
    start: tuple[int, ...]
    """The index of its first element in the whole tensor, in each dimension."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""


class LocalShard(_Shard):
    """A plain tensor that is a part of a whole one: an entry of a state dict without ``DTensor``.

    The parts of several ranks may be equal, but they must not overlap in part.

    Args:
        tensor: The part.
        start: The index in the whole tensor of the part's first element, one number for each dimension.
        shape: The shape of the whole tensor.

    Raises:
        TypeError: It is no tensor, or the others are not integers.

    Example:
        >>> import torch
        >>> from easydist import weights
        >>> weights.LocalShard(torch.zeros(2, 4), start=(2, 0), shape=(4, 4)).shape
        (4, 4)
    """

    __slots__ = ()

    def __new__(
        cls, tensor: torch.Tensor, start: Iterable[SupportsIndex], shape: Iterable[SupportsIndex]
    ) -> LocalShard:
        """Return the part, with its place as integers."""
        part: object = tensor
        if not isinstance(part, torch.Tensor):
            raise TypeError(f"LocalShard: tensor has to be a tensor, got {type(part).__name__}")
        return super().__new__(cls, part, _integers("start", start), _integers("shape", shape))

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> LocalShard:  # type: ignore[override]
        """Return a part with these fields, checked: ``_replace`` calls this."""
        return cls(*iterable)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the part."""
        return self.tensor.dtype

    @property
    def is_meta(self) -> bool:
        """True if the part has no memory."""
        return self.tensor.is_meta


def _integers(name: str, values: Iterable[SupportsIndex]) -> tuple[int, ...]:
    try:
        return tuple(map(index, values))
    except TypeError:
        raise TypeError(f"LocalShard: {name} has to be one integer for each dimension, got {values!r}") from None


def empty_like(value: torch.Tensor | LocalShard) -> torch.Tensor | LocalShard:
    """Return a tensor, ``DTensor`` or local shard of the same layout in new, contiguous memory."""
    part = value.tensor if isinstance(value, LocalShard) else value
    made = torch.empty_like(part.detach(), memory_format=torch.contiguous_format)
    return value._replace(tensor=made) if isinstance(value, LocalShard) else made


def is_tensor(value: object) -> TypeGuard[torch.Tensor | LocalShard]:
    """True if this is a tensor, or a part of one."""
    return isinstance(value, torch.Tensor | LocalShard)


def check_dense(values: Mapping[str, Any]) -> None:
    """Check that entries that are tensors have dense memory, or none yet, on the meta device.

    Raises:
        TypeError: One is sparse, nested, uninitialized, …
    """
    for name, value in values.items():
        if is_tensor(value) and (is_lazy(local(value)) or not value.is_meta):
            as_tensor(local(value), f"[{name!r}]")


def is_shard(value: Any) -> bool:
    """True if ranks may hold different parts of the tensor."""
    if isinstance(value, LocalShard):
        return True
    return is_sharded(value) and not all(placement.is_replicate() for placement in value.placements)


def local(value: Any) -> torch.Tensor:
    """Return the tensor itself, or this rank's part of it."""
    if isinstance(value, LocalShard):
        return value.tensor
    found: torch.Tensor = value.to_local() if is_sharded(value) else value
    return found


def box_of(value: Any, name: str) -> Block:
    """Return the block of the whole tensor that this rank holds.

    Args:
        value: A ``DTensor`` or a local shard.
        name: Its name.

    Raises:
        TypeError: A placement has no values before a reduction.
        ValueError: This rank is not in its mesh, or the block is not inside of the whole.
    """
    if isinstance(value, LocalShard):
        return _checked(Block(value.start, tuple(value.tensor.shape)), value.shape, name)
    mesh = value.device_mesh
    if (place := mesh.get_coordinate()) is None:
        raise ValueError(f"[{name!r}] is a DTensor on a mesh that this rank is not in")
    return shard(value.shape, mesh.shape, place, value.placements)


def _checked(block: Block, sizes: tuple[int, ...], name: str) -> Block:
    is_inside = len(block.start) == len(block.shape) == len(sizes) and all(
        0 <= first <= size - length for first, length, size in zip(*block, sizes, strict=True)
    )
    if not is_inside:
        raise ValueError(f"[{name!r}] is a shard of shape {block.shape} at {block.start}, not inside of {sizes}")
    return block


def memory_of(value: Any) -> Any:
    """Return a key that is equal for entries in the same memory, such as tied weights, while ``value`` lives."""
    if isinstance(value, LocalShard):  # one part in two places is no tie
        part = outline.memory_of(value.tensor) if value.tensor.numel() else id(value)
        return part, value.start, value.shape
    if not is_sharded(value):
        return outline.memory_of(value)
    tensor = local(value)  # a new object each time, so its id is no key of a part without memory
    return outline.memory_of(tensor) if tensor.numel() else id(value)
