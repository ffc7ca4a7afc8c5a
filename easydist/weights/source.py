"""A state dict made ready to be sent: which entries, under which names, in which dtype, and who holds what of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from easydist.data import packing
from easydist.data.leaves import as_tensor
from easydist.format import header, outline
from easydist.verbs.sharded import is_sharded
from easydist.weights.blocks import Block, shard, whole
from easydist.weights.schedule import Message, Part

METADATA = "easydist.weights"
"""The key of a header's ``__metadata__`` under which stands what else is known of the state dict."""

Rename = Callable[[str], str] | Mapping[str, str] | None
Filter = Callable[[str], bool] | None


def state_of(model_or_dict: Any) -> Mapping[str, Any]:
    """The entries of a module or of a dict.

    Raises:
        TypeError: It is neither, or a name is no text.
    """
    state = model_or_dict.state_dict() if isinstance(model_or_dict, nn.Module) else model_or_dict
    if not isinstance(state, Mapping):
        raise TypeError(f"takes a module or a dict of tensors, got {type(model_or_dict).__name__}")
    for name in state:
        if not isinstance(name, str):
            raise TypeError(f"the names of a state dict are text, got {name!r}")
    return state


def named(names: Iterable[str], keep: Filter, rename: Rename) -> dict[str, str]:
    """Name -> the name after ``rename``, of those that ``keep`` does not leave out.

    Raises:
        ValueError: Two names become one.

    Example:
        >>> named(["a.x", "b.x"], lambda name: name != "b.x", lambda name: "model." + name)
        {'a.x': 'model.a.x'}
    """
    change = (lambda name: rename.get(name, name)) if isinstance(rename, Mapping) else rename
    found = {name: change(name) if change else name for name in names if keep is None or keep(name)}
    if len(set(found.values())) < len(found):
        first: dict[str, str] = {}
        one, other = next((first[new], old) for old, new in found.items() if first.setdefault(new, old) != old)
        raise ValueError(f"rename= makes {one!r} and {other!r} both {found[other]!r}")
    return found


def box_of(value: Any) -> Block:
    """The block of the whole tensor that this rank holds of a ``DTensor``.

    Raises:
        TypeError: Its values are not there before a reduction.
        ValueError: This rank is not in its mesh.
    """
    mesh = value.device_mesh
    if (place := mesh.get_coordinate()) is None:
        raise ValueError("the DTensor lives on a mesh that this rank is not in")
    return shard(value.shape, mesh.shape, place, value.placements)


class _Held(NamedTuple):
    """An entry as this rank has it: its part of the values, and which part that is."""

    values: torch.Tensor
    box: Block
    is_cut: bool
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def description(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def _held(name: str, value: torch.Tensor, dtype: torch.dtype | None) -> _Held:
    shape, is_cut = tuple(value.shape), _is_cut(value)
    box = box_of(value) if is_cut else whole(shape)
    values = as_tensor(local(value), f"[{name!r}]")
    casts = dtype is not None and values.is_floating_point()
    return _Held(values, box, is_cut, shape, dtype if casts and dtype is not None else values.dtype)


def _is_cut(value: Any) -> bool:
    """Whether ranks may hold different parts of it."""
    return is_sharded(value) and not all(placement.is_replicate() for placement in value.placements)


def local(value: Any) -> torch.Tensor:
    """The tensor itself, or what this rank has of a ``DTensor``."""
    found: torch.Tensor = value.to_local() if is_sharded(value) else value
    return found


class Source:
    """What one rank sends of a state dict.

    Args:
        state: The entries.
        names: Those of them that travel, and under which names.
        dtype: Of floating-point tensors on the wire; None is their own.
        about: What the header shall say besides.

    Raises:
        TypeError: An entry cannot travel; the text has its name.
        ValueError: An entry has too many dimensions, …

    Attributes:
        header: The bytes of a safetensors header for the whole entries; the structure of what is no tensor is in it.
        shards: By name, the block that this rank holds of an entry that is sharded.
    """

    def __init__(
        self, state: Mapping[str, Any], names: Mapping[str, str], dtype: torch.dtype | None, about: Mapping[str, Any]
    ) -> None:
        held: dict[str, _Held] = {}
        first: dict[Any, str] = {}
        keys: dict[str, str | None] = {}
        extra: dict[str, Any] = {}
        for name, new in names.items():
            value = state[name]
            if not isinstance(value, torch.Tensor):
                keys[new], extra[new] = None, value
                continue
            one = _held(new, value, dtype)
            key = keys[new] = first.setdefault(outline.memory_of(local(value)), new)
            if key == new:
                held[new] = one
        structure, tensors = outline.encode(extra, "a state dict", "leave it out with filter=")
        if both := held.keys() & tensors.keys():
            raise ValueError(f"{min(both)} is the name of one entry and the path of another; use rename=")
        held |= {path: _held(path, tensor, None) for path, tensor in tensors.items()}
        kinds = {name: one.values.device.type for name, one in held.items() if not one.values.is_cpu}
        text = json.dumps({"names": keys, "kinds": kinds, "extra": structure, **about})
        shown = {name: one.description for name, one in held.items()}
        self.header = torch.frombuffer(bytearray(header.encode(shown, {METADATA: text})), dtype=torch.uint8)
        self.shards = {name: one.box for name, one in held.items() if one.is_cut}
        self._held = [held[name] for name in header.order(shown)]

    def load(self, message: Message, there: torch.device) -> torch.Tensor:
        """The bytes of a message on a device; a view where nothing has to be cast, packed or moved."""
        return packing.pack([self._piece(part) for part in message.parts], there)

    def _piece(self, part: Part) -> torch.Tensor:
        held = self._held[part.entry]
        return part.block.within(held.box).of(held.values).to(held.dtype)


def mesh_ranks(state: Mapping[str, Any], names: Iterable[str]) -> list[int]:
    """The ranks of the world over which entries are sharded, in order; none where they are not."""
    cut = [state[name] for name in names if isinstance(state[name], torch.Tensor) and _is_cut(state[name])]
    return sorted({rank for one in cut for rank in one.device_mesh.mesh.flatten().tolist()})
